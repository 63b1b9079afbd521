"""EAGLEInference: the same output as the target alone, for any draft, batch, order of arrival and stop rule."""

import copy
import functools
import gc
import random

import huggingface_hub.errors
import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.demo import demo_directory, demo_prompts
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.inference.costs import CostTable
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.heads import Eagle1Head, Eagle3Head
from eagle_triton.models.target import cache_argument
from tests.test_speculative_session import finish
from tests.tiny import random_prompt, tiny_model

FIXED = EAGLEConfig(fallback=False)


@torch.no_grad()
def target_alone(base, prompt, new, stops=()):
    """Plain argmax decoding with the Hugging Face model and its own cache; new tokens, the stop token kept."""
    fed, cache, tokens = prompt[None], None, []
    while len(tokens) < new:
        out = base(fed, use_cache=True, **{cache_argument(base.forward): cache})
        fed, cache = out.logits[:, -1].argmax(-1)[:, None], out.past_key_values
        tokens.append(int(fed))
        if tokens[-1] in stops:
            break
    return tokens


def new_tokens(stats):
    return [completion.tokens for completion in stats.completions]


def pairs(device):
    """Three random targets, each with another kind of draft."""
    llama = tiny_model("llama", seed=0).to(device)
    qwen = tiny_model("qwen3", eagle3=False, seed=1)
    with torch.no_grad():  # both say little more than what the newest token's embedding says, so they often agree
        for name, weight in qwen.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.02)
        qwen.ea_layer.fc.weight.copy_(torch.eye(*qwen.ea_layer.fc.weight.shape))
    qwen = qwen.to(device)
    mistral = tiny_model("mistral", seed=2).base_model.to(device)
    draft = tiny_model("llama", eagle3=False, layers=2, seed=7).base_model.to(device)
    return {
        "llama, EAGLE-3 head": (llama.ea_layer, llama.base_model),
        "qwen3, EAGLE-1 head": (qwen, qwen),
        "mistral, causal draft": (draft, mistral),
    }


# --- greedy identity ---


@pytest.mark.parametrize("count", [3, 12])
def test_greedy_output_of_the_demo_is_the_targets(count, device):
    model = EaModel.from_pretrained("demo").to(device)
    eagle = EAGLEInference(model.ea_layer, model.base_model, tokenizer=model.tokenizer)
    text = model.tokenizer("\n".join(demo_prompts(20)), return_tensors="pt").input_ids[0].to(device)
    lengths = {3: [1, 63, 300], 12: [1, 2, 5, 13, 34, 64, 65, 89, 128, 233, 512, 700]}[count]
    prompts = [text[3 * length : 4 * length] for length in lengths]
    limits = [12 + index % 3 for index in range(count)]
    _, stats = eagle.generate(prompts, limits)
    assert new_tokens(stats) == [target_alone(model.base_model, *call) for call in zip(prompts, limits, strict=True)]
    assert stats["total_accepted_tokens"] > 5 * count and stats.tau > 1.5
    assert stats["total_tokens_generated"] == sum(limits)


@pytest.mark.parametrize("name", ["llama, EAGLE-3 head", "qwen3, EAGLE-1 head", "mistral, causal draft"])
def test_greedy_output_of_random_models_is_the_targets(name, device):
    draft, target = pairs(device)[name]
    base = target.base_model if isinstance(target, EaModel) else target
    prompts = [random_prompt(length)[0].to(device) for length in (9, 1, 130, 2, *range(3, 51, 4))]
    want = [target_alone(base, prompt, 22 if index < 3 else 8) for index, prompt in enumerate(prompts)]
    auto = EAGLEConfig(topk=3, num_steps=4, num_draft_tokens="auto")
    accepted = 0
    for count, config in ((3, FIXED.changed(slots=2)), (16, auto.changed(slots=5))):
        limits = [len(tokens) for tokens in want[:count]]
        _, stats = EAGLEInference(draft, target, config).generate(prompts[:count], limits)
        assert new_tokens(stats) == want[:count]
        accepted += stats["total_accepted_tokens"]
    assert accepted > 8, "hardly anything was accepted: the test shows little"


def test_tensors_come_back_padded_and_masks_are_taken_off(device):
    model = tiny_model().to(device)
    eagle = EAGLEInference(None, model)
    rows = [random_prompt(5)[0], random_prompt(3)[0]]
    padded = torch.stack((rows[0], torch.cat((torch.zeros(2, dtype=torch.int64), rows[1])))).to(device)
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]], device=device)
    out, stats = eagle.generate(padded, [4, 2], attention_mask=mask)
    assert out.shape == (2, 9) and out[1, 5:].eq(0).all() and torch.equal(out[0, :5], padded[0])
    assert torch.equal(out[1, 3:5].cpu(), torch.tensor(stats.completions[1].tokens))
    assert torch.equal(eagle.generate(padded[:1], 4, return_stats=False), out[:1])


