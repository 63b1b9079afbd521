"""SpeculativeConfig: what it takes, settles and refuses, its JSON, and the metrics of a request's drafts."""

import dataclasses
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_triton import EAGLEConfig, EAGLEInference
from eagle_triton.inference import AcceptPolicy, MTPStrategy, SpecMethod, SpeculativeConfig, Statistics, VerifyStrategy
from eagle_triton.inference.speculative_config import INSTEAD, MAX_SLOTS, METHODS_FOR_OPTION, OF_TOPP
from tests.tiny import tiny_model

CHAINS, TREES = ("ngram", "mtp", "hybrid"), ("suffix", "eagle", "draft_model")
FIELDS = [field.name for field in dataclasses.fields(SpeculativeConfig)]
OTHER = {  # a valid value of each option that is not the default
    "num_speculative_tokens": 3,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "max_candidate_len": 7,
    "verify_window": 2,
    "max_ngram_size": 4,
    "min_ngram_size": 1,
    "match": "latest",
    "joined": True,
    "suffix_decoding_max_tree_depth": 32,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.5,
    "ban_tokens": (3,),
    "ngram_storage": "onelevel",
    "ngram_n": 4,
    "filler_top_k": 10,
    "filler_weight": 0.5,
    "reset_in_between": False,
    "model": "folder",
    "quantization": "fp8",
    "verify_strategy": "greedy",
    "accept_policy": "accept_all",
    "benchmark_mode": True,
}


def config(**options):
    """The configuration, with topp where its options ask for it."""
    if options.keys() & set(OF_TOPP):
        options.setdefault("verify_strategy", "topp")
    return SpeculativeConfig(**options)


# --- methods and numbers of drafts ---


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((method.value, method) for method in SpecMethod),
        ("ngram_match", SpecMethod.NGRAM),
        ("NGRAM_Match", SpecMethod.NGRAM),
        ("MTP", SpecMethod.MTP),
        ("eagle3", SpecMethod.EAGLE),
        (SpecMethod.EAGLE, SpecMethod.EAGLE),
    ],
)
def test_methods_by_name(name, method):
    assert SpecMethod.from_string(name) is method and SpeculativeConfig(method=name).method is method


@pytest.mark.parametrize("method", (*CHAINS, *TREES, "nasd"))
def test_drafts_lie_within_the_methods_limit(method):
    most = {"nasd": 15}.get(method, 5 if method in CHAINS else 63)
    for drafts in (1, most):
        assert SpeculativeConfig(method=method, num_speculative_tokens=drafts).num_speculative_tokens == drafts
    for drafts in (-1, 0, most + 1):
        with pytest.raises(ValueError, match=rf"num_speculative_tokens must lie in 1..{most} .* got {drafts}"):
            SpeculativeConfig(method=method, num_speculative_tokens=drafts)


@pytest.mark.parametrize(("drafts", "warnings"), [(0, 0), (1, 0), (4, 1)])
def test_naive_drafts_nothing(drafts, warnings, caplog):
    assert SpeculativeConfig(method="naive", num_speculative_tokens=drafts).num_speculative_tokens == 0
    assert len(caplog.records) == warnings
    with pytest.raises(ValueError, match="num_speculative_tokens must lie in 0..0 for method naive, got -1"):
        SpeculativeConfig(method="naive", num_speculative_tokens=-1)


@pytest.mark.parametrize("method", ["mtp", "hybrid"])
def test_more_steps_raise_the_drafts_with_a_warning(method, caplog):
    assert SpeculativeConfig(method=method, num_speculative_tokens=2, num_model_steps=3).num_speculative_tokens == 3
    assert "num_speculative_tokens=2 is raised to num_model_steps=3" in caplog.records[0].message
    for steps in (0, 6):
        with pytest.raises(ValueError, match=f"num_model_steps must lie in 1..5, got {steps}"):
            SpeculativeConfig(method=method, num_model_steps=steps)


def test_drafts_that_nobody_makes_are_said(caplog):
    SpeculativeConfig(method="mtp", num_speculative_tokens=3, num_model_steps=3)
    SpeculativeConfig(method="hybrid", num_speculative_tokens=5, num_model_steps=2)
    assert not caplog.records
    SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    SpeculativeConfig(method="hybrid", num_speculative_tokens=2, num_model_steps=2)
    told = [record.message for record in caplog.records]
    assert (
        len(told) == 2
        and "MTP drafts num_model_steps=1 tokens a step" in told[0]
        and "no room for n-grams after" in told[1]
    )


