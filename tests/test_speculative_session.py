"""Sessions: closed ones refuse, bad requests never reach the loop, and nothing that was made or submitted is lost."""

import itertools
import random
import tempfile
from pathlib import Path

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.inference.policy import TreePolicy
from eagle_triton.models.mtp import load_mtp
from eagle_triton.operands.adaptive_length import EGAGConfig
from eagle_triton.operands.verification import Verification
from tests.failing import failing
from tests.tiny import random_prompt, tiny_model
from tests.tiny_hybrids import QWEN, mtp_tensors, save_with_mtp, tiny_hybrid

CONFIG = EAGLEConfig(fallback=False, slots=2)


@pytest.fixture
def eagle():
    return EAGLEInference(None, tiny_model(eagle3=False, layers=2), CONFIG)


@pytest.fixture(scope="module")
def demo():
    return EAGLEInference(None, EaModel.from_pretrained("demo"), CONFIG)


def finish(session, pieces=()):
    """The completions of all requests, by index."""
    pieces = list(pieces)
    while not session.idle:
        pieces += session.step()
    return {piece.index: piece.completion for piece in pieces if piece.completion is not None}


# --- closing ---


def test_a_closed_session_refuses_everything_and_closes_again(eagle):
    session = eagle.session(rows=64)
    index = session.submit(random_prompt(9)[0], 20)
    session.step()
    session.close()  # without a `with`
    assert session.idle and not session.waiting
    calls = (lambda: session.submit([1], 2), session.step, session.advance, lambda: session.cancel(index))
    for call in (*calls, session.__enter__):
        with pytest.raises(RuntimeError, match="this session is closed"):
            call()
    with eagle.session(rows=64) as other:
        session.close()  # the other one keeps the engine
        with pytest.raises(RuntimeError, match="another generation"):
            eagle.generate([[1, 2]], 2)
        assert other.submit([1, 2, 3], 3) == 0 and len(finish(other)[0].tokens) == 3
    eagle.generate([[1, 2]], 2)


# --- trees that change ---


@pytest.mark.parametrize("strategy", ["target_match", "rejection", "topp"])
def test_a_seeded_request_keeps_its_tree_where_its_text_depends_on_it(strategy, monkeypatch):
    model = tiny_model(eagle3=False, layers=2, vocab=12, seed=2, total_token=8, depth=2, top_k=2)
    config = EAGLEConfig(num_draft_tokens="auto", topk=3, slots=2, temperature=1.0, verify_strategy=strategy)
    turns = itertools.count()

    def another(policy):
        return (*policy.trees, PLAIN)[next(turns) % (len(policy.trees) + 1)]

    monkeypatch.setattr("eagle_triton.inference.policy.TreePolicy.choose", another)
    eagle, prompt = EAGLEInference(None, model, config), random_prompt(5, 12)[0]
    plain = EAGLEInference(None, model, config)
    plain._policies[1] = TreePolicy([TreeSpec.dynamic(2, 0, 1)], eagle.policy(1).costs)
    monkeypatch.setattr(plain._policies[1], "choose", lambda: PLAIN)
    nodes = []
    stats = eagle.generate([prompt], 20, seed=3, on_step=lambda info: nodes.append(info.nodes))[1]
    assert nodes[0] == 0  # the first token
    assert (len(set(nodes[1:])) == 1) == (strategy != "target_match")
    if strategy == "target_match":
        assert stats.completions[0].tokens == plain.generate([prompt], 20, seed=3)[1].completions[0].tokens
    assert stats.lossless == stats.completions[0].statistics.lossless == (strategy != "topp")
    assert eagle.statistics.lossless == stats.lossless == stats.to_dict()["lossless"]
    assert f"verification: {strategy}; lossless: {stats.lossless}" in eagle.report().splitlines()


def test_verification_options_are_checked_by_the_configuration():
    assert EAGLEConfig(verify_strategy="topp", verify_window=2).verification == Verification("topp", verify_window=2)
    for make in (EAGLEConfig, CONFIG.changed):
        with pytest.raises(ValueError, match='max_candidate_len=3 needs verify_strategy="topp"'):
            make(max_candidate_len=3)


# --- what submit takes ---


def test_submit_takes_every_form_of_one_prompt(demo):
    ids = demo.tokenizer("import os\n").input_ids
    want = demo.generate("import os\n", 6)[1].completions[0]
    forms = ["import os\n", ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]), torch.tensor(ids).int()]
    with demo.session(rows=64) as session:
        for form in forms:
            session.submit(form, 6)
        got = finish(session)
    assert all(got[index].tokens == want.tokens and got[index].text == want.text for index in range(len(forms)))