def test_exactly_max_new_tokens():
    model = tiny_model(vocab=8, seed=1, total_token=4, depth=2, top_k=1)
    draft = model.base_model  # draft = target: steps of four tokens, so that most limits fall inside one
    eagle = EAGLEInference(draft, model.base_model, EAGLEConfig(topk=1, num_draft_tokens=4, fallback=False))
    for limit in (0, 1, 2, 3, 4, 5, 7, 11):
        (out,), stats = eagle.generate([random_prompt(6, vocab=8)[0]], limit)
        assert len(out) == 6 + limit and stats["total_tokens_generated"] == limit
        assert stats.completions[0].finished == "length"


def test_end_tokens_as_draft_as_bonus_and_as_first_token():
    """Each token of an output in turn is the stop token, so that it falls on every place of a step of four."""
    model = tiny_model(seed=8)
    base, prompt = model.base_model, random_prompt(6)[0]
    eagle = EAGLEInference(base, base, EAGLEConfig(topk=1, num_draft_tokens=4, fallback=False))
    free = target_alone(base, prompt, 24)
    assert len(set(free[:12])) >= 6
    for place in range(12):
        for stops in ([free[place]], [free[place], 31, free[(place + 3) % 12]])[: 1 + (place < 4)]:
            (_,), stats = eagle.generate([prompt], 24, stop_token_ids=stops)
            first = next(index for index, token in enumerate(free) if token in stops)
            assert new_tokens(stats) == [free[: first + 1]]
            assert stats.completions[0].finished == "stop" and stats.completions[0].tokens[-1] in stops
    base.generation_config.eos_token_id = [free[5], 31]
    _, stats = EAGLEInference(base, base).generate([prompt], 24)
    assert new_tokens(stats) == [target_alone(base, prompt, 24, [free[5], 31])]


# --- drafts that are always or never right ---


def test_a_draft_that_is_the_target_is_always_right(device):
    base = tiny_model(seed=2).base_model.to(device)
    config = EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4, fallback=False)
    prompts = [random_prompt(length)[0].to(device) for length in (3, 17)]
    _, stats = EAGLEInference(base, base, config).generate(prompts, 40)
    assert stats["acceptance_rate"] == 1.0 and stats["mean_accept_length"] == 4.0
    assert dict(stats.histogram) == {3: 20} and [row["rate"] for row in stats.positions] == [1.0] * 3
    assert new_tokens(stats) == [target_alone(base, prompt, 40) for prompt in prompts]


def never_right():
    """A target, and a draft that always proposes token 0, which the target never chooses."""
    target = tiny_model(seed=3).base_model
    draft = copy.deepcopy(target)
    draft.lm_head.weight.data.zero_()  # all logits equal: ties go to token 0
    target.lm_head.weight.data[0].zero_()  # below the best of 31 others
    return draft, target


def test_a_draft_that_is_never_right_costs_speed_and_nothing_else():
    draft, target = never_right()
    prompt = random_prompt(8)[0]
    want = target_alone(target, prompt, 70)
    assert 0 not in want
    config = EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4)
    _, stats = EAGLEInference(draft, target, config.changed(fallback=False)).generate([prompt], 30)
    assert stats["acceptance_rate"] == 0.0 and stats["mean_accept_length"] == 1.0 and new_tokens(stats) == [want[:30]]
    eagle = EAGLEInference(draft, target, config)
    _, stats = eagle.generate([prompt], 70)
    assert new_tokens(stats) == [want] and stats.plain_steps > 35
    assert stats["acceptance_rate"] == 0.0 and stats.tau == 1.0
    assert "plain" in eagle.report() and "drafting was stopped 0 times" not in eagle.report()


# --- sampling ---

MEMORYLESS = 5


def memoryless_target():
    """One layer whose attention adds nothing: what comes next depends on the last token alone."""
    tree = dict(total_token=4, depth=1, top_k=2)
    model = tiny_model(eagle3=False, vocab=MEMORYLESS, layers=1, seed=7, **tree)
    model.base_model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    model.base_model.lm_head.weight.data.mul_(2.0)
    return model


@pytest.mark.slow
def test_sampled_tokens_follow_the_targets_distribution():
    """20,000 transitions of a target without memory: the joint distribution of (token, next token), total variation <
    0.02, with every filter and rule.

    A penalty's distribution depends on which tokens were seen too: each transition is expected by the distribution of
    its own history.
    """
    model, options = memoryless_target(), dict(temperature=1.7, top_k=4, top_p=0.9, min_p=0.1)
    penalty, bias = 1.6, {1: 1.5, 3: -2.0}
    config = EAGLEConfig(topk=2, num_steps=2, num_draft_tokens=4, fallback=False, slots=200)
    prompts = [torch.tensor([index % MEMORYLESS]) for index in range(200)]
    torch.manual_seed(0)
    rules = dict(repetition_penalty=penalty, logit_bias=bias)
    rows, stats = EAGLEInference(None, model, config).generate(prompts, 100, **options, **rules)
    assert stats["total_accepted_tokens"] > 1000
    with torch.no_grad():
        logits = model.base_model(torch.arange(MEMORYLESS)[:, None]).logits[:, 0].double()
    sequences = torch.stack(rows)
    last, following = sequences[:, :-1].flatten(), sequences[:, 1:].flatten()
    seen = torch.nn.functional.one_hot(sequences, MEMORYLESS).cumsum(1)[:, :-1].flatten(0, 1) > 0
    histories, which = torch.cat((last[:, None], seen), dim=1).unique(dim=0, return_inverse=True)
    own, held = logits[histories[:, 0]], histories[:, 1:] > 0
    own = torch.where(held, torch.where(own > 0, own / penalty, own * penalty), own)
    for token, value in bias.items():
        own[:, token] += value
    distribution = exact_distribution(own, **options)
    counts, expected = torch.zeros(2, MEMORYLESS, MEMORYLESS, dtype=torch.float64)
    counts.index_put_((last, following), torch.ones(len(last), dtype=torch.float64), accumulate=True)
    expected.index_add_(0, last, distribution[which])
    assert (counts - expected).abs().sum() / 2 / len(last) < 0.02
    assert (distribution[which, following] > 0).all()