def test_hybrid_is_mtp_with_ngram():
    one = SpeculativeConfig(method="mtp", mtp_strategy="With_Ngram", num_speculative_tokens=5, num_model_steps=2)
    other = SpeculativeConfig(method="hybrid", num_speculative_tokens=5, num_model_steps=2)
    assert one == other and one.method is SpecMethod.HYBRID and one.mtp_strategy is MTPStrategy.WITH_NGRAM


def test_at_most_256_slots():
    options = SpeculativeConfig(method="ngram")
    for slots in (1, 256):
        options.check_slots(slots)
    for slots in (0, 257):
        with pytest.raises(ValueError, match=f"slots must lie in 1..256, got {slots}"):
            options.check_slots(slots)
    with pytest.raises(TypeError, match="slots must be an integer, got '3'"):
        options.check_slots("3")
    assert MAX_SLOTS == 256


# --- names ---


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (SpecMethod, "method"),
        (MTPStrategy, "mtp_strategy"),
        (VerifyStrategy, "verify_strategy"),
        (AcceptPolicy, "accept_policy"),
    ],
)
def test_names_in_any_case_and_what_is_none(kind, field):
    for member in kind:
        assert kind.from_string(member.value.upper()) is member and str(member) == f"{member}" == member.value
    with pytest.raises(ValueError, match=rf"{field} must be one of {', '.join(kind)}, got 'medusa'"):
        kind.from_string("medusa")
    for wrong in (None, 7, True, b"mtp", ["mtp"]):
        with pytest.raises(TypeError, match=f"{field} must be a string, got"):
            kind.from_string(wrong)


def test_verify_strategies_by_number():
    numbered = [SpeculativeConfig(method="ngram", verify_strategy=number).verify_strategy for number in range(3)]
    assert numbered == [VerifyStrategy.TOPP, VerifyStrategy.GREEDY, VerifyStrategy.TARGET_MATCH]
    for number in (-1, 3):
        with pytest.raises(ValueError, match=rf"verify_strategy must be 0 \(topp\).* got {number}"):
            SpeculativeConfig(method="ngram", verify_strategy=number)
    with pytest.raises(TypeError, match="verify_strategy must be a string, got True"):
        SpeculativeConfig(method="ngram", verify_strategy=True)


@pytest.mark.parametrize("strategy", VerifyStrategy)
@pytest.mark.parametrize("policy", AcceptPolicy)
def test_what_is_lossy_says_so(strategy, policy):
    lossy = strategy in ("topp", "greedy") or policy == "accept_all"
    assert SpeculativeConfig(method="ngram", verify_strategy=strategy, accept_policy=policy).lossless != lossy


def test_benchmark_mode_rejects_all():
    assert SpeculativeConfig(method="ngram", benchmark_mode=True).accept_policy is AcceptPolicy.REJECT_ALL
    with pytest.raises(ValueError, match="benchmark_mode=True .* contradicts accept_policy=accept_all"):
        SpeculativeConfig(method="ngram", benchmark_mode=True, accept_policy="accept_all")


# --- what is refused ---


def test_every_option_is_read_or_not_offered():
    assert {"method", *METHODS_FOR_OPTION, *INSTEAD} == set(FIELDS) and OTHER.keys() == METHODS_FOR_OPTION.keys()


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("method", [None, *SpecMethod])
def test_options_are_for_the_methods_that_read_them(method, name):
    if method in METHODS_FOR_OPTION[name]:
        option = getattr(config(method=method, **{name: OTHER[name]}), name)
        assert option == (0 if method == "naive" and name == "num_speculative_tokens" else OTHER[name])
        return
    with pytest.raises(ValueError) as refused:
        config(method=method, **{name: OTHER[name]})
    assert str(refused.value).startswith(f"{name}={OTHER[name]} ")
    assert str(refused.value).endswith(f"method is {method}")


