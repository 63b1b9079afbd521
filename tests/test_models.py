"""EaModel against decoding with the target alone, and everything it must refuse.

The targets are tiny and random, but predictable: the residual stream is dominated by the embedding and the LM head is
a permutation of it, so a head that passes the embedding on drafts what the target will say, with some errors.
"""

import copy
import json
import pickle
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eagle_triton import EAGLEInference
from eagle_triton.demo import demo_directory
from eagle_triton.models import MC_SIM_7B_63, DraftConfig, Eagle1Head, Eagle3Head, EaModel, head_loading, loading
from eagle_triton.models.head_loading import read_draft_config
from eagle_triton.models.loading import load_target, read_target_config
from eagle_triton.models.target import TargetCache, default_feature_layers, run_target
from eagle_triton.models.tree import ancestor_mask, fixed_tree, grow_dynamic_tree, retrieve_paths, top_k
from eagle_triton.models.verify import children_of, generate_warpers, verify_tree
from tests.checkpoints import config_of, edited
from tests.tiny import SIZES, random_matrices

V, H, LAYERS, EOS = 64, 64, 8, 63
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
TREES = {
    "60/7/10": dict(total_token=60, depth=7, top_k=10),
    "26-fixed": dict(tree_choices=MC_SIM_7B_63),
    "8/3/2": dict(total_token=8, depth=3, top_k=2),
    "2/1/1": dict(total_token=2, depth=1, top_k=1),
}


# --- tiny models ---


@cache
def tokenizer():
    vocab = {f"t{i}": i for i in range(V - 2)} | {"<|eot_id|>": V - 2, "<eos>": EOS}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="t0")), unk_token="t0", eos_token="<eos>"
    )


@cache
def target(architecture: str = "llama", **changes):
    """A target that mostly maps each token to a fixed next one."""
    torch.manual_seed(0)
    own = dict(vocab_size=V, num_hidden_layers=LAYERS, head_dim=16, max_position_embeddings=512)
    own |= dict(tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS)
    config = AutoConfig.for_model(architecture, **SIZES | own | changes)
    model = random_matrices(AutoModelForCausalLM.from_config(config).float(), 0.08)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_(0, 1)
        order = torch.randperm(EOS)  # no token leads to EOS
        model.lm_head.weight[order] = embedding[order.roll(1)]
        model.lm_head.weight[EOS] = 0
    return model


def draft_config(eagle3: bool, **changes) -> DraftConfig:
    own = dict(num_key_value_heads=4, vocab_size=V, draft_vocab_size=48 if eagle3 else V, bias=False)
    return DraftConfig(**SIZES | own | changes)


def head(base, eagle3: bool, seed: int = 1, config: DraftConfig | None = None, **tree):
    """A head that passes on the embedding of the newest token, plus noise."""
    torch.manual_seed(seed)
    config = config or draft_config(eagle3)
    draft = random_matrices((Eagle3Head if eagle3 else Eagle1Head)(config, **tree), 0.08)
    eye = torch.eye(H)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(base.model.embed_tokens.weight)
        if not eagle3:
            draft.fc.weight[:, :H] += eye
            return draft
        attention = draft.midlayer.self_attn  # attends to itself: the embedding against itself
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[:, :H] += 2 * eye
        attention.o_proj.weight += eye
        ids = torch.arange(V)
        if draft.d2t is not None:
            ids = torch.randperm(V)[: config.draft_vocab_size].sort().values
            draft.d2t.copy_(ids - torch.arange(len(ids)))
            draft.t2d[ids] = True
        draft.lm_head.weight.copy_(base.lm_head.weight[ids])
    return draft


def model(architecture: str = "llama", eagle3: bool = True, **tree) -> EaModel:
    base = target(architecture)
    return EaModel(base, head(base, eagle3, **tree), tokenizer())


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, EOS - 1, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["eagle3", "eagle1"])
def eagle3(request) -> bool:
    return request.param


# --- speculation changes nothing ---