@pytest.mark.parametrize(
    ("strategy", "filters"), [("target_match", dict(top_p=0.6)), ("rejection", dict(top_k=4, top_p=0.8))]
)
def test_ties_at_the_cut_follow_the_law_of_transformers(strategy, filters, monkeypatch):
    """Transitions of a target without memory, three of whose tokens tie, by transformers' own processors: a chi-square,
    and nothing outside the support."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    model = memoryless_target()
    with torch.no_grad():
        model.base_model.lm_head.weight[:3] = model.base_model.lm_head.weight[1]
        scores = model.base_model(torch.arange(MEMORYLESS)[:, None]).logits[:, 0]
    config = EAGLEConfig(
        topk=2, num_steps=2, num_draft_tokens=4, fallback=False, slots=100, verify_strategy=strategy, temperature=1.0
    )
    torch.manual_seed(0)
    prompts = [torch.tensor([index % MEMORYLESS]) for index in range(100)]
    rows, stats = EAGLEInference(None, model, config).generate(prompts, 60, **filters)
    assert stats["total_accepted_tokens"] > 500
    if "top_k" in filters:
        scores = TopKLogitsWarper(filters["top_k"])(None, scores)
    scores = TopPLogitsWarper(filters["top_p"])(None, scores)
    law, sequences = scores.double().softmax(-1), torch.stack(rows)
    seen = torch.zeros_like(law)
    one = torch.ones(sequences[:, 1:].numel(), dtype=torch.float64)
    seen.index_put_((sequences[:, :-1].flatten(), sequences[:, 1:].flatten()), one, accumulate=True)
    assert (seen[law == 0] == 0).all()
    assert ((law > 0)[:, :3].sum(-1) % 3 != 0).any(), "ties are kept or dropped together: the test shows nothing"
    kept = (law > 0) & (seen.sum(-1, keepdim=True) > 0)
    expected = (seen.sum(-1, keepdim=True) * law)[kept]
    freedom = kept.sum() - kept.any(-1).sum()
    chance = torch.special.gammaincc(freedom.double() / 2, ((seen[kept] - expected) ** 2 / expected).sum() / 2)
    assert freedom > 3 and chance > 1e-4


def exact_distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The documented order written out for rows of a small vocabulary: temperature, top-k, top-p, min-p."""
    distribution = (logits / temperature).softmax(-1)
    for row in distribution:
        order = row.argsort(descending=True)
        if top_k:
            row[order[top_k:]] = 0
        before = row[order].cumsum(0) - row[order]
        row[order[before >= top_p * row.sum()]] = 0
        row[row < min_p * row.max()] = 0
    return distribution / distribution.sum(-1, keepdim=True)


@pytest.mark.parametrize(("tokens", "strategy"), [("auto", "target_match"), (8, "rejection")])
def test_a_seed_gives_the_same_tokens_whatever_the_batch(tokens, strategy):
    model, config = tiny_model(seed=5), EAGLEConfig(num_draft_tokens=tokens, topk=3, slots=3, verify_strategy=strategy)
    eagle = EAGLEInference(None, model, config)
    prompts = [random_prompt(length)[0] for length in (6, 11, 3, 8, 20)]
    options = dict(temperature=[0.9, 0.0, 1.2, 0.7, 1.0], top_k=[0, 0, 5, 0, 3], top_p=[1.0, 1.0, 0.9, 0.8, 1.0])
    limits, seeds = [12, 4, 9, 10, 12], [11, 12, 13, 14, 15]
    together = new_tokens(eagle.generate(prompts, limits, seed=seeds, **options)[1])
    assert together == new_tokens(eagle.generate(prompts, limits, seed=11, **options)[1])
    assert together != new_tokens(eagle.generate(prompts, limits, seed=99, **options)[1])
    for index, prompt in enumerate(prompts):
        own = {name: values[index] for name, values in options.items()}
        alone = eagle.generate([prompt], limits[index], seed=seeds[index], **own)[1]
        assert new_tokens(alone) == [together[index]]


def test_logprobs_are_the_targets(device):
    model = tiny_model(seed=5).to(device)
    eagle = EAGLEInference(None, model)
    prompts = [random_prompt(length)[0].to(device) for length in (6, 11)]
    rows, stats = eagle.generate(prompts, 20, logprobs=True)
    for row, completion, prompt in zip(rows, stats.completions, prompts, strict=True):
        with torch.no_grad():
            distribution = model.base_model(row[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt), len(row), device=device)
        want = distribution[places - 1, row[places]].cpu()
        torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=1e-4, rtol=1e-4)
    assert eagle.generate(prompts, 3)[1].completions[0].logprobs is None


