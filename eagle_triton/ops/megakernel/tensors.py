"""What the megakernel reads and writes, and the sizes it is compiled for.

B sequences, N nodes of a tree of D levels, K children for each node; F features of the target for each node. Pages have
PAGE rows. A pass has rows b * n + i, of the model's dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from eagle_triton.ops.attention_tiles import HeadSizes, KeyLayout, Splits, Tiles
from eagle_triton.ops.layers.rotary import Rotation
from eagle_triton.ops.views import Pages

# ------------------------------------------------------------------------------------------- the state and the model


class Target(NamedTuple):
    """The target's cache [layers, 2, P, heads, PAGE, width], of layers * 2 * B * heads planes, and its sizes."""

    cache: Tensor
    planes: int
    heads: int
    page: int  # stride
    vocabulary: int
    features: int


class SequenceTensors(NamedTuple):
    """The sequences' tokens [B, columns], report [B, *], and int32 tensors [B]. before: the lengths before the step."""

    tokens: Tensor
    columns: int
    lengths: Tensor
    active: Tensor
    report: Tensor
    counter: Tensor
    before: Tensor


class Verified(NamedTuple):
    """The results of verification: path [B, D + 1], the others [B]."""

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    nan: Tensor


class Stopping(NamedTuple):
    """When sequences finish: ids [B, stops], limit and exact [B]."""

    ids: Tensor
    stops: int
    limit: Tensor
    exact: Tensor


class TreeTensors(NamedTuple):
    """The draft tree: tokens, parents and depths [B, nodes], ancestors [B, nodes, words]."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    nodes: int


class Plan(NamedTuple):
    """How a tree grows: a BeamPlan, and levels [3, D + 1] int32: for each level the width of its beam, the beam's first
    slot, and its first candidate."""

    levels: Tensor
    chain: Tensor
    beam_children: Tensor | None
    selected: Tensor | None


class DraftTensors(NamedTuple):
    """The draft's cache, and the hidden state of each sequence's last accepted token, [B, hidden]."""

    cache: Tensor
    hidden: Tensor
    normed: Tensor


class HeadLayer(NamedTuple):
    """A draft head of one layer: its dense weights, None for missing ones."""

    embedding: Tensor
    fc: Tensor
    fc_bias: Tensor | None
    q: Tensor
    q_bias: Tensor | None
    k: Tensor
    k_bias: Tensor | None
    v: Tensor
    v_bias: Tensor | None
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    head: Tensor
    vocabulary: int
    d2t: Tensor | None
    token_norm: Tensor | None
    token_eps: float
    feature_norm: Tensor | None
    feature_eps: float
    post_norm: Tensor
    post_eps: float
    norm: Tensor | None
    norm_eps: float
    inv_freq: Tensor
    rotary_scaling: float
    scale_log2: float


class Workspace(NamedTuple):
    """Memory that phases pass on to each other. `products` are fp32 partial sums of split products; `candidates` and
    `scores` [B, C] are all children in flat order; `beam_scores` and `beam_ancestors` [D, B, K, ...] are of each
    level's nodes."""

    gathered: Tensor
    products: Tensor
    inputs: Tensor
    residual: Tensor
    queries: Tensor
    partial: Tensor
    softmax: Tensor
    attended: Tensor
    x: Tensor
    normed: Tensor
    inner: Tensor
    hidden: Tensor
    head_in: Tensor
    logits: Tensor
    ranks: Tensor
    places: Tensor
    peaks: Tensor
    masses: Tensor
    log_probs: Tensor
    candidates: Tensor
    scores: Tensor
    beam_scores: Tensor
    beam_ancestors: Tensor
    beam_candidates: Tensor
    root: Tensor
    scratch: Tensor


# ---------------------------------------------------------------------------------- constants of a compiled kernel


class HeadShape(NamedTuple):
    """Of the draft head: its hidden and inner sizes, key heads with `group` query heads each, the width of a head and
    of all queries and keys, and rows of a page of its cache.

    eagle3: EAGLE-3, else EAGLE-1. normed_residual: the residual stream begins with normed features.
    """

    hidden: int
    inner: int
    heads: int
    group: int
    width: int
    q_cols: int
    kv_cols: int
    page: int
    eagle3: bool
    normed_residual: bool


class TreeShape(NamedTuple):
    """Of a step: sequences, passes of the head, children of a node, the widest beam, slots of all beams, and
    candidates; a power of two of at least as many nodes; 64-bit words of a beam's and of a tree's ancestors.

    uniform: all beams after the root's are as wide.
    """

    batch: int
    passes: int
    top_k: int
    beam: int
    slots: int
    candidates: int
    nodes: int
    words: int
    tree_words: int
    uniform: bool


class Scanning(NamedTuple):
    """Logits that a task scans: `part` of a node's in `parts` tasks, and `chunk` of the draft's in `chunks`."""

    part: int
    parts: int
    chunk: int
    chunks: int


class ProductTiles(NamedTuple):
    """Tiles of `rows` rows of x by `columns` of a weight, in steps of `depth`; those of SwiGLU; and the parts into
    which products are split. even: all depths are multiples of the steps."""

    rows: int
    columns: int
    depth: int
    swap: bool
    stages: int
    swiglu_columns: int
    swiglu_depth: int
    swiglu_swap: bool
    fc_splits: int
    qkv_splits: int
    out_splits: int
    down_splits: int
    even: bool


class AttentionSizes(NamedTuple):
    """What `attend_split` is compiled for."""

    keys: KeyLayout
    heads: HeadSizes
    splits: Splits
    tiles: Tiles


class Sizes(NamedTuple):
    """All that the kernel is compiled for.

    target_width: of the target's heads. stops: a power of two, at least the number of stop ids. report: columns of a
    report. greedy: the kernel verifies, greedily; otherwise that was done. tma: descriptors load.
    """

    head: HeadShape
    tree: TreeShape
    scanning: Scanning
    products: ProductTiles
    rotation: Rotation
    attention: AttentionSizes
    target_width: int
    stops: int
    report: int
    programs: int
    greedy: bool
    tma: bool


# ------------------------------------------------------------------------------------------ inside of the kernel


class Grid(NamedTuple):
    """A program of the grid. ok: 1, or 0 after a fault, when no phase has tasks."""

    program: Any
    ok: Any


class Pass(NamedTuple):
    """A pass of the draft head over `rows` rows, `count` for each sequence: the accepted tokens in the first pass, then
    the beam of a level.

    above: nodes of the level above, `start` the first candidate among their children. first_slot: of the beam.
    next_start: the first candidate among the pass' own children. ends: rows whose children are scored.
    """

    first: Any
    level: Any
    count: Any
    above: Any
    first_slot: Any
    start: Any
    next_start: Any
    rows: Any
    ends: Any


class WeightDescriptors(NamedTuple):
    """Descriptors of the weights, or None."""

    fc: Any
    q: Any
    k: Any
    v: Any
    o: Any
    gate: Any
    up: Any
    down: Any
    head: Any


class InputDescriptors(NamedTuple):
    """Descriptors of what the products read, or None."""

    fc: Any
    qkv: Any
    o: Any
    mlp: Any
    down: Any
    head: Any


class State(NamedTuple):
    """All that phases read and write."""

    target: Target
    pages: Pages
    sequences: SequenceTensors
    verified: Verified
    stopping: Stopping
    tree: TreeTensors
    plan: Plan
    draft: DraftTensors
    layer: HeadLayer
    weights: WeightDescriptors
    inputs: InputDescriptors
    work: Workspace
