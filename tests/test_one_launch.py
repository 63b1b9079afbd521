"""All layers of a model over one row in one launch, against the separate operations."""

import copy
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_triton import optimize_with_triton
from eagle_triton.engine.drafts import causal_lm
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model import model_view, one_launch
from eagle_triton.engine.model.model_view import ModelView, target_forward
from eagle_triton.engine.model.modules import Projection
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.state import Sequences
from eagle_triton.engine.step import Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.runtime.fallback import KernelError, give_up_gluon, triton_version
from tests.test_causal_lm import causal_lm as tiny_causal_lm
from tests.tiny import random_prompt

pytestmark = pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6, whose Gluon compiles the kernel")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # hidden, intermediate, heads, and the head's size
    "qwen3-0.6b": ("qwen3", 1024, 3072, 16, 128),
    "llama-3.2-1b": ("llama", 2048, 8192, 32, 64),
    "llama-3.2-3b": ("llama", 3072, 8192, 24, 128),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 128),
    "phi-4-mini": ("phi3", 3072, 8192, 24, 128),
    "qwen3-4b": ("qwen3", 2560, 9728, 32, 128),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 16, 128),
    "ministral-8b": ("mistral", 4096, 12288, 32, 128),
    "yi-6b": ("llama", 4096, 11008, 32, 128),
    "tinyllama": ("llama", 2048, 5632, 32, 64),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 768, 32, 128),
}
OF_KINDS = {
    "phi3": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.75}),
    "qwen2": dict(num_key_value_heads=2),
    "mistral": dict(sliding_window=200),
    "qwen3_moe": dict(num_key_value_heads=4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    | dict(norm_topk_prob=True),
}
FEW_KEY_HEADS = {"yi-6b": dict(num_key_value_heads=4), "tinyllama": dict(num_key_value_heads=4)}
VOCAB = 512
PROMPT = random_prompt(7, vocab=64).to(DEVICE)
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
MIXTURE = dict(shape="qwen3-30b-a3b", num_experts=4, num_experts_per_tok=2)