def test_an_end_token_beyond_the_vocabulary_ends_nothing():
    model, prompts = tiny_model(seed=5), [random_prompt(length)[0] for length in (6, 9, 4)]
    rules = dict(repetition_penalty=[1.0, 1.3, 1.0], min_new_tokens=[0, 0, 5], logit_bias=[None, None, {3: 1.0}])
    eagle = EAGLEInference(None, model, FIXED)
    free = new_tokens(eagle.generate(prompts, 12, stop_token_ids=[], **rules)[1])
    model.base_model.generation_config.eos_token_id = 2**31 + 5
    eagle = EAGLEInference(None, model, FIXED)
    assert new_tokens(eagle.generate(prompts, 12, **rules)[1]) == free


def test_min_new_tokens(demo):
    """Of each prompt, whatever ends it: a stop token or a stop string."""
    prompt, stop = "import os\nimport sys\n", demo.tokenizer("\n").input_ids
    free = demo.generate(prompt, 40, stop_token_ids=[])[1].completions[0]
    assert free.text.count("\n") > 2
    own = demo.generate([prompt] * 3, 40, stop_token_ids=stop, min_new_tokens=[0, 12, 40])[1].completions
    assert len(own[0].tokens) < 12 <= len(own[1].tokens) and len(own[2].tokens) == 40
    assert not set(stop) & set(own[1].tokens[:12]) and not set(stop) & set(own[2].tokens)
    late = demo.generate(prompt, 40, stop_token_ids=[], stop_strings="\n", min_new_tokens=12)[1].completions[0]
    assert free.text.startswith(late.text) and 12 <= len(late.tokens) < 40 and late.finished == "stop"


def test_filters_beside_temperature_0_change_nothing():
    eagle = EAGLEInference(None, tiny_model(seed=5), EAGLEConfig(fallback=False, verify_strategy="rejection"))
    prompts = [random_prompt(length)[0] for length in (6, 9)]
    greedy = new_tokens(eagle.generate(prompts, 12)[1])
    filters = dict(top_p=0.1, top_k=2, min_p=0.9)
    assert new_tokens(eagle.generate(prompts, 12, **filters)[1]) == greedy
    beside = eagle.generate(prompts, 12, temperature=[0.0, 1.0], seed=3, **filters)[1]
    assert new_tokens(beside)[0] == greedy[0]
    with eagle.session(rows=64) as session:
        session.submit(prompts[0], 12, temperature=0.0, **filters)
        session.submit(prompts[1], 12, sampling=SamplingParams(**filters))
        found = finish(session)
    assert [found[0].tokens, found[1].tokens] == greedy


# --- text ---


@pytest.fixture(scope="module")
def demo():
    model = EaModel.from_pretrained("demo")
    return EAGLEInference(model, model)


def test_half_of_a_surrogate_pair_is_no_text(demo):
    demo.generate("x = '🎉'", 1)
    with pytest.raises(ValueError, match="prompt 1: a prompt must be text, got a string with half of a surrogate pair"):
        demo.generate(["x", "y = '\ud83c'"], 1)


def test_streamed_pieces_are_the_text(demo):
    prompts = ["def naïve(", "x = '日本語 — ", "import "]
    whole = demo.generate(prompts, [30, 20, 10])[1]
    pieces, last = {0: [], 1: [], 2: []}, {}
    for piece in demo.stream(prompts, [30, 20, 10]):
        pieces[piece.index].append(piece)
        if piece.completion is not None:
            last[piece.index] = piece.completion
    for index, completion in enumerate(whole.completions):
        assert "".join(map(str, pieces[index])) == completion.text == last[index].text
        assert [token for piece in pieces[index] for token in piece.tokens] == completion.tokens == last[index].tokens
        both = demo.tokenizer.decode(completion.output_ids, skip_special_tokens=True)
        assert both == prompts[index] + completion.text
        assert len(pieces[index]) > 2


def test_stop_strings_end_a_text(demo):
    prompt = "def read_lines(path):\n"
    free = demo.generate(prompt, 60, logprobs=True)[1].completions[0]
    assert len(free.logprobs) == len(free.tokens) == 60
    middle = len(free.text) // 2
    for stop in (free.text[middle : middle + 12], free.text[:1]):
        options = dict(stop_strings=[stop, "never there"], logprobs=True)
        completion = demo.generate(prompt, 60, **options)[1].completions[0]
        assert completion.finished == "stop"
        assert completion.text == free.text[: free.text.index(stop)]
        assert completion.tokens == free.tokens[: len(completion.tokens)]
        expected = free.logprobs[: len(completion.tokens)]  # other trees, chosen by the time they take, round otherwise
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert demo.tokenizer.decode(completion.tokens).startswith(completion.text)
        assert "".join(map(str, demo.stream(prompt, 60, stop_strings=stop))) == completion.text
    assert demo.generate(prompt, 5, stop_strings="never there")[1].completions[0].finished == "length"


