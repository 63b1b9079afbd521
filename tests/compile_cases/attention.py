"""Production settings of the attention kernels: the 8b (32/8 heads, d 128) and 1b (32/8 heads, d 64) shapes."""

import triton

from eagle_triton.attention import MERGE_REGISTERS, merge_rows_of, settings_for
from eagle_triton.ops import attention_hopper as streamed
from eagle_triton.ops.attention_tiles import (
    HeadSizes,
    KeyLayout,
    Parts,
    Splits,
    Tiles,
    _merge_kernel,
    _tree_attention_kernel,
)
from eagle_triton.ops.views import BatchedRows, Heads, KeyValues, PairParts
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

KV_HEADS, GROUP = 8, 4
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}
ALIGNED = {"capacity", *(f"{view}.{field}" for view in ("q", "out") for field in ("batch", "row", "head"))}
ALIGNED |= {"cache.side", "cache.page", "cache.head"}
TYPES = {
    "table_ptr": "*i32",
    "lengths_ptr": "*i32",
    "ancestors": typed(BatchedRows, "*i64"),
    "parts": Parts("*fp32", "*fp32"),
    "lse_ptr": "*fp32",
    "scale_log2": "fp32",
    "tanh_scale": "fp32",
}
PAIR = {"pair": PairParts("*fp8e4nv", "*fp32")}
SHAPES = [  # nodes, words of ancestors (0: causal), sliding window
    (60, 1, False),
    (10, 2, False),
    (8, 0, False),
    (1, 1, False),
    (512, 0, False),
    (60, 1, True),
]


def _case(name: str, kernel, constexprs: dict, tensors: dict, options: dict) -> tuple:
    constexprs = {key: value for key, value in constexprs.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constexprs else tensors.get(argument, TYPES.get(argument, "i32"))
        for argument in kernel.arg_names
    }
    return name, kernel, signature, constexprs, {**options, "aligned": ALIGNED}


def _tensors(dtype: str) -> dict:
    pointer = f"*{dtype}"
    return {"q": typed(Heads, pointer), "out": typed(Heads, pointer), "cache": typed(KeyValues, pointer)}


def _cases(
    nodes: int,
    words: int,
    window: bool,
    width: int,
    dtype: str,
    arch: str,
    page: int | None = None,
    batch: int = 1,
    lse: bool = False,
    sinks: bool = False,
    softcap: bool = False,
) -> list[tuple]:
    """page: rows of a page where there is a table, 0: a page for each sequence. lse: as attend_committed. The merge
    knows of neither sinks nor softcap."""
    types = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16}
    sliding_window = 1024 if window else None
    use = settings_for(nodes * GROUP, width, KV_HEADS, batch, types[dtype], CAPABILITIES[arch], sliding_window)
    use = use._replace(splits=1, programs=1, pdl=0) if lse else use
    tma = use.tma and not window
    constexprs = {
        "KEYS": KeyLayout(page or 0, width, words), "SIZES": HeadSizes(width, GROUP, KV_HEADS, False),
        "SPLITS": Splits(use.splits, use.programs, use.min_tiles), "PDL": use.pdl,
        "TILES": Tiles(use.block_m, use.block_n, use.block_t, width), "BLOCK_N": use.block_n, "BLOCK_D": width,
        **({"table_ptr": None} if page is None else {}), **({} if window else {"window": None}),
        **({} if words else {"ancestors": None}), **({} if tma else {"cache_desc": None}),
        **({} if use.programs > 1 else {"parts": None}), **({} if lse else {"lse_ptr": None}),
        **({} if sinks else {"sinks_ptr": None}), **({} if softcap else {"tanh_scale": None}),
        **({"nodes": 1} if nodes == 1 else {}),
    }  # fmt: skip
    tensors = {**_tensors(dtype), "sinks_ptr": f"*{dtype}"}
    tensors["cache_desc"] = f"tensordesc<{dtype}[{use.block_n},{width}]>"
    mask = f"{words} words" if words else "causal"
    name = f"N {nodes} {mask} d {width} {dtype}{' window' if window else ''}"
    name += "" if page is None else f" pages of {page}"
    name += " and its sum" if lse else ""
    name += f"{' sinks' if sinks else ''}{' softcap' if softcap else ''}"
    options = {**NO_FMA_FUSION, "num_warps": use.num_warps, "num_stages": use.num_stages, "targets": (arch,)}
    if batch > 1:
        name += f" of {batch}"
        options |= {"local": 64}  # of the sums of splits before, once a split
    options |= {"local": 16} if width > 128 and batch == 1 else {}  # addresses
    options |= {"local": 8} if window else {}  # a word of a mask, once a program
    if width == 256 and use.block_n == 64:  # in tiles with new keys; faster than tiles of 32 keys all the same
        options |= {"local": 400 if use.programs > 1 else 700}
    cases = [_case(f"attend {name}", _tree_attention_kernel, constexprs, tensors, options)]
    if use.programs > 1 and page is None and not (sinks or softcap):
        merge = {**constexprs, "BLOCK_R": merge_rows_of(use.splits, width)}
        capped = {"maxnreg": MERGE_REGISTERS} if use.pdl and use.splits == 8 else {}
        options |= {"num_warps": 1, **capped}
        cases.append(_case(f"merge  {name}", _merge_kernel, {**merge, "pair": None}, tensors, options))
        if width == 128 and arch == "sm_90" and dtype == "bf16" and nodes in (1, 60) and not window:
            one = {"all_rows": 1} if nodes == 1 else {}  # as it would be specialised
            cases.append(
                _case(f"merge  {name} to a pair", _merge_kernel, {**merge, **one}, {**tensors, **PAIR}, options)
            )
            ordered = {**merge, "pair": None, "SIZES": merge["SIZES"]._replace(word_order=True)}
            cases.append(_case(f"merge  {name} in the order of words", _merge_kernel, ordered, tensors, options))
    return cases