@pytest.mark.parametrize(
    ("architecture", "eagle3", "tree"),
    [
        *(("llama", True, tree) for tree in TREES),
        *(("llama", False, tree) for tree in ("26-fixed", "8/3/2", "2/1/1")),
        *((other, True, "26-fixed") for other in ARCHITECTURES if other != "llama"),
    ],
)
def test_speculation_gives_the_targets_tokens(architecture, eagle3, tree):
    """Every tree over one architecture, and one tree over each: a tree does not depend on the layers."""
    m = model(architecture, eagle3, **TREES[tree])
    accepted = []
    for length in (1, 2, 33):
        ids = prompt(length)
        got, new, index = m.eagenerate(ids, max_new_tokens=12, log=True)
        accepted += m.accept_lengths
        assert index + 1 == len(m.accept_lengths) and new == sum(m.accept_lengths) + len(m.accept_lengths)
        want = m.naivegenerate(ids, max_new_tokens=new)
        assert torch.equal(got, want[:, : got.shape[1]])
    assert sum(accepted) > 0 and max(accepted) <= max(m.ea_layer.depth + 1, 5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_target_alone_equals_transformers_generate(architecture):
    base, ids = target(architecture), prompt(20)
    want = base.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(model(architecture).generate(ids, max_new_tokens=20), want)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", dict(sliding_window=6)),
        ("qwen2", dict(sliding_window=6, use_sliding_window=True, max_window_layers=4)),
        ("qwen3", dict(sliding_window=6, use_sliding_window=True, max_window_layers=4)),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_sliding_windows_are_observed(architecture, changes):
    base, ids = target(architecture, **changes), prompt(20)
    want = base(ids, use_cache=False).logits
    cache_ = TargetCache()
    run_target(base, ids[:, :13], cache_)
    hidden, _ = run_target(base, ids[:, 13:], cache_)
    torch.testing.assert_close(base.lm_head(hidden), want[:, 13:], atol=1e-4, rtol=1e-4)
    assert (want - target(architecture)(ids, use_cache=False).logits).abs().max() > 1e-3


def test_the_cache_after_a_generation_is_that_of_plain_decoding(eagle3, monkeypatch):
    m, caches = model(eagle3=eagle3), []
    monkeypatch.setattr("eagle_triton.models.ea_model.TargetCache", lambda: caches.append(TargetCache()) or caches[-1])
    ids = m.eagenerate(prompt(9), max_new_tokens=20)
    plain = TargetCache()
    run_target(m.base_model, ids, plain)
    assert caches[0].get_seq_length() == plain.get_seq_length()
    for (key, value), (want_key, want_value) in zip(caches[0].layers, plain.layers, strict=True):
        torch.testing.assert_close(key, want_key, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(value, want_value, atol=1e-4, rtol=1e-4)


def test_streams_end_where_the_whole_generation_does():
    m, ids = model(), prompt(5)
    for stream, whole in ((m.ea_generate, m.eagenerate), (m.naive_generate, m.naivegenerate)):
        steps = list(stream(ids, max_new_tokens=10))
        want, new, index = whole(ids, max_new_tokens=10, log=True)
        assert torch.equal(steps[-1], want) and len(steps) == index + 1 and new == want.shape[1] - 5
        assert all(torch.equal(longer[:, : shorter.shape[1]], shorter) for shorter, longer in pairwise(steps))


# --- the original stop rules ---


def test_stops_after_passing_max_new_tokens():
    m = model()
    assert m.naivegenerate(prompt(3), max_new_tokens=7, log=True)[1:] == (8, 7)
    sizes = [ids.shape[1] - 3 for ids in m.ea_generate(prompt(3), max_new_tokens=7)]
    assert sizes[-1] > 7 and all(size <= 7 for size in sizes[:-1])


def test_stops_at_max_length_less_the_tree_less_ten():
    m = model(total_token=8, depth=3, top_k=2)
    limit = 60 - 7 - 10
    sizes = [ids.shape[1] for ids in m.ea_generate(prompt(30), max_length=60)]
    assert sizes[-1] > limit >= max(sizes[:-1])
    assert m.naivegenerate(prompt(30), max_length=60).shape[1] == limit + 1
    assert m.naivegenerate(prompt(1), max_length=27).shape[1] == 11  # the loop runs that often at most
    ids, new, index = m.eagenerate(prompt(3), max_length=17, log=True)
    assert torch.equal(ids, prompt(3)) and (new, index) == (0, -1)


def test_stops_at_the_end_token_and_keeps_what_the_step_accepted(monkeypatch):
    m, ids = model(), prompt(4)
    sequence = m.naivegenerate(ids, max_new_tokens=30)[0].tolist()
    end = sequence[12]
    position = sequence.index(end, 4)
    monkeypatch.setattr(m, "tokenizer", _Tokens(end, end))
    sizes = [s.shape[1] for s in m.ea_generate(ids, max_new_tokens=30)]
    assert sizes[-1] > position >= max(sizes[:-1], default=0)
    assert m.naivegenerate(ids, max_new_tokens=30).shape[1] == position + 1
    monkeypatch.setattr(m, "tokenizer", _Tokens(None, end))
    assert m.naivegenerate(ids, max_new_tokens=20).shape[1] == 4 + 21
    assert m.naivegenerate(ids, max_new_tokens=20, is_llama3=True).shape[1] == position + 1


class _Tokens:
    def __init__(self, eos, eot):
        self.eos_token_id, self.eot = eos, eot

    def convert_tokens_to_ids(self, token):
        assert token == "<|eot_id|>"
        return self.eot


# --- generate stops exactly ---


def test_generate_counts_exactly():
    m, ids = model(), prompt(6)
    want = m.naivegenerate(ids, max_new_tokens=40)
    for new in (0, 1, 2, 7, 20):
        assert torch.equal(m.generate(ids, max_new_tokens=new), want[:, : 6 + new])
    assert torch.equal(m.generate(ids, max_length=15), want[:, :15])
    assert m.generate(ids, max_length=6).shape[1] == 6


def test_generate_cuts_after_the_end_token():
    m, ids = model(), prompt(4)
    want = m.naivegenerate(ids, max_new_tokens=30)[0].tolist()
    for end in (want[10], [EOS, want[15]]):
        ends = {end} if isinstance(end, int) else set(end)
        position = next(i for i in range(4, len(want)) if want[i] in ends)
        assert m.generate(ids, max_new_tokens=30, eos_token_id=end)[0].tolist() == want[: position + 1]
        assert m.generate(ids, max_new_tokens=30, eos_token_id=torch.tensor(end))[0].tolist() == want[: position + 1]
    assert m.generate(ids, max_new_tokens=20, eos_token_id=-1)[0].tolist() == want[:24]  # -1 is no token
    for end in ("</s>", 9.0, [9, "</s>"]):
        with pytest.raises(TypeError, match="eos_token_id: must be a token id or a list of them"):
            m.generate(ids, max_new_tokens=3, eos_token_id=end)


def test_generate_takes_batches_with_padding_on_either_side():
    m = model()
    prompts = [prompt(n, seed=n)[0] for n in (3, 7, 5)]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, p in enumerate(prompts):
        place = slice(7 - len(p), 7) if row == 0 else slice(0, len(p))
        ids[row, place], mask[row, place] = p, 1
    got = m.generate(ids, max_new_tokens=9, attention_mask=mask, pad_token_id=1)
    assert got.shape == (3, 7 + 9)
    for row, p in enumerate(prompts):
        want = m.generate(p[None], max_new_tokens=9)[0]
        assert torch.equal(got[row, : len(want)], want) and (got[row, len(want) :] == 1).all()


def test_sampling_repeats_with_its_seed():
    m, ids = model(), prompt(4)
    options = dict(do_sample=True, temperature=15.0, top_p=0.95, top_k=20, max_new_tokens=12)
    first = m.generate(ids, seed=3, **options)
    assert torch.equal(first, m.generate(ids, seed=3, **options))
    assert torch.equal(first, m.generate(ids, generator=torch.Generator().manual_seed(3), **options))
    assert any(not torch.equal(first, m.generate(ids, seed=s, **options)) for s in (4, 5))
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(m.eagenerate(ids, temperature=15.0, top_p=0.9, top_k=5.0, max_new_tokens=12))
        runs.append(m.naivegenerate(ids, temperature=15.0, top_p=0.9, top_k=5.0, max_new_tokens=12))
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[3])


@pytest.mark.parametrize("filters", [dict(), dict(top_p=0.7)], ids=str)
def test_the_sampled_walk_is_lossless(filters):
    """The distribution of the first two tokens, over a tree whose nodes' logits depend on their token alone."""
    torch.manual_seed(0)
    size, samples = 5, 6000
    table = torch.randn(size, size) * 1.5
    warpers = generate_warpers(**dict(dict(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0), **filters))
    distribution = warpers(None, table.clone()).softmax(-1)
    tokens = torch.tensor([2, 0, 4, 1, 3, 4])
    children = [[1, 2], [3, 4], [5], [], [], []]
    counts, logits = torch.zeros(size, size), table[tokens]
    for _ in range(samples):
        path, after = verify_tree(tokens, children, logits, warpers)
        emitted = [*tokens[path[1:]].tolist(), int(after)]
        if len(emitted) == 1:
            emitted.append(int(torch.multinomial(distribution[emitted[0]], 1)))
        counts[emitted[0], emitted[1]] += 1
    exact = distribution[2][:, None] * distribution
    assert 0.5 * (counts / samples - exact).abs().sum() < 0.03
    assert counts[exact == 0].sum() == 0


# --- trees ---


def test_ties_keep_the_tree_closed():
    """A head that is certain of one token: every child ties with its parent, and only the order saves the tree."""
    certain = torch.full((1, 6), -9.0).index_fill(1, torch.tensor([2]), 0.0)
    expand = lambda tokens, hidden, visible, depth: (certain.expand(len(tokens), -1), hidden)  # noqa: E731
    for total in (1, 2, 7, 12):
        drafts, parents = grow_dynamic_tree(certain, torch.zeros(1, 1, 4), expand, lambda ids: ids, total, 5, 3)
        assert len(drafts) == total and parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents.tolist()[1:], start=1))
        siblings = list(zip(parents[1:].tolist(), drafts.tolist(), strict=True))
        assert len(set(siblings)) == total
    assert top_k(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3)[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("tree", TREES)
def test_the_four_tensors_describe_one_tree(eagle3, tree):
    m = model(eagle3=eagle3, **TREES[tree])
    ids = prompt(12)
    width = H if not eagle3 else 3 * H
    for processor in (None, object()):
        m.ea_layer.reset_kv()
        tokens, paths, mask, depths = m.ea_layer.topK_genrate(
            torch.randn(1, 11, width), ids, m.base_model.lm_head, processor
        )
        n = m.ea_layer.total_tokens + 1
        assert tokens.shape == (1, n) and tokens[0, 0] == ids[0, -1] and mask.shape == (1, 1, n, n)
        assert mask.dtype == torch.float32 and paths.shape[1] == depths.max() + 1
        children = children_of(mask[0, 0].bool(), depths)
        leaves = [node for node in range(n) if not children[node]]
        ends = [[node for node in path if node >= 0] for path in paths.tolist()]
        assert sorted(path[-1] for path in ends) == leaves
        for path in ends:
            assert path[0] == 0 and all(child in children[node] for node, child in pairwise(path))
            assert mask[0, 0, path[-1]].nonzero().flatten().tolist() == path
    assert m.ea_layer.stable_kv[0][0].shape[2] == 11


def test_a_fixed_tree_holds_the_likeliest_followers_of_each_node(eagle3):
    m = model(eagle3=eagle3, tree_choices=[[0], [2], [0, 1], [2, 0], [2, 0, 1]])
    features = torch.randn(1, 6, 3 * H if eagle3 else H)
    ids = prompt(7)
    tokens, _, _, _ = m.ea_layer.topK_genrate(features, ids, m.base_model.lm_head)
    nodes = {(): 0, (0,): 1, (2,): 2, (0, 1): 3, (2, 0): 4, (2, 0, 1): 5}
    for path, node in nodes.items():  # each path again, as a plain sequence without cache or mask
        if not path:
            continue
        line = [tokens[0, nodes[path[:i]]].item() for i in range(1, len(path))]
        hidden, cache_ = m.ea_layer(features, ids[:, 1:])
        for token in line:
            hidden, cache_ = m.ea_layer(hidden[:, -1:], torch.tensor([[token]]), cache_)
        logits = m.ea_layer.draft_logits(hidden[0, -1], m.base_model.lm_head)
        wanted = m.ea_layer.to_target_ids(logits.argsort(descending=True))[path[-1]]
        assert tokens[0, node] == wanted


def test_mc_sim_7b_63():
    tree = fixed_tree(MC_SIM_7B_63)
    assert len(tree.parents) == 26 and tree.branching == 4
    assert [len(level) for level in tree.levels] == [1, 4, 4, 1, 1]  # nodes with children, per depth
    assert ancestor_mask(torch.tensor(tree.parents)).sum(1).max() == 6
    assert len(retrieve_paths(tree.parents)) == 26 - 11


@pytest.mark.parametrize(
    "tree",
    [
        dict(total_token=1),
        dict(total_token=60, depth=1, top_k=2),
        dict(top_k=49),
        dict(depth=0),
        dict(tree_choices=[]),
        dict(tree_choices=[[0, 0]]),
        dict(tree_choices=[[0], [0]]),
        dict(tree_choices=[[-1]]),
        dict(tree_choices=[[48]]),
    ],
    ids=str,
)
def test_impossible_trees_are_refused(tree):
    with pytest.raises(ValueError, match="tree"):
        model(**tree)


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), "1", True])
def test_thresholds_are_positive(threshold):
    with pytest.raises(ValueError, match="threshold: must be a positive number"):
        model(threshold=threshold)