def test_a_stream_that_is_closed_frees_the_engine(demo):
    stream = demo.stream("import ", 50)
    next(stream)
    with pytest.raises(RuntimeError, match="another generation is running"):
        demo.generate("import ", 2)
    stream.close()
    demo.generate("import ", 2)


# --- a queue ---


def live_elements():
    gc.collect()
    found = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())  # views are no memory


def test_requests_that_arrive_at_random_get_what_they_get_alone(device):
    """100 requests through 16 slots, greedy and sampled, with limits and end tokens of their own; memory stays flat."""
    model = tiny_model(seed=8).to(device)
    fallback = device == "cpu"  # on a GPU a graph that is captured late would count as memory
    eagle = EAGLEInference(None, model, EAGLEConfig(topk=2, num_steps=2, num_draft_tokens=4, fallback=fallback))
    source = random.Random(0)
    prompts = [random_prompt(source.randint(1, 40), seed=index)[0].to(device) for index in range(6)]
    samplings = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    kinds = [(prompt, sampling) for prompt in prompts for sampling in samplings]
    alone = []
    for prompt, distribution in kinds:
        with eagle.session(rows=60, slots=1) as session:
            session.submit(prompt, 14, distribution, stop_token_ids=())
            alone.append(finish(session)[0].tokens)
    wanted, got, memory = {}, {}, []
    with eagle.session(rows=60, slots=16) as session:
        while len(got) < 100:
            for _ in range(source.choice([0, 0, 1, 5, 12])):
                if len(wanted) < 100:
                    kind, limit, stop = source.randrange(12), source.randint(1, 14), source.randrange(32)
                    index = session.submit(kinds[kind][0], limit, kinds[kind][1], stop_token_ids=[stop])
                    tokens = alone[kind][:limit]
                    wanted[index] = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
            for piece in session.step():
                if piece.completion is not None:
                    got[piece.index] = piece.completion.tokens
            if len(got) // 50 > len(memory):
                memory.append(torch.cuda.max_memory_allocated() if device == "cuda" else live_elements())
    assert got == wanted
    assert max(memory[1:]) <= memory[0] * 1.01, memory


def test_cancelled_requests_leave_and_others_do_not_notice():
    eagle = EAGLEInference(None, tiny_model())
    want = new_tokens(eagle.generate([random_prompt(5)[0]], 30)[1])[0]
    with eagle.session(rows=64, slots=2) as session:
        first, second, third = (session.submit(random_prompt(n)[0], 30) for n in (9, 5, 7))
        pieces = session.step()
        session.cancel(first)
        assert session._batch.free == [0] and session._batch.lengths  # the slot is free at once
        fourth = session.submit(random_prompt(3)[0], 4)
        session.cancel(third)
        assert fourth in {piece.index for piece in session.step()}, "the next in line did not start at the next step"
        while not session.idle:
            pieces += session.step()
    ended = {piece.index: piece.completion.tokens for piece in pieces if piece.completion}
    assert ended[second] == want and set(ended) <= {second, fourth}
    assert {piece.index for piece in pieces[2:]} <= {second, fourth}


def test_steps_are_reported(caplog):
    eagle = EAGLEInference(None, tiny_model(), FIXED.changed(slots=2, verbose=True))
    infos = []
    with caplog.at_level("INFO", logger="eagle_triton.inference.eagle_inference"):
        eagle.generate([random_prompt(n)[0] for n in (3, 4, 5)], 6, on_step=infos.append)
    assert [info.nodes for info in infos].count(0) == 2 and {info.nodes for info in infos} == {0, 8}
    steps = 0
    for info in infos:  # first tokens come without a step
        steps += info.nodes > 0
        assert info.step == steps
        assert all((piece.tree is None) == (info.nodes == 0) for piece in info.pieces if piece.tokens)
    assert len(caplog.records) == len(infos)
    assert infos[0].nodes == 0 and infos[1].nodes == 8
    assert infos[0].waiting == infos[1].waiting == 1 and infos[-1].running == infos[-1].waiting == 0
    assert sum(len(piece.tokens) for info in infos for piece in info.pieces) == 18


# --- statistics, costs ---


def test_benchmark_times_both_sides():
    eagle = EAGLEInference(None, tiny_model(), FIXED)
    prompts = [random_prompt(n)[0] for n in (5, 9)]
    plain = eagle.generate(prompts, 10)[1]
    assert plain.speedup is None and f"{plain['speedup']:.2f}x" == "n/a x"
    stats = eagle.benchmark(prompts, 10)
    assert stats.speedup == stats["speedup_ratio"] == stats.plain_seconds / stats.seconds
    assert eagle.statistics["total_tokens_generated"] == 40
    eagle.reset_statistics()
    assert eagle.statistics["total_tokens_generated"] == 0


