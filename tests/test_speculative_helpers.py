"""The configuration and helpers of eagle_triton.inference: trees, tokens, text, statistics and the tree policy."""

import itertools
import json
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle_triton import inference as speculative
from eagle_triton import integrators
from eagle_triton.benchmarks.record import ROOT
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference import (
    EAGLEConfig,
    Statistics,
    TextStream,
    TreeMaskMode,
    build_tree_structure,
    calculate_acceptance_rate,
    compute_tree_statistics,
    estimated_speedup,
    expected_emitted,
    fast_topk_torch,
    generate_token_bitmask,
    next_power_of_2,
    organize_draft_results,
    pad_to_alignment,
    sample_from_logits,
    select_top_k_tokens,
    session,
    verify_tree_greedy,
)
from eagle_triton.inference import policy as policy_module
from eagle_triton.inference.costs import CostTable, StepCosts, Timing
from eagle_triton.inference.policy import TreePolicy, tree_sizes
from eagle_triton.reference import integrators as reference
from eagle_triton.reference import tree_decoding
from tests.tiny_tokenizers import byte_tokenizer
from tools import cost_tables

# --- configuration ---


def test_the_documented_defaults_and_a_tree_that_keeps_its_size():
    config = EAGLEConfig()
    assert (config.topk, config.num_steps, config.num_draft_tokens, config.temperature) == (4, 3, 8, 0.0)
    assert (config.top_p, config.top_k, config.tree_mask_mode) == (None, None, TreeMaskMode.FULL_MASK)
    assert config.tree() == TreeSpec.dynamic(8, 2, 4) and config.tree().depth == 3
    assert config.candidates == 36
    assert EAGLEConfig(num_draft_tokens=None).tree().nodes == 37
    assert EAGLEConfig(topk=10, num_steps=7, num_draft_tokens=None).nodes == 64
    assert EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4).tree() == TreeSpec.dynamic(4, 2, 1)
    method = EAGLEConfig(speculative=speculative.SpeculativeConfig(method="eagle", num_speculative_tokens=4))
    assert method.tree() == method.tree(60) == TreeSpec.chain(4)  # a method has no other


def test_auto_trees_are_as_deep_and_wide_as_they_can_fill():
    config = EAGLEConfig(topk=8, num_steps=7, num_draft_tokens="auto")
    trees = [config.tree(nodes) for nodes in tree_sizes(config.nodes)]
    assert [(tree.nodes, tree.depth, tree.top_k) for tree in trees] == [
        (2, 1, 1), (4, 3, 3), (8, 7, 7), (16, 7, 8), (32, 7, 8), (64, 7, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(topk=0), ValueError, "topk must be at least 1"),
        (dict(topk=2.0), TypeError, "topk must be an integer"),
        (dict(num_steps=-1), ValueError, "num_steps"),
        (dict(num_draft_tokens=0), ValueError, "num_draft_tokens"),
        (dict(num_draft_tokens=1), ValueError, "counts the root and must be in 2..37"),
        (dict(num_draft_tokens=38), ValueError, "36 candidates; got 38"),
        (dict(topk=1, num_steps=3, num_draft_tokens=5), ValueError, "2..4"),
        (dict(num_draft_tokens="many"), ValueError, "auto"),
        (dict(num_draft_tokens=8.0), TypeError, "integer"),
        (dict(temperature=-0.5), ValueError, "temperature"),
        (dict(top_p=0.0), ValueError, "top_p"),
        (dict(top_k=-3), ValueError, "top_k"),
        (dict(min_p=1.5), ValueError, "min_p"),
        (dict(slots=0), ValueError, "slots"),
        (dict(max_length=0), ValueError, "max_length"),
        (dict(slots=257), ValueError, "slots must lie in 1..256, got 257"),
        (dict(tree_mask_mode=3), ValueError, "tree_mask_mode must be one of 0, 1, 2, got 3"),
        (dict(device="gpu"), ValueError, "device must be a torch.device or the name of one, got 'gpu'"),
        (dict(device=1.5), ValueError, "device must be a torch.device or the name of one, got 1.5"),
        (dict(fallback=1), TypeError, "fallback"),
        (dict(dtype=torch.int64), TypeError, "dtype"),
        (dict(num_drafts=3), TypeError, "num_drafts"),
    ],
)
def test_bad_options_fail_before_a_model_is_loaded(options, error, message):
    with pytest.raises(error, match=message):
        EAGLEConfig(**options)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="unknown option top_q; the options are verify_strategy"):
        EAGLEConfig().changed(top_q=1)
    with pytest.raises(ValueError, match="unknown sampling option temp"):
        EAGLEConfig().sampling(temp=1)
    assert EAGLEConfig(temperature=0.5).sampling(top_k=3).temperature == 0.5