# --- heads ---


def test_heads_train_and_their_cache_changes_nothing(eagle3):
    draft = head(target(), eagle3, config=draft_config(eagle3, num_hidden_layers=1 if eagle3 else 2))
    features, ids = torch.randn(2, 9, 3 * H if eagle3 else H), prompt(18).view(2, 9)
    hidden, cache_ = draft(features, ids)
    first, past = draft(features[:, :4], ids[:, :4])
    rest, past = draft(features[:, 4:], ids[:, 4:], past)
    torch.testing.assert_close(torch.cat((first, rest), 1), hidden, atol=1e-4, rtol=1e-4)
    assert len(cache_) == len(past) and cache_[0][0].shape == past[0][0].shape == (2, 4, 9, 16)
    draft.draft_logits(hidden, target().lm_head).sum().backward()
    assert all(p.grad is not None for p in draft.parameters())
    target().zero_grad()


def test_rotary_scaling_is_that_of_transformers(eagle3):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from eagle_triton.models.heads import rotary_frequencies, rotary_scale

    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    llama3 |= dict(original_max_position_embeddings=512)
    yarn = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64)
    weighed = yarn | dict(mscale=0.7, mscale_all_dim=1.3, truncate=False)
    linear, given = dict(rope_type="linear", factor=4.0), yarn | dict(attention_factor=2.5)
    for scaling in (None, linear, llama3, yarn, weighed, given):
        rotary = dict(rope_theta=5e5, rope_scaling=scaling)
        config = draft_config(eagle3, **rotary)
        rope = LlamaRotaryEmbedding(LlamaConfig(**SIZES, max_position_embeddings=4096, **rotary))
        torch.testing.assert_close(rotary_frequencies(config), rope.inv_freq)
        assert rotary_scale(config) == pytest.approx(rope.attention_scaling)
    for scaling in (dict(rope_type="longrope", factor=2.0), dict(rope_type="yarn", factor=2.0)):
        with pytest.raises(ValueError, match="rope_scaling"):
            draft_config(eagle3, rope_scaling=scaling)