def test_submit_takes_options_by_name_as_generate_does(eagle):
    prompt = random_prompt(9)[0]
    options = dict(temperature=1.3, top_p=0.9, top_k=9, seed=5, logit_bias={3: -1.0}, stop_token_ids=[1, 2])
    want = eagle.generate([prompt], 12, **options)[1].completions[0]
    stops = options.pop("stop_token_ids")
    with eagle.session(rows=64) as session:
        session.submit(prompt, 12, stop_token_ids=stops, **options)
        session.submit(prompt, 12, SamplingParams(**options), stop_token_ids=stops)
        got = finish(session)
    assert got[0].tokens == got[1].tokens == want.tokens and got[0].finished == want.finished
    sampled = EAGLEInference(None, eagle.pair.target_model, CONFIG.changed(temperature=1.3))
    with sampled.session(rows=64) as session:
        session.submit(prompt, 12, seed=5)
        got = finish(session)[0].tokens
    assert got == sampled.generate([prompt], 12, seed=5)[1].completions[0].tokens


BAD = [
    ("text", {}, ValueError, "need a tokenizer.*tokenizer="),
    ([1, 99], {}, ValueError, "out of range"),
    (torch.tensor([1.0]), {}, ValueError, "integer"),
    (torch.tensor([True]), {}, ValueError, "integer"),
    ([1], dict(max_new_tokens=-1), ValueError, "max_new_tokens"),
    ([1], dict(stop_strings="x"), ValueError, "tokenizer"),
    ([1], dict(sampling=0.7), TypeError, "sampling must be a SamplingParams"),
    ([1], dict(sampling=SamplingParams(), temperature=1.0), ValueError, "not both"),
    ([1], dict(min_new_tokens=101), ValueError, "min_new_tokens must lie in 0..100"),
    ([1], dict(min_new_tokens="5"), TypeError, "min_new_tokens must be an integer"),
    ([1], dict(logprobs=1), TypeError, "logprobs must be True or False"),
    ([1], dict(best_of=2), ValueError, "submit: unknown option best_of.*options are prompt, max_new_tokens"),
    ([1], dict(stop="x"), ValueError, "did you mean stop_strings or stop_token_ids"),
    ([1], dict(stop_ids=[1]), ValueError, "stop_token_ids"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "message"), BAD, ids=lambda value: f"{value}"[:30])
def test_bad_requests_are_refused_at_submit_and_the_loop_goes_on(eagle, prompt, options, error, message):
    with eagle.session(rows=64) as session:
        good = session.submit(random_prompt(5)[0], 3)
        with pytest.raises(error, match=message):
            session.submit(prompt, **options)
        assert list(finish(session)) == [good]


def test_a_prompt_that_is_too_long_says_so_in_its_completion(eagle):
    with eagle.session(rows=32) as session:
        for length, new in ((33, 5), (32, 5), (30, 5), (9, 5)):
            session.submit(random_prompt(length)[0], new)
        got = finish(session)
    assert [got[index].finished for index in range(4)] == ["error", "length", "length", "length"]
    assert "33 tokens does not fit into the 32 rows" in got[0].error
    assert [len(got[index].tokens) for index in range(4)] == [0, 0, 2, 5]


def test_log_probabilities_of_the_requests_that_ask_for_them(eagle):
    """They enter and leave in the middle of others, whose tokens stay as they are."""
    prompts, wanted = [random_prompt(length)[0] for length in (5, 8, 11, 6)], (False, True, False, True)
    alone = [
        eagle.generate([prompt], 6 + 4 * index, logprobs=True)[1].completions[0] for index, prompt in enumerate(prompts)
    ]
    with eagle.session(rows=64) as session:
        for index, prompt in enumerate(prompts):
            session.submit(prompt, 6 + 4 * index, logprobs=wanted[index])
        got = finish(session)
    for index, completion in enumerate(alone):
        assert got[index].tokens == completion.tokens
        assert (got[index].logprobs is not None) == wanted[index]
        if wanted[index]:
            torch.testing.assert_close(
                torch.tensor(got[index].logprobs), torch.tensor(completion.logprobs), atol=1e-4, rtol=1e-4
            )


def test_a_piece_is_accepted_drafts_and_the_targets_token(demo):
    with demo.session(rows=256) as session:
        session.submit("import os\nimport sys\n", 60)
        assert session.waiting == [0]
        pieces = session.step()
        assert session.waiting == []
        while not session.idle:
            pieces += session.step()
    first, *pieces = pieces
    assert (len(first.tokens), first.tree, first.accepted, first.proposed) == (1, None, 0, 0)
    assert any(piece.accepted for piece in pieces)
    assert all(len(piece.tokens) == piece.accepted + 1 and piece.tree.nodes == 8 for piece in pieces[:-1])


