"""The experiment of a plain step in one launch: tools/one_launch_step.py."""

from tools.tuning.one_launch_step import CONTEXT, TILE_LAYOUT, Mailboxes, Vectors, Weights, sizes_of, step_kernel

SIZES = sizes_of("qwen3-0.6b")
ROWS, KEYS = (f"tensordesc<bf16[{height}, {width}],{TILE_LAYOUT!r}>" for height, width in ((8, 1024), (32, SIZES.D)))
CASES = [
    (
        "qwen3-0.6b",
        step_kernel,
        dict(
            **dict(zip(Weights._fields, (ROWS, KEYS, KEYS, *[ROWS] * 5), strict=True)),
            vectors=Vectors(*["*bf16"] * 6, "*fp32", "*fp32", "*bf16", "*bf16"),
            boxes=Mailboxes(*["*i32"] * 10, "*fp32", "*i32"),
            **dict.fromkeys(("epsilon", "scale"), "fp32"),
            **dict.fromkeys(("S", "T", "SLOTS", "LOADS", "PACE", "CLOCKS"), "constexpr"),
        ),
        dict(S=SIZES, T=CONTEXT, SLOTS=11, LOADS=2, PACE=1000, CLOCKS=True),
        dict(targets=["sm_90"], num_warps=8),
    )
]