CASES = [
    case
    for arch in CAPABILITIES
    for width, dtype, shapes in (
        (128, "bf16", SHAPES),
        (64, "bf16", SHAPES[:1]),
        (128, "fp16", SHAPES[:1]),
        (256, "bf16", SHAPES[:1]),
    )
    for shape in shapes
    for case in _cases(*shape, width, dtype, arch)
]
CASES += [
    case
    for arch in CAPABILITIES
    for page, shape in ((0, (60, 1, False)), (64, (60, 1, False)), (64, (64, 0, False)))
    for case in _cases(*shape, 128, "bf16", arch, page)
]
CASES += [
    case
    for arch in CAPABILITIES
    for width, shape in ((128, (60, 1, False)), (128, (1, 1, False)), (256, (60, 1, True)))
    for case in _cases(*shape, width, "bf16", arch, 64, batch=64)
]
CASES += [case for arch in CAPABILITIES for case in _cases(2048, 0, False, 128, "bf16", arch, 64, lse=True)]
CASES += [  # gpt-oss, and Gemma 2 of 9b and 27b
    case
    for arch in CAPABILITIES
    for shape in ((60, 1, True), (512, 0, True))
    for width, options in ((64, {"sinks": True}), (256, {"softcap": True}))
    for case in _cases(*shape, width, "bf16", arch, 64, **options)
]


CASES += [  # Gemma 4's full layers
    case
    for arch in CAPABILITIES
    for shape, batch in (
        ((60, 1, False), 64),
        ((1, 1, False), 64),
        ((512, 0, False), 1),
    )
    for case in _cases(*shape, 512, "bf16", arch, 64, batch=batch)
]
CASES += [case for arch in CAPABILITIES for case in _cases(60, 1, False, 512, "bf16", arch)]  # with its merge


def _streamed_case(
    nodes: int,
    words: int,
    width: int,
    dtype: str,
    page: int | None,
    batch: int = 1,
    sinks: bool = False,
    word_order: bool = False,
    window: bool = False,
) -> tuple:
    types = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16}
    use = settings_for(nodes * GROUP, width, KV_HEADS, batch, types[dtype], (9, 0))
    block_d = triton.next_power_of_2(width)
    constexprs = {
        "KEYS": KeyLayout(page or 0, width, words), "SIZES": HeadSizes(width, GROUP, KV_HEADS, word_order),
        "SPLITS": Splits(use.splits, use.programs, use.min_tiles),
        "NODES": streamed.nodes_for(nodes, words), "STAGES": streamed.stages_of(width),
        "READ_EARLY": page is not None,
        **({"table_ptr": None} if page is None else {}),
        **({} if use.programs > 1 else {"parts": None}), **({} if sinks else {"sinks_ptr": None}),
        **({"nodes": 1} if nodes == 1 else {}), **({} if window else {"window": None}),
    }  # fmt: skip
    tensors = {**_tensors(dtype), "sinks_ptr": f"*{dtype}"}
    tensors["cache_desc"] = f"tensordesc<{dtype}{[streamed.ROWS, block_d]},{streamed.TILE_LAYOUT!r}>"
    pages = "" if page is None else f" pages of {page}"
    name = f"stream N {nodes} {words} words d {width} {dtype}{pages} of {batch}{' sinks' if sinks else ''}"
    name += f"{' in the order of words' if word_order else ''}{' window' if window else ''}"
    options = {**NO_FMA_FUSION, "num_warps": 4, "maxnreg": streamed.REGISTERS, "targets": ("sm_90",)}
    options |= {"local": 104 if window else 64} if batch > 1 else {}  # of the sums of splits before, once a split
    return _case(name, streamed.tree_attention_kernel, constexprs, tensors, options)


CASES += [
    _streamed_case(60, 1, 128, "bf16", 64),
    _streamed_case(60, 1, 128, "bf16", 64, batch=8, word_order=True),
    _streamed_case(60, 1, 128, "fp16", None),
    _streamed_case(1, 1, 128, "bf16", 64),
    _streamed_case(256, 4, 128, "bf16", 0, batch=2),
    _streamed_case(8, 1, 80, "bf16", 64, batch=32),
    _streamed_case(60, 1, 64, "bf16", 64, sinks=True),
    _streamed_case(60, 1, 128, "bf16", 64, batch=8, sinks=True),
    _streamed_case(1, 1, 64, "bf16", 64, sinks=True, window=True),
    _streamed_case(60, 1, 128, "bf16", 64, batch=8, window=True),
]