# --- trees ---


def draft_lists(batch, k, depth, seed=0, ties=False):
    """Level by level: cumulative log scores, tokens, parents as SGLang's workers hand them over."""
    source = torch.Generator().manual_seed(seed)

    def steps(*shape):
        values = -torch.rand(*shape, generator=source)
        return (2 * values).round() if ties else values

    def tokens(count):
        return torch.randint(1000, (batch, count), generator=source)

    scores, drafted = [steps(batch, 1, k)], [tokens(k)]
    parents = [torch.arange(-1, k).expand(batch, -1)]
    beam, flat = scores[0][:, 0], torch.arange(k).expand(batch, -1)
    for level in range(1, depth):
        level_scores = beam[:, :, None] + steps(batch, k, k)
        scores.append(level_scores)
        drafted.append(tokens(k * k))
        beam, chosen = level_scores.flatten(1).sort(descending=True, stable=True)
        beam, chosen = beam[:, :k], chosen[:, :k]
        flat = chosen + k + (level - 1) * k * k
        parents.append(flat)
    return scores, drafted, parents


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("k", "depth", "nodes"), [(1, 1, 2), (1, 4, 5), (4, 3, 8), (4, 3, 37), (3, 1, 3)])
def test_organize_draft_results_makes_the_engines_trees(k, depth, nodes, ties):
    scores, tokens, parents = draft_lists(3, k, depth, seed=k + nodes, ties=ties)
    parent_list, chosen, drafts = organize_draft_results(scores, tokens, parents, nodes)
    assert parent_list.shape == (3, k * (depth - 1) + 1 if depth > 1 else 0)
    assert (chosen.diff(dim=1) > 0).all() and chosen.shape == drafts.shape == (3, nodes - 1)
    root = torch.tensor([5, 6, 7])
    mask, positions, _, _, _, flat_tokens = build_tree_structure(
        root, parent_list, chosen, drafts, torch.tensor([0, 4, 9]), k, depth, nodes, TreeMaskMode.QLEN_ONLY
    )
    flat_scores = torch.cat([level.flatten(1) for level in scores], 1)
    slots = torch.cat(parents[1:], 1) if depth > 1 else chosen[:, :0]
    beams = torch.cat((torch.arange(k).expand(3, -1), slots), 1)[:, : k * (depth - 1)]
    tree = tree_decoding.build_tree(root, torch.cat(tokens, 1), flat_scores, beams, nodes, k)
    assert torch.equal(tree[0], flat_tokens.view(3, nodes))
    assert torch.equal(tree[2].long(), positions.view(3, nodes) - torch.tensor([0, 4, 9])[:, None])
    ancestors = tree[3][:, :, 0, None] >> torch.arange(nodes) & 1
    assert torch.equal(ancestors.bool(), mask.view(3, nodes, nodes))


def test_organize_draft_results_ranks_nan_last_and_refuses_what_does_not_fit():
    scores, tokens, parents = draft_lists(1, 4, 2, seed=1)
    scores[1][:] = float("nan")
    assert organize_draft_results(scores, tokens, parents, 5)[1].tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="2..21"):
        organize_draft_results(scores, tokens, parents, 22)
    with pytest.raises(ValueError, match="one score, token and parent tensor"):
        organize_draft_results(scores, tokens[:1], parents, 3)
    with pytest.raises(ValueError, match="a token for each score"):
        organize_draft_results(scores, [tokens[0], tokens[1][:, :3]], parents, 3)


def test_an_orphan_is_refused_by_name():
    chosen = torch.tensor([[0, 8]])
    with pytest.raises(ValueError, match=r"\{0: 1\}"):
        build_tree_structure(torch.tensor([1]), torch.arange(-1, 4)[None], chosen, chosen, torch.tensor([3]), 4, 2, 3)


