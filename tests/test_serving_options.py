"""`SpeculativeConfig.to_vllm` and `.to_sglang`: every option is handed on or refused by name."""

from __future__ import annotations

import json

import pytest

from eagle_triton.demo import demo_directory
from eagle_triton.inference import SpecMethod, SpeculativeConfig
from eagle_triton.inference.speculative_config import INSTEAD, METHODS_FOR_OPTION, OF_TOPP
from tests.test_speculative_config import OTHER

CHAIN = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"


def options(**given) -> SpeculativeConfig:
    return SpeculativeConfig(**given)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (options(), None),
        (options(method="naive"), None),
        (
            options(method="ngram", num_speculative_tokens=4, max_ngram_size=3, joined=True),
            dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
        ),
        (
            options(method="suffix", num_speculative_tokens=8),
            dict(
                method="suffix",
                num_speculative_tokens=8,
                suffix_decoding_max_tree_depth=64,
                suffix_decoding_max_cached_requests=2**31 - 1,
                suffix_decoding_max_spec_factor=1.0,
                suffix_decoding_min_token_prob=0.1,
            ),
        ),
        (options(method="mtp", num_model_steps=3), dict(method="mtp", num_speculative_tokens=3)),
        (options(method="mtp", model="M"), dict(method="mtp", model="M", num_speculative_tokens=1)),
        (
            options(method="eagle", model="OUT", num_speculative_tokens=5, verify_strategy="rejection"),
            dict(method="eagle3", model="OUT", num_speculative_tokens=5),
        ),
        (
            options(method="draft_model", model="demo-draft", num_speculative_tokens=5),
            dict(method="draft_model", model=str(demo_directory("draft")), num_speculative_tokens=5),
        ),
    ],
    ids=str,
)
def test_to_vllm(config, wanted):
    assert config.to_vllm() == wanted
    assert json.loads(json.dumps(config.to_vllm())) == wanted


@pytest.mark.parametrize(
    ("config", "algorithm", "model", "chain"),
    [
        (options(method="eagle", model="OUT", num_speculative_tokens=5), "EAGLE3", "OUT", (5, 1, 6)),
        (options(method="draft_model", model="D", num_speculative_tokens=2), "STANDALONE", "D", (2, 1, 3)),
        (options(method="mtp", num_model_steps=3), "NEXTN", None, (3, 1, 4)),
        (options(method="mtp", model="M"), "NEXTN", "M", (1, 1, 2)),
    ],
    ids=str,
)
def test_to_sglang(config, algorithm, model, chain):
    found = config.to_sglang()
    assert found.pop("speculative_algorithm") == algorithm
    assert found.pop("speculative_draft_model_path", None) == model
    assert tuple(found.pop(name) for name in CHAIN) == chain and not found


def test_to_sglang_without_a_model():
    assert options().to_sglang() == options(method="naive").to_sglang() == {}
    assert options(method="ngram", num_speculative_tokens=4, max_ngram_size=3, match="latest").to_sglang() == dict(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=5,
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=1,
        speculative_ngram_match_type="BFS",
        speculative_ngram_max_trie_depth=7,
    )


def test_a_draft_in_eight_bits_is_handed_on():
    for method in ("eagle", "draft_model"):
        config = options(method=method, model="M", quantization="fp8")
        assert config.to_vllm()["quantization"] == "fp8"
        assert config.to_sglang()["speculative_draft_model_quantization"] == "fp8"
    for call in (
        options(method="mtp", quantization="fp8").to_vllm,
        options(method="mtp", quantization="fp8").to_sglang,
    ):
        with pytest.raises(ValueError, match="quantization=fp8 is not offered by"):
            call()


def test_a_draft_in_four_bits_is_not_handed_on():
    config = options(method="eagle", model="M", quantization="int4")
    for call in (config.to_vllm, config.to_sglang):
        with pytest.raises(ValueError, match="quantization=int4 is not offered by .*: it copies no draft"):
            call()


SAME = {  # what means nothing else there
    ("joined", "ngram"),  # always
    ("match", "ngram"),  # SGLang's is always the latest
    ("num_speculative_tokens", "mtp"),  # as many as num_model_steps are drafted
}


@pytest.mark.parametrize("call", ["to_vllm", "to_sglang"])
@pytest.mark.parametrize("method", [method for method in SpecMethod if method is not SpecMethod.NAIVE], ids=str)
def test_no_option_is_lost(method, call):
    """Another value of an option gives another result, or is refused by name."""
    model = dict(model="M") if method in METHODS_FOR_OPTION["model"] else {}
    for name, value in OTHER.items():
        if name in (*INSTEAD, *OF_TOPP, "model") or method not in METHODS_FOR_OPTION[name]:
            continue
        plain = SpeculativeConfig(method=method, **{**model, "num_speculative_tokens": 2})
        config = SpeculativeConfig(method=method, **{**model, "num_speculative_tokens": 2, name: value})
        try:
            changed = getattr(config, call)() != getattr(plain, call)()
        except ValueError as error:
            assert "is not offered by" in str(error)
        else:
            assert changed or (name, str(method)) in SAME, name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (options(method="nasd"), "method nasd is not offered by {}, which has ngram"),
        (options(method="hybrid", num_speculative_tokens=3), "method hybrid is not offered by {}"),
        (options(method="eagle"), "model must name the draft, the folder that export_head wrote"),
        (options(method="draft_model"), "model must name the draft, a causal language model"),
        (options(method="ngram", verify_strategy="topp"), "verify_strategy=topp is not offered by {}"),
        (options(method="ngram", verify_strategy="greedy"), "verify_strategy=greedy is not offered by {}"),
        (options(method="ngram", accept_policy="accept_all"), "accept_policy=accept_all is not offered by {}"),
        (options(method="ngram", benchmark_mode=True), "accept_policy=reject_all is not offered by {}"),
    ],
    ids=str,
)
def test_what_both_lack_is_refused_by_name(config, message):
    for engine, call in (("vLLM", config.to_vllm), ("SGLang", config.to_sglang)):
        with pytest.raises(ValueError, match=message.format(engine)):
            call()


def test_what_one_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="method suffix is not offered by SGLang"):
        options(method="suffix").to_sglang()
    with pytest.raises(ValueError, match="match=latest is not offered by vLLM: it takes the leftmost"):
        options(method="ngram", match="latest").to_vllm()
    with pytest.raises(ValueError, match=r"ban_tokens=\(3,\) is not offered by vLLM"):
        options(method="suffix", ban_tokens=[3]).to_vllm()
