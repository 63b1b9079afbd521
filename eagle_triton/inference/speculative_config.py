"""How to draft and verify, with the option names of serving engines: one frozen dataclass, or a JSON string."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any, NoReturn, get_args

from typing_extensions import Self

from eagle_triton.engine.drafts.counted import MAX_FILLERS, MAX_N, NgramStorageKind
from eagle_triton.engine.drafts.quantised import BITS
from eagle_triton.engine.tree_spec import MAX_NODES
from eagle_triton.inference import serving_options
from eagle_triton.operands.suffix_match import Match
from eagle_triton.options import MAX_SLOTS
from eagle_triton.values import check_choice, check_number, check_range, check_switches, checked_integer

__all__ = ["MAX_SLOTS", "AcceptPolicy", "MTPStrategy", "SpecMethod", "SpeculativeConfig", "VerifyStrategy"]

log = logging.getLogger(__name__)

MAX_DRAFTS = {  # the largest num_speculative_tokens
    "naive": 0,
    "nasd": 15,
    **dict.fromkeys(("ngram", "mtp", "hybrid"), 5),
    **dict.fromkeys(("suffix", "eagle", "dflash", "dspark", "draft_model"), MAX_NODES - 1),
}
MAX_STEPS = 5
FIELDS = {  # a configuration's fields by the names of their enums
    "SpecMethod": "method",
    "MTPStrategy": "mtp_strategy",
    "VerifyStrategy": "verify_strategy",
    "AcceptPolicy": "accept_policy",
}
ALIASES = {"ngram_match": "ngram", "jetspec": "dflash", "eagle3": "eagle"}
THEIR_NAMES = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}  # vLLM's


class _Name(str, Enum):
    """A word of the configuration."""

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Self:
        """The member with a name, in any case; "ngram_match" is ngram, "jetspec" is dflash, "eagle3" is eagle.

        Raises ValueError with the valid names, TypeError unless `name` is a string.
        """
        field = FIELDS[cls.__name__]
        if not isinstance(name, str):
            raise TypeError(f"{field} must be a string, got {name!r}")
        word = str(name).lower()
        try:
            return cls(ALIASES.get(word, word))
        except ValueError:
            raise ValueError(f"{field} must be one of {', '.join(cls)}, got {name!r:.60}") from None


class SpecMethod(_Name):
    """Where drafts come from."""

    NAIVE = "naive"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    NASD = "nasd"
    MTP = "mtp"
    HYBRID = "hybrid"
    EAGLE = "eagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    DRAFT_MODEL = "draft_model"

    @property
    def most_drafts(self) -> int:
        """The largest num_speculative_tokens."""
        return MAX_DRAFTS[self]


class MTPStrategy(_Name):
    """What completes the drafts of MTP."""

    DEFAULT = "default"
    WITH_NGRAM = "with_ngram"


class VerifyStrategy(_Name):
    """Which drafts are accepted: those in the target's nucleus (TOPP), its argmax (GREEDY), its own sample
    (TARGET_MATCH), or those that rejection sampling keeps (REJECTION)."""

    TOPP = "topp"
    GREEDY = "greedy"
    TARGET_MATCH = "target_match"
    REJECTION = "rejection"

    @classmethod
    def of(cls, given: VerifyStrategy | str | int) -> VerifyStrategy:
        """A strategy by itself, its name or its number: 0 topp, 1 greedy, 2 target_match."""
        if isinstance(given, (str, bool)) or not isinstance(given, Integral):
            return cls.from_string(given)  # type: ignore[arg-type]
        if given not in range(3):
            raise ValueError(
                f"verify_strategy must be 0 (topp), 1 (greedy), 2 (target_match) or a name of {', '.join(cls)}, got "
                f"{given}"
            )
        return (cls.TOPP, cls.GREEDY, cls.TARGET_MATCH)[int(given)]

    @property
    def lossless(self) -> bool:
        """Whether sampled output follows the target's distribution."""
        return self not in (VerifyStrategy.TOPP, VerifyStrategy.GREEDY)


class AcceptPolicy(_Name):
    """Whether verification decides (NORMAL), or all drafts are accepted, or none."""

    NORMAL = "normal"
    ACCEPT_ALL = "accept_all"
    REJECT_ALL = "reject_all"