@pytest.mark.parametrize("use_triton", [None, True], ids=["auto", "kernel"])
def test_verify_tree_greedy_on_a_hand_worked_tree(device, use_triton):
    """Root 7 with children 1, 2; node 1 has child 3. The target says 1, then 3, then 6."""
    tree = [
        torch.tensor([[7, 1, 2, 3]]),
        torch.tensor([[1, 3, 0, 6]]),
        torch.arange(4)[None],
        torch.tensor([[1, 3, -1, -1]]),
        torch.tensor([[-1, 2, -1, -1]]),
    ]
    candidates, target, *links = (value.to(device) for value in tree)
    predicts, accept_index, accept_length = verify_tree_greedy(candidates, target, *links, use_triton=use_triton)
    assert predicts.tolist() == [1, 3, -1, 6] and accept_index.tolist() == [[0, 1, 3, -1]]
    assert accept_length.tolist() == [2]
    again = verify_tree_greedy(
        candidates, target, retrieve_index=links[0], retrieve_next_token=links[1], retrieve_next_sibling=links[2]
    )
    assert torch.equal(again[0], predicts)


BATCHES = (1, 2, 5, 17, 64, 256)
NODES = (2, 3, 5, 7, 8, 9, 16, 17, 31, 32, 33, 60)


def test_hundreds_of_random_trees_kernel_against_reference(device):
    """Build and walk, exact: launches of one size and many requests, 400 trees and more; lengths up to 131072.

    On a CPU every size takes the mask modes in turn, on a GPU all of them."""
    source, trees = random.Random(0), 0
    cases = [(nodes, k, depth) for nodes in NODES for k in (1, 2, 4, 8, 10) for depth in (1, 2, 4, 7)]
    cases = [case for case in cases if case[0] - 1 <= case[1] + (case[2] - 1) * case[1] ** 2]
    source.shuffle(cases)
    chosen_cases = {nodes: [case for case in cases if case[0] == nodes][:4] for nodes in NODES}
    for index, (nodes, k, depth) in enumerate(case for group in chosen_cases.values() for case in group):
        batch = BATCHES[index % len(BATCHES)] if torch.cuda.is_available() else (1, 2, 5, 9, 17, 24)[index % 6]
        scores, tokens, parents = draft_lists(batch, k, depth, seed=index, ties=index % 3 == 0)
        tokens = [level % 5 for level in tokens]  # few different tokens: siblings share some, targets hit often
        parent_list, chosen, drafts = organize_draft_results(scores, tokens, parents, nodes)
        modes = [mode for mode in TreeMaskMode if mode != TreeMaskMode.QLEN_ONLY_BITPACKING or nodes <= 32]
        for mode in modes if torch.cuda.is_available() else [modes[index % len(modes)]]:
            longest = 6 if mode == TreeMaskMode.FULL_MASK else 131072
            lengths = torch.tensor([source.choice([0, 1, 5, 1000, longest]) % (longest + 1) for _ in range(batch)])
            arguments = (torch.arange(batch), parent_list, chosen, drafts, lengths)
            sizes = (int(lengths.sum()), k, depth, nodes, mode)
            want = reference.build_tree_efficient_triton(*arguments, *sizes)
            got = integrators.build_tree_efficient_triton(*(value.to(device) for value in arguments), *sizes)
            assert all(torch.equal(signed(a), signed(b)) for a, b in zip(got, want, strict=True)), (nodes, k, depth)
        target = torch.randint(5, (batch, nodes), generator=torch.Generator().manual_seed(index))
        walk = (drafts.new_zeros(batch, 1), drafts)
        tree = (torch.cat(walk, 1), target, *want[2:5])
        wanted = verify_tree_greedy(*tree, use_triton=False)
        walked = verify_tree_greedy(*(value.to(device) for value in tree), use_triton=True)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(walked, wanted, strict=True)), (nodes, k, depth)
        trees += batch
    assert trees >= 400


def signed(value):
    return value.view({torch.uint16: torch.int16, torch.uint32: torch.int32}.get(value.dtype, value.dtype)).cpu()


# --- tokens ---


def test_topk_and_log_probabilities(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0], [0.0, 0.0, 5.0, float("-inf")]], device=device)
    scores, ids = select_top_k_tokens(logits, 2)
    assert ids.tolist() == [[1, 2], [2, 0]]
    torch.testing.assert_close(scores, logits.log_softmax(-1).gather(-1, ids))
    wide = logits[:, None].repeat(1, 3, 1)
    assert [list(part.shape) for part in select_top_k_tokens(wide, 3)] == [[2, 3, 3]] * 2
    values, places = fast_topk_torch(logits, 1)
    assert values.tolist() == [[3.0], [5.0]] and places.shape == (2, 1)
    assert torch.equal(fast_topk_torch(logits, 2, dim=0)[0], logits.topk(2, dim=0).values)
    for bad in (0, 5):
        with pytest.raises(ValueError, match="k must be in 1..4"):
            fast_topk_torch(logits, bad)


