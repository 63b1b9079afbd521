"""The megakernel as MegakernelStep launches it: 8b, 1b and demo shapes, both kinds of head, one and four sequences."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton.engine import megakernel_step
from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft, EagleDraft
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import MLP, Norm, Projection, Rotary
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.ops.linear import settings
from eagle_triton.ops.megakernel import draft_verify_update_kernel
from eagle_triton.runtime.launch import DRAFT_WARPS, NO_FMA_FUSION

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_SHAPES = {  # hidden, intermediate, query heads, key/value heads, head dim, draft vocabulary
    "8b": (4096, 14336, 32, 8, 128, 32000),
    "1b": (2048, 8192, 32, 8, 64, 32000),
    "demo": (256, 640, 4, 2, 64, 2048),
}


def _views(shape: str, eagle3: bool, dtype: torch.dtype) -> tuple[ModelView, EagleDraft]:
    """A target of two layers and a draft head of a shape, of memory that nobody touches."""
    hidden, inner, heads, kv_heads, width, draft_vocab = _SHAPES[shape]
    vocabulary = 4096

    def product(rows: int, cols: int, bias: bool = False) -> Projection:
        return Projection(torch.empty(rows, cols, dtype=dtype), torch.empty(rows, dtype=dtype) if bias else None)

    def norm() -> Norm:
        return Norm(torch.empty(hidden, dtype=dtype), 1e-5)

    def layer(columns: int, input_norm: Norm | None) -> Layer:
        attention = Attention(
            product(heads * width, columns),
            product(kv_heads * width, columns),
            product(kv_heads * width, columns),
            product(hidden, heads * width),
            heads,
            kv_heads,
            width,
            width**-0.5,
            Rotary(torch.empty(width // 2)),
        )
        return Layer(
            input_norm, attention, norm(), MLP(product(inner, hidden), product(inner, hidden), product(hidden, inner))
        )

    embedding = torch.empty(vocabulary, hidden, dtype=dtype)
    target = ModelView(
        embedding, (layer(hidden, norm()),) * 2, norm(), Projection(embedding), (0, 1, 1) if eagle3 else (), (), None
    )
    shared = dict(
        embedding=embedding,
        fc=product(hidden, (3 if eagle3 else 2) * hidden, bias=not eagle3),
        layers=(layer((2 if eagle3 else 1) * hidden, norm() if eagle3 else None),),
        head=product(draft_vocab if eagle3 else vocabulary, hidden),
        tree_reader=lambda: TreeSpec.dynamic(60, 7, 10),
    )
    if not eagle3:
        return target, Eagle1Draft(**shared)
    d2t = torch.empty(draft_vocab, dtype=torch.int64)
    return target, Eagle3Draft(hidden_norm=norm(), norm=norm(), d2t=d2t, **shared)


def _kind(value):
    """The type of an argument, or of a view's fields; None for what is absent."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return type(value)(*map(_kind, value))
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32"


def _aligned(given: dict):
    """The integers that are multiples of 16, those of views as "view.field"."""
    for name, value in given.items():
        if isinstance(value, tuple):
            yield from (f"{name}.{field}" for field in _aligned(value._asdict()))
        elif isinstance(value, int) and value % 16 == 0:
            yield name


def _case(
    name: str,
    shape: str,
    targets: tuple[str, ...],
    capability: tuple[int, int],  # (0, 0): no descriptors
    eagle3: bool = True,
    batch: int = 1,
    greedy: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple:
    original, settings.compute_capability = settings.compute_capability, lambda device: capability
    try:
        view, draft = _views(shape, eagle3, dtype)
        spec = draft.read_tree()
        state = DecodeState(Sequences(view, draft, batch, 512), draft, spec)
        step = megakernel_step.MegakernelStep(view, draft, state, programs=132)
    finally:
        settings.compute_capability = original
    given = {"target_logits_ptr": torch.empty(1, dtype=dtype), "features_ptr": torch.empty(1, dtype=dtype)}
    given |= {"absent": -1, "limit": 1, "GREEDY": greedy, **step._arguments}
    constexprs = {p.name: given.pop(p.name) for p in draft_verify_update_kernel.params if p.is_constexpr}
    signature = {**dict.fromkeys(constexprs, "constexpr"), **{name: _kind(value) for name, value in given.items()}}
    constexprs |= {argument: None for argument, value in given.items() if value is None}
    aligned = tuple(_aligned(given))
    options = {
        **NO_FMA_FUSION,
        "num_warps": DRAFT_WARPS,
        "num_stages": step.stages,
        "targets": targets,
        "aligned": aligned,
    }
    options["local"] = 2048  # what its phases share across their loop; docs/megakernel.md
    return name, draft_verify_update_kernel, signature, constexprs, options


CASES = [
    _case("8b eagle3 greedy", "8b", ("sm_90", "sm_100"), (9, 0)),
    _case("demo eagle1 fp32 sampled, four sequences", "demo", ("sm_90",), (9, 0), False, 4, False, torch.float32),
    _case("1b eagle3 greedy, any device", "1b", ("sm_80", "gfx942"), (0, 0)),
]