_ANY = tuple(SpecMethod)
_DRAFTING = tuple(method for method in SpecMethod if method is not SpecMethod.NAIVE)
_MTP = (SpecMethod.MTP, SpecMethod.HYBRID)
_WITH_MODEL = (*_MTP, SpecMethod.EAGLE, SpecMethod.DFLASH, SpecMethod.DSPARK, SpecMethod.DRAFT_MODEL)
_NGRAM, _SUFFIX, _NASD = (SpecMethod.NGRAM, SpecMethod.HYBRID), (SpecMethod.SUFFIX,), (SpecMethod.NASD,)
METHODS_FOR_OPTION: dict[str, tuple[SpecMethod, ...]] = {  # the methods that read each option
    "num_speculative_tokens": _ANY,
    "num_model_steps": _MTP,
    "mtp_strategy": _MTP,
    "max_candidate_len": _ANY,
    "verify_window": _DRAFTING,
    "max_ngram_size": _NGRAM,
    "min_ngram_size": (SpecMethod.HYBRID,),
    "match": _NGRAM,
    "joined": _NGRAM,
    **{f"suffix_decoding_max_{what}": _SUFFIX for what in ("tree_depth", "cached_requests", "spec_factor")},
    **dict.fromkeys(("suffix_decoding_min_token_prob", "ban_tokens"), _SUFFIX),
    **dict.fromkeys(("ngram_storage", "ngram_n", "filler_top_k", "filler_weight", "reset_in_between"), _NASD),
    "model": _WITH_MODEL,
    "quantization": _WITH_MODEL,
    "verify_strategy": _ANY,
    "accept_policy": _DRAFTING,
    "benchmark_mode": _DRAFTING,
}
RANGES: dict[str, tuple[int, int | None]] = {
    "max_candidate_len": (1, None),
    "verify_window": (0, None),
    "max_ngram_size": (1, None),
    "min_ngram_size": (1, None),
    "suffix_decoding_max_tree_depth": (2, None),
    "suffix_decoding_max_cached_requests": (-1, None),
    "suffix_decoding_min_token_prob": (0, 1),
    "num_model_steps": (1, MAX_STEPS),
    "ngram_n": (2, MAX_N),
    "filler_top_k": (1, MAX_FILLERS),
}
OF_TOPP = ("max_candidate_len", "verify_window")
INSTEAD = {  # known options that are not offered
    "prefill_one_step_stop": "prefill and decoding run in one process: to prefill alone, generate with "
    "max_new_tokens=1",
    "enable_draft_logprob": "log-probabilities are the target's: generate(..., logprobs=True)",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of a method of drafting. Names are read in any case and kept as members of their enums.

    method: None drafts nothing and takes no other option; "naive" drafts nothing, but runs the code of methods that
    draft; "ngram" ("ngram_match"): the tokens after an earlier occurrence of the last ones; "suffix": the tokens that
    most often followed the last ones, in this request and others; "nasd": the same, from n-grams that are counted while
    decoding, the target's guesses included; "mtp": a multi-token-prediction layer; "hybrid", or "mtp" with
    mtp_strategy="with_ngram": MTP, with n-grams after its drafts; "eagle": an EAGLE head; "dflash" ("jetspec") and
    "dspark": a block drafter; "draft_model": a causal language model. num_speculative_tokens: the most drafts per step,
    1..5 for ngram, mtp and hybrid, 1..15 for nasd, 1..63 for suffix, eagle, dflash, dspark and draft_model; naive makes
    it 0. num_model_steps: passes of MTP per step, 1..5; num_speculative_tokens is raised to at least this.

    max_ngram_size, min_ngram_size: longest and shortest match; ngram goes down to 1, hybrid to min_ngram_size. match:
    which of several matches counts, "leftmost" or "latest". joined: search prompt and output as one text.
    suffix_decoding_max_tree_depth: match and draft together; suffix_decoding_max_cached_requests: -1 no limit, 0 no
    other requests; suffix_decoding_max_spec_factor: drafts per token of the match; suffix_decoding_min_token_prob,
    ban_tokens: drafts end before tokens with a lower probability and before these tokens.

    ngram_n: tokens of the longest counted n-gram, 2..5; ngram_storage: "basic" counts n-grams of 2 to ngram_n tokens,
    "onelevel" only n-grams of ngram_n tokens. filler_top_k: also count this many of the target's largest logits after
    each context, filler_weight times each; 1: none. reset_in_between: each request starts with empty counts. A draft
    ends before an unknown context.

    model: path of the draft, None: the one given to the engine. quantization: "fp8" or "int4" drafts with copies of the
    draft in eight or four bits, as `EAGLEConfig(draft_dtype=...)`; None: no copies.
    verify_strategy: also 0 (topp), 1 (greedy), 2 (target_match). For topp, which is lossy: max_candidate_len, the most
    candidates; verify_window: a second-best draft is accepted if this many best ones follow, 0: never. accept_policy:
    "accept_all" and "reject_all" are for debugging. benchmark_mode: as "reject_all".

    Raises ValueError or TypeError with the option's name: for a value out of range, for an option that the method does
    not read, for two that contradict each other, and for what this package does not offer (other quantization such as
    WINT4 and WINT8, prefill_one_step_stop, enable_draft_logprob).
    """

    method: SpecMethod | str | None = None
    num_speculative_tokens: int = 1
    num_model_steps: int = 1
    mtp_strategy: MTPStrategy | str = "default"
    max_candidate_len: int = 5
    verify_window: int = 0
    max_ngram_size: int = 5
    min_ngram_size: int = 2
    match: str = "leftmost"
    joined: bool = False
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = -1
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    ban_tokens: Collection[int] = ()
    ngram_storage: str = "basic"
    ngram_n: int = 3
    filler_top_k: int = 3
    filler_weight: float = 1.0
    reset_in_between: bool = True
    model: str | None = None
    quantization: str | None = None
    verify_strategy: VerifyStrategy | str | int = "target_match"
    accept_policy: AcceptPolicy | str = "normal"
    benchmark_mode: bool = False
    prefill_one_step_stop: bool = False
    enable_draft_logprob: bool = False

    def __post_init__(self) -> None:
        self._read_names()
        self._check_types()
        self._refuse_what_is_not_offered()
        self._merge_mtp_strategy()
        self._refuse_what_is_not_read()
        self._check_ranges()
        self._settle_drafts()
        self._check_pairs()

    @classmethod
    def from_json(cls, given: str | Mapping[str, Any]) -> SpeculativeConfig:
        """Make one from a mapping, or from the text of a JSON object.

        Method "mtp" with options of suffix decoding, as in a published example, becomes "suffix", with a warning.
        Raises ValueError for text that is not a JSON object (the message has the place), for an unknown key (it lists
        the known ones), for a repeated key, and as the constructor does; TypeError for neither text nor mapping.
        """
        if isinstance(given, str):
            options = _parsed(given)
        elif isinstance(given, Mapping):
            options = dict(given)
        else:
            raise TypeError(f"speculative config: JSON text or a mapping expected, got {type(given).__name__}")
        _check_keys(options)
        method = options.get("method")
        of_suffix = [name for name in options if name.startswith("suffix_decoding_")]
        if of_suffix and isinstance(method, str) and method.lower() == "mtp":
            log.warning('method "mtp" does not read %s: taken as method "suffix"', ", ".join(of_suffix))
            options["method"] = SpecMethod.SUFFIX
        return cls(**options)

    def to_json(self) -> str:
        """The options that differ from the defaults, as JSON. `from_json` restores the configuration."""
        values = {name: getattr(self, name) for name in self.given()}
        return json.dumps({"method": self.method, **values})

    def to_vllm(self) -> dict[str, Any] | None:
        """For vLLM: `vllm.LLM(target, speculative_config=...)`, and as JSON after `--speculative-config`.

        None if nothing is drafted. vLLM must be able to read `model`: for method eagle an EAGLE-3 head (`export_head`
        writes it). For suffix vLLM needs arctic-inference. Raises ValueError for a method (nasd, hybrid), option or
        lossy strategy that vLLM does not offer, and names it.
        """
        return serving_options.vllm_options(self)

    def to_sglang(self) -> dict[str, Any]:
        """For SGLang: keyword arguments of `sglang.Engine`; with dashes for underscores, options of its server.

        Empty if nothing is drafted, otherwise for a chain. Raises as `to_vllm` does, and for method suffix.
        """
        return serving_options.sglang_options(self)

    @property
    def lossless(self) -> bool:
        """Whether sampled output follows the target's distribution."""
        return VerifyStrategy.of(self.verify_strategy).lossless and self.accept_policy != AcceptPolicy.ACCEPT_ALL

    def check_slots(self, slots: int) -> None:
        """Raise ValueError unless `slots` is in 1..MAX_SLOTS, TypeError unless it is an integer."""
        checked_integer("slots", slots, 1, MAX_SLOTS)

    # --- checks, in the order in which they run ---

    def _read_names(self) -> None:
        if self.method is not None:
            self._set("method", SpecMethod.from_string(self.method))
        self._set("mtp_strategy", MTPStrategy.from_string(self.mtp_strategy))
        self._set("verify_strategy", VerifyStrategy.of(self.verify_strategy))
        self._set("accept_policy", AcceptPolicy.from_string(self.accept_policy))
        for name in ("match", "ngram_storage"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a string, got {getattr(self, name)!r}")
            self._set(name, getattr(self, name).lower())

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_switches(**{field.name: value})
            elif isinstance(field.default, int):
                self._set(field.name, checked_integer(field.name, value))
            elif isinstance(field.default, float):
                check_number(field.name, value)
                self._set(field.name, float(value))
            elif field.default is None and not (value is None or isinstance(value, str)):
                raise TypeError(f"{field.name} must be a string or None, got {value!r}")
        if isinstance(self.ban_tokens, (str, bytes, Mapping)) or not isinstance(self.ban_tokens, Collection):
            raise TypeError(f"ban_tokens must be token ids, got {self.ban_tokens!r}")
        ids = {checked_integer("ban_tokens: a token", token) for token in self.ban_tokens}
        self._set("ban_tokens", tuple(sorted(ids)))

    def _refuse_what_is_not_offered(self) -> None:
        for name, instead in INSTEAD.items():
            value = getattr(self, name)
            if value not in (None, False):
                raise ValueError(f"{name}={value!r} is not offered; {instead}")
        if self.quantization is not None:
            if self.quantization.lower() not in BITS:
                offered = " or ".join(f'quantization="{name}", {bits} bits' for name, bits in BITS.items())
                raise ValueError(
                    f"quantization={self.quantization!r} is not offered; a draft runs in the dtype it was loaded in, "
                    f"or by {offered}"
                )
            self._set("quantization", self.quantization.lower())

    def _merge_mtp_strategy(self) -> None:
        """MTP with n-grams is hybrid, by either name."""
        if self.method is SpecMethod.HYBRID:
            self._set("mtp_strategy", MTPStrategy.WITH_NGRAM)
        elif self.method is SpecMethod.MTP and self.mtp_strategy is MTPStrategy.WITH_NGRAM:
            self._set("method", SpecMethod.HYBRID)

    def _refuse_what_is_not_read(self) -> None:
        for name in self.given():
            value = getattr(self, name)
            if self.method is None:
                raise ValueError(f"{name}={value} needs a method, one of {', '.join(SpecMethod)}; method is None")
            if self.method not in METHODS_FOR_OPTION[name]:
                readers = ", ".join(METHODS_FOR_OPTION[name])
                raise ValueError(f"{name}={value} is read by method {readers}, and method is {self.method}")
            if name in OF_TOPP and self.verify_strategy is not VerifyStrategy.TOPP:
                raise ValueError(
                    f"{name}={value} is read by verify_strategy topp, and verify_strategy is {self.verify_strategy}"
                )

    def _check_ranges(self) -> None:
        for name, (least, most) in RANGES.items():
            check_range(name, getattr(self, name), least, most)
        for name, kind in (("match", Match), ("ngram_storage", NgramStorageKind)):
            check_choice(name, getattr(self, name), get_args(kind))
        if not (math.isfinite(factor := self.suffix_decoding_max_spec_factor) and factor > 0):
            raise ValueError(f"suffix_decoding_max_spec_factor must be a finite number above 0, got {factor}")
        if not (math.isfinite(self.filler_weight) and self.filler_weight >= 0):
            raise ValueError(f"filler_weight must be a finite number, not below 0, got {self.filler_weight}")
        if negative := [token for token in self.ban_tokens if token < 0]:
            raise ValueError(f"ban_tokens must not be negative, got {negative}")
        if self.model == "":
            raise ValueError("model must be a path or None, got an empty text")

    def _settle_drafts(self) -> None:
        """Check num_speculative_tokens, and fit it to the method and num_model_steps."""
        drafts, steps = self.num_speculative_tokens, self.num_model_steps
        if self.method is SpecMethod.NAIVE and drafts >= 0:
            if drafts > 1:
                log.warning("num_speculative_tokens=%d becomes 0: method naive drafts nothing", drafts)
            drafts = self._set("num_speculative_tokens", 0)
        most = 1 if self.method is None else SpecMethod(self.method).most_drafts
        if not min(most, 1) <= drafts <= most:
            raise ValueError(
                f"num_speculative_tokens must lie in {min(most, 1)}..{most} for method {self.method}, got {drafts}"
            )
        if drafts < steps and self.method in METHODS_FOR_OPTION["num_model_steps"]:
            log.warning("num_speculative_tokens=%d is raised to num_model_steps=%d", drafts, steps)
            self._set("num_speculative_tokens", steps)
        if self.method is SpecMethod.MTP and drafts > steps:
            log.warning(
                "num_speculative_tokens=%d: MTP drafts num_model_steps=%d tokens a step; raise it, or let n-grams "
                'follow with mtp_strategy="with_ngram"',
                drafts,
                steps,
            )
        if self.method is SpecMethod.HYBRID and drafts <= steps:
            log.warning("num_speculative_tokens=%d leaves no room for n-grams after num_model_steps=%d", drafts, steps)

    def _check_pairs(self) -> None:
        if self.filler_top_k == 1 and self.filler_weight != 1:
            raise ValueError(f"filler_weight={self.filler_weight} weighs fillers, and filler_top_k=1 gives none")
        if self.method is SpecMethod.HYBRID and self.min_ngram_size > self.max_ngram_size:
            self._contradict("min_ngram_size", "max_ngram_size", "be at most")
        if self.verify_window and self.max_candidate_len < 2:
            raise ValueError(
                f"verify_window={self.verify_window} accepts second-best drafts and needs max_candidate_len of at "
                f"least 2, got {self.max_candidate_len}"
            )
        if self.method is SpecMethod.SUFFIX and self.num_speculative_tokens >= self.suffix_decoding_max_tree_depth:
            self._contradict("num_speculative_tokens", "suffix_decoding_max_tree_depth", "be below")
        if self.verify_window and (self.benchmark_mode or self.accept_policy is not AcceptPolicy.NORMAL):
            policy = "benchmark_mode=True" if self.benchmark_mode else f"accept_policy={self.accept_policy}"
            raise ValueError(f"verify_window={self.verify_window} judges drafts, which {policy} does not")
        if self.benchmark_mode and self.accept_policy is AcceptPolicy.ACCEPT_ALL:
            raise ValueError("benchmark_mode=True rejects all drafts, which contradicts accept_policy=accept_all")
        if self.benchmark_mode:
            self._set("accept_policy", AcceptPolicy.REJECT_ALL)

    def given(self) -> list[str]:
        """The names of options, without the method, that differ from their defaults."""
        hybrid = ("mtp_strategy",) if self.method is SpecMethod.HYBRID else ()
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in ("method", *hybrid) and getattr(self, field.name) != field.default
        ]

    def _contradict(self, name: str, other: str, relation: str) -> NoReturn:
        raise ValueError(f"{name} must {relation} {other}, got {getattr(self, name)} and {getattr(self, other)}")

    def _set(self, name: str, value: Any) -> Any:
        object.__setattr__(self, name, value)
        return value


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object in a text. Raises ValueError with the place if there is none."""
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"speculative config: not JSON, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise ValueError("speculative config: JSON that is nested too deep to be options") from None
    if not isinstance(found, dict):
        start = text[: len(text) - len(text.lstrip())]
        line, column = 1 + start.count("\n"), len(start) - start.rfind("\n")
        raise ValueError(
            f"speculative config: must be a JSON object, got {text.strip():.60} in line {line} column {column}"
        )
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"speculative config: {key} is given twice")
        found[key] = value
    return found


def _check_keys(options: Mapping[Any, Any]) -> None:
    """Raise ValueError for keys that are no options, and name the options, the nearest first."""
    valid = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    for key in options:
        if key not in valid:
            near = difflib.get_close_matches(THEIR_NAMES.get(key, key), valid) if isinstance(key, str) else []
            rest = [name for name in valid if name not in near]
            raise ValueError(f"speculative config: unknown key {key!r:.60}; valid keys are {', '.join([*near, *rest])}")
