"""EAGLEInference: speculative decoding with a draft and a target of one's own, on the one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.models.checks import check_attention_mask, check_prompt
from eagle_triton.speculative import stages
from eagle_triton.speculative.config import EAGLEConfig
from eagle_triton.speculative.costs import CostTable, StepCosts, pass_cost
from eagle_triton.speculative.pair import read_pair
from eagle_triton.speculative.policy import TreePolicy, tree_sizes
from eagle_triton.speculative.session import Piece, Results, Session, StepInfo
from eagle_triton.speculative.statistics import Statistics
from eagle_triton.speculative.text import check_stop_strings
from eagle_triton.speculative.timing import Stopwatch, measure_costs

log = logging.getLogger(__name__)

WARM_UP = 8  # tokens of each prompt, decoded before a benchmark is timed

Prompts = Tensor | str | Sequence[str] | Sequence[Tensor] | Sequence[Sequence[int]]


class EAGLEInference:
    """Decodes with a target, several times as fast for the drafts of a small model, with the same output.

    Greedy output is token for token that of the target alone; sampled output follows the target's own distribution. One
    call runs at a time. `statistics` adds up over all calls until `reset_statistics`.
    """

    def __init__(
        self,
        draft_model: Any,
        target_model: Any,
        config: EAGLEConfig | None = None,
        device: str | torch.device | None = None,
        *,
        tokenizer: Any | None = None,
        kernels: bool | None = None,
        cuda_graph: bool | None = None,
        costs: Sequence[CostTable] | None = None,
    ) -> None:
        """draft_model: an EAGLE head, an EaModel for its head, a causal language model with the target's vocabulary,
        or None for the head of the target. target_model: an EaModel, a Hugging Face causal language model, or the path
        of one. device: goes before config.device. tokenizer: for prompts and output as text; None takes the target's.
        kernels, cuda_graph: as for `EagleTritonConfig`. costs: cost tables to consult, None: those of the package.

        Nothing of the models is changed. Raises ValueError (and UnsupportedModelError, which is one) for models that
        are not known, do not fit, or lie elsewhere.
        """
        self.config = config or EAGLEConfig()
        wanted = device if device is not None else self.config.device
        wanted = None if wanted is None else torch.device(wanted)
        if wanted is not None and wanted.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={str(wanted)!r}: there is no GPU here")
        self.pair = read_pair(draft_model, target_model, self.config, wanted)
        self.tokenizer = tokenizer or self.pair.tokenizer
        view, draft = self.pair.view, self.pair.draft
        on_gpu = view.device.type == "cuda"
        kernels = on_gpu if kernels is None else kernels
        graph = on_gpu and kernels if cuda_graph is None else cuda_graph
        if graph and not (on_gpu and kernels):
            raise ValueError("cuda_graph=True needs a model on a GPU and the kernels")
        self.engine = Engine(view, draft, make_operations(kernels), graph)
        self._table = CostTable.find(CostTable.read() if costs is None else costs, view)
        self._policies: dict[int, TreePolicy] = {}
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Begin the count of `statistics` anew."""
        self.statistics = Statistics()

    # --- whole generations ---

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
        stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
        stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
        logprobs: bool = False,
        seed: int | Sequence[int] | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        progress: bool = False,
        baseline: bool = False,
        **sampling: Any,
    ) -> Any:
        """Decode every prompt until a stop token, a stop string, or exactly max_new_tokens.

        input_ids: [bs, L] int64 (with attention_mask [bs, L] where rows are padded), a list of prompts of any lengths,
        or text. Options are one value for all prompts or a list with one for each; None takes the configuration's.
        sampling: min_p, repetition_penalty, logit_bias. seed: that of the first prompt if it is one number, prompt i
        then has seed + i. stop_token_ids: None takes the target's end tokens. on_step is called after every step.
        progress: show a bar. baseline: decode once more with the target alone, so that `speedup` is measured.

        Returns (output_ids, stats), or without return_stats output_ids: prompt and new tokens, [bs, longest] padded
        on the right if `input_ids` was a tensor, else a list. `stats` (`Results`) has the documented keys and
        `stats.completions`: tokens, text, logprobs and statistics of each request, and why it ended. A request that
        fails says so there and does not harm the others; if all fail, that is raised.

        Raises ValueError for bad arguments, RuntimeError if another generation is running or all requests failed.
        """
        prompts = self._prompts(input_ids, attention_mask)
        calls = self._calls(
            prompts, max_new_tokens, stop_token_ids, stop_strings, seed,
            temperature=temperature, top_p=top_p, top_k=top_k, **sampling,
        )  # fmt: skip
        policy = self.policy(min(self.config.slots, len(prompts)))
        results = self._run(calls, policy, logprobs, on_step, progress)
        if baseline:
            results.plain_seconds = self._run(calls, None, logprobs, None, progress).seconds
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
        stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
        stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
        logprobs: bool = False,
        seed: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Decode as `generate` does and hand out every piece when it is there.

        `piece.index` names the prompt, `piece.tokens` are its new tokens, `piece.text` (or `str(piece)`) is text that
        never splits a character nor begins a stop string, and the last piece of a prompt has its `completion`. Closing
        the iterator ends the generation. Raises as `generate`, arguments at once.
        """
        calls = self._calls(self._prompts(input_ids), max_new_tokens, stop_token_ids, stop_strings, seed, **sampling)
        return self._stream(calls, self.policy(min(self.config.slots, len(calls))), logprobs)

    def session(self, rows: int | None = None, slots: int | None = None, logprobs: bool = False) -> Session:
        """A batch that stays open: submit requests at any time, `step()` for their pieces. Use as a context manager.

        rows: the most tokens of a sequence, prompt included (default config.max_length, which must then be set); slots:
        default config.slots. Raises ValueError if no rows are known.
        """
        rows, slots = rows or self.config.max_length, slots or self.config.slots
        if rows is None:
            raise ValueError(
                "session: give rows, the most tokens of a sequence, or set max_length in the configuration"
            )
        return self._session(self.policy(slots), slots, rows, logprobs)

    def benchmark(
        self,
        test_data: Prompts,
        max_new_tokens: int | Sequence[int] = 100,
        *,
        stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
        stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
        seed: int | Sequence[int] | None = None,
        warm_up: bool = True,
        progress: bool = False,
        **sampling: Any,
    ) -> Results:
        """Decode the prompts with drafts and without, both timed, after a short run of each that captures and compiles.

        Arguments as for `generate`. Returns its statistics with a measured `speedup`.
        """
        calls = self._calls(self._prompts(test_data), max_new_tokens, stop_token_ids, stop_strings, seed, **sampling)
        policy = self.policy(min(self.config.slots, len(calls)))
        if warm_up:
            short = [replace(call, max_new_tokens=min(call.max_new_tokens, WARM_UP)) for call in calls]
            for mode in (policy, None):
                self._run(short, mode, False, rows=self._rows(calls))  # the room, and so the graphs, of the real run
        results = self._run(calls, policy, False, progress=progress)
        results.plain_seconds = self._run(calls, None, False, progress=progress).seconds
        self.statistics += results
        return results

    # --- the stages of a step ---

    def draft_step(self, input_ids: Tensor, past_key_values: stages.Prefix | None = None) -> stages.DraftStep:
        """One pass of the draft: the topk likeliest next tokens.

        input_ids [bs, T] int64: the sequence, or with `past_key_values` what follows it. Returns (scores [bs, k]
        float32, probabilities; token_ids [bs, k] int64; past_key_values for the next call).
        """
        self._check_ids(input_ids)
        return stages.draft_step(self.engine, self.config, input_ids, past_key_values)

    def generate_draft_tree(self, input_ids: Tensor, verified_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft a tree for each sequence.

        input_ids [bs, T] int64, verified_id [bs]: the token behind them, the root. Returns (draft_tokens [bs, N - 1],
        parent_list [bs, k (D - 1) + 1], top_scores_index [bs, N - 1]), int64, as `build_tree_structure` takes them.
        """
        self._check_ids(input_ids)
        return stages.generate_draft_tree(self.engine, self.config, input_ids, verified_id)

    def verify_drafts(
        self,
        input_ids: Tensor,
        draft_tokens: Tensor,
        verified_id: Tensor,
        parent_list: Tensor,
        top_scores_index: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The target's greedy verdict on a tree, in one forward over all its nodes.

        Arguments as `generate_draft_tree` takes and gives them. Returns (accepted [bs, D + 1] int64: accepted drafts,
        then the target's own token, then -1; accept_length [bs] int32: drafts accepted; tree_stats: those of
        `compute_tree_statistics`, and under "tree" the tuple of `build_tree_structure`).
        """
        self._check_ids(input_ids)
        tree = (draft_tokens, verified_id, parent_list, top_scores_index)
        return stages.verify_drafts(self.engine, self.config, input_ids, *tree)

    # --- what it costs ---

    def measure_costs(
        self, batches: Sequence[int] = (1, 4, 16), context: int = 128, steps: int = 12, rows: int | None = None
    ) -> CostTable:
        """Time plain decoding and the trees that the configuration may choose, and go by that from now on.

        batches: numbers of slots to time; context: tokens of the random prompts; rows: the most tokens of the
        sequences to come (default config.max_length), for which the graphs captured here will do. Keep the table with
        `CostTable.write([table], path)` and hand it to the next EAGLEInference as `costs=CostTable.read(path)`.
        """
        self._table = measure_costs(
            self.engine, self._trees(), batches, context, steps, rows or self.config.max_length or 0
        )
        self._policies.clear()
        return self._table

    def policy(self, slots: int) -> TreePolicy:
        """The policy for batches of so many slots; what it has learnt stays for the next call."""
        if slots not in self._policies:
            cost, trees = pass_cost(self.pair.view, self.pair.draft), self._trees()
            usual = TreePolicy(trees, StepCosts(self.config.slots, cost, self._table))
            costs = StepCosts(slots, cost, self._table)
            self._policies[slots] = TreePolicy(trees, costs, self.config.fallback, fixed_tree=usual.spec)
        return self._policies[slots]

    def memory_bytes(self, slots: int | None = None, rows: int | None = None) -> dict[str, int]:
        """Bytes on the device that a batch needs beside the weights: {"target_cache", "draft_cache", "logits"}.

        What a node more costs shows in the logits, [slots, N, V], and in a few cache rows.
        """
        slots, rows = slots or self.config.slots, rows or self.config.max_length or 2048
        return stages.memory_bytes(self.engine, self.config.tree(), slots, rows)

    def report(self) -> str:
        """Which trees are drafted, what that is decided by, whether drafting was stopped, and what fell back."""
        lines = [f"{key}: {reason}" for key, reason in self.engine.notes.items()]
        for slots, policy in self._policies.items():
            lines += [f"batch of {slots}:", *(f"  {line}" for line in policy.report())]
        return "\n".join([f"statistics: {self.statistics}", *lines])

    # --- details ---

    def _prompts(self, given: Prompts, attention_mask: Tensor | None = None) -> list[Tensor]:
        """Every prompt as int64 [L] on the device, checked."""
        vocabulary, device = self.pair.view.vocab_size, self.pair.view.device
        if isinstance(given, str):
            given = [given]
        if isinstance(given, Tensor):
            given = given[None] if given.dim() == 1 else given
            check_prompt(given, vocabulary)
            if attention_mask is None:
                return list(given.to(device, torch.long))
            check_attention_mask(attention_mask, given)
            return [row[kept].to(device, torch.long) for row, kept in zip(given, attention_mask.bool(), strict=True)]
        if attention_mask is not None:
            raise ValueError("attention_mask is for padded rows: give input_ids as one tensor [bs, L]")
        if not given:
            raise ValueError("input_ids: no prompts")
        prompts = []
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError("prompts as text need a tokenizer, the target has none")
                prompt = self.tokenizer(prompt).input_ids
            row = torch.as_tensor(prompt, device=device)
            try:
                check_prompt(row[None], vocabulary)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            prompts.append(row.long())
        return prompts

    def _calls(
        self,
        prompts: list[Tensor],
        max_new_tokens: int | Sequence[int],
        stop_token_ids: Any,
        stop_strings: Any,
        seed: int | Sequence[int] | None,
        **sampling: Any,
    ) -> list[_Call]:
        """One call of `Session.submit` for each prompt, checked."""
        count = len(prompts)
        if isinstance(seed, int):
            seed = [seed + index for index in range(count)]
        options = {name: _each(name, value, count) for name, value in {**sampling, "seed": seed}.items()}
        if isinstance(stop_strings, str):
            stop_strings = [stop_strings]
        if all(isinstance(stop, str) for stop in stop_strings):
            stop_strings = [tuple(stop_strings)] * count
        if stop_token_ids is not None:
            stop_token_ids = list(stop_token_ids)
            if all(isinstance(token, int) for token in stop_token_ids):
                stop_token_ids = [frozenset(stop_token_ids)] * count
        limits = _each("max_new_tokens", max_new_tokens, count)
        strings, stops = _each("stop_strings", stop_strings, count), _each("stop_token_ids", stop_token_ids, count)
        for limit in limits:
            if limit < 0:
                raise ValueError(f"max_new_tokens must not be negative, got {limit}")
        for stop in strings:
            check_stop_strings(stop)
        if any(strings) and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, the target has none")
        return [
            _Call(
                prompts[index],
                limits[index],
                self.config.sampling(**{name: values[index] for name, values in options.items()}),
                None if stops[index] is None else frozenset(stops[index]),
                tuple(strings[index]),
            )
            for index in range(count)
        ]

    def _run(
        self,
        calls: Sequence[_Call],
        policy: TreePolicy | None,
        logprobs: bool,
        on_step: Callable[[StepInfo], None] | None = None,
        progress: bool = False,
        rows: int | None = None,
    ) -> Results:
        """Decode all calls to their ends; the completions in their order."""
        results, completions = Results(), {}
        name = "target alone" if policy is None else "speculative"
        with (
            self._open(calls, policy, logprobs, on_step is not None, rows) as session,
            tqdm(total=len(calls), desc=name, disable=not progress) as bar,
        ):
            watch = Stopwatch(self.pair.view.device)
            for call in calls:
                call.submit(session)
            while not session.idle:
                info = session.advance()
                for piece in info.pieces:
                    if piece.completion is not None:
                        completions[piece.index] = piece.completion
                        bar.update()
                if progress:
                    bar.set_postfix_str(f"{session.tokens / watch.so_far():.0f} tokens/s", refresh=False)
                if self.config.verbose:
                    log.info("step %d: %d nodes, %d running, %d waiting, %.1f ms", *_facts(info))
                if on_step is not None:
                    on_step(info)
            results.seconds = watch.seconds()
            results += session.statistics
        results.completions = [completions[index] for index in range(len(calls))]
        return results

    def _stream(self, calls: Sequence[_Call], policy: TreePolicy, logprobs: bool) -> Iterator[Piece]:
        with self._open(calls, policy, logprobs) as session:
            for call in calls:
                call.submit(session)
            try:
                while not session.idle:
                    yield from session.step()
            finally:
                self.statistics += session.statistics

    def _open(
        self,
        calls: Sequence[_Call],
        policy: TreePolicy | None,
        logprobs: bool,
        text: bool = True,
        rows: int | None = None,
    ) -> Session:
        slots = min(self.config.slots, len(calls))
        return self._session(policy, slots, rows or self._rows(calls), logprobs, text)

    def _rows(self, calls: Sequence[_Call]) -> int:
        """The most tokens of a sequence."""
        rows = max(len(call.prompt) + call.max_new_tokens for call in calls)
        return rows if self.config.max_length is None else min(rows, self.config.max_length)

    def _session(self, policy: TreePolicy | None, slots: int, rows: int, logprobs: bool, text: bool = True) -> Session:
        return Session(
            self.engine, policy, slots, rows,
            tokenizer=self.tokenizer, stop_ids=self.pair.stop_ids, logprobs=logprobs, text=text,
        )  # fmt: skip

    def _trees(self) -> list[TreeSpec]:
        """What the policy may choose from."""
        if not self.pair.draft.any_tree:
            return [self.pair.draft.read_tree()]
        if self.config.num_draft_tokens != "auto":
            return [self.config.tree()]
        return [self.config.tree(nodes) for nodes in tree_sizes(self.config.nodes)]

    def _check_ids(self, input_ids: Tensor) -> None:
        check_prompt(input_ids, self.pair.view.vocab_size)

    def _pad_id(self) -> int:
        known = (self.pair.view.pad_token_id, getattr(self.tokenizer, "pad_token_id", None))
        return next((token for token in known if token is not None), min(self.pair.stop_ids, default=0))


@dataclass(frozen=True)
class _Call:
    """What one prompt asks for."""

    prompt: Tensor
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] | None
    stop_strings: tuple[str, ...]

    def submit(self, session: Session) -> None:
        session.submit(
            self.prompt, self.max_new_tokens, self.sampling, stop_ids=self.stop_ids, stop_strings=self.stop_strings
        )


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value for every prompt: a list or tuple as it is, anything else repeated. ValueError for a wrong length."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: one value or {count} (one for each prompt) expected, got {len(value)}")
    return list(value)


def _facts(info: StepInfo) -> tuple[int, int, int, int, float]:
    return info.step, info.nodes, info.running, info.waiting, info.seconds * 1e3