def model(shape="qwen3-0.6b", layers=2, device=DEVICE, dtype=torch.bfloat16, **changes):
    """With random weights; on a CPU, where the kernel does not run, matrices are left as memory is."""
    kind, hidden, inner, heads, width = SHAPES[shape]
    sizes = dict(hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, head_dim=width)
    sizes |= dict(num_key_value_heads=8, num_hidden_layers=layers, vocab_size=VOCAB, rope_theta=1e5)
    sizes |= OF_KINDS.get(kind, {}) | FEW_KEY_HEADS.get(shape, {}) | changes
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    with torch.device("meta" if device == "cpu" else device):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ends), dtype=dtype).eval()
    if device == "cpu":
        made.to_empty(device=device).model.rotary_emb = type(made.model.rotary_emb)(made.config)
    parameters = list(made.parameters())
    room = aligned_bytes(sum(-(-one.nbytes // 128) * 128 for one in parameters), device)
    for parameter in parameters:  # beside each other: an allocator's may lie too far apart
        size = parameter.nbytes
        parameter.data = room[:size].view(parameter.dtype).view_as(parameter)
        room = room[-(-size // 128) * 128 :]
        if parameter.dim() == 1:
            parameter.data.normal_(1.0, 0.2)
        elif device != "cpu":
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return made


def aligned_bytes(count, device, shift=0):
    """Memory at an address that is `shift` bytes beyond a multiple of 128."""
    room = torch.empty(count + 256, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 128 + shift
    return room[start : start + count]


def aligned(tensor, shift=0):
    """The same at such an address."""
    return aligned_bytes(tensor.nbytes, tensor.device, shift).view(tensor.dtype).view_as(tensor).copy_(tensor)


def sequences(view, length, spare=8):
    """One sequence of `length` committed rows, random in keys and values, in shuffled pages of which some are free."""
    found = Sequences(view, None, 1, 64 * (-(-(length + spare) // 64)))
    for tensor in found.caches.tensors:
        tensor.normal_(0.0, 1.0, generator=torch.Generator(DEVICE).manual_seed(length))
    pages = found.pages.table.shape[1]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    found.pages.table[0] = found.pages.table[0][order.to(DEVICE)]
    return found


def widened(place, wide):
    """The same sequence for a model in fp32."""
    other = Sequences(wide, None, 1, place.capacity)
    for mine, theirs in zip(other.caches.tensors, place.caches.tensors, strict=True):
        mine.copy_(theirs)
    other.pages.table.copy_(place.pages.table)
    return other


def settled_token(place, wide, before):
    """A token that chooses its experts without a near tie in fp32, so that it chooses the same ones in bf16."""
    for token in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).tolist():
        gaps, ops = [torch.inf], make_operations()
        ops.route = partial(route_and_note, ops.route, gaps)
        token = torch.tensor([[token]], device=DEVICE)
        target_forward(ops, wide, token, widened(place, wide).caches, before, None, None)
        if min(gaps) > 0.06:
            return token
    raise AssertionError("every token has a near tie")


def route_and_note(route, gaps, x, weight, bias, correction, routing):
    """The routes; notes how far the last chosen logit is above the next one, in units of the logits' deviation."""
    logits = (x @ weight.T).flatten()
    best = logits.sort(descending=True).values
    gaps.append(float((best[routing.chosen - 1] - best[routing.chosen]) / logits.std()))
    return route(x, weight, bias, correction, routing)


def reason(read):
    return one_launch.unsupported_model(read_causal_lm(read))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": torch.float32}, "in float32"),
        ({"hidden_size": 512}, "hidden size is 512"),
        ({"hidden_size": 1600}, "hidden size is 1600"),
        ({"intermediate_size": 1600}, "intermediate size of 1600"),
        ({"intermediate_size": 17408}, "intermediate size of 17408"),
        ({"num_key_value_heads": 16}, "heads (16, 16, 128)"),
        ({"num_attention_heads": 8}, "heads (8, 8, 128)"),
        ({"attention_bias": True}, "a bias of a product other than q, k and v"),
        (MIXTURE, "a mixture of sizes (2048, (32, 4, 128), 768, 4, 2)"),
        (MIXTURE | {"norm_topk_prob": False}, "a router other than"),
        (MIXTURE | {"use_sliding_window": True, "max_window_layers": 0}, "a mixture beside biases or a sliding window"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_model_that_it_does_not_take_has_a_reason(changes, expected):
    assert expected in reason(model(**{"device": "cpu", "layers": 1} | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(gate_up_bias=torch.zeros(4, 1536)), "biases"),
        (dict(shared=object()), "a shared expert"),
        (dict(interleaved=True), "interleaved rows"),
        (dict(gate_up=torch.zeros(4, 1536, 2048)), "not in bfloat16"),
        (dict(down=object()), "without plain weights"),
        (None, "without plain weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mixtures_that_it_does_not_take_are_refused(monkeypatch, changes, expected):
    monkeypatch.setattr(one_launch, "_MIXTURE", (2048, (32, 4, 128), 768, 4, 2))
    view = read_causal_lm(model(**{"device": "cpu", "layers": 1} | MIXTURE))
    assert one_launch.unsupported_model(view) is None
    (layer,) = view.layers
    weights = None if changes is None else replace(layer.mlp.weights, **changes)
    other = replace(layer, mlp=replace(layer.mlp, weights=weights))
    assert expected in one_launch.unsupported_model(replace(view, layers=(other,)))


def test_its_table_has_the_first_rows_of_a_mixture(monkeypatch):
    monkeypatch.setattr(one_launch, "_MIXTURE", (2048, (32, 4, 128), 768, 4, 2))
    read = model(**{"device": "cpu", "layers": 1} | MIXTURE)
    made = one_launch.OneLaunch(read_causal_lm(read))
    (layer,), ((*_, gate, up, down, _),) = read.model.layers, made._model.rows.tolist()
    lowest, experts = made._weights.base.data_ptr(), layer.mlp.experts
    expected = (experts.gate_up_proj, experts.gate_up_proj[0, 768:], experts.down_proj)
    assert [lowest + 128 * row for row in (gate, up, down)] == [tensor.data_ptr() for tensor in expected]
    assert made._model.addresses.tolist()[0][4] == layer.mlp.gate.weight.data_ptr()
    assert made._sizes.MIXTURE and made._sizes.KV == 4 and made._sizes.I == 768


@pytest.mark.parametrize(
    ("name", "shift", "expected"),
    [("mlp.up_proj", 64, "address of a weight"), ("self_attn.k_norm", 2, "address of a norm's weight")],
)
def test_weights_at_addresses_that_its_loads_cannot_begin_with_are_refused(name, shift, expected):
    odd = model(device="cpu", layers=1)
    weight = odd.model.layers[0].get_submodule(name).weight
    weight.data = aligned(weight.data, shift)
    assert expected in reason(odd)


@pytest.mark.parametrize(
    ("queries", "width", "key_heads"), [(2, 128, 2), (4, 64, 4), (3, 128, 8)], ids=lambda value: str(value)
)
def test_programs_make_all_rows_of_q_k_and_v(queries, width, key_heads):
    """Each block of q once, and each of k and v by all groups that share its head, in the order of their mailbox."""
    loading = pytest.importorskip("eagle_triton.ops.one_launch.loading")
    kernel = pytest.importorskip("eagle_triton.ops.one_launch")
    sizes = kernel.Sizes(2048, queries, width, width, 2048, 1, False, KV=key_heads)
    q_blocks, heads = queries * width // 128, width // 8
    for pid in range(128):
        group, member = divmod(pid, 16)
        gl = SimpleNamespace(program_id=lambda axis, pid=pid: pid, where=lambda which, a, b: a if which else b)
        gl.constexpr = loading.gl.constexpr
        block_of = FunctionType(loading.block_of_qkv.fn.__code__, {"gl": gl, "MEMBERS": 16})
        for block in range(q_blocks + width // 64):
            of_q, of_k, place = block_of(block, sizes)
            in_group = block * 16 + member  # of the group's q, then its k and its v
            expected = (True, False, group * q_blocks * 16 + in_group)
            if in_group >= q_blocks * 16:
                of_key, place_in_head = divmod(in_group - q_blocks * 16, heads)
                expected = (False, of_key == 0, group * key_heads // 8 * heads + place_in_head)
            assert (of_q, of_k and not of_q, place) == expected


def test_its_table_has_biases_and_windows():
    read = model("qwen2.5-3b", device="cpu", layers=1)
    made, attention = one_launch.OneLaunch(read_causal_lm(read)), read.model.layers[0].self_attn
    biases = [projection.bias.data_ptr() for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert made._model.addresses.tolist()[0][5:] == biases
    assert made._sizes.BIASED and not made._sizes.WINDOWED and made._model.rows.tolist()[0][7] == 2**31 - 1
    made = one_launch.OneLaunch(read_causal_lm(model("ministral-8b", device="cpu", layers=1)))
    assert made._sizes.WINDOWED and not made._sizes.BIASED and made._model.rows.tolist()[0][7] == 200
    some = dict(use_sliding_window=True, sliding_window=200, max_window_layers=1)
    made = one_launch.OneLaunch(read_causal_lm(model("qwen2.5-3b", device="cpu", **some)))
    assert made._sizes.WINDOWED and made._model.rows[:, 7].tolist() == [2**31 - 1, 200]


def test_some_biases_of_q_k_and_v_alone_are_refused():
    view = read_causal_lm(model("qwen2.5-3b", device="cpu", layers=1))
    (layer,) = view.layers
    for change, expected in ((None, "some of q, k and v"), (torch.zeros(256), "not in bfloat16")):
        mixer = replace(layer.mixer, k=replace(layer.mixer.k, bias=change))
        other = replace(view, layers=(replace(layer, mixer=mixer),))
        assert expected in one_launch.unsupported_model(other)


def test_products_that_ranks_share_are_refused():
    view = read_causal_lm(model(device="cpu", layers=1))
    (layer,) = view.layers
    shared = replace(layer.mlp, down=replace(layer.mlp.down, summed_over=object()))
    assert "shared by ranks" in one_launch.unsupported_model(replace(view, layers=(replace(layer, mlp=shared),)))


def test_layer_norms_blocks_without_a_gate_and_side_by_side_are_refused():
    view = read_causal_lm(model(device="cpu", layers=1))
    (layer,) = view.layers
    norm = replace(layer.input_norm, round_first=False, subtract_mean=True)
    for change, expected in (
        (dict(parallel=True), "is not like Llama's"),
        (dict(mlp=replace(layer.mlp, gate=None)), "is not attention and SwiGLU"),
        (dict(input_norm=norm), "LayerNorms"),
    ):
        assert expected in one_launch.unsupported_model(replace(view, layers=(replace(layer, **change),)))


@pytest.mark.parametrize("change", [{"embedding_scale": 2.0}, {"layer_inputs": object()}, {"feature_layers": (0,)}])
def test_models_that_read_or_give_more_than_their_layers_are_refused(change):
    view = read_causal_lm(model(device="cpu", layers=1))
    draft = draft_from_causal_lm(model(device="cpu", layers=1), view, lambda: TreeSpec.chain(2))
    for either in (view, draft):
        assert one_launch.unsupported_model(either) is None
        assert "scaled" in one_launch.unsupported_model(replace(either, **change))


def test_the_report_says_whether_plain_steps_use_it(monkeypatch):
    monkeypatch.setattr("eagle_triton.runtime.fallback._gluon_modules", {})
    view = read_causal_lm(model(device="cpu", layers=1))
    engine = Engine(view, None, make_operations(), megakernel=True)

    def note(used=True):
        engine.note_one_launch(Mode(one_launch=used))
        return engine.notes.get("one_launch")

    assert note() is None, "the references run"
    engine.ops.one_launch = True
    assert note() == "not used: it needs a Hopper GPU"
    vars(view).update(reason_against_one_launch=None, one_launch=one_launch.OneLaunch(view))  # as on such a GPU
    assert note().startswith("used")
    assert note(used=False).endswith("faster for a request of more than 16384 tokens")
    give_up_gluon(one_launch._KERNEL)
    assert note() == "not used: its kernel does not compile here"
    engine.megakernel = None
    assert note() is None, "it was not asked for"


def test_its_table_has_the_address_of_each_weight():
    read = model(device="cpu")
    view = read_causal_lm(read)
    made = one_launch.OneLaunch(view)
    lowest = made._weights.base.data_ptr()
    for layer, rows, norms in zip(
        read.model.layers, made._model.rows.tolist(), made._model.addresses.tolist(), strict=True
    ):
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        products += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        assert [lowest + 128 * row for row in rows[:7]] == [product.weight.data_ptr() for product in products]
        found = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
        assert norms[:4] == [norm.weight.data_ptr() for norm in found]
    ends = max(parameter.data_ptr() + parameter.nbytes for parameter in read.model.layers.parameters())
    assert lowest + 128 * made._weights.shape[0] <= ends


def test_without_its_kernel_the_separate_ones_run(monkeypatch):
    """On a machine where it does not compile a call gives nothing, and the operations are told once."""
    read = model(device="cpu", layers=1)
    view = read_causal_lm(read)
    made = one_launch.OneLaunch(view)
    caches, ops, told = view.new_caches(Sequences(view, None, 1, 64).pages), make_operations(), []
    ops.on_kernel_error = lambda name, error: told.append(name)

    def fails(*args):
        raise KernelError(one_launch._kernel().one_launch_kernel, ValueError("no such instruction"))

    monkeypatch.setattr(one_launch, "launch", fails)
    monkeypatch.setattr("eagle_triton.runtime.fallback._gluon_modules", {})
    token, lengths = torch.tensor([[5]]), torch.tensor([3], dtype=torch.int32)
    assert made(ops, token, caches, lengths) is None and told == ["one_launch"]
    assert made(ops, token, caches, lengths) is None and told == ["one_launch"], "it is not tried again"
    assert not ops.calls["one_launch"]


def test_only_one_row_is_taken():
    view = read_causal_lm(model(device="cpu", layers=1))
    made = one_launch.OneLaunch(view)
    caches = view.new_caches(Sequences(view, None, 1, 64).pages)
    assert made(make_operations(), torch.tensor([[5, 6]]), caches, torch.tensor([0], dtype=torch.int32)) is None


class ByReference:
    """In the place of OneLaunch on any machine: the same row by the separate operations."""

    compiles: ClassVar[bool] = True
    calls: ClassVar[list[int]] = []  # the skip of each

    def __init__(self, model):
        self.view = ModelView(model.embedding, model.layers, model.norm, Projection(), (), (), None)

    def __call__(self, ops, tokens, caches, lengths, skip=0, at_least=None):
        self.calls.append(skip)
        if at_least is not None and int(at_least[0]) < at_least[1]:
            return torch.full((2, 1, 1, self.view.embedding.shape[1]), torch.nan, device=tokens.device)
        normed = target_forward(ops, self.view, tokens, caches, lengths + skip, None, None)[0]
        return normed, normed


@pytest.fixture
def by_reference(monkeypatch):
    started = Engine.__post_init__

    def allowed(engine):
        started(engine)
        engine.ops.one_launch = engine.one_launch

    monkeypatch.setattr(Engine, "__post_init__", allowed)
    for module in (model_view, causal_lm):
        monkeypatch.setattr(module, "reason_against", lambda model: None)
        monkeypatch.setattr(module, "OneLaunch", ByReference)
    ByReference.calls = []


def test_plain_steps_of_one_slot_use_it(by_reference, monkeypatch):
    target = tiny_causal_lm(vocab=64)
    for prompts, allowed, rows, count, note in (
        (PROMPT, "auto", 100, 11, "used"),
        (PROMPT, False, 100, 0, None),
        (PROMPT.repeat(2, 1), "auto", 100, 0, None),
        (PROMPT, "auto", 18, 0, "more than 18 tokens"),
    ):
        monkeypatch.setattr(one_launch, "MAX_ROWS", rows)
        expected, ByReference.calls = target.generate(prompts, **OPTIONS), []
        with optimize_with_triton(target, megakernel=allowed, kernels=False) as (_, originals):
            assert torch.equal(target.generate(prompts, **OPTIONS), expected)
            notes = [entry.reason for entry in originals.report() if entry.path == "one_launch"]
        assert len(ByReference.calls) >= count and set(ByReference.calls) == ({0} if count else set())
        assert [note in said for said in notes] == ([True] if note else [])


def test_a_step_that_gives_nan_gives_the_launch_up_for_good(by_reference, monkeypatch):
    """A program that waits in vain takes NaN. The request ends with that error, and later ones do without the
    launch."""
    target = tiny_causal_lm(vocab=64)
    expected, whole = target.generate(PROMPT, **OPTIONS), ByReference.__call__

    def waits_in_vain(self, *args):
        outputs = whole(self, *args)
        return outputs if len(self.calls) < 3 else tuple(torch.full_like(output, torch.nan) for output in outputs)

    monkeypatch.setattr(ByReference, "__call__", waits_in_vain)
    with optimize_with_triton(target, kernels=False) as (_, originals):
        with pytest.raises(RuntimeError, match="NaN"):
            target.generate(PROMPT, **OPTIONS)
        ByReference.calls.clear()
        assert torch.equal(target.generate(PROMPT, **OPTIONS), expected) and not ByReference.calls
        (note,) = [entry.reason for entry in originals.report() if entry.path == "one_launch"]
    assert note.startswith("given up: a step gave NaN")


def test_an_engine_beside_another_follows_it_on_the_device():
    """Their launches share mailboxes, so one must have ended before the next begins. They share the launch's end,
    too."""
    view = read_causal_lm(model(device="cpu", layers=1))
    engine = Engine(view, None, make_operations())
    engine.ops.one_launch = engine.one_launch = False
    other = engine.beside(draft_from_causal_lm(model(device="cpu", layers=1), view, lambda: TreeSpec.chain(2)), None)
    assert other.view.one_launch is view.one_launch and other.ops is engine.ops and not other.ops.one_launch
    waited = []
    one, two = (SimpleNamespace(wait_stream=lambda other, name=name: waited.append((name, other))) for name in "ab")
    for each, stream in ((engine, one), (engine, one), (other, two), (engine, one)):
        each._streams.follow(stream)
    assert waited == [("b", one), ("a", two)]


def test_a_draft_models_chain_uses_it(by_reference, monkeypatch):
    """With as many accepted drafts as without it. A step takes in the last draft, if all were accepted, and the root;
    each pass finds the rows of those before it."""
    target, options = tiny_causal_lm(vocab=64), OPTIONS | dict(max_new_tokens=24)
    expected, chain = target.generate(PROMPT, **options), dict(topk=1, num_steps=3, num_draft_tokens=4, kernels=False)
    other = copy.deepcopy(target)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "mlp" in name:
                weight.add_(torch.randn_like(weight), alpha=0.05)

    def decoded(draft, **changes):
        """The number of steps, and the skips of their launches."""
        ByReference.calls = []
        with optimize_with_triton(target, draft, **chain | changes) as (_, originals):
            assert torch.equal(target.generate(PROMPT, **options), expected)
            steps = next(entry.calls for entry in originals.report() if entry.path == "update_sequence")
        return steps, ByReference.calls

    for draft, least, most in ((copy.deepcopy(target), 6, 8), (other, 9, 20)):
        steps, calls = decoded(draft)
        separate, none = decoded(draft, megakernel=False)
        assert least <= steps == separate <= most and not none, (steps, separate)
        assert calls[:2] == [0, 1] and calls[2:] == [3, 0, 0, 1] * (len(calls[2:]) // 4) and len(calls) > 4 * least - 8
    _, calls = decoded(copy.deepcopy(target), topk=2, num_draft_tokens=6)
    assert not calls
    monkeypatch.setattr(causal_lm.CausalLMDraft, "_extends_by_one_launch", False)  # as a wide one
    _, calls = decoded(copy.deepcopy(target))
    assert calls == [0, 1] * (len(calls) // 2), "only the chain's passes"


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_that_of_the_separate_operations(shape):
    """Within twice the error of torch in bf16, wherever the row falls into tiles, pages and programs. It writes its own
    keys and values only, and gives the same bits every time."""
    read = model(shape)
    view, wide = read_causal_lm(read), read_causal_lm(copy.deepcopy(read).float())
    made, reference, ops = one_launch.OneLaunch(view), make_operations(), make_operations()
    errors = []
    for length, skip in ((0, 0), (1, 0), (30, 1), (62, 2), (64, 0), (511, 0), (509, 5), (1100, 0)):
        before = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        token = settled_token(sequences(view, length), wide, before + skip)
        outputs, caches = {}, {}
        for name, of in (("wide", wide), ("torch", view), ("ours", view)):
            place = sequences(view, length)
            if name == "wide":
                place = widened(place, wide)
            kept = [tensor.clone() for tensor in place.caches.tensors]
            if name == "ours":
                _, outputs[name] = made(ops, token, place.caches, before, skip)
                again = made(ops, token, place.caches, before, skip)[1]
                assert torch.equal(again, outputs[name])
            else:
                outputs[name] = target_forward(reference, of, token, place.caches, before + skip, None, None)[0]
            (cache,), (old,) = list(place.caches.tensors), kept
            row = length + skip
            page = int(place.pages.table[0, row // 64])
            caches[name] = cache[:, :, page, :, row % 64].float()
            cache[:, :, page, :, row % 64] = old[:, :, page, :, row % 64]
            assert torch.equal(cache, old), "only the new row is written"
        for found in (outputs, caches):
            theirs = float((found["torch"].float() - found["wide"].float()).abs().max())
            ours = float((found["ours"].float() - found["wide"].float()).abs().max())
            assert ours <= 2 * theirs + 1e-5, (length, skip, ours, theirs)
            errors.append(theirs)
    assert max(errors) > 1e-4, "else zeros would pass"
    assert ops.calls["one_launch"] == 16


@needs_hopper
def test_below_its_least_count_a_launch_changes_nothing():
    view = read_causal_lm(model(layers=3))  # odd, so that launches begin with either parity
    made, place, ops = one_launch.OneLaunch(view), sequences(view, 100), make_operations()
    token, before = torch.tensor([[5]], device=DEVICE), torch.tensor([100], dtype=torch.int32, device=DEVICE)
    expected = made(ops, token, place.caches, before)[1].clone()
    kept = [tensor.clone() for tensor in place.caches.tensors]
    for count, runs in ((2, False), (3, True), (-1, False), (4, True)):
        for tensor in place.caches.tensors:
            tensor[:, :, place.pages.table[0, 1], :, 100 % 64] = 0
        accepted = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        found = made(ops, token, place.caches, before, at_least=(accepted, 3))[1]
        wrote = [bool(tensor[:, :, place.pages.table[0, 1], :, 100 % 64].any()) for tensor in place.caches.tensors]
        assert wrote == [runs]
        assert torch.equal(made(ops, token, place.caches, before)[1], expected)
        assert not runs or torch.equal(found, expected)
        assert all(map(torch.equal, place.caches.tensors, kept))


@needs_hopper
def test_generate_and_a_draft_model_use_it():
    """The tokens are those without it: within bf16 a model of two layers is sure enough of them."""
    target = model(layers=3)
    prompt = torch.randint(VOCAB, (1, 700), device=DEVICE)
    options = dict(max_new_tokens=100, do_sample=False, pad_token_id=0)
    expected = target.generate(prompt, **options)
    texts, calls = [], []
    for allowed in ("auto", False):
        with optimize_with_triton(target, megakernel=allowed) as (_, originals):
            texts.append(target.generate(prompt, **options))
            calls.append(sum(entry.calls for entry in originals.report() if entry.path == "one_launch"))
    assert calls[0] >= 99 and calls[1] == 0
    same = [int((text == expected).long().cumprod(1).sum()) - 700 for text in texts]
    assert min(same) > 20, same
    with optimize_with_triton(target, model(layers=1), topk=1, num_steps=5, num_draft_tokens=6) as (_, originals):
        drafted = target.generate(prompt, **options)
        (count,) = [entry.calls for entry in originals.report() if entry.path == "one_launch"]
    assert int((drafted == expected).long().cumprod(1).sum()) - 700 > 20 and count > 20


@needs_hopper
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_a_program_that_never_sends_gives_nan_instead_of_a_launch_without_end(shape):
    view = read_causal_lm(model(shape))
    made, place, ops = one_launch.OneLaunch(view), sequences(view, 100), make_operations()
    token, before = torch.tensor([[5]], device=DEVICE), torch.tensor([100], dtype=torch.int32, device=DEVICE)
    expected = made(ops, token, place.caches, before)[1]
    made.programs -= 1
    assert made(ops, token, place.caches, before)[1].isnan().all()
    made.programs += 1
    assert torch.equal(made(ops, token, place.caches, before)[1], expected)
