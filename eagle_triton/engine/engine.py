"""The engine of one model. It makes each state and each step once, and reuses them."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from eagle_triton.engine import skipped_features
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.graph import LaunchGraph, StepGraph, median_milliseconds, takes_captures
from eagle_triton.engine.long_prompts import LongPrompts
from eagle_triton.engine.memory.pages import PAGE_ROWS, PagePool, check_cache_tokens
from eagle_triton.engine.model import one_launch
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prefill import Prefill
from eagle_triton.engine.state import DecodeState, Sequences, capacity_bucket, table_capacity
from eagle_triton.engine.step import (
    Mode,
    TreeOutputs,
    VerifiedTree,
    allocate,
    decode_step,
    draft_tree,
    forward_tree,
    verify_tree,
)
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import TARGET_MATCH, Verification
from eagle_triton.runtime.fallback import KernelError
from eagle_triton.runtime.launch import StreamOrder

if TYPE_CHECKING:
    from eagle_triton.engine.megakernel_step import MegakernelStep

log = logging.getLogger(__name__)

KERNEL_REMEDY = "install versions that this package is tested with (docs/support.md), or update the driver"

CAPTURES = 3  # failed captures after which a step stays without a graph

_AGAIN = "keys and values of earlier prompts are computed again, because a module may have changed"
_BUSY = "another generation is running on this model; finish or close it first (docs/limits.md#threads)"


class MegakernelError(RuntimeError):
    """A grid barrier of the megakernel waited too long, because a program did not arrive."""


@dataclass(frozen=True)
class SplitStep:
    """A step with grammars in three parts. While the first runs on the device, the host writes the masks for the
    second. While the third drafts, the host reads what the second committed.

    draft_forced: launched before the first part where a grammar forces tokens, see Tree.draft_forced; None: nothing is
    drafted.
    """

    forward: Callable[[], None]
    verify: Callable[[], None]
    draft: Callable[[], None]
    draft_forced: Callable[[], None] | None = None

    @property
    def parts(self) -> tuple[Callable[[], None], ...]:
        """The three parts, in order."""
        return self.forward, self.verify, self.draft

    def __call__(self) -> None:
        """Run all parts, with the masks as they are."""
        for part in self.parts:
            part()


@dataclass
class Engine:
    """Decodes with one model. Holds references to the model's parts, and the states and graphs of the shapes used.

    cuda_graph: launch each step as one CUDA graph (on a GPU only).
    megakernel: run everything after the target forward in one launch, if the model allows it. None: do what was
    measured faster; on a GPU that is not in megakernel_step.FASTER, measure first.
    strict: raise if a step or a prompt's forward cannot be captured, instead of launching its kernels one by one.
    watch: finds changes of the models since they were read. verification: the default for batches.
    pack_prompts: read prompts in pieces of fixed sizes, several in a forward. None: do so on a GPU. Layers without
    support for pieces read prompts one by one.
    cache_tokens: allocate memory for this many tokens of all sequences at once. None: memory grows as needed.
    prefixes: keep the pages of prompts and their outputs for requests with the same beginning.
    long_prompts: read one long prompt with `prompt_attention`, without a graph. None: if cuDNN supports it.
    one_launch: run the layers of one row in one launch if that is faster: the target's layers in plain steps of a batch
    with one slot, and a draft model's layers in its chain.

    `notes` says what fell back and why. One batch (batch.py) runs at a time; a second one raises RuntimeError.
    """

    view: ModelView
    draft: Draft | None
    ops: Operations
    cuda_graph: bool = False
    megakernel: bool | None = False
    strict: bool = False
    watch: ModelWatch | None = None
    verification: Verification = TARGET_MATCH
    pack_prompts: bool | None = None
    cache_tokens: int | None = None
    prefixes: bool = True
    long_prompts: bool | None = None
    one_launch: bool = True

    def __post_init__(self) -> None:
        self.ops.one_launch = self.one_launch and self.ops.kernels
        self.accept_lengths: list[int] = []  # for each step of the last generation's last sequence
        self.notes: dict[str, str] = {}
        self.launched = 0  # steps so far
        self._each_time: str | None = None  # why launches are not captured
        self.number = 0  # among the engines of its ranks
        self.device = self.view.device
        if self.view.ranks is not None:
            self._prepare_ranks()
        check_cache_tokens(self.cache_tokens)
        if not self.strict:
            self.ops.on_kernel_error = self._note_kernel_error
        self._lock = threading.Lock()
        self._streams = StreamOrder() if self.view.ranks is None else self.view.ranks.streams
        self.clear()

    def _note_kernel_error(self, operation: str, error: KernelError) -> None:
        """Log once that a slower fallback replaces a kernel, because the kernel does not compile."""
        path = f"kernels of {operation}"
        if self.notes.get(path) != str(error):
            log.warning("%s runs a slower fallback of its kernel: %s; %s", operation, error, KERNEL_REMEDY)
        self.notes[path] = f"a slower fallback runs: {error}"

    def _prepare_ranks(self) -> None:
        """Turn off options that depend on a measurement or on free memory, because ranks could decide differently. On
        GPUs, let kernels exchange sums if they can. Raises ValueError if megakernel or long_prompts was set to True."""
        assert self.view.ranks is not None
        for option in ("megakernel", "long_prompts"):
            if getattr(self, option):
                raise ValueError(f"{option}=True is not supported over several ranks (tp_plan): leave it out")
        self.megakernel = self.long_prompts = self.ops.one_launch = False
        ranks = self.view.ranks
        ranks.engines += 1
        self.number = ranks.engines
        self.notes["ranks"] = (
            f"{ranks.size} ranks share the target; the megakernel is not used, and long prompts are read like others"
        )
        if self.ops.kernels and self.device.type == "cuda":
            ranks.open_memory(self.view.hidden_size, self.device)
            ranks.prove_memory(self.ops, self.view.norm.weight)
            self.notes["ranks"] += f"; {ranks.note}"

    def clear(self) -> None:
        """Drop all states, graphs and sequences."""
        pages = None if self.cache_tokens is None else -(-self.cache_tokens // PAGE_ROWS)
        ranks = {} if self.view.ranks is None else {"all_gather_object": self.view.ranks.all_gather_object}
        self.pool = PagePool(pages, self._cache_moved, **ranks)
        self._weights: Any = None  # the weights' versions when pages were last kept
        self._sequences: list[Sequences] = []  # none is larger than another in both slots and capacity
        self._states: dict[tuple[Sequences, TreeSpec], DecodeState] = {}
        # by state and mode; mode None: the draft's catching up
        self._steps: dict[tuple[DecodeState, Mode | None], Callable[[], None]] = {}
        self._compiled: set[tuple[DecodeState, Mode | None]] = set()  # keys that were compiled ahead
        self._prefills: dict[Sequences, Prefill] = {}
        self._launched: set[tuple[Any, ...]] = set()  # keys of prompts' launches that have run once
        self._prompt_launches: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._failures: Counter[tuple[Any, ...]] = Counter()  # how many captures failed, by key
        self._called_state = [] if self.watch is None else self.watch.called_state()
        self._long_prompts: LongPrompts | None = None
        self.notes.pop("long_prompts", None)  # long prompts are tried again

    def beside(self, draft: Draft, watch: ModelWatch | None, view: ModelView | None = None) -> Engine:
        """An engine with the same target and another draft. Only one of the two decodes at a time, also on the device.
        Both share counters, notes and the target's OneLaunch. view: with other features; None: the engine's."""
        hook = self.ops.on_kernel_error
        other = replace(self, view=view or self.view, draft=draft, watch=watch, one_launch=self.ops.one_launch)
        other._lock, other._streams, other.notes = self._lock, self._streams, self.notes
        self.ops.on_kernel_error = hook
        return other

    def acquire(self) -> Callable[[], None]:
        """Claim the engine. Returns what gives it back, to be called once. Raises RuntimeError if it is claimed."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(_BUSY)
        return self._lock.release

    def check_free(self) -> None:
        """Raise RuntimeError if the engine is claimed. Call this before ranks exchange anything."""
        if self._lock.locked():
            raise RuntimeError(_BUSY)

    def check_launches(self) -> bool:
        """Do the part of `check_model` that must come before prompts are read. Returns whether `check_model` must still
        be called, perhaps while prompts are read. It was called already if weights have moved from where graphs read
        them, if modules are called, which may have new hooks, or if not all changes in place are counted."""
        self._check_autocast()
        if self.watch is None:
            return False
        if self._called_state or self._weights is None or self.watch.moved():
            self.check_model()
            return False
        return True

    def check_model(self) -> bool:
        """Raise RuntimeError if a part of the model was replaced, moved, cast or hooked since it was read, or if
        autocast is on. Returns whether pages found since the last check may come from other weights."""
        self._check_autocast()
        if self.watch is None:
            return False
        if change := self.watch.change():
            raise RuntimeError(
                f"{change}, after the engine had read the model: undo this, or restore the model and optimise it "
                "again (EAGLEInference: make a new one; docs/limits.md#weights)"
            )
        called_state = self.watch.called_state()
        if called_state != self._called_state:  # graphs use the former addresses
            self._called_state = called_state
            self._forget_graphs()
            self.pool.forget()
        weights, before = self.watch.versions(), self._weights
        each_time = self.watch.runs_each_time()
        self._launch_each_time(each_time)
        hidden = each_time or self.watch.unknown_code()
        if hidden is not None and self.prefixes:
            self.notes["prefixes"] = f"{_AGAIN}: {hidden}"
        elif self.notes.get("prefixes", "").startswith(f"{_AGAIN}: "):
            del self.notes["prefixes"]
        if weights is None or weights != before or hidden is not None:
            self._weights = weights
            self.pool.forget()
        return before is not None and weights != before

    def _launch_each_time(self, reason: str | None) -> None:
        """Use no graphs for this reason, or use them again. Raises RuntimeError if `strict` forbids that."""
        if reason == self._each_time:
            return
        if self.cuda_graph and reason is not None:
            if self.strict:
                raise RuntimeError(f"{reason}, which a CUDA graph would not run each time, as strict=True demands one")
            log.warning("steps without a CUDA graph, several times slower: %s", reason)
            self.notes["cuda_graph"] = f"not used, which is several times slower: {reason}"
        elif self._each_time is not None:
            self.notes.pop("cuda_graph", None)
        self._each_time = reason
        self._forget_graphs()

    @property
    def _captures(self) -> bool:
        """Whether launches are captured in graphs."""
        return self.cuda_graph and self._each_time is None

    def _check_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError("torch.autocast is on, and the engine ignores it: turn it off, or cast the model")

    def _cache_moved(self) -> None:
        self._forget_graphs()
        if self.pool.limit is None and self.device.type == "cuda":
            self.notes["cache"] = "moves when it grows, and then captures graphs again: memory cannot be mapped here"

    def _forget_graphs(self) -> None:
        self._steps, self._compiled = {}, set()
        self._launched, self._prompt_launches = set(), {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Decode inside the block: without gradients, and with tensors that outlive a caller's inference mode.

        Raises RuntimeError if another thread decodes on the same ranks.
        """
        with torch.inference_mode(False), torch.no_grad(), self._claim_ranks(), self.current():
            yield

    @contextmanager
    def _claim_ranks(self) -> Iterator[None]:
        """Let only this thread exchange data with other ranks, so that all ranks keep one order."""
        if self.view.ranks is None:
            yield
            return
        if not self.view.ranks.decoding.acquire(blocking=False):
            raise RuntimeError("another thread decodes with a model of these ranks: use one thread for all of them")
        try:
            yield
        finally:
            self.view.ranks.decoding.release()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside the block, launch on the model's device after all earlier launches on any stream, also by the engines
        beside this one and by all engines of the same ranks."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device):
            self._streams.follow(torch.cuda.current_stream())
            yield

    def sequences(self, slots: int, rows: int) -> Sequences:
        """Sequences with room for `rows` rows in each of `slots` slots, new or part of existing ones. Their contents
        are not cleared."""
        fitting = [kept for kept in self._sequences if kept.slots >= slots and kept.capacity >= rows]
        if not fitting:
            by_row = self.draft is not None and self.draft.learns  # its tables are as large as the capacity
            cheap = self.ops.kernels and not by_row
            capacity = table_capacity(rows, slots) if cheap else capacity_bucket(rows)
            for smaller in [kept for kept in self._sequences if kept.slots <= slots and kept.capacity <= capacity]:
                self._drop(smaller)  # a part of the new ones takes their place
            fitting = [Sequences(self.view, self.draft, slots, capacity, self.pool)]
            self._sequences += fitting
        return min(fitting, key=lambda kept: (kept.capacity, kept.slots)).first(slots)

    def release_pages(self) -> None:
        """Take back the pages of all sequences. Pages that prompts may find are kept."""
        for whole in self._sequences:
            whole.pages.clear()
        self.pool.reclaim()

    def _drop(self, whole: Sequences) -> None:
        """Forget sequences, their parts and everything made for them, and take their pages back."""
        whole.pages.clear()
        self.forget_steps(whole)
        gone = whole.family
        self._states = {key: state for key, state in self._states.items() if key[0] not in gone}
        self._prefills = {key: prefill for key, prefill in self._prefills.items() if key not in gone}
        self._sequences.remove(whole)

    def state(self, sequences: Sequences, spec: TreeSpec) -> DecodeState:
        """The state to decode `sequences` with trees of one shape."""
        if (sequences, spec) not in self._states:
            self._states[sequences, spec] = DecodeState(sequences, self.draft, spec)
        return self._states[sequences, spec]

    def prefill(self, sequences: Sequences) -> Prefill:
        """The reader of prompts into `sequences`."""
        if sequences not in self._prefills:
            packed = self.device.type == "cuda" if self.pack_prompts is None else self.pack_prompts
            packed = packed and self.view.reads_pieces
            share = self.prefixes and self.view.by_token and (self.draft is None or self.draft.by_token)
            if self.prefixes and not share:
                self.notes["prefixes"] = "computed again: recurrent layers keep no state inside a prompt"
            if self._long_prompts is None:
                shapes = [layer.mixer.span_shape for layer in self.view.layers]
                draft_shapes = [] if self.draft is None else [mixer.span_shape for mixer in self.draft.mixers]
                self._long_prompts = LongPrompts(
                    self.ops, shapes, draft_shapes, self.view.dtype, self.device, self.notes, self.long_prompts
                )
            self._prefills[sequences] = Prefill(
                self.ops, self.view, sequences, packed, share, self._graph_on_repeat, self._long_prompts
            )
        return self._prefills[sequences]

    def _graph_on_repeat(self, key: tuple[Any, ...], launches: Callable[[], None]) -> Callable[[], None]:
        """Run the launches directly the first time a key is seen, then as a captured graph where graphs are on.

        A key begins with the sequences or with a state of them.
        """
        if not (self._captures and self.ops.kernels and self.device.type == "cuda"):
            return launches
        if key in self._prompt_launches:
            return self._prompt_launches[key]
        if key not in self._launched:

            def launch() -> None:
                launches()
                self._launched.add(key)

            return launch
        made = self._captured(
            key,
            lambda: LaunchGraph(launches, self.ops, self._pool(), self.view.ranks),
            launches,
            "prompt_graph",
            "reading prompts",
        )
        if self._is_final(key):
            self._prompt_launches[key] = made
        return made

    def step(self, state: DecodeState, mode: Mode) -> Callable[[], None]:
        """The decode step for a state: a graph, captured on the first call. A step with a judge on the host is not
        captured; one with grammars is a SplitStep, of several graphs."""
        if mode.judge is not None:
            self.compile_ahead(state, mode)
            return functools.partial(decode_step, self.ops, self.view, self.draft, state, mode)
        key = (state, mode)
        if key not in self._steps:
            self.compile_ahead(state, mode)
            megakernel = None if mode.masked else self._megakernel_step(state)
            made: Callable[[], None]
            if mode.masked:
                made = self._split_step(state, mode)
            elif megakernel is not None and self.megakernel is None:
                made = self._faster_of(state, mode, megakernel)
            else:
                made = self._launchable(state, mode, megakernel)
            if not self._is_final(key):
                return made
            self._steps[key] = made
        return self._steps[key]

    def has_step(self, state: DecodeState) -> bool:
        """Whether a step for this state has been captured in at least one mode, or needs no capture."""
        return not self._captures or any(known is state for known, _ in self._steps)

    def compile_ahead(self, state: DecodeState, mode: Mode, before: Callable[[], None] | None = None) -> None:
        """Compile in parallel everything that `before` and then a step for this state will launch, once for each mode.

        The state stays as it is, except for what `before` writes. The model's own modules (a quantised projection)
        run once more, on zeros. If compiling ahead fails, each kernel is compiled at its first launch, and the report
        says so.
        """

        mode = mode._replace(judge=None)  # there is no tree to judge yet
        allocate(state, mode)

        def launch_all() -> None:
            if before is not None:
                before()
            megakernel = None if mode.masked else self._megakernel_step(state)
            both = megakernel is not None and self.megakernel is None  # both are measured
            for which in [megakernel, None] if both else [megakernel]:
                try:
                    decode_step(self.ops, self.view, self.draft, state, mode, which)
                except KernelError:  # without the megakernel the step still runs
                    if not both or which is None:
                        raise

        self._compile_ahead(state, mode, launch_all)

    def catch_up(self, state: DecodeState) -> Callable[[], None]:
        """The launches with which the draft takes in up to skipped_features.ROWS tokens of each sequence that plain
        steps committed. A graph, captured on the first call."""
        key = (state, None)
        if key not in self._steps:
            assert self.draft is not None, "without a draft nothing catches up"
            rows = skipped_features.ROWS  # a fixed number, for the graph; some may hold no token
            launches = functools.partial(skipped_features.catch_up, self.ops, self.draft, state.sequences, rows)
            self._compile_ahead(state, None, launches)
            self._steps[key] = self._as_graph(key, launches, state, "catch_up_graph", "catching up after plain steps")
        return self._steps[key]

    def _compile_ahead(self, state: DecodeState, mode: Mode | None, launch_all: Callable[[], None]) -> None:
        """Compile in parallel what `launch_all` launches, once for a state and a mode; mode None: catching up."""
        if (state, mode) in self._compiled or not self.ops.kernels:
            return
        from eagle_triton.runtime.compile_ahead import can_compile_ahead, compiled_ahead  # needs Triton

        if not can_compile_ahead(self.device):
            return
        calls = Counter(self.ops.calls)
        try:
            while True:
                with state.unchanged(), compiled_ahead() as failed:
                    launch_all()
                if not failed:
                    break  # otherwise try again, with fallbacks of kernels that do not compile here
        except Exception as error:  # the launch or the step itself will raise it again
            if self.view.ranks is not None:  # the other ranks are in the middle of an exchange
                raise
            if self.strict and isinstance(error, KernelError):
                raise
            log.warning("kernels are compiled one after another: compiling them ahead failed: %s", error)
            self.notes["compile_ahead"] = f"kernels are compiled one after another: {error}"
        finally:
            self.ops.calls.clear()  # calls while compiling do not count
            self.ops.calls.update(calls)
        self._compiled.add((state, mode))

    def disable_megakernel(self) -> MegakernelError:
        """Stop using the megakernel after a failed step. Returns the error to raise."""
        self.megakernel, self._steps, self._compiled = False, {}, set()
        self.notes["megakernel"] = "given up: a program did not arrive at a grid barrier"
        return MegakernelError(
            "a program of the megakernel did not arrive at a grid barrier; this generation is lost, the next ones run "
            "without the megakernel"
        )

    def _split_step(self, state: DecodeState, mode: Mode) -> SplitStep:
        """A step with grammars: a graph of each part if graphs are on; each reads what the earlier ones wrote. The
        megakernel is not used."""
        if self.megakernel:
            self.notes["grammar"] = "steps with a grammar run without the megakernel"
        outputs = list[TreeOutputs]()
        verified = list[VerifiedTree]()

        def forward() -> None:
            outputs[:] = [forward_tree(self.ops, self.view, self.draft, state, mode)]

        def verify() -> None:
            verified[:] = [verify_tree(self.ops, state, mode, outputs[0])]

        def draft() -> None:
            draft_tree(self.ops, self.draft, state, mode, outputs[0], verified[0])

        def draft_forced() -> None:
            assert state.masks is not None, "call add_masks before a step with a grammar"
            state.tree.draft_forced(state.spec, state.masks.forced)

        launches, made = [forward, verify, draft], list[Callable[[], None]]()
        if state.spec.drafts:
            launches.append(draft_forced)
        for launch, what in zip(launches, ("forward", "verification", "drafting", "forced tokens"), strict=False):
            if made:
                with state.unchanged():
                    made[-1]()  # so that the next part's warm-up reads valid tokens and numbers
            part = self._as_graph((state, mode), launch, state, "cuda_graph", f"the {what} of a step with a grammar")
            if not isinstance(part, LaunchGraph):
                break  # a later graph needs the outputs at fixed addresses
            made.append(part)
        return SplitStep(*made, *launches[len(made) :])

    def _launchable(self, state: DecodeState, mode: Mode, megakernel: MegakernelStep | None) -> Callable[[], None]:
        launches = functools.partial(decode_step, self.ops, self.view, self.draft, state, mode, megakernel)
        return self._as_graph((state, mode), launches, state, "cuda_graph", "a step")

    def _as_graph(
        self, key: tuple[Any, ...], launches: Callable[[], None], state: DecodeState, path: str, what: str
    ) -> Callable[[], None]:
        """Launches over a state, as a graph if graphs are on and the capture works. If it fails, a note under `path`
        says why."""
        if not (self._captures and state.tokens.is_cuda):
            return launches
        capture = functools.partial(StepGraph, launches, state, self.ops, ranks=self.view.ranks, what=what)
        return self._captured(key, lambda: capture(pool=self._pool()), launches, path, what)

    def _captured(
        self, key: tuple[Any, ...], capture: Callable[[], LaunchGraph], eager: Callable[[], None], path: str, what: str
    ) -> Callable[[], None]:
        """The graph; `eager` and a note under `path` if the capture fails. See `_is_final`."""
        try:
            graph = capture()
            if self._failures.pop(key, 0):
                self.notes.pop(path, None)
            return graph
        except RuntimeError as error:  # an operation cannot be captured, or there is no memory for it
            if self.strict or self.view.ranks is not None:  # the other ranks may have captured it
                raise
            reason = "there was no memory for it" if isinstance(error, torch.OutOfMemoryError) else str(error)
            self._failures[key] += 1
            if path not in self.notes:
                log.warning("%s without a CUDA graph, several times slower: %s", what, reason)
            self.notes[path] = f"not used, which is several times slower; capturing {what} failed: {reason}"
            return eager

    def _is_final(self, key: tuple[Any, ...]) -> bool:
        """Whether the result for a key is final. A failed capture is tried again a few times."""
        return self._failures[key] in (0, CAPTURES)

    def _pool(self) -> Any:
        """The memory pool that all graphs share, freed with the last of them. A new one after a failed capture."""
        steps: list[Callable[[], None]] = []
        for step in self._steps.values():
            steps += step.parts if isinstance(step, SplitStep) else [step]
        graphs = (*steps, *self._prompt_launches.values())
        pools = (graph.graph.pool() for graph in graphs if isinstance(graph, LaunchGraph))
        return next(filter(takes_captures, pools), None) or torch.cuda.graph_pool_handle()

    def note_one_launch(self, mode: Mode) -> None:
        """Note whether plain steps in this mode run the target's layers in one launch, for a batch with one slot. With
        megakernel=True, also note why the target has no such launch."""
        if not self.ops.one_launch:  # nothing to note, or noted when it was given up
            return
        launched, reason = self.view.one_launch, self.view.reason_against_one_launch
        self.notes.pop("one_launch", None)
        if launched is not None and launched.compiles:
            self.notes["one_launch"] = (
                "used: the target's layers run in one launch in each step"
                if mode.one_launch
                else f"not used: separate kernels are faster for a request of more than {one_launch.MAX_ROWS} tokens"
            )
        elif self.megakernel:
            self.notes["one_launch"] = f"not used: {reason or 'its kernel does not compile here'}"

    def give_up_one_launch(self) -> None:
        """Run separate kernels from now on. A step with the target's layers in one launch gave NaN, which can mean that
        one of its programs waited too long for another."""
        if self.view.one_launch is not None and self.view.one_launch.compiles:
            self.ops.one_launch = False
            self.notes["one_launch"] = (
                "given up: a step gave NaN, perhaps because a program of the launch waited too long for another; "
                "separate kernels run from now on"
            )

    def _megakernel_step(self, state: DecodeState) -> MegakernelStep | None:
        """The megakernel for a state; None if it is turned off or cannot be used."""
        if self.megakernel is False or not self.ops.kernels or not state.spec.drafts:
            return None
        from eagle_triton.engine import megakernel_step  # needs Triton

        if self.megakernel is None:
            if not state.tokens.is_cuda:
                return None
            name = torch.cuda.get_device_name(state.tokens.device)
            if megakernel_step.FASTER.get(name) is False:
                self.notes["megakernel"] = f"not used: measured slower than separate kernels on {name}"
                return None
        reason = megakernel_step.unsupported(self.draft, state)
        if reason is not None:
            self.notes["megakernel"] = f"not used: {reason}"
            return None
        return megakernel_step.MegakernelStep(self.view, self.draft, state)

    def _faster_of(self, state: DecodeState, mode: Mode, megakernel: MegakernelStep) -> Callable[[], None]:
        """The faster step, with or without the megakernel, measured with no active sequence.

        If the megakernel does not compile or launch here, the result is the step without it.
        """
        from triton.errors import TritonError

        without = self._launchable(state, mode, None)
        try:
            with_megakernel = self._launchable(state, mode, megakernel)
            with state.unchanged():
                ours, others = (median_milliseconds(step) for step in (with_megakernel, without))
        except (RuntimeError, TritonError) as error:
            self.notes["megakernel"] = f"not used: it does not run here: {error}"
            self.notes.pop("cuda_graph", None)  # the note was about the trial
            return without
        verb = "used" if ours < others else "not used"
        self.notes["megakernel"] = f"{verb}: measured {ours:.3f} ms a step with it, {others:.3f} ms without"
        return with_megakernel if ours < others else without

    def forget_steps(self, sequences: Sequences) -> None:
        """Drop the graphs of sequences and their family, because their tensors were replaced."""
        gone = sequences.family
        self._steps = {key: step for key, step in self._steps.items() if key[0].sequences not in gone}
        kept = {key for key in self._launched if not {key[0], getattr(key[0], "sequences", None)} & {*gone}}
        self._launched = kept
        self._prompt_launches = {key: launch for key, launch in self._prompt_launches.items() if key in kept}
        self._compiled = {key for key in self._compiled if key[0].sequences not in gone}