# --- pickling ---


@pytest.mark.parametrize("way", ["pickle", "save", "copy"])
def test_a_model_that_has_generated_can_be_kept_and_copied(eagle3, way, tmp_path):
    base = copy.deepcopy(target())
    m, ids = EaModel(base, head(base, eagle3, **TREES["8/3/2"]), tokenizer()), prompt(5)
    want, accepted = m.eagenerate(ids, max_new_tokens=8), m.accept_lengths
    if way == "save":
        torch.save(m, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(m)) if way == "pickle" else copy.deepcopy(m)
    base.lm_head.weight.data.zero_()  # the twin is a model of its own
    assert torch.equal(twin.eagenerate(ids, max_new_tokens=8), want) and twin.accept_lengths == accepted
    assert m(ids, output_orig=True)[1].abs().max() == 0, "the original still runs"
    assert copy.copy(m).base_model is base


# --- checkpoints ---


def write_target(directory: Path, base=None) -> Path:
    (base or target()).save_pretrained(directory / "base")
    tokenizer().save_pretrained(directory / "base")
    return directory / "base"


def write_head(directory: Path, draft, layout: str = "safeailab", binary: bool = False) -> Path:
    """The checkpoint of a head, in the layout that others publish."""
    directory = directory / f"head-{layout}-{binary}"
    directory.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in draft.config.to_dict().items() if v is not None}
    tensors = dict(draft.state_dict())
    if layout in ("speculators", "vllm"):
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["verifier_norm.weight"] = torch.ones(H)
        tensors.pop("t2d", None)
        config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
        outer = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", *EAGLE31)
        inner = {k: v for k, v in config.items() if k not in outer}
        config = {name: config[name] for name in outer} | dict(
            speculators_model_type="eagle3",
            target_hidden_size=None,
            transformer_layer_config=inner,
            speculators_config=dict(algorithm="eagle3", verifier=dict(name_or_path="x", architectures=[])),
        )
    if layout == "vllm":
        tensors = {n if n in ("d2t", "lm_head.weight") else f"model.{n}": t for n, t in tensors.items()}
    if layout == "sglang":
        config["eagle_config"] = dict(eagle_aux_hidden_state_layer_ids=[1, 3, 4], use_aux_hidden_state=True)
        del tensors["embed_tokens.weight"]
    (directory / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    return directory


def load(paths, **options) -> EaModel:
    """The model of a target and a head at these paths."""
    return EaModel.from_pretrained(*map(str, paths), **options)


def check_refused(paths, message: str, error: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        load(paths, **options)


EAGLE31 = dict(norm_before_fc=True, fc_norm=True, norm_output=True)
HEADS = {
    "usual": {},
    **{name: {name: True} for name in EAGLE31},
    "all of EAGLE 3.1": EAGLE31,
    "sliding window": dict(sliding_window=5),
}
LAYOUTS = [(layout, False) for layout in ("safeailab", "speculators", "vllm", "sglang", "nested")]
CHECKPOINTS = [
    *(("usual", layout, True) for layout in ("safeailab", "vllm")),
    *((kind, *way) for kind in ("usual", "all of EAGLE 3.1", "sliding window") for way in LAYOUTS),
    *((kind, layout, False) for kind in EAGLE31 for layout in ("safeailab", "speculators", "nested")),
]


@pytest.mark.parametrize(("kind", "layout", "binary"), CHECKPOINTS)
def test_every_layout_gives_the_same_model(tmp_path, kind, layout, binary):
    """nested: fields in `eagle_config`, where NVIDIA's heads have them."""
    fields = HEADS[kind]
    config = draft_config(True, **fields, feature_layers=(2, 4, 5) if fields else None)
    want = EaModel(target(), head(target(), True, config=config, **TREES["8/3/2"]))
    for tensor in want.ea_layer.parameters():
        if tensor.dim() == 1:
            nn.init.normal_(tensor, 1, 0.3)
    path = write_head(tmp_path, want.ea_layer, "sglang" if layout == "nested" else layout, binary)
    raw = config_of(path)
    if layout == "nested":
        raw["eagle_config"] |= {name: raw.pop(name) for name in EAGLE31} | dict(use_last_layernorm=True)
    if kind == "sliding window":  # layer_types of a whole target say of the first layers what the head's do
        raw.get("transformer_layer_config", raw)["layer_types"] = ["sliding_attention", "full_attention"]
    (path / "config.json").write_text(json.dumps(raw))
    got = load((write_target(tmp_path), path), **TREES["8/3/2"])
    if kind == "sliding window":
        got.save_pretrained(tmp_path / "pair")
        got = EaModel.from_pretrained(str(tmp_path / "pair"))
    assert got.feature_layers == want.feature_layers == (2, 4, 5)
    for name in (*EAGLE31, "sliding_window"):
        assert getattr(got.ea_layer.config, name) == getattr(config, name)
    tensors = got.ea_layer.state_dict()
    assert ("input_norm.weight" in tensors) == ("norm_before_fc" in fields)
    assert [f"fc_norm.{index}.weight" in tensors for index in range(4)] == [*["fc_norm" in fields] * 3, False]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in want.ea_layer.state_dict().items())
    ids = prompt(8)
    assert torch.equal(got.eagenerate(ids, max_new_tokens=6), want.eagenerate(ids, max_new_tokens=6))
    assert got.accept_lengths == want.accept_lengths


def test_a_field_of_eagle_3_1_and_its_tensors_go_together(checkpoints):
    path = checkpoints[1]
    for name, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight, fc_norm.1.weight")):
        edited(path, **{**dict(norm_before_fc=False, fc_norm=False), name: True})
        check_refused(checkpoints, f"lacks {tensor}")
    edited(path, norm_before_fc=False, fc_norm=False)
    tensors = load_file(path / "model.safetensors") | {"input_norm.weight": torch.ones(3 * H)}
    save_file(tensors, path / "model.safetensors")
    check_refused(checkpoints, "has unexpected input_norm.weight")


def test_another_familys_name_beside_llamas_architecture(checkpoints):
    """What trainers leave in a head's config of the target's: SpecForge's for Phi-4."""
    for architecture in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel"):
        edited(checkpoints[1], model_type="gemma3_text", architectures=[architecture])
        load(checkpoints)
    for architectures in (None, ["Gemma3ForCausalLM"], ["Eagle3Speculator"]):
        edited(checkpoints[1], architectures=architectures)
        check_refused(checkpoints, "'gemma3_text' .* norms by 1 . weight")


@pytest.mark.parametrize("kind", ["phi3", "gpt_oss"])
def test_a_layer_that_its_weights_tell_apart_is_known_by_them(checkpoints, kind):
    """Whatever config.json says, a head with the weights of Llama's layer loads, and others are named."""
    path = edited(checkpoints[1], model_type=kind, architectures=["Eagle3Speculator"])
    load(checkpoints)
    tensors = load_file(path / "model.safetensors")
    packed = torch.cat([tensors.pop(f"midlayer.self_attn.{name}_proj.weight") for name in "qkv"])
    save_file(tensors | {"midlayer.self_attn.qkv_proj.weight": packed}, path / "model.safetensors")
    check_refused(checkpoints, "lacks midlayer.self_attn.k_proj.weight")


def test_an_eagle1_checkpoint_and_a_full_draft_vocabulary(tmp_path):
    base = write_target(tmp_path)
    for eagle3_ in (True, False):
        draft = head(target(), eagle3_, config=draft_config(eagle3_, draft_vocab_size=V, bias=True))
        got = load((base, write_head(tmp_path / str(eagle3_), draft)), use_eagle3=eagle3_)
        assert got.ea_layer.d2t is None and got.use_eagle3 == eagle3_
        assert torch.equal(got.eagenerate(prompt(5), max_new_tokens=8)[:, :13], got.generate(prompt(5), 13))


def test_biases_are_those_of_the_weights(tmp_path, eagle3):
    """Engines name them otherwise in config.json, and have one in o_proj wherever queries have one."""
    want = head(target(), eagle3, config=draft_config(eagle3, qkv_bias=True, bias=not eagle3))
    base, path = write_target(tmp_path), write_head(tmp_path, want)
    layer = "midlayer" if eagle3 else "layers.0"
    tensors = {**want.state_dict(), f"{layer}.self_attn.o_proj.bias": torch.zeros(H)}
    edited(path, qkv_bias=None, bias=False, attention_bias=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    got = load((base, path), use_eagle3=eagle3).ea_layer
    assert got.config.qkv_bias and got.state_dict().keys() == want.state_dict().keys()
    assert all(torch.equal(got.state_dict()[name], tensor) for name, tensor in want.state_dict().items())
    tensors[f"{layer}.self_attn.o_proj.bias"] += 1
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    check_refused((base, path), r"unexpected .*o_proj.bias", use_eagle3=eagle3)


def test_save_pretrained_round_trip(tmp_path, eagle3):
    tree = dict(tree_choices=[(0,), (1,), (0, 0)]) if eagle3 else TREES["8/3/2"]
    want = model(eagle3=eagle3, **tree)
    want.save_pretrained(tmp_path)
    got = EaModel.from_pretrained(tmp_path)
    assert got.use_eagle3 == eagle3 and got.ea_layer.total_tokens == want.ea_layer.total_tokens
    assert got.get_tokenizer().eos_token_id == EOS
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    ids = prompt(8)
    assert torch.equal(got.eagenerate(ids, max_new_tokens=6), want.eagenerate(ids, max_new_tokens=6))
    assert got.accept_lengths == want.accept_lengths
    overridden = EaModel.from_pretrained(tmp_path, total_token=4, depth=2, top_k=3)
    assert (overridden.ea_layer.depth, overridden.ea_layer.top_k) == (2, 3)
    asked = EaModel.from_pretrained(tmp_path, total_token=60, depth=7, top_k=10).ea_layer  # the defaults, by name
    assert (asked.total_tokens, asked.depth, asked.top_k, asked.tree_choices) == (59, 7, 10, None)


def test_dtype_goes_by_both_names(tmp_path):
    model().save_pretrained(tmp_path)
    assert EaModel.from_pretrained(tmp_path).base_model.dtype == torch.float32
    for name in ("dtype", "torch_dtype"):
        m = EaModel.from_pretrained(tmp_path, **{name: torch.bfloat16})
        assert m.base_model.dtype == m.ea_layer.fc.weight.dtype == torch.bfloat16
        assert m.ea_layer.d2t.dtype == torch.int64
        assert m.eagenerate(prompt(3), max_new_tokens=4).shape[1] > 7


def test_total_token_minus_one_measures(tmp_path):
    model().save_pretrained(tmp_path)
    m = EaModel.from_pretrained(tmp_path, total_token=-1)
    assert m.ea_layer.total_tokens + 1 in (40, 48, 50, 56, 60)


def test_loading_is_quiet(tmp_path, capfd):
    model().save_pretrained(tmp_path)
    capfd.readouterr()
    EaModel.from_pretrained(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_forward_is_the_targets(eagle3):
    m, ids = model(eagle3=eagle3), prompt(6)
    outputs, logits, hidden = m(ids, output_orig=True)
    torch.testing.assert_close(logits, m.base_model(ids).logits)
    assert torch.equal(hidden, m(ids)[1]) and torch.equal(outputs[0], hidden)
    if eagle3:
        assert len(outputs.hidden_states) == 3


# --- what is refused, and that nothing is lost by it ---


@pytest.fixture
def checkpoints(tmp_path) -> tuple[Path, Path]:
    return write_target(tmp_path), write_head(tmp_path, model().ea_layer)


@pytest.mark.parametrize("which", ["target", "head"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(checkpoints, which, name):
    (checkpoints[which == "head"] / name).unlink()
    check_refused(checkpoints, which, FileNotFoundError)


@pytest.mark.parametrize("keep", [0.5, 0.001], ids=["half", "header"])
@pytest.mark.parametrize("which", ["target", "head"])
def test_truncated_weights_are_named(checkpoints, which, keep):
    file = checkpoints[which == "head"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    check_refused(checkpoints, f"{which}.*cannot be read")


def test_a_missing_package_of_a_quantised_target_is_named(checkpoints, monkeypatch):
    def without(*_):
        raise ImportError("some-package>=1 is required")

    monkeypatch.setattr("eagle_triton.models.loading._read_target", without)
    check_refused(checkpoints, r"^target '.*': some-package>=1 is required$")


def test_truncated_or_unsafe_bin_files_are_refused(tmp_path):
    paths = write_target(tmp_path), write_head(tmp_path, model().ea_layer, binary=True)
    file = paths[1] / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    check_refused(paths, "cannot be read")
    torch.save({"fc.weight": nn.Linear(2, 2)}, file)
    check_refused(paths, "cannot be read")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "config.json' is not JSON"), ("[]", "must hold an object, got list")]
)
def test_a_config_that_cannot_be_read_is_named(checkpoints, text, message):
    (checkpoints[1] / "config.json").write_text(text)
    check_refused(checkpoints, message)


def test_missing_and_unexpected_tensors_are_named(checkpoints):
    tensors, path = dict(model().ea_layer.state_dict()), checkpoints[1]
    for wrong, message in (
        ({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, "lacks fc.weight"),
        (tensors | {"extra.weight": torch.ones(2)}, "unexpected extra.weight"),
        (tensors | {"fc.weight": torch.ones(H, H)}, r"fc.weight must be \[64, 192\]"),
        (tensors | {"d2t": torch.full((48,), V)}, "d2t"),
    ):
        save_file(wrong, path / "model.safetensors")
        check_refused(checkpoints, message)


def test_a_target_that_lacks_weights_is_refused(checkpoints):
    tensors = {n: t for n, t in target().state_dict().items() if "layers.3.mlp.up_proj" not in n}
    save_file(tensors, checkpoints[0] / "model.safetensors", metadata={"format": "pt"})
    check_refused(checkpoints, "target.*lacks model.layers.3.mlp.up_proj.weight")


def test_a_quantisation_that_transformers_does_not_know_is_named(checkpoints):
    base = checkpoints[0]
    edited(base, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    scales = {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    save_file(target().state_dict() | scales, base / "model.safetensors", metadata={"format": "pt"})
    message = r"unexpected model.*input_scale; this transformers does not know its quant_method, 'modelopt'"
    with pytest.raises(ValueError, match=message):
        load_target(str(base))


@pytest.mark.parametrize("name", ["k_scale", "v_proj.output_scale"])
def test_scales_of_a_quantised_cache_are_said_and_not_used(name, checkpoints, caplog):
    base, _ = checkpoints
    scales = {f"model.layers.{number}.self_attn.{name}": torch.ones(1) for number in range(2)}
    save_file(target().state_dict() | scales, base / "model.safetensors", metadata={"format": "pt"})
    load_target(str(base))
    said = f"keys and values are not quantised, so model.layers.0.self_attn.{name} and its like are not used"
    assert said in caplog.text


def test_the_weights_of_a_head_tell_which_it_is(eagle3, tmp_path):
    own = "3" if eagle3 else "1/2"
    paths = write_target(tmp_path), write_head(tmp_path, model(eagle3=eagle3).ea_layer)
    loaded = load(paths, use_eagle3=None)
    assert loaded.use_eagle3 == eagle3 and isinstance(loaded.ea_layer, Eagle3Head if eagle3 else Eagle1Head)
    message = f"is an EAGLE-{own} head by its weights, got use_eagle3={not eagle3}"
    check_refused(paths, message, use_eagle3=not eagle3)
    loaded.save_pretrained(tmp_path / "pair")
    assert EaModel.from_pretrained(str(tmp_path / "pair"), use_eagle3=None).use_eagle3 == eagle3


def test_another_head_for_the_target_of_a_saved_pair(tmp_path):
    """Be it the demo by its name, or a directory."""
    model().save_pretrained(tmp_path / "pair")
    path = write_head(tmp_path, model(eagle3=False).ea_layer)
    loaded = load((tmp_path / "pair", path), use_eagle3=False)
    assert isinstance(loaded.ea_layer, Eagle1Head)
    loaded = EaModel.from_pretrained("demo", str(demo_directory("eagle3")))
    assert isinstance(loaded.ea_layer, Eagle3Head) and loaded.base_model_name_or_path == "demo"
    assert isinstance(EaModel.from_pretrained("demo", "demo", use_eagle3=False).ea_layer, Eagle1Head)


def test_a_target_whose_weights_are_of_other_shapes_is_refused(checkpoints):
    edited(checkpoints[0], intermediate_size=80)
    got = r", got \[64, 96\]" if transformers.__version__ >= "5" else ""
    message = rf"target .*: by config.json model.layers.0.mlp.down_proj.weight must be \[64, 80\]{got}$"
    check_refused(checkpoints, message)


def test_shapes_that_transformers_refuses_whatever_is_asked_are_said_once(tmp_path, monkeypatch):
    target().save_pretrained(tmp_path)
    asked = []

    def refuse(path, **options):
        asked.append(options.get("ignore_mismatched_sizes"))
        raise RuntimeError("size mismatch for lm_head.weight")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(RuntimeError, match="size mismatch for lm_head"):
        load_target(str(tmp_path))
    assert asked == [None, True]


def test_an_unknown_target_is_called_that_also_beside_weights_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody-s"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    (tmp_path / "model.safetensors").write_bytes(b"none either")
    expected = "target .*: supported are llama, mistral.* without an EAGLE head.*qwen3_next.*nobody-s"
    with pytest.raises(ValueError, match=expected):
        read_target_config(str(tmp_path))


@pytest.mark.parametrize(("layout", "binary"), [("safeailab", False), ("safeailab", True), ("vllm", False)])
def test_a_head_is_no_target(layout, binary, eagle3, tmp_path):
    """Be it that transformers takes it for a model with other shapes, or knows nothing of its configuration."""
    path = write_head(tmp_path, model(eagle3=eagle3).ea_layer, layout, binary)
    if layout == "safeailab":
        edited(path, model_type="llama")
    with pytest.raises(ValueError, match="whatever '.*head-.*' is a draft head .it has fc.weight., not a causal "):
        read_target_config(str(path), whose="whatever")
        load_target(str(path), whose="whatever")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=V + 1), "vocabulary"),
        (dict(hidden_size=2 * H, target_hidden_size=2 * H), "hidden size"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 4, LAYERS]), "layers"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 4]), "fc.weight"),
        (dict(num_hidden_layers=2), "one layer"),
        (dict(draft_vocab_size=V + 5), "draft_vocab_size"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(intermediate_size=None), "intermediate_size"),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_scaling"),
        (dict(use_aux_norm=True), "use_aux_norm=True"),
        (dict(eagle_config=dict(return_hidden_post_norm=True)), "return_hidden_post_norm=True"),
        (dict(eagle_config=dict(eh_proj_bias=True)), "eh_proj_bias=True"),
        (dict(residual_gate=True), "residual_gate"),
        (dict(attention_multiplier=0.5), "attention_multiplier"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(rope_parameters=dict(sliding_attention=dict(rope_theta=1e4))), "for each of .'sliding_attention'"),
        (dict(model_type="gemma3_text"), "gemma3_text"),
        (dict(hidden_act=None, hidden_activation="relu"), "hidden_act .* got 'relu'"),
        (dict(sliding_window=128), "sliding_window=128 in config.json is ambiguous"),
        (dict(layer_types=["sliding_attention"]), "sliding_window must be a number"),
        (dict(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=False), "use_sliding_window"),
        (dict(layer_types=["chunked_attention"]), "layer_types"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_refused_before_the_target_is_read(checkpoints, changes, message, monkeypatch):
    edited(checkpoints[1], **changes)
    monkeypatch.setattr("eagle_triton.models.ea_model.load_target", lambda *a, **k: pytest.fail("target was read"))
    check_refused(checkpoints, message)


def test_fields_that_change_nothing_are_accepted(checkpoints):
    edited(
        checkpoints[1], norm_output=False, fc_norm=None, partial_rotary_factor=1.0, logit_scale=1.0, use_cache=True,
        use_sliding_window=False, attention_bias=False, architectures=["LlamaForCausalLMEagle3"], dtype="bfloat16",
        sliding_window=4096, pretraining_tp=1, model_type="llama", embed_requires_grad=True, anything_else="x",
    )  # fmt: skip
    load(checkpoints)


def test_unknown_architectures_are_refused(checkpoints):
    for kind in ("gpt2", "no-such-model"):
        edited(checkpoints[0], model_type=kind)
        check_refused(checkpoints, "llama, mistral, qwen2, qwen3")


def test_paths_that_hold_no_head_are_refused(tmp_path):
    check_refused([tmp_path], "ea_model_path", FileNotFoundError)
    base = write_target(tmp_path)
    for path in (tmp_path / "nothing", "./nothing", "../nothing", "~/nothing", f"{tmp_path.parent}/x/y"):
        check_refused((base, path), r"ea_model_path: .* does not exist", FileNotFoundError)
        check_refused([path], r"base_model_path: .* does not exist", FileNotFoundError)
    check_refused((base, base / "config.json"), "config.json' is a file")
    for hub_id in ("dem", "somebody/their-model"):
        check_refused([hub_id], f"needed, because '{hub_id}'.*target without a head: give", FileNotFoundError)


def test_an_unsupported_target_is_called_that_before_its_head_is_missed(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    gpt2.save_pretrained(tmp_path)
    check_refused([tmp_path], "model_type 'gpt2' is not supported; supported are llama, mistral, qwen2")
    with pytest.raises(ValueError, match="gpt2|GPT2"):
        EAGLEInference(None, gpt2)


# --- the hub ---


@pytest.fixture
def fetched(monkeypatch):
    """What each kind of file is asked for with; nothing is fetched."""
    calls = {}

    def record(name, answer):
        def call(path, *_, **options):
            calls[name] = (path, options)
            return answer()

        return call

    raw = {name: value for name, value in draft_config(True).to_dict().items() if value is not None}
    tensors = head(target(), True).state_dict()
    loaded = lambda: (target(), dict(missing_keys=[], unexpected_keys=[], mismatched_keys=[]))  # noqa: E731
    monkeypatch.setattr(loading, "snapshot_download", record("first", lambda: "/c"))
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", record("config", lambda: target().config))
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", record("tokenizer", tokenizer))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", record("weights", loaded))

    def download(whose, path, patterns, options):
        calls["head"] = (path, options)
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(raw))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder

    monkeypatch.setattr(head_loading, "fetch_from_hub", download)
    return calls