def test_costs_are_measured_once_and_kept(tmp_path):
    model, config = tiny_model(), EAGLEConfig(topk=2, num_steps=3, num_draft_tokens="auto")
    eagle = EAGLEInference(None, model, config)
    eagle.generate([random_prompt(4)[0]], 2)
    assert "assumed" in eagle.report()
    table = eagle.measure_costs(batches=(1, 2), context=16, steps=3)
    assert {(row.batch, row.nodes) for row in table.timings} == {(b, n) for b in (1, 2) for n in (1, 2, 4, 8, 11)}
    CostTable.write([table], tmp_path / "costs.json")
    eagle = EAGLEInference(None, model, config, costs=CostTable.read(tmp_path / "costs.json"))
    eagle.generate([random_prompt(4)[0]], 2)
    assert "table of cpu (measured here)" in eagle.report()
    memory = eagle.memory_bytes(slots=4, rows=400)
    assert memory["target_cache"] == 4 * 2 * 2 * 16 * 4 * 64 * (4 * 9 + 1) and memory["logits"] == 4 * 11 * 32 * 4


# --- the stages of a step ---


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "model"])
def test_stages_are_the_engines(kind, device):
    """The tree of generate_draft_tree is the one that a generation verifies; verify_drafts accepts what it accepts."""
    model = tiny_model(eagle3=kind != "eagle1", seed=1).to(device)
    draft = tiny_model(eagle3=False, layers=2, seed=1).base_model.to(device) if kind == "model" else model.ea_layer
    config = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=10, fallback=False)
    eagle = EAGLEInference(draft, model, config)
    prompts = torch.cat([random_prompt(12, seed=seed) for seed in range(6)]).to(device)
    out, stats = eagle.generate(prompts, 8)
    root = out[:, 12]
    tokens, parents, chosen = eagle.generate_draft_tree(prompts, root)
    assert tokens.shape == (6, 9) and parents.shape == (6, 7)
    accepted, lengths, facts = eagle.verify_drafts(prompts, tokens, root, parents, chosen)
    for row, length, sequence in zip(accepted.tolist(), lengths.tolist(), out.tolist(), strict=True):
        assert row[: length + 1] == sequence[13 : 14 + length] and set(row[length + 1 :]) <= {-1}
    assert facts["total_accepted"] == lengths.sum() and facts["batch_size"] == 6
    assert len(facts["tree"]) == 6 and facts["tree"][0].numel() == 6 * 10 * (12 + 10)
    first = [completion.statistics.histogram for completion in stats.completions]
    assert all(histogram[length] for histogram, length in zip(first, lengths.tolist(), strict=True))
    scores, ids, past = eagle.draft_step(torch.cat((prompts, root[:, None]), 1))
    assert scores.shape == ids.shape == (6, 3) and (scores.diff(dim=1) <= 0).all() and scores.sum(1).max() <= 1 + 1e-5
    assert all(set(row.tolist()) & set(drafts.tolist()) for row, drafts in zip(ids, tokens, strict=True))
    for piece in (root[:, None], out[:, 13:16]):
        cached = eagle.draft_step(piece, past)
        prompts = torch.cat((prompts, root[:, None]) if piece is not root else (prompts, piece), 1)
        past = cached.past_key_values


def stepping(kind):
    model = tiny_model(seed=1)
    draft = tiny_model(eagle3=False, layers=2, seed=1).base_model if kind == "model" else model.ea_layer
    return EAGLEInference(draft, model)


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_draft_step_goes_on_where_the_last_one_ended(kind):
    eagle, ids = stepping(kind), random_prompt(700)
    whole = eagle.draft_step(ids)
    step = eagle.draft_step(ids[:, :5])
    for first, last in ((5, 6), (6, 80), (80, 700)):
        step = eagle.draft_step(ids[:, first:last], step.past_key_values)
    assert torch.equal(step.token_ids, whole.token_ids)
    torch.testing.assert_close(step.scores, whole.scores, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="two tokens at least"):
        eagle.draft_step(ids[:, :1])


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
ROOT = torch.tensor([7, 8])


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("input_ids", IDS + 1000, "token ids out of range, expected 0..31, got 1001..1006"),
        ("input_ids", -IDS, r"token ids out of range, expected 0..31, got -6..-1"),
        ("verified_id", ROOT + 32, "token ids out of range, expected 0..31, got 39..40"),
        ("verified_id", ROOT - 8, "token ids out of range, expected 0..31, got -1..0"),
        ("verified_id", ROOT[:1], r"expected shape \[2\], got \[1\]"),
        ("verified_id", ROOT[:, None], r"expected shape \[2\], got \[2, 1\]"),
        ("verified_id", ROOT.float(), "expected an integer dtype"),
        ("verified_id", [7, 8], r"expected a tensor \[2\], got list"),
        ("draft_tokens", IDS + 29, "token ids out of range, expected 0..31, got 30..35"),
        ("draft_tokens", IDS - 2, "token ids out of range, expected 0..31, got -1..4"),
        ("draft_tokens", IDS[:1], r"expected shape \[2, N - 1\], got \[1, 3\]"),
        ("draft_tokens", IDS[:, :0], r"expected shape \[2, N - 1\], got \[2, 0\]"),
        ("draft_tokens", None, r"expected a tensor \[2, N - 1\], got NoneType"),
        *(
            ("top_scores_index", torch.tensor([[0, 1, index]] * 2), "candidates must lie in 0..2, got")
            for index in (-1, 3)
        ),
    ],
)
def test_stages_refuse_token_ids_by_name(argument, value, message):
    eagle = EAGLEInference(None, tiny_model(), EAGLEConfig(topk=1, num_draft_tokens=4))
    parents, chosen = torch.tensor([[-1, 0, 1]] * 2), torch.tensor([[0, 1, 2]] * 2)
    given = {"input_ids": IDS, "verified_id": ROOT, "draft_tokens": IDS, "top_scores_index": chosen, argument: value}
    calls = [lambda: eagle.verify_drafts(**given, parent_list=parents)]
    if argument in ("input_ids", "verified_id"):
        calls.append(lambda: eagle.generate_draft_tree(given["input_ids"], given["verified_id"]))
    if argument == "input_ids":
        calls += [lambda: eagle.draft_step(value), lambda: eagle.draft_step(value, eagle.draft_step(IDS)[2])]
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=f"^{argument}: {message}"):
            call()


