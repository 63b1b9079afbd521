"""Write the cost tables that ship with the package from results of `benchmark.py batches`.

python tools/cost_tables.py results/batches-llama-3.1-8b-h200.json ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eagle_triton.models.shapes import SHAPES
from eagle_triton.speculative.costs import TABLES, CostTable, Timing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files that benchmark.py batches --output wrote")
    parser.add_argument("--output", type=Path, default=TABLES, help="default: the package's own file")
    args = parser.parse_args(argv)
    CostTable.write([read(path) for path in args.results], args.output)
    return 0


def read(path: Path) -> CostTable:
    """The table of one result, of its shortest context. Raises ValueError for a result without timed trees."""
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in record["rows"] if row["variant"] == "tree"]
    if not rows or record["options"]["shape"] not in SHAPES:
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
    sys.exit(main())