def test_a_head_borrows_an_embedding_that_ranks_have_whole():
    """transformers 5.17 spreads projections and leaves the embedding whole."""
    target = nn.Module()
    target.embedding, target.up = nn.Embedding(6, 4), nn.Linear(4, 4)
    target.get_input_embeddings = lambda: target.embedding
    target.up.weight.full_tensor = lambda: pytest.fail("only the embedding is borrowed")
    head = nn.Module()
    head.embed_tokens = nn.Embedding(6, 4)
    assert head_loading.is_sharded(target)
    head_loading.borrow_embedding(head, target)
    assert torch.equal(head.embed_tokens.weight, target.embedding.weight)
    assert head.embed_tokens.weight.data_ptr() != target.embedding.weight.data_ptr()


def test_hub_arguments_reach_every_file(fetched):
    everywhere = dict(token="T", cache_dir="/c", local_files_only=True, force_download=False)
    targets = dict(revision="abc", trust_remote_code=True, subfolder="s")
    EaModel.from_pretrained("a/target", "b/head", ea_revision="def", **everywhere, **targets)
    assert fetched["head"] == ("b/head", {**everywhere, "revision": "def"})
    config = dict(allow_patterns=["s/config.json"], revision="abc")
    assert fetched["first"] == ("a/target", {**everywhere, **config})
    for name in ("config", "tokenizer", "weights"):
        path, options = fetched[name]
        options.pop("dtype", None), options.pop("output_loading_info", None)
        assert path == "a/target" and options == {**everywhere, **targets}, name


