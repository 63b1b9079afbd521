"""Grammars: every output fits its grammar, and is distributed as the target is, restricted to what the grammar allows.

Greedy and sampled outputs are compared with decoding on the host, one token at a time, by the target's own forward.
"""

import copy
import json
import random
import sys
from collections import Counter

import pytest
import torch

pytest.importorskip("llguidance", reason="it reads grammars")

from eagle_triton import EAGLEConfig, EAGLEInference, Grammar
from eagle_triton.engine.grammar import DraftTree, GrammarError, compiler_for
from eagle_triton.engine.graph import LaunchGraph
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.grammar_masks import GrammarMasks
from eagle_triton.engine.scheduler.requests import Request, RunningRequest
from eagle_triton.engine.state import Tree
from eagle_triton.engine.step_cache import SplitStep
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.operands.ancestors import ancestor_matrix, pack_ancestors
from eagle_triton.serve.bodies import read_completion
from eagle_triton.serve.errors import RequestError
from tests.test_speculative_session import finish
from tests.tiny import tiny_model
from tests.tiny_tokenizers import END, VOCABULARY, byte_tokenizer

TOKENIZER = byte_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
}
JSON = Grammar.json_schema(SCHEMA)
GRAMMARS = [JSON, Grammar.regex("[a-f]{3,9}x"), None, Grammar.choice(["north", "north-east", "süd"])]
GRAMMARS += [Grammar.ebnf('root ::= "(" root ")" | "y"'), Grammar.json_schema({"type": "integer"}, whitespace=True)]
PROMPTS = [[5, 6, 7], [8], [1, 2, 3, 4], [9, 9], [3], [2, 2]]
PLAIN = EAGLEConfig(fallback=False, slots=2)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(vocab=VOCABULARY, layers=3)
    model.base_model.config.eos_token_id = model.base_model.generation_config.eos_token_id = END
    return model


def inference(model, **options):
    given = {"fallback": False, "slots": 3, **options}
    return EAGLEInference(None, model, EAGLEConfig(**given), tokenizer=TOKENIZER)


def matcher_of(grammar):
    return compiler_for(TOKENIZER, VOCABULARY, frozenset({END})).matcher(grammar)


def allowed_by(matcher):
    """Which tokens may come next, bool [V]."""
    words = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32)
    matcher.write_mask(words)
    token = torch.arange(VOCABULARY)
    return (words[token // 32] >> (token % 32)) & 1 == 1


def restricted(model, prompt, output, matcher):
    """The target's logits after an output that the matcher has read, -inf where the grammar forbids, [V]."""
    with torch.no_grad():
        logits = model.base_model(torch.tensor([[*prompt, *output]])).logits[0, -1]
    return logits if matcher is None else logits.masked_fill(~allowed_by(matcher), float("-inf"))


def greedy_on_the_host(model, prompt, grammar, most):
    output, logprobs, matcher = [], [], None if grammar is None else matcher_of(grammar)
    while len(output) < most and output[-1:] != [END]:
        logits = restricted(model, prompt, output, matcher)
        output.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[output[-1]]))
        if matcher is not None:
            matcher.read(output[-1:])
    return output, logprobs


def check_fits(grammar, completion):
    """Assert that an output has ended and fits its grammar."""
    assert completion.finished == "stop" and completion.tokens[-1] == END
    text = completion.text
    if grammar is JSON:
        value = json.loads(text)
        assert list(value) == ["name", "tags", "ok"] and len(value["name"]) <= 6 and isinstance(value["ok"], bool)
        assert set(value["tags"]) <= {"red", "green"} and len(value["tags"]) <= 2
    matcher = matcher_of(grammar)
    matcher.read(completion.tokens)


TREES = {
    "tree": {},
    "wide": {"topk": 3, "num_steps": 4, "num_draft_tokens": 12},
    "suffix": {"suffix_drafts": 4},
    "repeats": {"speculative": SpeculativeConfig(method="suffix", num_speculative_tokens=5)},
    "rejection": {"verify_strategy": "rejection"},
}