def test_samples_follow_the_filtered_law(device):
    distribution = torch.tensor([0.45, 0.3, 0.15, 0.07, 0.03])
    logits = distribution.log().expand(40_000, -1).contiguous().to(device)

    def frequencies(**options):
        tokens = sample_from_logits(logits, generator=torch.Generator().manual_seed(1), **options)
        return tokens.bincount(minlength=5).cpu() / len(logits)

    def distance(got, want):
        return (got - want / want.sum()).abs().sum() / 2

    keep = torch.arange(5)
    assert distance(frequencies(), distribution) < 0.01
    assert distance(frequencies(temperature=0.5), distribution**2) < 0.01
    assert distance(frequencies(top_k=2), distribution * (keep < 2)) < 0.01
    assert distance(frequencies(top_p=0.7), distribution * (keep < 2)) < 0.01  # 0.45 + 0.3 crosses 0.7
    assert distance(frequencies(top_p=0.76), distribution * (keep < 3)) < 0.01  # the token that crosses is kept
    assert distance(frequencies(min_p=0.3), distribution * (keep < 3)) < 0.01
    assert sample_from_logits(logits, temperature=0.0).eq(0).all()
    for options in (dict(top_p=0.0), dict(temperature=-1.0), dict(top_k=-1)):
        with pytest.raises(ValueError):
            sample_from_logits(logits, **options)


def test_bitmask():
    ids = torch.tensor([[0, 31, 32, -1], [40, 41, 39, 39]])
    mask = generate_token_bitmask(ids, 41)
    assert mask.shape == (2, 41) and mask.nonzero().tolist() == [[0, 0], [0, 31], [0, 32], [1, 39], [1, 40]]
    packed = generate_token_bitmask(ids, 41, packed=True)
    assert packed.dtype == torch.int32 and packed.tolist() == [[1 - 2**31, 1], [0, 2**7 + 2**8]]
    with pytest.raises(ValueError, match="vocab_size"):
        generate_token_bitmask(ids, 0)


def test_padding_and_powers():
    x = torch.arange(6).view(2, 3)
    assert pad_to_alignment(x, 4, dim=-1, value=9).tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert pad_to_alignment(x, 3, dim=1) is x and pad_to_alignment(x, 5).shape == (5, 3)
    with pytest.raises(ValueError, match="alignment"):
        pad_to_alignment(x, 0)
    assert [next_power_of_2(n) for n in (-3, 0, 1, 2, 3, 64, 65)] == [1, 1, 1, 2, 4, 64, 128]


# --- text ---


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token for every byte: each character beyond ASCII is split over several tokens."""
    return byte_tokenizer()


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """Llama 2's way: <0xE2> tokens, which decode to one broken character for each byte while they are incomplete."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁word": 257, "x": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TEXT = "naïve café — 日本語のテキスト 👩‍🚀🙂 end, " * 3


def test_pieces_never_split_a_character(bytes_tokenizer):
    ids = bytes_tokenizer(TEXT).input_ids
    assert len(ids) == len(TEXT.encode())
    stream = TextStream(bytes_tokenizer, prompt=bytes_tokenizer("日").input_ids)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == TEXT and all("\ufffd" not in piece for piece in pieces)
    assert max(map(len, pieces)) == 1 and stream.tokens == len(ids)


def test_byte_fallback_tokens(fallback_tokenizer):
    text = "é日x🙂 word"
    ids = [byte + 1 for byte in "é日".encode()] + [258] + [byte + 1 for byte in "🙂".encode()] + [257]
    stream = TextStream(fallback_tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)


def test_stop_strings_that_come_too_early_do_not_count(bytes_tokenizer):
    for least, text in ((0, "a"), (1, "a"), (2, "a;b"), (4, "a;b;c;")):
        stream = TextStream(bytes_tokenizer, stop_strings=[";"], min_new_tokens=least)
        pieces = [stream.push(token) for token in bytes_tokenizer("a;b;c;").input_ids if not stream.stopped]
        assert "".join(pieces) + stream.finish() == (text if least < 4 else "a;b;c") and stream.stopped