@pytest.mark.parametrize(("name", "value"), [("prefill_one_step_stop", True), ("enable_draft_logprob", True)])
def test_what_is_not_offered_says_what_is(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not offered; {INSTEAD[name][:20]}"):
        SpeculativeConfig(method="mtp", **{name: value})


@pytest.mark.parametrize("value", ["WINT4", "WINT8", "int8", ""])
@pytest.mark.parametrize("method", ["mtp", "ngram", None])
def test_other_quantization_is_refused_by_name(value, method):
    offered = 'quantization="fp8", eight bits or quantization="int4", four bits'
    with pytest.raises(ValueError, match=f"quantization={value!r} is not offered; .* by {offered}"):
        SpeculativeConfig(method=method, quantization=value)


@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_quantization_is_the_dtype_of_the_draft(dtype):
    config = EAGLEConfig(speculative=SpeculativeConfig(method="draft_model", quantization=dtype.upper()))
    assert config.drafting_dtype == dtype and EAGLEConfig(draft_dtype=dtype).drafting_dtype == dtype
    target, draft = (tiny_model(eagle3=False, layers=2, seed=seed).base_model for seed in (0, 1))
    eagle = EAGLEInference(draft, target, config)
    assert f"draft_dtype: {dtype}: 15 projections of the draft are copies" in eagle.report()
    assert EAGLEConfig(speculative=SpeculativeConfig(method="draft_model")).drafting_dtype is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="hybrid", min_ngram_size=4, max_ngram_size=3), "min_ngram_size .* max_ngram_size, got 4 and 3"),
        (dict(method="hybrid", max_ngram_size=1), "min_ngram_size must be at most max_ngram_size, got 2 and 1"),
        (dict(method="ngram", max_ngram_size=0), "max_ngram_size must be at least 1, got 0"),
        (dict(method="hybrid", min_ngram_size=0), "min_ngram_size must be at least 1, got 0"),
        (dict(method="ngram", match="newest"), "match must be one of leftmost, latest, got 'newest'"),
        (
            dict(method="suffix", num_speculative_tokens=8, suffix_decoding_max_tree_depth=8),
            "num_speculative_tokens must be below suffix_decoding_max_tree_depth, got 8 and 8",
        ),
        (dict(method="suffix", suffix_decoding_max_tree_depth=1), "max_tree_depth must be at least 2, got 1"),
        (dict(method="suffix", suffix_decoding_max_cached_requests=-2), "cached_requests must be at least -1, got -2"),
        (dict(method="suffix", suffix_decoding_max_spec_factor=0), "spec_factor must be a finite number above 0"),
        (dict(method="suffix", suffix_decoding_max_spec_factor=float("inf")), "spec_factor must be a finite number"),
        (dict(method="suffix", suffix_decoding_min_token_prob=1.1), r"min_token_prob must lie in 0..1, got 1.1"),
        (dict(method="suffix", suffix_decoding_min_token_prob=float("nan")), "min_token_prob must lie in 0..1"),
        (dict(method="nasd", ngram_n=1), r"ngram_n must lie in 2..5, got 1"),
        (dict(method="nasd", ngram_n=6), r"ngram_n must lie in 2..5, got 6"),
        (dict(method="nasd", ngram_storage="two"), "ngram_storage must be one of basic, onelevel, got 'two'"),
        (dict(method="nasd", filler_top_k=0), r"filler_top_k must lie in 1..64, got 0"),
        (dict(method="nasd", filler_top_k=65), r"filler_top_k must lie in 1..64, got 65"),
        (dict(method="nasd", filler_weight=-0.5), "filler_weight must be a finite number, not below 0, got -0.5"),
        (dict(method="nasd", filler_weight=float("nan")), "filler_weight must be a finite number, not below 0"),
        (dict(method="nasd", filler_top_k=1, filler_weight=0.5), "filler_weight=0.5 weighs fillers, and filler_t"),
        (dict(method="suffix", ban_tokens=[3, -1]), r"ban_tokens must not be negative, got \[-1\]"),
        (dict(method="mtp", model=""), "model must be a path or None"),
        (dict(method="ngram", verify_strategy="topp", max_candidate_len=0), "max_candidate_len must be at least 1"),
        (dict(method="ngram", verify_strategy="topp", verify_window=-1), "verify_window must be at least 0, got -1"),
        (
            dict(method="ngram", verify_strategy="topp", verify_window=1, max_candidate_len=1),
            "verify_window=1 .* needs max_candidate_len of at least 2, got 1",
        ),
        (dict(method="ngram", verify_window=2), "verify_window=2 .* topp, and verify_strategy is target_match"),
        (
            dict(method="ngram", max_candidate_len=2, verify_strategy="greedy"),
            "max_candidate_len=2 is read by verify_strategy topp, and verify_strategy is greedy",
        ),
    ],
    ids=str,
)
def test_bad_values_and_contradictions_name_the_options(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**options)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "verify_strategy"])
def test_wrong_types_are_named(name):
    wrong = [object(), {"a": 1}, 2 + 1j]
    wrong += [] if isinstance(getattr(SpeculativeConfig, name), float) else [1.5]
    for value in wrong:
        with pytest.raises(TypeError, match=name):
            SpeculativeConfig(method=value) if name == "method" else SpeculativeConfig(method="ngram", **{name: value})