@pytest.fixture(scope="module")
def on_the_host(model):
    return [greedy_on_the_host(model, *given, 40) for given in zip(PROMPTS, GRAMMARS, strict=True)]


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_greedy_outputs_are_the_restricted_targets(model, on_the_host, options):
    _, results = inference(model, **options).generate(PROMPTS, 40, grammar=GRAMMARS, logprobs=True)
    assert sum(tokens[-1] == END for tokens, _ in on_the_host) > 1
    for (tokens, logprobs), completion in zip(on_the_host, results.completions, strict=True):
        assert completion.tokens == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=2e-4)


def test_seeded_outputs_are_the_same_for_every_drafter_tree_and_batch(model):
    """And they end: a random model leaves no grammar."""
    drawn = {"grammar": GRAMMARS, "temperature": 1.2, "top_p": 0.95, "seed": 3, "repetition_penalty": 1.1}
    expected, most = None, [15 if grammar is None else 70 for grammar in GRAMMARS]
    for name, slots in (("tree", 6), ("wide", 2), ("suffix", 4), ("repeats", 1)):
        _, results = inference(model, slots=slots, **TREES[name]).generate(PROMPTS, most, **drawn)
        tokens = [completion.tokens for completion in results.completions]
        expected = expected or tokens
        assert tokens == expected
    for grammar, completion in zip(GRAMMARS, results.completions, strict=True):
        if grammar is not None:
            check_fits(grammar, completion)


@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_sampled_outputs_follow_the_restricted_law(model, strategy):
    """All outputs of a small language, by the exact probability of each: chi-square over 640 samples."""
    grammar, prompt, count = Grammar.regex("[ab]{1,2}c?"), [7, 8], 640
    exact: dict[tuple[int, ...], float] = {}

    def enumerate_from(output, probability):
        matcher = matcher_of(grammar)
        matcher.read(output)
        law = (restricted(model, prompt, output, matcher) / 1.5).softmax(-1)
        for token in law.nonzero()[:, 0].tolist():
            following = (*output, token)
            if token == END:
                exact[following] = probability * float(law[token])
            else:
                enumerate_from(following, probability * float(law[token]))

    enumerate_from((), 1.0)
    assert len(exact) == 12 and sum(exact.values()) == pytest.approx(1)
    engine = inference(model, slots=64, verify_strategy=strategy, topk=3, num_steps=3, num_draft_tokens=10)
    _, results = engine.generate([prompt] * count, 4, grammar=grammar, temperature=1.5, seed=1)
    seen = Counter(tuple(completion.tokens) for completion in results.completions)
    assert set(seen) <= set(exact)
    common = [output for output, probability in exact.items() if count * probability >= 5]
    chi2 = sum((seen[output] - count * exact[output]) ** 2 / (count * exact[output]) for output in common)
    free = len(common) - 1
    assert free > 4 and chi2 < free + 4 * (2 * free) ** 0.5


