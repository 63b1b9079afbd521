"""All layers over one row in one launch: models' shapes, narrow heads with norms, and the least free shared memory."""

from eagle_triton.ops.linear.gluon_tiles import TILE_LAYOUT
from eagle_triton.ops.one_launch import Cache, Mailboxes, Model, Row, Sizes, one_launch_kernel, settings_for
from eagle_triton.ops.one_launch.sizes import NARROW

SIZES = {
    "qwen3-0.6b": Sizes(1024, 2, 128, 128, 3072, 28, True),
    "llama-3.2-1b": Sizes(2048, 4, 64, 64, 8192, 16, False),
    "llama-3.2-3b": Sizes(3072, 3, 128, 128, 8192, 28, False),
    "llama-3.1-8b": Sizes(4096, 4, 128, 128, 14336, 32, False),
    "phi-4-mini": Sizes(3072, 3, 128, 96, 8192, 32, False),
    "norms-of-64": Sizes(3072, 4, 64, 64, 1024, 3, True),
    "13-parts": Sizes(1024, 4, 128, 128, 13312, 2, True),
    "qwen3-4b": Sizes(2560, 4, 128, 128, 9728, 36, True),
    "qwen2.5-3b": Sizes(2048, 2, 128, 128, 11008, 36, False, KV=2, BIASED=True),
    "windows": Sizes(1152, 4, 64, 64, 5632, 2, False, KV=4, BIASED=True, WINDOWED=True),
    "qwen3-30b-a3b": Sizes(2048, 4, 128, 128, 768, 48, True, KV=4, MIXTURE=True),
}


def rows_of(width: int) -> str:
    return f"tensordesc<bf16[1, 16, 64],{NARROW.value!r}>" if width % 1024 else tiles(16, 64)


def tiles(height: int, width: int) -> str:
    return f"tensordesc<bf16[{height}, {width}],{TILE_LAYOUT!r}>"


CASES = [
    (
        name,
        one_launch_kernel,
        dict(
            weights=tiles(16, 64),
            of_hidden=rows_of(sizes.H),
            of_inner=rows_of(sizes.I),
            keys=tiles(4096 // sizes.D, sizes.D),
            model=Model("*bf16", "*bf16", "*i32", "*i64", "*fp32", *["fp32"] * 3),
            row=Row("*i64", "*i32", "i32", "*i32", "*bf16", "*bf16", "*i32", "i32"),
            cache=Cache("*bf16", *["i32"] * 3),
            boxes=Mailboxes(*["*i32"] * 9),
            **dict.fromkeys(("S", "SLOTS", "LOADS"), "constexpr"),
        ),
        dict(S=sizes, **settings_for(sizes)),
        dict(targets=["sm_90"], num_warps=8, distinct=True, local=8 if name == "qwen3-4b" else 0),
    )
    for name, sizes in SIZES.items()
]
