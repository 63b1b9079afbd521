"""A `SpeculativeConfig` for vLLM and SGLang, by the code of vLLM 0.20.2 and SGLang 0.5.13.

Each given option is passed on or refused. Defaults may differ where these engines have no such option: vLLM searches
prompt and output as one text and takes the leftmost of equally long matches; SGLang keeps the n-grams of all requests
in one trie and takes the latest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_triton.demo import path_of
from eagle_triton.engine.drafts.quantised import INT4

if TYPE_CHECKING:
    from eagle_triton.inference.speculative_config import SpeculativeConfig

NO_LIMIT = 2**31 - 1  # cached requests: vLLM has no value for no limit
NOTHING = (None, "naive")  # methods that draft nothing
EVERY = ("num_speculative_tokens", "verify_strategy")
HANDED_ON: dict[str, dict[str, tuple[str, ...]]] = {  # by engine and method, the options in addition to EVERY
    "vLLM": {
        "ngram": ("max_ngram_size", "joined"),
        "suffix": (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "mtp": ("num_model_steps", "model"),
        **dict.fromkeys(("eagle", "dflash", "dspark", "draft_model"), ("model", "quantization")),
    },
    "SGLang": {
        "ngram": ("max_ngram_size", "joined", "match"),
        "mtp": ("num_model_steps", "model"),
        "dflash": ("model",),
        **dict.fromkeys(("eagle", "draft_model"), ("model", "quantization")),
    },
}
WHY_NOT = {
    "match": "it takes the leftmost",
    "ban_tokens": "it drafts every token",
    "accept_policy": "it judges every draft",
    "benchmark_mode": "it judges every draft",
}
WHOSE = {
    "eagle": "the folder that export_head wrote",
    "dflash": "a block drafter",
    "dspark": "a block drafter",
    "draft_model": "a causal language model",
}
ALGORITHMS = {  # SGLang's names of methods
    "ngram": "NGRAM",
    "mtp": "NEXTN",
    "eagle": "EAGLE3",
    "dflash": "DFLASH",
    "draft_model": "STANDALONE",
}
STRATEGIES = {  # those that are not passed on
    "greedy": "each request asks for it there, by temperature 0",
    "topp": "it accepts what the target would draw, and this is lossy",
}


def vllm_options(config: SpeculativeConfig) -> dict[str, Any] | None:
    """`SpeculativeConfig.to_vllm`."""
    method = _checked(config, "vLLM")
    if method is None:
        return None
    name = "eagle3" if method == "eagle" else method
    options = {"method": name, **_draft(config, "model", "quantization"), "num_speculative_tokens": _drafts(config)}
    if method == "ngram":
        options |= {"prompt_lookup_max": config.max_ngram_size, "prompt_lookup_min": 1}
    if method == "suffix":
        options |= {name: getattr(config, name) for name in HANDED_ON["vLLM"]["suffix"]}
        if config.suffix_decoding_max_cached_requests < 0:
            options["suffix_decoding_max_cached_requests"] = NO_LIMIT
    return options


def sglang_options(config: SpeculativeConfig) -> dict[str, Any]:
    """`SpeculativeConfig.to_sglang`."""
    method = _checked(config, "SGLang")
    if method is None:
        return {}
    drafts, by_steps = _drafts(config), method not in ("ngram", "dflash")
    options = {
        "speculative_algorithm": ALGORITHMS[method],
        **_draft(config, "speculative_draft_model_path", "speculative_draft_model_quantization"),
        **({"speculative_num_steps": drafts, "speculative_eagle_topk": 1} if by_steps else {}),
        "speculative_num_draft_tokens": drafts + 1,  # with the root
    }
    if method == "ngram":
        options |= dict.fromkeys(("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth"), 1)
        options |= {"speculative_ngram_match_type": "BFS"}
        options |= {"speculative_ngram_max_trie_depth": config.max_ngram_size + drafts}
    return options


def _drafts(config: SpeculativeConfig) -> int:
    return config.num_model_steps if config.method == "mtp" else config.num_speculative_tokens


def _draft(config: SpeculativeConfig, model: str, quantization: str) -> dict[str, Any]:
    """The draft's path and its quantization, by the engine's names for them. Raises ValueError if a path is needed."""
    if config.model is None and (what := WHOSE.get(str(config.method))) is not None:
        raise ValueError(f"model must name the draft, {what}, to be served; got None")
    options = {model: None if config.model is None else _place(config.model), quantization: config.quantization}
    return {name: value for name, value in options.items() if value is not None}


def _place(model: str) -> str:
    """A path for another program, which does not know this package's names of models."""
    return path_of(model, "eagle3")


def _checked(config: SpeculativeConfig, engine: str) -> str | None:
    """The method, None if it drafts nothing. Raises ValueError for what the engine does not offer, and names it."""
    method = None if config.method is None else str(config.method)
    methods = HANDED_ON[engine]
    if method not in NOTHING and method not in methods:
        raise ValueError(f"method {method} is not offered by {engine}, which has {', '.join(methods)} of those here")
    strategy = str(config.verify_strategy)
    if strategy in STRATEGIES:
        raise ValueError(f"verify_strategy={strategy} is not offered by {engine}: {STRATEGIES[strategy]}")
    for name in config.given():
        if name not in (*EVERY, *methods.get(str(method), ())):
            why = f": {WHY_NOT[name]}" if name in WHY_NOT else ""
            raise ValueError(f"{name}={getattr(config, name)} is not offered by {engine}{why}")
    if config.quantization == INT4:
        raise ValueError(f"quantization={INT4} is not offered by {engine}: it copies no draft in four bits")
    return None if method in NOTHING else method