def test_a_revision_is_that_of_one_repository(fetched, tmp_path):
    EaModel.from_pretrained("a/target", "b/head", revision="abc")
    assert fetched["head"] == ("b/head", {}) and fetched["config"][1]["revision"] == "abc"
    EaModel.from_pretrained("a/both", "a/both", revision="abc")
    assert fetched["head"] == ("a/both", {"revision": "abc"})
    check_refused((tmp_path, "b/head"), "^revision: .* is a local directory", revision="abc")
    check_refused(("a/target", tmp_path), "^ea_revision: .* is a local directory", ea_revision="abc")


def test_shallow_targets_need_named_feature_layers():
    assert default_feature_layers(8) == (2, 4, 5) and default_feature_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        default_feature_layers(4)


def test_configs_that_leave_the_residual_open_are_refused():
    with pytest.raises(ValueError, match="norm_before_residual"):
        read_draft_config(dict(transformer_layer_config=dict(hidden_size=8)))


METHODS = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate", "generate")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.tensor([[1, V]]), "out of range"),
        (torch.tensor([[1, -1]]), "out of range"),
        (torch.tensor([[1.0, 2.0]]), "integer"),
        (torch.tensor([1, 2]), "shape"),
        (torch.ones(1, 2, dtype=torch.long, device="meta"), "meta"),
    ],
    ids=["empty", "above", "below", "float", "1d", "meta"],
)
def test_bad_prompts_are_refused_at_the_call(method, ids, message):
    m = model()
    m.eagenerate(prompt(4), max_new_tokens=3)
    before, accepted = m.ea_layer.stable_kv, m.accept_lengths
    with pytest.raises(ValueError, match=message):
        getattr(m, method)(ids)
    assert m.ea_layer.stable_kv is before and m.accept_lengths is accepted


