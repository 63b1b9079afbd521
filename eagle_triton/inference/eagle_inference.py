"""EAGLEInference: speculative decoding with your own draft and target, on the same engine as other calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, overload

import torch
from torch import Tensor, nn
from tqdm import tqdm
from typing_extensions import Unpack

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.hybrid import HybridDraft
from eagle_triton.engine.memory.pages import MAX_ROWS
from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.engine.tree_spec import MIXTURE_DRAFTS, PLAIN, TreeSpec
from eagle_triton.families.reading.experts import STORED
from eagle_triton.inference import stages
from eagle_triton.inference.arguments import (
    TOKENIZER,
    ArgumentReader,
    FurtherSampling,
    ListedPrompts,
    Prompt,
    Prompts,
    Sampling,
    StopIds,
    StopStrings,
    StreamOptions,
    check_options,
)
from eagle_triton.inference.config import EAGLEConfig, checked_device
from eagle_triton.inference.costs import CostTable, StepCosts, pass_cost
from eagle_triton.inference.load import load_pair, tree_of
from eagle_triton.inference.policy import TreePolicy, tree_sizes
from eagle_triton.inference.session import Results, Session, StepInfo
from eagle_triton.inference.shared_session import SharedSession
from eagle_triton.inference.speculative_config import SpeculativeConfig
from eagle_triton.inference.statistics import Statistics
from eagle_triton.inference.timing import Stopwatch, measure_costs
from eagle_triton.models.checks import check_positions, check_prompt, check_token_ids
from eagle_triton.options import candidates_of
from eagle_triton.values import check_switches, checked_integer

log = logging.getLogger(__name__)

Result = TypeVar("Result")
WARM_UP = 8  # tokens to decode for each prompt before a benchmark is timed


class FurtherGenerateOptions(FurtherSampling, total=False):
    """Keyword-only arguments of `EAGLEInference.generate`."""

    attention_mask: Tensor | None
    stop_token_ids: StopIds
    stop_strings: StopStrings
    logprobs: bool
    seed: int | Sequence[int] | None
    min_new_tokens: int | Sequence[int]
    on_step: Callable[[StepInfo], None] | None
    progress: bool
    baseline: bool


class GenerateOptions(FurtherGenerateOptions, Sampling, total=False):
    """Arguments of `EAGLEInference.generate` after `max_new_tokens`."""


class LoadingOptions(TypedDict, total=False):
    """Keyword arguments of `EAGLEInference`."""

    tokenizer: Any | None
    kernels: bool | None
    cuda_graph: bool | None
    costs: Sequence[CostTable] | None
    tp_plan: str | None


class EAGLEInference:
    """Decodes with a target and a draft: several times as fast as the target alone, with the same output.

    Greedy output equals the target's own, token for token; so does sampled output with a seed and the default
    verify_strategy. Sampled output has the target's own distribution if `config.verification.lossless`. One call runs
    at a time. `statistics` adds up all calls until `reset_statistics`.
    """

    def __init__(
        self,
        draft_model: nn.Module | Draft | str | Path | None,
        target_model: nn.Module | str | Path,
        config: EAGLEConfig | SpeculativeConfig | None = None,
        device: str | torch.device | None = None,
        *,
        tokenizer: Any | None = None,
        kernels: bool | None = None,
        cuda_graph: bool | None = None,
        costs: Sequence[CostTable] | None = None,
        tp_plan: str | None = None,
    ) -> None:
        """draft_model: an EAGLE head, an EaModel for its head, a block drafter, a causal language model with the
        target's vocabulary, "mtp" or the result of `load_mtp`, "suffix" or "ngram" for drafts from earlier text, your
        own `Draft`, or the directory or hub id of a head, a block drafter or an assistant; None for the target's own
        head, or if the configuration drafts without a model. target_model: an EaModel, a Hugging Face causal language
        model, or the path of one. config: a `SpeculativeConfig` means an EAGLEConfig with it as `speculative`. device:
        None takes config.device. tokenizer: for prompts and output as text; None takes the target's. kernels,
        cuda_graph: as for `EagleTritonConfig`. costs: cost tables to use, None: the package's own. tp_plan: "auto"
        spreads a target given by path over the ranks that torchrun started.

        The models are not changed. Raises ValueError (or UnsupportedModelError, a kind of it) for models that are not
        supported, do not fit, or are on another device.
        """
        if isinstance(config, SpeculativeConfig):
            config = EAGLEConfig(speculative=config)
        if not isinstance(config, (EAGLEConfig, type(None))):
            raise TypeError(f"config must be an EAGLEConfig or a SpeculativeConfig, got {type(config).__name__}")
        self.config = config or EAGLEConfig()
        wanted = checked_device(self.config.device if device is None else device)
        if wanted is not None and wanted.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={str(wanted)!r}: there is no GPU here")
        self.pair = load_pair(draft_model, target_model, self.config, wanted, tp_plan, kernels, cuda_graph)
        self.engine = self.pair.engine
        self.tokenizer = tokenizer or self.pair.tokenizer
        view = self.pair.view
        self._reader = ArgumentReader(self.config, view.vocab_size, view.device, self.tokenizer, self.pair.stop_ids)
        others = {"activations", "four_bits", *STORED, "draft_dtype", "projections"} & self.engine.notes.keys()
        measured = [] if others or view.ranks is not None else CostTable.read()  # for one GPU, in 16 and 32 bits
        self._table = CostTable.find(measured if costs is None else costs, view)
        self._policies: dict[int, TreePolicy] = {}
        self.reset_statistics()

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        config: EAGLEConfig | SpeculativeConfig | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[LoadingOptions],
    ) -> EAGLEInference:
        """Load from directories or hub ids.

        target: a target alone, with multi-token-prediction layers among its weights, or with a head in a folder next to
        it, as `EaModel.save_pretrained` writes them; this package has "demo", "demo-gdn" and "demo-moe". draft: an
        EAGLE head, a block drafter, "mtp", "suffix", "ngram", or None for the draft that config names or that comes
        with the target. config, device, options: see the constructor. Raises as the constructor does, and
        FileNotFoundError for missing files.
        """
        return cls(draft, str(target), config, device, **options)

    def __repr__(self) -> str:
        pair, view, draft, options = self.pair, self.pair.view, self.pair.draft, self.config.speculative
        target = pair.target_model.base_model if hasattr(pair.target_model, "ea_layer") else pair.target_model
        drafter = draft if pair.draft_model is None else getattr(pair.draft_model, "ea_layer", pair.draft_model)
        nodes = self.config.num_draft_tokens if draft is None or draft.any_tree else draft.read_tree().nodes
        drafts = f"num_draft_tokens {nodes}" if options is None else f"method {options.method}"
        return (
            f"EAGLEInference({type(target).__name__} of {len(view.layers)} layers, "
            f"{str(view.dtype).removeprefix('torch.')} on {view.device}; draft {type(drafter).__name__}; "
            f"{drafts}, temperature {self.config.temperature})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an EAGLEInference cannot be pickled or copied: it holds caches, graphs and a lock. Save the models with "
            "their save_pretrained and make a new EAGLEInference of them"
        )

    def reset_statistics(self) -> None:
        """Set `statistics` to zero."""
        self.statistics = Statistics()

    def forget_outputs(self) -> None:
        """Forget the kept pages of prompts, and the outputs of earlier requests (for `suffix_drafts`, method suffix,
        and method nasd with reset_in_between=False). If ranks share the target, all of them must call this, and none
        while a session is open."""
        self._check_same_on_all_ranks("what is called, here forget_outputs,", None)
        self.engine.pool.forget()
        if self.pair.draft is not None:
            with self.engine.running():
                self.pair.draft.forget()

    # --- whole generations ---

    @overload
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        return_stats: Literal[True] = True,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Tensor, Results]: ...

    @overload
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        return_stats: Literal[False],
        **options: Unpack[GenerateOptions],
    ) -> Tensor: ...

    @overload
    def generate(
        self,
        input_ids: ListedPrompts,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        return_stats: Literal[True] = True,
        **options: Unpack[GenerateOptions],
    ) -> tuple[list[Tensor], Results]: ...

    @overload
    def generate(
        self,
        input_ids: ListedPrompts,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        return_stats: Literal[False],
        **options: Unpack[GenerateOptions],
    ) -> list[Tensor]: ...

    @overload
    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int | Sequence[int] = 100,
        temperature: float | Sequence[float] | None = None,
        top_p: float | Sequence[float] | None = None,
        top_k: int | Sequence[int] | None = None,
        return_stats: bool = True,
        **options: Unpack[FurtherGenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int | Sequence[int] = 100,
        temperature: float | Sequence[float] | None = None,
        top_p: float | Sequence[float] | None = None,
        top_k: int | Sequence[int] | None = None,
        return_stats: bool = True,
        *,
        attention_mask: Tensor | None = None,
        stop_token_ids: StopIds = None,
        stop_strings: StopStrings = (),
        logprobs: bool = False,
        seed: int | Sequence[int] | None = None,
        min_new_tokens: int | Sequence[int] = 0,
        on_step: Callable[[StepInfo], None] | None = None,
        progress: bool = False,
        baseline: bool = False,
        **sampling: Unpack[FurtherSampling],
    ) -> Any:
        """Decode every prompt until a stop token, a stop string, or exactly max_new_tokens.

        input_ids: [bs, L] int64 (with attention_mask [bs, L] if rows are padded), a list of prompts of any lengths,
        text, or the token ids of one prompt. An option is one value for all prompts, or a list with one for each; None
        takes the configuration's. sampling: min_p, logit_bias, grammar, repetition_penalty, presence_penalty,
        frequency_penalty. seed: a single number gives prompt i seed + i. logit_bias: a mapping or a list of (token,
        value) pairs is for all prompts; any other list has one of these for each prompt. Filters (top_p, top_k, min_p)
        change nothing at temperature 0. stop_token_ids: None takes the target's end tokens. min_new_tokens: before this
        many tokens no stop token is chosen, and a stop string that begins there does not count. A sequence ends at
        `config.max_length` or the target's last position. on_step is called after every step. progress: show a bar.
        baseline: also decode with the target alone, to measure `speedup`.

        Returns (output_ids, stats), without return_stats only output_ids: prompts and new tokens, as a tensor [bs,
        longest] padded on the right if `input_ids` was a tensor, else as a list. `stats` (`Results`) has the documented
        keys and `stats.completions`: tokens, text, logprobs and statistics of each request, and why it ended. The
        completion of a failed request has the error, and the others go on; if all fail, the error is raised.

        Raises ValueError or TypeError for bad arguments (such as a single prompt longer than the target's positions),
        RuntimeError if another generation is running or all requests failed, ImportError for a grammar without
        llguidance.
        """
        check_options("generate", sampling, self.generate)
        check_switches(return_stats=return_stats, logprobs=logprobs, progress=progress, baseline=baseline)
        if not (on_step is None or callable(on_step)):
            raise TypeError(f"on_step must be a function of a StepInfo, got {on_step!r}")
        prompts = self._reader.prompts(input_ids, attention_mask)
        if len(prompts) == 1:
            check_positions(len(prompts[0]), self.pair.max_positions)
        requests = self._reader.requests(
            prompts, seed, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, stop_token_ids=stop_token_ids,
            stop_strings=stop_strings, temperature=temperature, top_p=top_p, top_k=top_k, **sampling,
        )  # fmt: skip
        policy = self.policy(min(self.config.slots, len(prompts)))
        results = self._run(requests, policy, logprobs, on_step, progress)
        if baseline:
            results.plain_seconds = self._run(requests, None, logprobs, None, progress).seconds
        self.statistics += results
        failed = [completion for completion in results.completions if completion.error is not None]
        if len(failed) == len(prompts):
            raise RuntimeError(f"no prompt could be decoded: {failed[0].error}")
        for completion in failed:
            log.warning("prompt %d failed: %s", completion.index, completion.error)
        rows: Any = [completion.output_ids for completion in results.completions]
        if isinstance(input_ids, Tensor):
            rows = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._pad_id())
        return (rows, results) if return_stats else rows

    def stream(
        self,
        input_ids: Prompts,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        stop_token_ids: StopIds = None,
        stop_strings: StopStrings = (),
        logprobs: bool = False,
        report_drafts: bool = False,
        seed: int | Sequence[int] | None = None,
        min_new_tokens: int | Sequence[int] = 0,
        **sampling: Unpack[Sampling],
    ) -> Generator[Piece, None, None]:
        """Decode as `generate` does, and yield each piece as soon as it is there.

        `piece.index` is the prompt's index, `piece.tokens` are its new tokens. `piece.text` (or `str(piece)`) has no
        part of a character or of a possible stop string. The last piece of a prompt has its `completion`.
        report_drafts: `piece.drafts` are the drafts. For strings see `stream_text`. Closing the iterator ends the
        generation. Raises as `generate` does, for bad arguments at once.
        """
        check_options("stream", sampling, self.stream)
        check_switches(logprobs=logprobs, report_drafts=report_drafts)
        prompts = self._reader.prompts(input_ids)
        requests = self._reader.requests(
            prompts, seed, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, stop_token_ids=stop_token_ids,
            stop_strings=stop_strings, **sampling,
        )  # fmt: skip
        return self._stream(requests, self.policy(min(self.config.slots, len(requests))), logprobs, report_drafts)

    def stream_text(self, prompt: Prompt, max_new_tokens: int = 100, **options: Unpack[StreamOptions]) -> Iterator[str]:
        """The text of one prompt's new tokens, in pieces; options as for `stream`.

        Raises ValueError for several prompts (their texts would mix) or without a tokenizer, RuntimeError if the
        request fails.
        """
        if self.tokenizer is None:
            raise ValueError(f"stream_text needs a tokenizer, and the target has none: {TOKENIZER}")
        prompts = self._reader.prompts(prompt)
        if len(prompts) > 1:
            raise ValueError(f"stream_text takes one prompt, got {len(prompts)}; stream() tells them apart")
        return _texts(self.stream(prompts, max_new_tokens, **options))

    def session(
        self,
        rows: int | None = None,
        slots: int | None = None,
        logprobs: bool = False,
        report_drafts: bool = False,
    ) -> Session:
        """An open batch: `submit` requests at any time, `step` for their pieces. Use as a context manager.

        rows: the most tokens of a sequence, prompt included; None takes config.max_length, which must then be set.
        More than the target's positions have no effect. slots: None takes config.slots. report_drafts: as for `stream`.
        If ranks share the target, each opens the same session; requests go to rank 0, and the others `follow`
        (`SharedSession`). Raises ValueError if neither rows nor max_length is set.
        """
        check_switches(logprobs=logprobs, report_drafts=report_drafts)
        rows = self.config.max_length if rows is None else checked_integer("rows", rows, 1, MAX_ROWS)
        slots = self.config.slots if slots is None else checked_integer("slots", slots)
        self.config.changed(slots=slots)  # checks them
        if rows is None:
            raise ValueError(
                "session: give rows, the most tokens of a sequence, or set max_length in the configuration"
            )
        texts = self.tokenizer is not None
        asked = (rows, slots, logprobs, report_drafts, texts)
        self._check_same_on_all_ranks("the configuration and the options of a session", (asked, self._configured()))
        kind = Session if self.pair.view.ranks is None else SharedSession
        return self._session(kind, self.policy(slots), slots, rows, logprobs=logprobs, report_drafts=report_drafts)

    def benchmark(
        self,
        test_data: Prompts,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        stop_token_ids: StopIds = None,
        stop_strings: StopStrings = (),
        seed: int | Sequence[int] | None = None,
        warm_up: bool = True,
        progress: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Results:
        """Time the prompts with drafts and without, after a short run of each that compiles and captures.

        Earlier outputs are forgotten first, so that drafts do not come from answers given before.

        Arguments as for `generate`. Returns its statistics with a measured `speedup`.
        """
        check_options("benchmark", sampling, self.benchmark)
        check_switches(warm_up=warm_up, progress=progress)
        prompts = self._reader.prompts(test_data)
        stops = {"stop_token_ids": stop_token_ids, "stop_strings": stop_strings}
        requests = self._reader.requests(prompts, seed, max_new_tokens=max_new_tokens, **stops, **sampling)
        policy = self.policy(min(self.config.slots, len(requests)))
        if warm_up:
            short = [replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP)) for request in requests]
            for mode in (policy, None):
                self._run(short, mode, False, rows=self._rows(requests))  # room and graphs as in the timed run
        self.forget_outputs()
        results = self._run(requests, policy, False, progress=progress)
        results.plain_seconds = self._run(requests, None, False, progress=progress).seconds
        self.statistics += results
        return results

    # --- the stages of a step ---

    def draft_step(self, input_ids: Tensor, past_key_values: stages.Prefix | None = None) -> stages.DraftStep:
        """One pass of the draft: the topk likeliest next tokens.

        input_ids [bs, T] int64: the sequence, or the tokens after `past_key_values`. Returns (scores [bs, k] float32,
        probabilities; token_ids [bs, k] int64; past_key_values for the next call). Raises TypeError or ValueError for
        another type or shape, for token ids outside the vocabulary, and if they do not fit `past_key_values`.
        """
        self._check_ids(input_ids)
        if not isinstance(past_key_values, (stages.Prefix, type(None))):
            got = type(past_key_values).__name__
            raise TypeError(f"past_key_values must be what draft_step returned, or None, got {got}")
        if past_key_values is not None and past_key_values.batch != len(input_ids):
            raise ValueError(
                f"input_ids: expected a row for each of the {past_key_values.batch} sequences of past_key_values, got "
                f"{len(input_ids)}"
            )
        return self._run_stage(stages.draft_step, input_ids, past_key_values)

    def generate_draft_tree(self, input_ids: Tensor, verified_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft a tree for each sequence.

        input_ids [bs, T] int64, verified_id [bs]: the token after them, the root. Returns (draft_tokens [bs, N - 1],
        parent_list [bs, k (D - 1) + 1], top_scores_index [bs, N - 1]), int64, as `build_tree_structure` takes them, so
        at most k nodes of a level have children. `generate` drafts the same tree, except with a block drafter: its
        trees have this bound only if each path has a state (Domino, DSpark's recurrent head).
        Raises TypeError or ValueError for other types or shapes, and for token ids outside the vocabulary.
        """
        self._check_ids(input_ids)
        self._check_roots(verified_id, input_ids)
        return self._run_stage(stages.generate_draft_tree, input_ids, verified_id)

    def verify_drafts(
        self,
        input_ids: Tensor,
        draft_tokens: Tensor,
        verified_id: Tensor,
        parent_list: Tensor,
        top_scores_index: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Verify a tree greedily, in one forward of the target over all its nodes.

        Arguments: as for `generate_draft_tree`, and its results. Returns (accepted [bs, D + 1] int64: accepted drafts,
        then the target's own token, then -1; accept_length [bs] int32: drafts accepted; tree_stats: the keys of
        `compute_tree_statistics`, and "tree": the result of `build_tree_structure`). Raises TypeError or ValueError for
        other types or shapes, for token ids outside the vocabulary, and for links that do not fit.
        """
        self._check_ids(input_ids)
        self._check_roots(verified_id, input_ids)
        check_token_ids("draft_tokens", draft_tokens, (len(input_ids), "N - 1"), self.pair.view.vocab_size)
        if isinstance(top_scores_index, Tensor) and top_scores_index.numel():
            least, most = int(top_scores_index.min()), int(top_scores_index.max())
            last = candidates_of(self.config.topk, self.config.num_steps) - 1
            if not 0 <= least <= most <= last:
                raise ValueError(f"top_scores_index: candidates must lie in 0..{last}, got {least}..{most}")
        tree = (draft_tokens, verified_id, parent_list, top_scores_index)
        return self._run_stage(stages.verify_drafts, input_ids, *tree)

    # --- what it costs ---

    def measure_costs(
        self, batches: Sequence[int] = (1, 4, 16), context: int = 128, steps: int = 12, rows: int | None = None
    ) -> CostTable:
        """Time plain decoding and the trees that the configuration may choose, and use these times from now on.

        batches: numbers of slots to time; context: tokens of the random prompts; rows: the most tokens of later
        sequences (default config.max_length), which can then use the graphs captured here. Save the table with
        `CostTable.write([table], path)`, and load it as `EAGLEInference(..., costs=CostTable.read(path))`. Raises
        TypeError or ValueError for numbers that are no integers or too small.
        """
        if not (sizes := [checked_integer("batches", size, 1) for size in batches]):
            raise ValueError("batches: give at least one number of slots")
        context, steps = checked_integer("context", context, 1), checked_integer("steps", steps, 1)
        least = self.config.max_length or 0 if rows is None else checked_integer("rows", rows, 1, MAX_ROWS)
        table = measure_costs(self.engine, self._trees(), sizes, context, steps, least)
        ranks = self.pair.view.ranks
        self._table = table if ranks is None else ranks.broadcast_from_rank0(table)
        self._policies.clear()
        return self._table

    def policy(self, slots: int) -> TreePolicy | None:
        """The policy for batches of `slots` slots, None if nothing is drafted. Later calls use what it learnt."""
        if self.pair.draft is None:
            return None
        ranks, known = self.pair.view.ranks, slots in self._policies
        if ranks is not None:
            self._check_same_on_all_ranks("what is called, and the number of slots,", slots)
            known = all(ranks.all_gather_object(known))  # a rank that was called alone may know more
        if not known:
            cost, trees = pass_cost(self.pair.view, self.pair.draft), self._trees()
            if ranks is not None:
                cost = ranks.broadcast_from_rank0(cost)  # from bytes, which differ by rank
            read = self.pair.view.bytes_read
            usual = TreePolicy(trees, StepCosts(self.config.slots, cost, self._table, read))
            costs = StepCosts(slots, cost, self._table, read)
            self._policies[slots] = TreePolicy(trees, costs, self.config.fallback, fixed_tree=usual.spec)
        return self._policies[slots]

    def memory_bytes(self, slots: int | None = None, rows: int | None = None) -> dict[str, int]:
        """Bytes on the device that a batch needs besides the weights: {"target_cache", "target_pending", "draft_cache",
        "logits"}.

        A larger tree needs more logits, [slots, N, V], a few cache rows, and with recurrent layers the uncommitted
        updates of its rows ("target_pending").
        """
        slots = self.config.slots if slots is None else checked_integer("slots", slots)
        rows = self.config.max_length or 2048 if rows is None else checked_integer("rows", rows)
        if slots < 1 or rows < 1:
            raise ValueError(f"slots and rows must be at least 1, got {slots} and {rows}")
        rows = min(rows, self.pair.max_positions or rows)
        largest = max([*self._trees(), PLAIN], key=lambda tree: tree.nodes)
        return stages.memory_bytes(self.engine, largest, slots, rows)

    def report(self) -> str:
        """How drafts are judged, which trees are chosen by which costs, whether drafting stopped, and what fell
        back."""
        lines = [f"verification: {self.config.verification.summary}"]
        lines += [f"{key}: {reason}" for key, reason in self.engine.notes.items()]
        for slots, policy in self._policies.items():
            lines += [f"batch of {slots}:", *(f"  {line}" for line in policy.report())]
        return "\n".join([f"statistics: {self.statistics}", *lines])

    # --- details ---

    def _run(
        self,
        requests: Sequence[Request],
        policy: TreePolicy | None,
        logprobs: bool,
        on_step: Callable[[StepInfo], None] | None = None,
        progress: bool = False,
        rows: int | None = None,
    ) -> Results:
        """Decode all requests to their ends. Completions are in the order of requests."""
        results, completions = Results(), {}
        name, ranks = "target alone" if policy is None else "speculative", self.pair.view.ranks
        with (
            self._open(requests, policy, rows, logprobs=logprobs, text=on_step is not None) as session,
            tqdm(total=len(requests), desc=name, disable=not progress or (ranks is not None and ranks.rank > 0)) as bar,
        ):
            watch = Stopwatch(self.pair.view.device, self.pair.view.ranks)
            for request in requests:
                session.enqueue(request)
            while not session.idle:
                info = session.advance()
                for piece in info.pieces:
                    if piece.completion is not None:
                        completions[piece.index] = piece.completion
                        bar.update()
                if progress:
                    bar.set_postfix_str(f"{session.tokens / watch.so_far():.0f} tokens/s", refresh=False)
                if self.config.verbose:
                    facts = info.step, info.nodes, info.running, info.waiting, info.seconds * 1e3
                    log.info("step %d: %d nodes, %d running, %d waiting, %.1f ms", *facts)
                if on_step is not None:
                    on_step(info)
            results.seconds = watch.seconds()
            results += session.statistics
        results.completions = [completions[index] for index in range(len(requests))]
        return results

    def _stream(
        self, requests: Sequence[Request], policy: TreePolicy | None, logprobs: bool, report_drafts: bool
    ) -> Generator[Piece, None, None]:
        with self._open(requests, policy, logprobs=logprobs, report_drafts=report_drafts) as session:
            for request in requests:
                session.enqueue(request)
            try:
                while not session.idle:
                    yield from session.step()
            finally:
                self.statistics += session.statistics

    def _open(
        self, requests: Sequence[Request], policy: TreePolicy | None, rows: int | None = None, **options: bool
    ) -> Session:
        """A session for these requests. options: see Session."""
        # the batch compares the rest, but has no text
        texts = [request.stop_strings for request in requests]
        self._check_same_on_all_ranks(
            "the configuration, the number of prompts and stop_strings", (texts, self._configured())
        )
        slots = min(self.config.slots, len(requests))
        return self._session(Session, policy, slots, rows or self._rows(requests), **options)

    def _configured(self) -> dict[str, str]:
        """The configuration for comparing ranks, without options that may differ."""
        return {name: repr(value) for name, value in vars(self.config).items() if name not in ("device", "verbose")}

    def _check_same_on_all_ranks(self, what: str, value: Any) -> None:
        """Compare the arguments of ranks that share the target. Raises RuntimeError before any exchange while a session
        or a stream is open here, because the other ranks wait for its step."""
        if self.pair.view.ranks is not None:
            self.engine.check_free()
            self.pair.view.ranks.check_same_on_all_ranks(what, value)

    def _rows(self, requests: Sequence[Request]) -> int:
        """The most tokens of a sequence."""
        rows = max(len(request.prompt) + request.max_new_tokens for request in requests)
        limits = (self.config.max_length, self.pair.max_positions)
        return min([rows, *(limit for limit in limits if limit is not None)])

    def _session(
        self, kind: type[Session], policy: TreePolicy | None, slots: int, rows: int, **options: bool
    ) -> Session:
        return kind(
            self.engine, policy, slots, rows,
            tokenizer=self.tokenizer, stop_ids=self.pair.stop_ids, config=self.config,
            max_positions=self.pair.max_positions, **options,
        )  # fmt: skip

    def _trees(self) -> list[TreeSpec]:
        """The trees that the policy may choose."""
        draft, view = self.pair.draft, self.pair.view
        if draft is None:
            return []
        trees = [tree_of(draft, self.config)]
        if not draft.any_tree:
            return trees
        if self.config.num_draft_tokens == "auto":
            trees = [self.config.tree(nodes) for nodes in tree_sizes(self.config.nodes)]
        if view.has_mixtures and not (self.config.has_tree or isinstance(draft, HybridDraft)) and self.config.fallback:
            chain = TreeSpec.chain(min(MIXTURE_DRAFTS, trees[0].beam_levels))
            trees = [*dict.fromkeys((replace(chain, adaptive=trees[0].adaptive), *trees))]
        if not isinstance(draft, HybridDraft):
            return trees
        places = draft.source.places
        grafted = [tree.with_grafts(places) for tree in trees]
        if not self.config.fallback and len(trees) == 1:
            return grafted
        return [*grafted, *trees, TreeSpec.repeats(places)]

    def _run_stage(self, stage: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of `stages`, which all ranks must call together."""
        shapes = [list(argument.shape) for argument in arguments if isinstance(argument, Tensor)]
        self._check_same_on_all_ranks(f"what is called, here {stage.__name__},", shapes)
        with self.engine.running(), torch.no_grad():
            return stage(self.engine, self.config, *arguments)

    def _check_ids(self, input_ids: Tensor) -> None:
        self.engine.check_model()
        check_prompt(input_ids, self.pair.view.vocab_size)

    def _check_roots(self, verified_id: Tensor, input_ids: Tensor) -> None:
        check_token_ids("verified_id", verified_id, (len(input_ids),), self.pair.view.vocab_size)

    def _pad_id(self) -> int:
        known = (self.pair.view.pad_token_id, getattr(self.tokenizer, "pad_token_id", None))
        return next((token for token in known if token is not None), min(self.pair.stop_ids, default=0))


def _texts(pieces: Iterator[Piece]) -> Iterator[str]:
    for piece in pieces:
        if piece.completion is not None and piece.completion.error is not None:
            raise RuntimeError(f"the prompt could not be decoded: {piece.completion.error}")
        if piece.text:
            yield piece.text