def test_a_draft_step_takes_a_row_for_each_sequence():
    eagle = EAGLEInference(None, tiny_model())
    with pytest.raises(ValueError, match="input_ids: expected a row for each of the 2 sequences .* got 1"):
        eagle.draft_step(IDS[:1], eagle.draft_step(IDS).past_key_values)


@pytest.mark.parametrize(("kind", "length"), [("eagle3", 3), ("eagle3", 600), ("model", 3), ("model", 600)])
def test_two_draft_steps_from_one_prefix_are_independent(kind, length):
    eagle, ids = stepping(kind), random_prompt(9)
    past = eagle.draft_step(ids).past_key_values
    ways = [random_prompt(length, seed=seed) for seed in (1, 2)]
    steps = [eagle.draft_step(way, past) for way in (*ways, ways[0])]
    assert past.length == 9 and steps[0].past_key_values.length == 9 + length
    for step, way in zip(steps, (*ways, ways[0]), strict=True):
        whole = eagle.draft_step(torch.cat((ids, way), dim=1))
        assert torch.equal(step.token_ids, whole.token_ids)
        torch.testing.assert_close(step.scores, whole.scores, atol=1e-5, rtol=1e-4)


# --- bad input ---


def test_models_that_do_not_fit_are_refused():
    model, other = tiny_model(), tiny_model(vocab=48)
    for draft, target, config, error, message in (
        (other.base_model, model, None, ValueError, "vocabulary"),
        (other.ea_layer, model.base_model, None, ValueError, "vocabulary"),
        (None, model.base_model, None, ValueError, "the target has no head"),
        (model.ea_layer, 7, None, TypeError, "target_model"),
        ("./missing", model.base_model, None, FileNotFoundError, "draft_model: './missing' does not exist"),
        (None, model, EAGLEConfig(topk=21), ValueError, "topk .* must be at most .*, the draft's vocabulary"),
        (torch.nn.Linear(2, 2), model.base_model, None, ValueError, "causal language model"),
        (None, "./missing", None, FileNotFoundError, "missing"),
    ):
        with pytest.raises(error, match=message):
            EAGLEInference(draft, target, config)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU"):
            EAGLEInference(None, model, device="cuda")


def test_a_request_that_is_too_long_fails_alone():
    model = tiny_model()
    eagle = EAGLEInference(None, model, EAGLEConfig(max_length=50))
    prompts = [random_prompt(length)[0] for length in (10, 49, 60, 12)]
    rows, stats = eagle.generate(prompts, [10, 20, 1, 10])
    reasons = [completion.error for completion in stats.completions]
    assert reasons[0] is reasons[1] is reasons[3] is None and "60 tokens does not fit into the 50 rows" in reasons[2]
    assert [completion.finished for completion in stats.completions] == ["length", "length", "error", "length"]
    assert len(rows[1]) == 50 and torch.equal(rows[1][:49], prompts[1])
    assert rows[0][10:].tolist() == target_alone(model.base_model, prompts[0], 10)
    assert rows[3][12:].tolist() == target_alone(model.base_model, prompts[3], 10)
    assert torch.equal(rows[2], prompts[2])
    with pytest.raises(RuntimeError, match="no prompt could be decoded"):
        eagle.generate(prompts[2], 1)
    with pytest.raises(ValueError, match="give rows"), EAGLEInference(None, model).session():
        pass


def test_nan_logits_fail_the_request_that_meets_them():
    """A token whose embedding is NaN poisons its own sequence, from the prompt on or from where it is emitted."""
    model = tiny_model(seed=9)
    base, prompts = model.base_model, [random_prompt(length)[0] for length in (6, 7, 30)]
    want = [target_alone(base, prompt, 40) for prompt in prompts]
    drafted = (model.ea_layer.d2t + torch.arange(len(model.ea_layer.d2t))).tolist()  # NaN among the drafts would spread
    harmless = {*want[0], *prompts[0].tolist(), *prompts[1].tolist(), *drafted}
    poison = next(token for token in want[1][3:] if token not in harmless)
    model.base_model.model.embed_tokens.weight.data[poison] = float("nan")
    eagle = EAGLEInference(model.ea_layer, base, FIXED)
    prompts[2][5] = poison
    _, stats = eagle.generate(prompts, 40)
    good, late, early = stats.completions
    assert good.error is None and good.tokens == want[0]
    assert late.finished == early.finished == "error" and "NaN" in late.error and "NaN" in early.error
    assert late.tokens == want[1][: want[1].index(poison)] or late.tokens == want[1][: want[1].index(poison) + 1]
    assert early.tokens == []