@pytest.mark.parametrize("method", METHODS[:4])
def test_bad_lengths_filters_and_batches_are_refused(method):
    call = getattr(model(), method)
    with pytest.raises(ValueError, match="batch"):
        call(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="below the prompt"):
        call(prompt(9), max_length=8)
    with pytest.raises(ValueError, match="does not fit"):
        call(prompt(40), max_length=40)
    with pytest.raises(ValueError, match="top_k must be a whole number, got 2.7"):
        call(prompt(4), temperature=1.0, top_k=2.7)
    with pytest.raises(TypeError, match="tensor"):
        call([[1, 2]])


def test_generate_refuses_bad_arguments():
    m, ids = model(), prompt(4)
    for bad in (
        dict(max_length=3),
        dict(max_new_tokens=-1),
        dict(do_sample=True, temperature=-1.0),
        dict(temperature=0.0, top_p=0.0),
        dict(do_sample=True, top_p=0.0),
        dict(do_sample=True, top_k=-1),
        dict(do_sample=True, top_k=2.7),
        dict(do_sample=True, min_p=2.0),
        dict(seed=1, generator=torch.Generator()),
        dict(attention_mask=torch.ones(1, 3)),
        dict(attention_mask=torch.zeros(1, 4)),
        dict(attention_mask=torch.tensor([[1, 0, 1, 1]])),
    ):
        with pytest.raises(ValueError):
            m.generate(ids, **bad)


