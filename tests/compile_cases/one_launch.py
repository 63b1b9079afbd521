"""All layers over one row in one launch: the shapes of Qwen3-0.6B and Llama-3.2-1B."""

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.one_launch import Cache, Mailboxes, Model, Row, Sizes, one_launch_kernel

SIZES = {"qwen3-0.6b": Sizes(1024, 2, 128, 3072, 28, True), "llama-3.2-1b": Sizes(2048, 4, 64, 8192, 16, False)}


def tiles(height: int, width: int) -> str:
    return f"tensordesc<bf16[{height}, {width}],{TILE_LAYOUT!r}>"


CASES = [
    (
        name,
        one_launch_kernel,
        dict(
            weights=tiles(16, 64),
            keys=tiles(4096 // sizes.D, sizes.D),
            model=Model("*bf16", "*bf16", "*i32", "*i64", "*fp32", "fp32"),
            row=Row("*i64", "*i32", "i32", "*i32", "*bf16", "*bf16"),
            cache=Cache("*bf16", *["i32"] * 3),
            boxes=Mailboxes(*["*i32"] * 8),
            **dict.fromkeys(("epsilon", "scale"), "fp32"),
            **dict.fromkeys(("S", "SLOTS", "LOADS", "PACE"), "constexpr"),
        ),
        dict(S=sizes, SLOTS=11 if sizes.I <= 4096 else 10, LOADS=2, PACE=1000),
        dict(targets=["sm_90"], num_warps=8),
    )
    for name, sizes in SIZES.items()
]