# --- paths ---


def test_the_demo_by_its_name():
    eagle = EAGLEInference(None, "demo", EAGLEConfig(dtype=torch.float32), device="cpu")
    assert eagle.generate("import ", 4)[1].completions[0].text and eagle.pair.view.device.type == "cpu"


def test_a_dtype_that_a_loaded_target_does_not_have_is_refused():
    model = tiny_model()
    for target in (model, model.base_model):
        with pytest.raises(ValueError, match="dtype=torch.bfloat16, but target_model is in torch.float32"):
            EAGLEInference(model.ea_layer, target, EAGLEConfig(dtype=torch.bfloat16))
        assert EAGLEInference(model.ea_layer, target, EAGLEConfig(dtype=torch.float32)).pair.view.dtype == torch.float32
    config = EAGLEConfig(speculative=SpeculativeConfig("ngram"), dtype=torch.bfloat16)
    assert EAGLEInference(None, "demo", config, "cpu").pair.view.dtype == torch.bfloat16


def test_paths_that_hold_nothing_are_refused_by_the_names_they_have_here(tmp_path):
    for (draft, target), message in {
        (None, str(tmp_path)): "draft: needed, because .* does not hold both a target and a head",
        (None, "./nothing"): "target: './nothing' does not exist",
        ("./nothing", "demo"): "draft_model: './nothing' does not exist",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            EAGLEInference(draft, target)


@pytest.mark.parametrize(("head", "target"), [("eagle3", "path"), ("eagle1", "demo")])
def test_a_head_and_its_target_by_their_paths(head, target):
    place, target = str(demo_directory(head)), "demo" if target == "demo" else str(demo_directory("target"))
    eagle = EAGLEInference(place, target, FIXED, "cpu")
    assert isinstance(eagle.pair.draft_model, Eagle3Head if head == "eagle3" else Eagle1Head)
    eagle.generate(demo_prompts(1), 24)
    assert eagle.statistics.tau > 2
    chain = EAGLEInference(None, target, SpeculativeConfig("eagle", model=place, num_speculative_tokens=3), "cpu")
    assert type(chain.pair.draft_model) is type(eagle.pair.draft_model)


@pytest.mark.parametrize("loaded", ["EaModel", "plain"])
def test_a_draft_by_its_path_has_the_dtype_of_a_loaded_target(loaded):
    """An EaModel's own head, EAGLE-3, does not draft then."""
    model = EaModel.from_pretrained("demo", dtype=torch.bfloat16)
    target = model if loaded == "EaModel" else model.base_model
    for draft, kind in ((demo_directory("eagle1"), Eagle1Head), ("demo-block", BlockDrafter)):
        eagle = EAGLEInference(draft, target, FIXED, tokenizer=model.tokenizer)
        assert isinstance(eagle.pair.draft_model, kind) and eagle.pair.draft.fc.weight.dtype == torch.bfloat16
        eagle.generate(demo_prompts(1), 24)
        assert eagle.statistics.tau > 1.5


@pytest.mark.parametrize("head", ["eagle3", "eagle1"])
def test_a_head_in_the_place_of_a_draft_model_is_called_one(head):
    place = str(demo_directory(head))
    options = SpeculativeConfig("draft_model", model=place)
    with pytest.raises(ValueError, match=f"draft '.*{head}' is a draft head.*: give it as the head"):
        EAGLEInference(None, "demo", options, "cpu")
    with pytest.raises(ValueError, match=f"target '.*{head}' is a draft head"):
        EAGLEInference(None, place, SpeculativeConfig("ngram"), "cpu")


def test_a_draft_model_that_is_not_there_is_called_the_draft(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Name or service not known")

    monkeypatch.setattr("eagle_triton.models.loading.snapshot_download", unreachable)
    monkeypatch.setattr("eagle_triton.models.loading.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("slow"))
    model = tiny_model()
    for place, message in {
        "some/model": "draft 'some/model' is not a directory here, .* cannot be fetched: Name or service not known",
        "./nothing": "draft: './nothing' does not exist",
        str(tmp_path): "draft: no config.json in",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            EAGLEInference(None, model.base_model, SpeculativeConfig("draft_model", model=place))


def test_weights_of_a_draft_model_that_cannot_be_read_are_the_drafts(tmp_path):
    for file in demo_directory("draft").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:100_000])
    model = EaModel.from_pretrained("demo")
    with pytest.raises(ValueError, match="draft '.*': the weights cannot be read"):
        EAGLEInference(None, model.base_model, SpeculativeConfig("draft_model", model=str(tmp_path)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in the interpreter")
def test_the_kernels_decode_as_the_references():
    model = EaModel.from_pretrained("demo").to("cuda")
    prompts = demo_prompts(6)
    options = dict(max_new_tokens=[40, 3, 20, 33, 1, 60], temperature=[0.0, 0.0, 0.0, 1.0, 0.0, 0.7], seed=1)
    outputs = [
        new_tokens(EAGLEInference(model, model, EAGLEConfig(slots=3), kernels=kernels).generate(prompts, **options)[1])
        for kernels in (False, True)
    ]
    assert outputs[0] == outputs[1]