def test_cancel_knows_its_indices(eagle):
    with eagle.session(rows=32) as session:
        with pytest.raises(ValueError, match="index"):
            session.cancel(0)
        session.cancel(session.submit([1, 2], 3))
        assert session.idle


# --- nothing is lost ---


def test_completions_are_not_lost_when_the_step_behind_them_raises(eagle, monkeypatch):
    with eagle.session(rows=32) as session:
        session.submit(random_prompt(40)[0], 5)  # cannot fit
        session.submit(random_prompt(9)[0], 5)
        error = RuntimeError("a cable was pulled")
        monkeypatch.setattr(session._batch, "step", failing(session._batch.step, error, 1))
        with pytest.raises(RuntimeError, match="cable"):
            session.step()
        assert not session.idle
        (piece,) = session.step()
        assert piece.index == 0 and piece.completion.finished == "error"


def test_a_step_during_another_is_refused_and_the_first_goes_on(eagle, monkeypatch):
    prompt, refused = random_prompt(5)[0], []
    alone = eagle.generate(prompt, 6)[1].completions[0].tokens
    with eagle.session(rows=64) as session:
        session.submit(prompt, 6)
        decode = session._batch.step

        def step_twice():
            with pytest.raises(RuntimeError, match="this session is in a step; it belongs to one thread") as error:
                session.step()
            refused.append(error)
            return decode()

        monkeypatch.setattr(session._batch, "step", step_twice)
        assert finish(session)[0].tokens == alone and refused


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.cuda.OutOfMemoryError("out of memory")], ids=repr)
def test_a_request_is_in_line_until_it_has_entered(eagle, monkeypatch, error):
    """An interrupt, or memory that is short, is nobody's error: it is raised, and the line is as it was."""
    prompt = random_prompt(9)[0]
    want = eagle.generate([prompt], 5)[1].completions[0].tokens
    with eagle.session(rows=32) as session:
        session.submit(random_prompt(40)[0], 5)
        index = session.submit(prompt, 5)
        monkeypatch.setattr(session._batch, "enter_all", failing(session._batch.enter_all, error, 1))
        with pytest.raises(type(error)):
            session.step()
        assert not session.idle and session._waiting
        got = finish(session)
    assert got[0].finished == "error" and got[index].tokens == want


def test_memory_that_is_short_for_one_of_several_is_raised(eagle, monkeypatch):
    """Also where requests enter one by one, because one of them was refused."""
    with eagle.session(rows=32, slots=3) as session:
        first, second = session.submit([7], 5), session.submit([1, 2, 3], 5)
        enter = session._batch.enter_all

        def enter_or_fail(requests):
            if len(requests) > 1 or len(requests[0].prompt) == 1:
                raise ValueError("refused")
            raise torch.cuda.OutOfMemoryError("out of memory")

        monkeypatch.setattr(session._batch, "enter_all", enter_or_fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            session.step()
        (piece,) = session.step()
        assert piece.index == first and piece.completion.error == "refused"
        monkeypatch.setattr(session._batch, "enter_all", enter)
        assert [job.index for job in session._waiting] == [second]


def test_requests_of_the_other_filter_order_wait(eagle):
    prompt = random_prompt(9)[0]
    ways = [dict(top_p_first=False), dict(top_p_first=True), dict(top_p_first=False)]
    options = [SamplingParams(temperature=1.2, top_p=0.7, top_k=6, seed=index, **way) for index, way in enumerate(ways)]
    alone = []
    for sampling in options:
        with eagle.session(rows=64, slots=1) as session:
            session.submit(prompt, 8, sampling)
            alone.append(finish(session)[0].tokens)
    with eagle.session(rows=64, slots=4) as session:
        for sampling in options:
            session.submit(prompt, 8, sampling)
        session.submit(prompt, 8)
        assert {piece.index for piece in session.step()} == {0}
        got = finish(session)
    assert [got[index].tokens for index in range(3)] == alone
    assert all(completion.error is None for completion in got.values()) and len(got) == 4


# --- who runs is what a step costs ---


def drafts_of(kind: str) -> EAGLEInference:
    """Of every kind that keeps something for its slots."""
    config = EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6)
    if kind in ("mtp", "recurrent target"):
        model = tiny_hybrid("qwen3_next", vocab=24)
        draft = "suffix" if kind == "recurrent target" else mtp_of(model)
        return EAGLEInference(draft, model, EAGLEConfig() if draft == "suffix" else config)
    model = tiny_model(vocab=24, layers=3)
    if kind == "head and suffixes":
        return EAGLEInference(None, model, config.changed(suffix_drafts=3))
    if kind == "entropy":
        chain = EAGLEConfig(topk=1, num_steps=4, num_draft_tokens=5, egag=EGAGConfig())
        return EAGLEInference(None, model, chain)
    if kind == "counted":
        return EAGLEInference(None, model, SpeculativeConfig("nasd", num_speculative_tokens=3))
    return EAGLEInference(tiny_model(eagle3=False, vocab=24, layers=2, seed=7).base_model, model.base_model, config)