# --- JSON ---


EXAMPLES = {
    '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}': (
        SpeculativeConfig(method="mtp", verify_strategy="greedy", model="${path_to_mtp_model}")
    ),
    '{"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1}': (
        SpeculativeConfig(method="mtp", accept_policy="accept_all")
    ),
    '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}': (
        SpeculativeConfig(method="mtp", model="${path_to_mtp_model}")
    ),
    '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, '
    '"model": "folder/mtp"}': (
        SpeculativeConfig(method="hybrid", num_model_steps=2, num_speculative_tokens=5, model="folder/mtp")
    ),
    '{"method": "ngram", "num_speculative_tokens": 1}': SpeculativeConfig(method="ngram"),
    '{"method": "naive", "num_speculative_tokens": 1}': SpeculativeConfig(method="naive"),
}
SUFFIX_EXAMPLE = (
    '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, '
    '"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, '
    '"suffix_decoding_min_token_prob": 0.1}'
)


@pytest.mark.parametrize("text", EXAMPLES)
def test_documented_strings_parse(text, caplog):
    assert SpeculativeConfig.from_json(text) == EXAMPLES[text] == SpeculativeConfig.from_json(json.loads(text))
    assert not caplog.records


def test_the_documented_suffix_string_names_another_method(caplog):
    found = SpeculativeConfig.from_json(SUFFIX_EXAMPLE)
    assert found == SpeculativeConfig(
        method="suffix", num_speculative_tokens=4, suffix_decoding_max_cached_requests=10000
    )
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and 'taken as method "suffix"' in record.message
    with pytest.raises(ValueError, match="mtp_strategy=with_ngram is read by method mtp, hybrid, and method is suffix"):
        SpeculativeConfig.from_json({**json.loads(SUFFIX_EXAMPLE), "mtp_strategy": "with_ngram"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, line 1 column 1: Expecting value"),
        ("method=mtp", "not JSON, line 1 column 1"),
        ("{'method': 'mtp'}", "not JSON, line 1 column 2"),
        ('{"method": "mtp",\n "model": }', "not JSON, line 2 column 11"),
        ('{"method": "mtp"} extra', "not JSON, line 1 column 19: Extra data"),
        ('["mtp"]', r"must be a JSON object, got \[\"mtp\"\] in line 1 column 1"),
        ("\n  5", "must be a JSON object, got 5 in line 2 column 3"),
        ("null", "must be a JSON object, got null in line 1 column 1"),
        ("[" * 100_000, "nested too deep"),
        ('{"method": "mtp", "method": "ngram"}', "method is given twice"),
        ('{"num_spec_tokens": 3}', "unknown key 'num_spec_tokens'; valid keys are num_speculative_tokens, "),
        ('{"Method": "mtp"}', "unknown key 'Method'; valid keys are method, "),
        ('{"xyz": 3}', f"unknown key 'xyz'; valid keys are {', '.join(FIELDS)}$"),
        ('{"method": "medusa"}', "method must be one of naive, ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 6}', "num_speculative_tokens must lie in 1..5"),
    ],
    ids=lambda value: value[:40],
)
def test_text_that_is_no_configuration(text, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_json(text)


@pytest.mark.parametrize("wrong", [None, 5, b"{}", [("method", "mtp")]], ids=repr)
def test_what_is_neither_text_nor_mapping(wrong):
    with pytest.raises(TypeError, match="speculative config: JSON text or a mapping expected, got"):
        SpeculativeConfig.from_json(wrong)
    with pytest.raises(ValueError, match="unknown key 3"):
        SpeculativeConfig.from_json({3: 4})


TEXT = st.text(max_size=20)
VALUES = {
    "num_model_steps": st.integers(1, 5),
    "mtp_strategy": st.sampled_from(MTPStrategy),
    "max_candidate_len": st.integers(2, 99),
    "verify_window": st.integers(0, 9),
    "max_ngram_size": st.integers(5, 9),
    "min_ngram_size": st.integers(1, 5),
    "match": st.sampled_from(["leftmost", "latest"]),
    "joined": st.booleans(),
    "suffix_decoding_max_tree_depth": st.integers(64, 99),
    "suffix_decoding_max_cached_requests": st.integers(-1, 10**6),
    "suffix_decoding_max_spec_factor": st.floats(0.0, 1e300, exclude_min=True),
    "suffix_decoding_min_token_prob": st.floats(0, 1),
    "ban_tokens": st.sets(st.integers(0, 2**31), max_size=3),
    "ngram_storage": st.sampled_from(["basic", "onelevel"]),
    "ngram_n": st.integers(2, 5),
    "filler_top_k": st.integers(2, 64),
    "filler_weight": st.floats(0, 1e9),
    "reset_in_between": st.booleans(),
    "model": st.none() | TEXT.filter(bool),
    "verify_strategy": st.sampled_from(VerifyStrategy) | st.integers(0, 2),
    "accept_policy": st.sampled_from([AcceptPolicy.NORMAL, AcceptPolicy.REJECT_ALL]),
    "benchmark_mode": st.booleans(),
}


def options_of(method):
    """A method and the options that it reads."""
    its = {name: values for name, values in VALUES.items() if method in METHODS_FOR_OPTION[name]}
    drafts = st.integers(min(method.most_drafts, 1), method.most_drafts)
    return st.fixed_dictionaries({"method": st.just(method), "num_speculative_tokens": drafts}, optional=its)


@given(st.one_of(*map(options_of, SpecMethod)))
@settings(deadline=None)
def test_json_and_back(options):
    if options.get("verify_strategy") not in (0, "topp"):
        options = {name: value for name, value in options.items() if name not in OF_TOPP}
    if options.get("benchmark_mode") or options.get("accept_policy", AcceptPolicy.NORMAL) is not AcceptPolicy.NORMAL:
        options.pop("verify_window", None)  # nothing is judged
    made = SpeculativeConfig(**options)
    text = made.to_json()
    assert SpeculativeConfig.from_json(text) == made == SpeculativeConfig.from_json(json.loads(text))
    assert hash(SpeculativeConfig.from_json(text)) == hash(made)


@given(st.dictionaries(st.sampled_from(FIELDS) | TEXT, st.none() | st.booleans() | st.integers() | TEXT))
@settings(deadline=None)
def test_any_object_is_a_configuration_or_refused(options):
    try:
        found = SpeculativeConfig.from_json(json.dumps(options))
    except (ValueError, TypeError) as error:
        assert str(error)
    else:
        assert SpeculativeConfig.from_json(found.to_json()) == found


def test_the_default_drafts_nothing():
    assert SpeculativeConfig().to_json() == '{"method": null}' and SpeculativeConfig.from_json("{}").method is None


# --- metrics ---


def test_metrics_of_hand_worked_steps():
    stats = Statistics()
    for accepted, depth in ((3, 3), (1, 3), (0, 3), (2, 2), (0, 0)):
        stats.add_step(accepted, depth, depth, accepted + 1)
    metrics = stats.request_metrics(4)
    assert (metrics.accepted_tokens, metrics.rejected_tokens) == (6, 5)
    assert metrics.accept_ratio == 6 / 11 and metrics.avg_accept_len == 11 / 5
    assert metrics.accepted_tokens_per_head == [3, 2, 1, 0]
    assert metrics.accept_ratio_per_head == [3 / 4, 2 / 3, 1 / 1, 0.0]
    with pytest.raises(ValueError, match="num_speculative_tokens must be at least 3, .* got 2"):
        stats.request_metrics(2)


def test_metrics_without_drafts():
    stats = Statistics()
    stats.add_step(0, 0, 0, 1)
    metrics = stats.request_metrics(0)
    assert metrics.accepted_tokens_per_head == metrics.accept_ratio_per_head == []
    assert (metrics.accept_ratio, metrics.avg_accept_len, metrics.rejected_tokens) == (0.0, 1.0, 0)


@given(st.lists(st.integers(0, 5).flatmap(lambda depth: st.tuples(st.integers(0, depth), st.just(depth)))))
@settings(deadline=None)
def test_heads_never_rise_and_add_up(steps):
    stats = Statistics()
    for accepted, depth in steps:
        stats.add_step(accepted, depth, depth, accepted + 1)
    metrics = stats.request_metrics(5)
    heads = metrics.accepted_tokens_per_head
    assert len(heads) == len(metrics.accept_ratio_per_head) == 5 and sum(heads) == metrics.accepted_tokens
    assert heads == sorted(heads, reverse=True) and all(0 <= ratio <= 1 for ratio in metrics.accept_ratio_per_head)


@pytest.mark.parametrize(
    "more, name",
    [({"benchmark_mode": True}, "benchmark_mode=True"), ({"accept_policy": "accept_all"}, "accept_policy=accept_all")],
)
def test_a_window_needs_drafts_that_are_judged(more, name):
    with pytest.raises(ValueError, match=f"verify_window=2 judges drafts, which {name} does not"):
        SpeculativeConfig("ngram", verify_strategy="topp", verify_window=2, **more)