def test_kernels_give_the_same_tokens(model, on_the_host, device):
    chain = EAGLEConfig(fallback=False, slots=2, topk=1, num_steps=1, num_draft_tokens=2)
    there = copy.deepcopy(model).to(device)
    engine = EAGLEInference(None, there, chain, tokenizer=TOKENIZER, kernels=True)
    outputs, _ = engine.generate(PROMPTS[1:3], 3, grammar=GRAMMARS[1:3])
    for (tokens, _), output, prompt in zip(on_the_host[1:3], outputs, PROMPTS[1:3], strict=True):
        assert output.tolist() == [*prompt, *tokens[:3]]
    assert engine.engine.ops.calls["mask_tokens"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graphs_of_a_step_give_the_tokens_of_its_launches():
    """In requests that come and go, so that steps with and without grammars take turns."""
    model = tiny_model(vocab=VOCABULARY, layers=3).to("cuda")
    model.base_model.generation_config.eos_token_id = model.base_model.config.eos_token_id = END
    found = []
    for cuda_graph in (False, True):
        engine = EAGLEInference(None, model, PLAIN, tokenizer=TOKENIZER, cuda_graph=cuda_graph)
        for temperature in (0.0, 1.0):
            drawn = {"grammar": GRAMMARS, "temperature": temperature, "seed": 3, "logprobs": True}
            _, results = engine.generate(PROMPTS, 40, **drawn)
            found.append([completion.tokens for completion in results.completions])
        steps = [step for step in engine.engine.steps._kept.values() if isinstance(step, SplitStep)]
        parts = [part for step in steps for part in step.parts]
        assert parts and all(isinstance(part, LaunchGraph) == cuda_graph for part in parts)
    assert found[:2] == found[2:]


def test_masks_of_a_tree_are_those_of_its_paths():
    """Nodes: a root, its children, and theirs; some are forbidden, one is empty, two are the same."""
    matcher, first = matcher_of(Grammar.regex("a(bc|bd|e)f")), TOKENIZER("a").input_ids
    a, b, c, e, x = TOKENIZER("abcex").input_ids
    matcher.read(first)
    tokens, parents = [a, b, x, e, c, -1, b, c], [-1, 0, 0, 0, 1, 1, 0, 6]
    masks = torch.full((8, -(-VOCABULARY // 32)), 77, dtype=torch.int32)
    matcher.write_masks(DraftTree(tokens, parents), masks)
    for node, path in {0: "a", 1: "ab", 3: "ae", 4: "abc", 6: "ab", 7: "abc"}.items():
        fresh, expected = matcher_of(Grammar.regex("a(bc|bd|e)f")), torch.zeros_like(masks[0])
        fresh.read(TOKENIZER(path).input_ids)
        fresh.write_mask(expected)
        assert torch.equal(masks[node], expected)
    assert (masks[[2, 5]] == 77).all() and matcher.consumed == 1
    matcher.read(TOKENIZER("ef").input_ids)
    matcher.rewind(2)
    assert allowed_by(matcher).nonzero().tolist() == [TOKENIZER("f").input_ids]


@pytest.mark.parametrize(("name", "depth"), [("tree", 3), ("wide", 4), ("suffix", 4), ("repeats", 5)])
def test_forced_tokens_are_drafted_with_any_drafter(model, name, depth):
    """All of 13 tokens are forced, the end too: the first comes after the prompt, the others by full depths."""
    _, results = inference(model, **TREES[name]).generate([[4, 5]], 20, grammar=Grammar.choice(["twelve bytes"]))
    (completion,) = results.completions
    assert completion.text == "twelve bytes" and completion.tokens[-1] == END
    assert completion.statistics.steps == -(-12 // (depth + 1))


def test_trees_are_waited_for_only_after_a_prompt(model, monkeypatch):
    """Then the root is not known before its tree. Later forced tokens are drafted before the trees are read: "cdef"
    after "[ab]", which are all of a tree, and "gh", after which drafts may follow."""
    waits, draft_forced, send = [], GrammarMasks.draft_forced, GrammarMasks.send_trees
    monkeypatch.setattr(GrammarMasks, "send_trees", lambda masks, *rest: waits.append("trees") or send(masks, *rest))
    monkeypatch.setattr(
        GrammarMasks, "draft_forced", lambda masks, *rest: waits.append("forced") or draft_forced(masks, *rest)
    )
    engine, grammar = inference(model, slots=1, **TREES["wide"]), Grammar.regex("[ab]{12}cdefgh")
    _, results = engine.generate([[4, 5], [6]], 30, grammar=grammar)
    for completion in results.completions:
        assert completion.text.endswith("cdefgh") and completion.statistics.steps > 8
    sent = Counter(step.count("trees") for step in " ".join(waits).split("forced")[1:])
    assert sent[2] == 2 and sent.keys() == {1, 2}, "the first trees are sent twice: as drafted and as verified"


SHAPES = [TreeSpec.dynamic(12, 3, 3), TreeSpec.dynamic(3, 3, 4), TreeSpec.chain(4), TreeSpec.repeats(5)]


@pytest.mark.parametrize("spec", [*SHAPES, TreeSpec.dynamic(70, 4, 8).with_grafts(3)], ids=repr)
def test_forced_tokens_are_drafted_where_a_tree_lacks_them(spec):
    """Random trees over a few tokens, some of which have the path of the forced tokens."""
    generator, batch, nodes = random.Random(spec.nodes), 40, spec.nodes
    trees, forced = [], []
    for _ in range(batch):
        parents = [-1, *(node - 1 if spec.is_chain else generator.randrange(node) for node in range(1, nodes))]
        depths = [0]
        for node in range(1, nodes):
            while depths[parents[node]] == spec.depth:
                parents[node] = parents[parents[node]]
            depths.append(depths[parents[node]] + 1)
        tokens = [7, *(generator.choice([-1, 0, 1] if spec.has_empty_places else [0, 1]) for _ in range(1, nodes))]
        trees.append((tokens, parents, depths))
        most = min(spec.depth, spec.drafts)
        count = generator.randrange(most + 1)
        forced.append([generator.choice([0, 1]) for _ in range(count)] + [-1] * (most - count))

    def ancestors(parents):
        rows = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            rows[node] |= rows[parents[node]]
        return pack_ancestors(rows)

    def paths(tokens, parents):
        found = [()]
        for node in range(1, nodes):
            above = found[parents[node]]
            found.append(None if above is None or tokens[node] < 0 else (*above, tokens[node]))
        return found

    tree = Tree(
        torch.tensor([tokens for tokens, _, _ in trees]),
        *(torch.tensor([tree[i] for tree in trees], dtype=torch.int32) for i in (1, 2)),
        torch.stack([ancestors(parents) for _, parents, _ in trees]),
    )
    tree.draft_forced(spec, torch.tensor(forced))
    changed = 0
    for (tokens, parents, depths), row, *new, words in zip(trees, forced, *tree, strict=True):
        count, new = sum(token >= 0 for token in row), [part.tolist() for part in new]
        path = tuple(row[:count])
        if path in paths(tokens, parents):
            assert new == [tokens, parents, depths]
        else:
            changed += 1
            assert new[0][: count + 1] == [7, *path] and new[1][: count + 1] == [*range(-1, count)]
            left = range(count + 1, nodes)
            assert [new[1][node] for node in left] == [node - 1 if spec.is_chain else 0 for node in left]
            if spec.has_empty_places:
                assert all(new[0][node] == -1 for node in left)
            elif not spec.is_chain:
                assert all(new[0][node] not in (-1, 0, path[0]) for node in left)
        assert new[2] == [sum(row) - 1 for row in ancestor_matrix(words[None], nodes)[0].tolist()]
        assert torch.equal(words, ancestors(new[1]))
    assert 5 < changed < batch


# --- with other options ---


def test_requests_leave_and_enter_while_others_go_on(model, on_the_host):
    """Cancelled, stopped by a string, waiting in line, and moved to a lower slot."""
    with inference(model, slots=4).session(rows=64) as session:
        numbers = [session.submit(prompt, 40, grammar=grammar) for prompt, grammar in
                   zip(PROMPTS, GRAMMARS, strict=True)]  # fmt: skip
        text = TOKENIZER.decode(on_the_host[1][0][:-1])
        stopped = session.submit(PROMPTS[1], 40, grammar=GRAMMARS[1], stop_strings=text[2:4])
        session.step()
        session.cancel(numbers[2])
        session.cancel(numbers[1])
        done = finish(session)
    for index in (0, 3, 4, 5):
        assert done[numbers[index]].tokens == on_the_host[index][0]
    assert done[stopped].text == text[:2] and done[stopped].finished == "stop"


def test_requests_that_pause_for_pages_go_on_in_their_grammar(model):
    """Two sequences of three pages do not fit into five."""
    grammar, new = Grammar.regex("[a-z]{30}"), 31
    drawn = {"grammar": grammar, "temperature": 1.0, "seed": 4}
    prompts = [[*range(first, first + 50)] * 2 for first in (1, 2)]
    roomy = inference(model, slots=2).generate(prompts, new, **drawn)[1]
    engine = inference(model, slots=2, cache_tokens=5 * 64)
    results = engine.generate(prompts, new, **drawn)[1]
    assert engine.engine.ops.calls["requests_paused"] == sum(one.pauses for one in results.completions) > 0
    for completion, expected in zip(results.completions, roomy.completions, strict=True):
        assert completion.tokens == expected.tokens and completion.finished == "stop"


def test_a_pause_forgets_what_is_dropped():
    """A step that was not read yet has committed two tokens more."""
    prompt, new = torch.tensor([1, 2, 3]), TOKENIZER("abcd").input_ids
    entry = RunningRequest(Request(prompt, 9, SamplingParams(grammar=Grammar.regex("abcd"))), 0)
    entry.matcher = matcher_of(entry.request.sampling.grammar)
    entry.matcher.read([*new, END])
    entry.pause(torch.tensor([1, 2, 3, new[0]]), entry.prefix, new[1])
    assert entry.matcher.consumed == 2 and entry.matcher.forced() == new[2:]


def test_an_output_that_cannot_go_on_ends_with_the_reason(model):
    """A bias forbids the only token that the grammar allows. Others go on."""
    c = TOKENIZER("c").input_ids[0]
    biases, grammar = [{c: float("-inf")}, None], Grammar.regex("[ab]{4}c")
    _, results = inference(model).generate([[1], [1]], 9, grammar=grammar, logit_bias=biases)
    failed, fine = results.completions
    assert failed.finished == "error" and "grammar: it does not allow the token" in failed.error
    assert len(failed.tokens) <= 5 and fine.finished == "stop" and len(fine.tokens) == 6


@pytest.mark.parametrize(("most", "stops"), [(1, [END]), (3, [END, 0])], ids=["length", "stop"])
def test_a_last_token_that_a_grammar_forbids_is_an_error(model, most, stops):
    """Biases forbid all tokens that the grammar allows, so the first is token 0, and no step comes after it."""
    forbidden = dict.fromkeys(range(1, VOCABULARY), float("-inf"))
    given = {"grammar": Grammar.regex("[b-z]{3}"), "logit_bias": forbidden, "stop_token_ids": stops}
    with pytest.raises(RuntimeError, match="grammar: it does not allow the token 0"):
        inference(model).generate([[1]], most, **given)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.json_schema({"type": "nope"}), "Invalid type"),
        (Grammar.json_schema({"not": {}}), "Unimplemented keys"),
        (Grammar.ebnf("start: missing"), "unknown name"),
    ],
)
def test_grammars_that_cannot_be_compiled(grammar, message):
    with pytest.raises(GrammarError, match=f"^grammar: .*{message}"):
        matcher_of(grammar)


def test_refusals(model, monkeypatch):
    engine, given = inference(model), {"grammar": JSON}
    for options, message in (
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"stop_token_ids": ()}, "name one in stop_token_ids"),
        ({"stop_token_ids": 4}, "name one in stop_token_ids"),
        ({"grammar": SCHEMA}, "Grammar.json_schema"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^grammar.*{message}"):
            engine.generate([[1]], 4, **given | options)
    for options in ({"verify_strategy": "topp"}, {"accept_policy": "accept_all"}):
        with pytest.raises(ValueError, match="tokens that a grammar forbids"):
            inference(model, **options).generate([[1]], 4, **given)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        EAGLEInference(None, model, PLAIN).generate([[1]], 4, **given)
    endless = tiny_model(vocab=VOCABULARY)
    endless.base_model.config.eos_token_id = endless.base_model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="neither the target nor its tokenizer has one"):
        EAGLEInference(None, endless, PLAIN, tokenizer=lambda text: text).generate([[1]], 4, **given)
    with Batch(engine.engine, 1, TreeSpec.chain(2), 32) as batch, pytest.raises(ValueError, match="set its matcher"):
        batch.admit(Request(torch.tensor([1]), 4, SamplingParams(grammar=JSON)))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install llguidance"):
        compiler_for(TOKENIZER, VOCABULARY, frozenset({3}))


def test_a_judge_reads_no_grammar(model):
    def judge(*_):
        raise AssertionError

    entry = RunningRequest(Request(torch.tensor([1]), 4, SamplingParams(grammar=JSON)), 0)
    entry.matcher = matcher_of(JSON)
    engine = inference(model).engine
    with Batch(engine, 1, TreeSpec.chain(2), 32, judge=judge) as batch, pytest.raises(ValueError, match="a judge"):
        batch.admit(entry)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("xml", "a"), "syntax must be one of"),
        (lambda: Grammar("regex", None), "must be strings"),
        (lambda: Grammar.regex("a").within(1), "around must be a string or None, got 1"),
        (lambda: Grammar("regex", "a", whitespace=True), "whitespace is for JSON"),
        (lambda: Grammar.json_schema("{"), "the schema is not JSON"),
        (lambda: Grammar.json_schema([1]), "must be an object"),
        (lambda: Grammar.json_schema({"const": {1}}), "that JSON cannot"),
        (lambda: Grammar.json_schema(False), "allows no value"),
        (lambda: Grammar.json_schema('{"items":' * 9999 + "{}" + "}" * 9999), "the schema is not JSON"),
        (lambda: Grammar.choice([]), "at least one"),
        (lambda: Grammar.choice([1]), "of strings"),
        (lambda: Grammar.choice(None), "of strings"),
    ],
)
def test_grammars_that_are_none(make, message):
    with pytest.raises((ValueError, TypeError), match=f"^grammar: .*{message}"):
        make()