@pytest.mark.parametrize("option", [dict(temperature=0.7), dict(top_p=0.9), dict(top_k=5), dict(min_p=0.1)], ids=str)
def test_options_of_sampling_need_do_sample(option):
    m, (name,) = model(), option
    with pytest.raises(ValueError, match=f"^{name}=.* needs do_sample=True"):
        m.generate(prompt(4), max_new_tokens=2, **option)
    m.generate(prompt(4), max_new_tokens=2, do_sample=True, **option)
    greedy = m.generate(prompt(4), max_new_tokens=2)
    for sampled in (False, True):  # temperature 0 is greedy, and filters keep its token
        given = {**option, "temperature": 0.0}
        assert torch.equal(greedy, m.generate(prompt(4), max_new_tokens=2, do_sample=sampled, **given))


def test_no_sequence_passes_the_positions():
    base = copy.copy(target())
    base.config = copy.copy(base.config)
    base.config.max_position_embeddings = 20
    m = EaModel(base, head(base, True, **TREES["8/3/2"]), tokenizer())
    assert torch.equal(m.generate(prompt(15), max_new_tokens=40), model().generate(prompt(15), max_new_tokens=5))
    assert m.generate(prompt(15), max_length=60).shape[1] == 20
    assert torch.equal(m.generate(prompt(20)), prompt(20))
    with pytest.raises(ValueError, match="21 tokens exceed the target's 20 positions"):
        m.generate(prompt(21), max_new_tokens=1)


@pytest.mark.parametrize("whose", ["target", "draft head"])
def test_nan_logits_are_named_and_the_model_lives_on(eagle3, whose):
    base = target()
    m = EaModel(base, head(base, eagle3), tokenizer())
    want = m.eagenerate(prompt(5), max_new_tokens=6)
    weight = base.lm_head.weight if whose == "target" else m.ea_layer.fc.weight
    kept = weight.detach().clone()
    try:
        weight.data[3] = float("nan")
        for call in (m.eagenerate, m.generate) + ((m.naivegenerate,) if whose == "target" else ()):
            with pytest.raises(RuntimeError, match=f"{whose}'s logits contain NaN"):
                call(prompt(5))
    finally:
        weight.data.copy_(kept)
    assert torch.equal(m.eagenerate(prompt(5), max_new_tokens=6), want)


def test_parts_that_do_not_fit_are_refused():
    base = target()
    with pytest.raises(ValueError, match="vocabulary"):
        EaModel(base, Eagle3Head(draft_config(True, vocab_size=V + 1)))
    with pytest.raises(ValueError, match="hidden size"):
        EaModel(base, Eagle1Head(draft_config(False, hidden_size=32)))
    with pytest.raises(ValueError, match="draft_vocab_size"):
        Eagle1Head(draft_config(False, draft_vocab_size=8))


def test_a_tp_plan_is_refused_where_it_would_do_nothing(monkeypatch):
    """As transformers does nothing, in one process without torchrun, and says nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for plan in ("auto", {"model.layers.*.mlp.up_proj": "colwise"}):
        check_refused(["demo"], "start them with torchrun --nproc-per-node N", tp_plan=plan)
    check_refused(["demo"], r"tp_plan must be .auto. .* or a plan, got 'colwise'", tp_plan="colwise")
