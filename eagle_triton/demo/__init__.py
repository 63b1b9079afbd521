"""The embedded checkpoints: small models trained on the standard library of Python 3.12, and drafts for them.

"demo" is a Llama (`target/`) and two draft heads (`eagle3/`, `eagle1/`). "demo-gdn" is a Qwen3.5 (`gdn/`): three of
four layers are gated delta nets, and a multi-token-prediction layer lies beside its weights. "demo-draft" is a Llama
of two layers (`draft/`) that drafts for "demo". "demo-block" is a block drafter for it (`block/`), DFlash with blocks
of eight, and "demo-block-causal" (`block-causal/`) the same with causal blocks. "demo-moe" is a Qwen3 mixture of
experts and its EAGLE-3 head (`moe/target/`, `moe/eagle3/`). All are ordinary checkpoint directories.
`tools/train_demo.py` makes them; `results/demo_checkpoint.json` says what they reach.
"""

import json
from itertools import cycle, islice
from pathlib import Path

PARTS = ("target", "eagle3", "eagle1", "gdn", "draft", "block", "block-causal", "moe")
PAIR, HYBRID, DRAFT, MIXTURE = "demo", "demo-gdn", "demo-draft", "demo-moe"  # as paths of models
BLOCKS = BLOCK, CAUSAL_BLOCK = "demo-block", "demo-block-causal"


def path_of(name: str | Path, part: str = "") -> str:
    """The directory of a model of this package that goes by a name; any other path, or hub id, as it is.

    Of "demo" the part that is meant, "target", "eagle3" or "eagle1"; without one the directory that holds all of them,
    as `EaModel.save_pretrained` leaves them; of "demo-moe" likewise. The others are one model each.
    """
    alone = {HYBRID: "gdn", DRAFT: "draft", BLOCK: "block", CAUSAL_BLOCK: "block-causal"}
    places = {PAIR: part, MIXTURE: f"moe/{part}", **alone}
    return str(Path(__file__).parent / places[str(name)]) if str(name) in places else str(name)


def demo_directory(name: str) -> Path:
    """The directory of one of `PARTS`. Raises ValueError for another name."""
    if name not in PARTS:
        raise ValueError(f"demo_directory: name must be one of {', '.join(PARTS)}, got {name!r}")
    return Path(__file__).parent / name


def demo_prompts(count: int) -> list[str]:
    """The first `count` prompts, 1 to 60 lines of library files that no part was trained on.

    There are 100; a larger count starts over. Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"demo_prompts: count must be at least 1, got {count}")
    prompts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    return list(islice(cycle(prompts), count))