def test_bytes_that_are_no_character_come_out_in_the_end(bytes_tokenizer):
    ids = bytes_tokenizer("a€").input_ids[:-1] + bytes_tokenizer("b").input_ids + bytes_tokenizer("€").input_ids[:2]
    stream = TextStream(bytes_tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert pieces == ["a", "", "", "\ufffdb", "", ""] and stream.finish() == "\ufffd"
    garbage = [bytes_tokenizer("€").input_ids[1]] * 100  # continuation bytes alone
    stream = TextStream(bytes_tokenizer)
    early = "".join(stream.push(token) for token in garbage)
    assert len(early) > 50 and early + stream.finish() == "\ufffd" * 100


@pytest.mark.parametrize(
    ("text", "stops", "want", "tokens"),
    [
        ("one STOP two", ["STOP"], "one ", 4),
        ("one STOP two", ["OP", "STO"], "one ", 4),
        ("one STO two", ["STOP"], "one STO two", 11),
        ("STOP", ["STOP"], "", 0),
        ("ab", ["abc"], "ab", 2),
        ("aab", ["ab"], "a", 1),
        ("日本語", ["本"], "日", 3),
        ("x\n\ny", ["\n\n", "y"], "x", 1),
    ],
)
def test_stop_strings_cut_the_text_before_them(bytes_tokenizer, text, stops, want, tokens):
    stream, pieces = TextStream(bytes_tokenizer, stop_strings=stops), []
    for token in bytes_tokenizer(text).input_ids:
        pieces.append(stream.push(token))
        assert want.startswith("".join(pieces))
        assert stream.certain_tokens == len("".join(pieces).encode())  # a token is a byte here
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == want and stream.tokens == stream.certain_tokens == tokens
    assert stream.stopped == (want != text)
    if stream.stopped:
        with pytest.raises(RuntimeError, match="has ended"):
            stream.push(0)


def test_a_token_may_reach_into_the_stop_string(fallback_tokenizer):
    stream = TextStream(fallback_tokenizer, stop_strings=["or"])
    assert stream.push(258) + stream.push(257) == "x w" and stream.stopped and stream.tokens == 2
    with pytest.raises(ValueError, match="non-empty"):
        TextStream(fallback_tokenizer, stop_strings=["a", ""])


# --- statistics ---


def test_statistics_as_the_conventions_define_them():
    stats = Statistics()
    assert stats["acceptance_rate"] == 0.0 and stats.tau == 0.0
    stats.add_prefill()
    for accepted, tokens in ((3, 4), (1, 2), (0, 1)):
        stats.add_step(accepted, proposed=7, depth=3, tokens=tokens)
    stats.add_step(0, proposed=0, depth=0, tokens=1)
    assert stats["acceptance_rate"] == stats["mean_acceptance_rate"] == 4 / 21
    assert stats.tau == stats["mean_accept_length"] == 8 / 4 and stats.tokens_per_target_forward == 8 / 5
    assert (stats["total_tokens_generated"], stats["total_draft_tokens"]) == (8, 21)
    assert (stats["total_accepted_tokens"], stats["total_target_forward"], stats["total_draft_forward"]) == (4, 4, 9)
    assert dict(stats.histogram) == {3: 1, 1: 1, 0: 1} and stats.plain_steps == 1
    assert [(row["tried"], row["accepted"]) for row in stats.positions] == [(3, 2), (2, 1), (1, 1)]
    total = Statistics()
    total += stats
    total += stats
    assert total["acceptance_rate"] == stats["acceptance_rate"] and total["total_accepted_tokens"] == 8
    assert [row["rate"] for row in total.positions] == [row["rate"] for row in stats.positions]


def test_the_formulas_of_older_documents():
    """14.29 % and 1.14 x are what they give when not one draft was accepted."""
    stats = Statistics()
    for _ in range(4):
        stats.add_step(0, proposed=7, depth=2, tokens=1)
    assert stats.legacy_acceptance_rate == pytest.approx(0.142857, abs=1e-6)
    assert stats.legacy_speedup_ratio == pytest.approx(1.142857, abs=1e-6)
    assert stats["acceptance_rate"] == 0.0 and stats.tau == 1.0
    assert Statistics().legacy_acceptance_rate == 0.0 and Statistics().legacy_speedup_ratio == 1.0


def test_speedup_is_there_only_when_both_sides_were_timed(tmp_path):
    stats = Statistics()
    stats.add_step(2, 7, 3, 3)
    stats.seconds = 2.0
    assert stats.speedup is None and stats["speedup"] == None and not stats["speedup_ratio"]  # noqa: E711
    assert f"{stats['speedup']:.2f}x" == "n/a x" and math.isnan(stats["speedup"] + 1)
    assert stats.to_dict()["speedup"] is None and stats.tokens_per_second == 1.5
    stats.plain_seconds = 5.0
    assert stats["speedup"] == stats["speedup_ratio"] == stats.speedup == 2.5
    assert json.loads(json.dumps(stats.to_dict()))["speedup_ratio"] == 2.5
    assert "speedup 2.50 x" in str(stats)
    stats.plot(tmp_path / "stats.png")
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_tree_statistics_and_rates():
    got = compute_tree_statistics(torch.tensor([3, 0, 1]), num_draft_tokens=8, num_steps=3)
    assert got == dict(
        mean_accept_length=4 / 3, max_accept_length=3, min_accept_length=0, acceptance_rate=4 / 21,
        total_proposed=21, total_accepted=4, batch_size=3,
    )  # fmt: skip
    assert set(compute_tree_statistics([], 8, 3).values()) == {0}
    with pytest.raises(ValueError, match=r"0\.\.3"):
        compute_tree_statistics([4], 8, 3)
    assert calculate_acceptance_rate([1, 2], 3) == 0.5 and calculate_acceptance_rate([], 3) == 0.0
    for alpha, values in ((0.6, (1.96, 2.3056, 2.4748)), (0.8, (2.44, 3.3616, 4.3289))):
        assert [expected_emitted(alpha, n) for n in (2, 4, 8)] == pytest.approx(values, abs=1e-4)
    assert expected_emitted(1.0, 3) == 4 and estimated_speedup(3.0, 5, 0.1) == 2.0


# --- costs and policy ---


def test_the_committed_cost_tables_are_those_of_results():
    tables = CostTable.read()
    assert tables
    for table in tables:
        record = json.loads((ROOT / table.source).read_text())
        assert table.device == record["machine"]["device"] and table.dtype == record["options"]["dtype"]
        for timing in table.timings:
            times = [row["ms_per_step"] for row in record["rows"] if row["batch"] == timing.batch]
            assert any(ms == pytest.approx(timing.ms, abs=1e-3) for ms in times), timing


def test_cost_tables_are_made_of_results(tmp_path):
    sizes = itertools.product((9, 5), (1, 4))
    rows = [dict(variant="tree", batch=1, context=c, nodes=n, depth=n - 1, ms_per_step=c + n) for c, n in sizes]
    record = dict(rows=rows, machine=dict(device="cpu"), options=dict(shape="tiny", dtype="float32"))
    (tmp_path / "batches.json").write_text(json.dumps(record))
    assert cost_tables.main([str(tmp_path / "batches.json"), "--output", str(tmp_path / "costs.json")]) == 0
    (table,) = CostTable.read(tmp_path / "costs.json")
    assert table.shape == (8, 64, 512) and table.ms(1, 4, 3) == 9 and table.source == "results/batches.json"
    record["rows"] = []
    (tmp_path / "batches.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="no trees of a known shape"):
        cost_tables.read(tmp_path / "batches.json")


def table(*timings):
    return CostTable("cpu", (2, 8, 32), "float32", "nowhere", tuple(Timing(*row) for row in timings))


def test_cost_tables_interpolate_and_travel(tmp_path):
    known = table((1, 1, 0, 4.0), (8, 1, 0, 5.0), (1, 8, 3, 6.0), (4, 8, 3, 9.0))
    assert known.ms(1, 1, 0) == 4.0 and known.ms(4, 8, 3) == 9.0 and known.ms(2, 8, 3) == 7.0
    assert known.ms(8, 8, 3) == 13.0 and known.ms(1, 60, 8) is None
    CostTable.write([known], tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == [known]
    with pytest.raises(ValueError, match="no plain step"):
        table((1, 8, 3, 6.0))


def test_costs_say_where_they_come_from():
    spec, other = TreeSpec.dynamic(8, 2, 4), TreeSpec.dynamic(4, 2, 2)
    costs = StepCosts(1, pass_cost=0.1)
    assert costs.ms(spec) == pytest.approx(1 + 0.3 + 7 * 0.0045) and "assumed" in costs.origin(spec)
    for ms in (99.0, 50.0, 40.0, 13.0, 13.0, 14.0):  # the first three are not timed
        costs.add(spec, ms)
    assert costs.ms(spec) == 13.0 and costs.origin(spec) == "measured in this run"
    assert costs.ms(PLAIN) == pytest.approx(13.0 / 1.3315)
    looked_up = StepCosts(1, 0.1, table((1, 1, 0, 4.0), (1, 8, 3, 6.0)))
    assert looked_up.ms(spec) == 6.0 and "table of cpu (nowhere)" in looked_up.origin(spec)
    assert 4.0 < looked_up.ms(other) < 6.0 and looked_up.origin(other).startswith("scaled from")


def simulate(config, rate, milliseconds, slots=1, steps=1500, fallback=True):
    """Decode with a drafter whose chain is accepted at `rate`; returns the policy and tokens/s over plain decoding."""
    source = random.Random(3)
    sizes = tree_sizes(config.nodes) if config.num_draft_tokens == "auto" else [config.nodes]
    policy = TreePolicy([config.tree(size) for size in sizes], StepCosts(slots, 0.05), fallback)
    tokens = time = plain = 0.0
    for _ in range(steps):
        spec, accepted = policy.choose(), []
        for _ in range(slots):
            length, chance = 0, 1 - (1 - rate) ** ((spec.drafts / max(spec.depth, 1)) ** 0.3)
            while length < spec.depth and source.random() < chance:
                length += 1
            accepted.append(length)
        ms = milliseconds(spec, slots) * source.uniform(0.97, 1.03)
        tokens, time, plain = tokens + sum(accepted) + slots, time + ms, plain + milliseconds(PLAIN, slots)
        policy.observe(accepted, ms)
    return policy, tokens / time / (slots * steps / plain)


def gpu(spec, slots):
    return 4.2 * (1 + 0.05 * spec.depth + 0.0045 * slots * spec.nodes)


WIDE = EAGLEConfig(topk=8, num_steps=7, num_draft_tokens="auto")


@pytest.mark.parametrize("slots", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("config", [EAGLEConfig(), WIDE], ids=["8", "auto"])
def test_speculation_costs_nothing_that_matters(config, rate, slots):
    policy, speed = simulate(config, rate, gpu, slots)
    assert speed > 0.94
    if rate == 0.0:
        assert policy.stops >= 3 and policy.plain_steps > 1300 and not policy.spec.drafts
        assert any("plain" in line for line in policy.report())
    if rate == 0.8:
        assert speed > 1.3 and policy.spec.drafts and policy.stops == 0


def test_auto_trees_shrink_with_the_batch_and_beat_the_largest():
    sizes = [simulate(WIDE, 0.7, gpu, slots)[0].spec.nodes for slots in (1, 32)]
    assert sizes[0] >= 32 and sizes[1] <= 8
    largest = simulate(WIDE.changed(num_draft_tokens=None), 0.7, gpu, 32, fallback=False)[1]
    assert simulate(WIDE, 0.7, gpu, 32)[1] > 1.5 * largest


def test_drafting_comes_back_when_it_pays_again():
    policy = TreePolicy([EAGLEConfig().tree()], StepCosts(1, 0.05))
    for step in range(600):
        spec = policy.choose()
        policy.observe([3 if spec.drafts and step > 300 else 0], gpu(spec, 1))
    assert policy.stops >= 1 and policy.spec.drafts and 100 < policy.plain_steps < 500


def test_a_request_that_is_alone_again_is_drafted_for_again():
    """16 sequences for which drafts do not pay, then one of them for which they do, and so on."""
    tree = EAGLEConfig(topk=8, num_steps=7, num_draft_tokens=60).tree()
    policy = TreePolicy([tree], StepCosts(16, 0.05))
    for _ in range(3):
        for slots, steps in ((16, 300), (1, 40)):
            chosen = []
            for _ in range(steps):
                policy.resize(slots)
                chosen.append(policy.choose())
                policy.observe([2 if chosen[-1].drafts else 0] * slots, gpu(chosen[-1], slots), slots)
            if slots == 16:  # but for a few steps that look whether it has changed
                assert sum(spec.drafts > 0 for spec in chosen[100:]) < 30
            else:  # but for a few plain steps, the first time, that say what they cost
                assert chosen[0] == tree and all(spec.drafts for spec in chosen[20:])
    assert policy.costs.measured(tree, 1) == pytest.approx(gpu(tree, 1))
    assert policy.costs.measured(PLAIN, 16) == pytest.approx(gpu(PLAIN, 16))


def test_without_fallback_a_single_tree_stays():
    policy, speed = simulate(EAGLEConfig(), 0.0, gpu, fallback=False)
    assert policy.spec == EAGLEConfig().tree() and speed < 1 and policy.plain_steps == 0


def test_a_source_of_drafts_that_lost_is_tried_again_only_after_long():
    """Both together are best for good; then repetition alone becomes it, and is found."""
    head = EAGLEConfig().tree()
    both, repeats = head.with_grafts(3), TreeSpec.repeats(7)
    policy, chosen = TreePolicy([both, head, repeats], StepCosts(1, 0.05), fallback=False), []
    for step in range(3 * policy_module.RETRY):
        chosen.append(policy.choose())
        best = both if step < 2 * policy_module.RETRY else repeats
        policy.observe([3 if chosen[-1] == best else 1], gpu(chosen[-1], 1))
    early, late = chosen[: policy_module.RETRY], chosen[policy_module.RETRY : 2 * policy_module.RETRY]
    assert 0 < early.count(repeats) < 4 * policy_module.LOOK and 0 < late.count(repeats) < 4 * policy_module.LOOK
    assert sum(one != next_one for one, next_one in itertools.pairwise(chosen[100 : policy_module.RETRY])) == 0
    assert chosen[-1] == repeats


def test_expand_beam_scores_children_and_chooses(device):
    """Two nodes of scores -1 and -2 with two children each: the best two of -1.5, -4, -2.25, -3."""
    log_probs = torch.tensor([[[-0.5, -3.0], [-0.25, -1.0]]], device=device)
    tokens = torch.tensor([[7, 8, 9, 10]], device=device)
    above = torch.tensor([[[1], [2]]], device=device)
    grown = speculative.expand_beam(torch.tensor([[-1.0, -2.0]], device=device), log_probs, tokens, above, 2, 2)
    assert grown.child_scores.tolist() == [[-1.5, -4.0, -2.25, -3.0]]
    assert grown.tokens.tolist() == [[7, 9]] and grown.parents.tolist() == [[0, 1]]
    assert grown.ancestors.tolist() == [[[1 | 4], [2 | 8]]]


def test_a_policy_expects_what_trees_have_given():
    """Tokens of a step: the accepted drafts and the target's own one."""
    spec = EAGLEConfig().tree()
    policy = TreePolicy([spec], StepCosts(1, 0.05), fallback=False)
    for accepted in ([2, 0], [1, 3]) * 200:
        policy.observe(accepted, 1.0)
    assert policy.emitted(spec) == pytest.approx(2.5, abs=0.02) and policy.emitted(PLAIN) == 1.0
    assert policy.rate(spec) == pytest.approx(2.5 / policy.costs.ms(spec), rel=0.01)


# --- names ---


def test_public_names_are_there():
    assert all(getattr(speculative, name) is not None for name in speculative.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = speculative.nothing


def test_what_generations_hand_out_is_public():
    """Also the classes that nobody makes, for annotations: of pieces, steps, requests and whole calls."""
    for shown in (session.Piece, session.StepInfo, session.Completion, session.Results):
        assert getattr(speculative, shown.__name__) is shown


def test_the_pause_that_learns_what_a_plain_step_costs_forgets_nothing():
    """Only a pause because drafting did not pay makes what was learnt before it hardly count."""
    spec = EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4).tree()
    policy = TreePolicy([spec], StepCosts(1, 0.5))
    for _ in range(policy_module.LOOK):
        assert policy.choose() == spec
        policy.observe([1], 1.0)
    learnt = policy._seen[spec].steps
    for _ in range(policy_module.CHECK):
        assert policy.choose() == PLAIN
        policy.observe([0], 1.0)
    assert policy.choose() == spec and policy.probes == 0
    assert policy._seen[spec].steps == learnt > policy_module.ENOUGH
    for _ in range(200):  # and from now on nothing is accepted: a real pause, and what it does
        if policy.choose() == PLAIN:
            break
        policy.observe([0], 9.0)
    before = policy._seen[spec].steps
    while policy.choose() == PLAIN:
        policy.observe([0], 1.0)
    assert policy.probes == 1 and policy._seen[spec].steps < 0.1 * before