def test_preparing_makes_steps_of_all_sizes_and_is_not_counted(eagle):
    state = torch.random.get_rng_state()
    with eagle.session(slots=6, rows=64) as session:
        made = []
        session._batch.engine.steps.of = lambda state, mode, step=session._batch.engine.steps.of: (
            made.append((state.batch, mode.sampled, state.spec)) or step(state, mode)
        )
        session.policy.fallback = True
        trees = (PLAIN, *session.policy.trees)
        session.prepare(1)
        assert set(made) == set(itertools.product([1], [False, True], trees))
        session.prepare()
        assert set(made) == set(itertools.product([1, 2, 4, 6], [False, True], trees))
        assert session.idle and session.steps == session.tokens == 0 and not session.statistics.tokens
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not session.policy.costs._live and not session.policy._seen
        assert session.submit([1, 2, 3], 3) == 0
        with pytest.raises(RuntimeError, match="prepare: call it before the first request"):
            session.prepare()
        for most in (0, -1, "2"):
            with pytest.raises((ValueError, TypeError), match="^most must be"):
                session.prepare(most)
        assert len(finish(session)[0].tokens) == 3
    del eagle.engine.steps.of
    with eagle.session(slots=1, rows=1) as session:
        session.prepare()  # nothing: no token fits


def mtp_of(model):
    with tempfile.TemporaryDirectory() as folder:
        return load_mtp(model, save_with_mtp(model, Path(folder), mtp_tensors(model, QWEN)))


@pytest.fixture(scope="module")
def calls_of_a_target(request):
    """Calls, with the text of each by a target that has nothing else to do, and that drafts nothing."""
    source = random.Random(5)
    rules = [
        {},
        dict(temperature=0.9),
        dict(repetition_penalty=1.3),
        dict(temperature=1.2, logit_bias={3: 1.0}, top_k=9),
    ]
    calls = [
        dict(prompt=random_prompt(source.randint(1, 70), 24, index)[0], max_new_tokens=source.choice([1, 6, 10, 14]),
             seed=index, **source.choice(rules))
        for index in range(16)
    ]  # fmt: skip
    model = tiny_model(vocab=24, layers=3) if request.param == "attention" else tiny_hybrid("qwen3_next", vocab=24)
    eagle, texts = EAGLEInference(None, model, SpeculativeConfig()), []
    for call in calls:
        with eagle.session(slots=1, rows=160) as session:
            session.submit(**call)
            texts.append(finish(session)[0].tokens)
    return calls, texts, source.getstate()


@pytest.mark.parametrize(
    ("calls_of_a_target", "kind"),
    [
        *(("attention", kind) for kind in ("head and suffixes", "counted", "draft model", "entropy")),
        *(("recurrent", kind) for kind in ("mtp", "recurrent target")),
    ],
    indirect=["calls_of_a_target"],
)
def test_steps_are_over_who_runs_and_every_text_is_that_of_the_request_alone(calls_of_a_target, kind):
    """Requests that come, end and are cancelled in random order, in slots that move down."""
    calls, texts, state = calls_of_a_target
    eagle, source = drafts_of(kind), random.Random()
    source.setstate(state)
    sizes, cancelled, done = [], set(), {}
    with eagle.session(slots=13, rows=160) as session:
        waiting = list(calls)
        while waiting or not session.idle:
            for _ in range(source.choice([0, 0, 0, 0, 1, 7])):
                if waiting:
                    session.submit(**waiting.pop(0))
            running = [job.index for job in session._running.values()]
            if running and source.random() < 0.03:
                cancelled.add(index := source.choice(running))
                session.cancel(index)
            pieces = session.step()
            done |= {piece.index: piece.completion for piece in pieces if piece.completion is not None}
            if session._running and not (session._batch.reading or pieces == []):
                sizes.append((session._batch.state.batch, len(session._running)))
    assert {size for size, _ in sizes} >= {1, 2, 4}
    assert all(done[index].tokens == texts[index] for index in done)
    assert len(done) >= 12 and done.keys() | cancelled == set(range(16))
