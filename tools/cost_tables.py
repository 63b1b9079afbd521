"""Write the cost tables that ship with the package from results of `benchmark.py batches`.

python tools/cost_tables.py results/batches-llama-3.1-8b-h200.json ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, existing_file, output_file, run_program

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from eagle_triton.inference.costs import CostTable


def main(argv: list[str] | None = None) -> int:
    parser = Parser("cost_tables.py", __doc__)
    results_help = "JSON files that benchmark.py batches --output wrote"
    parser.add_argument("results", nargs="+", type=existing_file, metavar="FILE.json", help=results_help)
    parser.add_argument("--output", type=output_file(), metavar="FILE.json", help="default: the package's own file")
    args = parser.parse_args(argv)
    with parser.explains():
        from eagle_triton.inference.costs import TABLES, CostTable

        CostTable.write([read(path) for path in args.results], args.output or TABLES)
    return 0


def read(path: Path) -> CostTable:
    """The table of one result, of its shortest context. Raises ValueError for a result without timed trees."""
    from eagle_triton.inference.costs import CostTable, Timing
    from eagle_triton.models.shapes import SHAPES

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["variant"] == "tree"]
        known = record["options"]["shape"] in SHAPES
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a result of benchmark.py batches, and it is not one: {error!r}") from error
    if not rows or not known:
        raise ValueError(f"{path}: no trees of a known shape were timed; benchmark.py batches --shape ... does")
    context = min(row["context"] for row in rows)
    sizes = SHAPES[record["options"]["shape"]]
    return CostTable(
        record["machine"]["device"],
        (sizes["num_hidden_layers"], sizes["hidden_size"], sizes["vocab_size"]),
        record["options"]["dtype"],
        f"results/{path.name}",
        tuple(
            Timing(row["batch"], row["nodes"], row["depth"], round(row["ms_per_step"], 3))
            for row in rows
            if row["context"] == context
        ),
    )


if __name__ == "__main__":
    sys.exit(run_program(main))