# --- bodies of the server ---


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": False}}, Grammar.json_schema({}, True)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar.ebnf("start: A")),
    ],
)
def test_bodies_that_ask_for_a_format(asked, grammar):
    body = read_completion({"prompt": "x", **asked})
    assert body.sampling.get("grammar") == grammar
    assert grammar is None or body.grammar_field == next(iter(asked))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": {"type": "xml"}}, "must have one of the types 'text', 'json_object', 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema is an unknown field"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema is missing"),
        ({"response_format": "json"}, "must be an object"),
        ({"structured_outputs": {}}, "must have one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got regex, choice"),
        ({"structured_outputs": {"choice": [3]}}, "structured_outputs.choice.0 must be a valid string"),
        ({"structured_outputs": {"json_object": False}}, "must be True"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is an unknown field"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "or json_object, got regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "must not both be given"),
    ],
)
def test_bodies_that_are_refused(asked, message):
    with pytest.raises(RequestError, match=message) as refused:
        read_completion({"prompt": "x", **asked})
    assert refused.value.status == 400 and refused.value.param.startswith(next(iter(asked)))


def test_preparing_makes_the_steps_with_a_grammar(model, monkeypatch):
    """So that the first request with one waits for no capture; where none is taken, none is made."""
    made = []

    def prepared(eagle, **options):
        made.clear()
        with eagle.session(rows=96, **options) as session:
            steps = session._batch.engine.steps
            step = steps.of
            monkeypatch.setattr(steps, "of", lambda state, mode: made.append((state.batch, mode)) or step(state, mode))
            session.prepare()
            assert session.idle and not session.tokens
        return {(size, mode.sampled) for size, mode in made if mode.masked}

    assert prepared(inference(model)) == {(size, sampled) for size in (1, 2, 3) for sampled in (False, True)}
    assert not any(mode.processed for _, mode in made)
    assert not prepared(EAGLEInference(None, model, PLAIN)), "without a tokenizer there are no grammars"
