"""The megakernel as MegakernelStep launches it: 8b, 1b and demo shapes, both kinds of head, one and four sequences."""

from __future__ import annotations

import torch

from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft, EagleDraft
from eagle_triton.engine.megakernel_step import MegakernelStep
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import MLP, Norm, Projection, Rotary
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from tests.compile_cases._launches import launches

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


def _launch(
    shape: str, eagle3: bool = True, batch: int = 1, greedy: bool = True, dtype: torch.dtype = torch.bfloat16
) -> None:
    view, draft = _views(shape, eagle3, dtype)
    spec = draft.read_tree()
    state = DecodeState(Sequences(view, draft, batch, 512), draft, spec)
    step = MegakernelStep(view, draft, state, programs=132)
    walk = None if greedy else (step.path, step.accepted, step.next_token)
    step(torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype), walk)


# its phases stand in one loop, so ptxas keeps what they share in local memory
_LOCAL = {"local": {"draft_verify_update_kernel": 2048}}
_DEMO = dict(eagle3=False, batch=4, greedy=False, dtype=torch.float32)
CASES = [
    *launches("8b eagle3 greedy", _launch, "8b", targets=("sm_90", "sm_100"), options=_LOCAL),
    *launches("demo eagle1 fp32 sampled, four", _launch, "demo", **_DEMO, targets=("sm_90",), options=_LOCAL),
    *launches("1b eagle3 greedy, any device", _launch, "1b", targets=("sm_80", "gfx942"), options=_LOCAL),
]
