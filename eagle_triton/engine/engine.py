"""The engine of one model: its sequences, states and steps, and whether the model has changed since it was read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.long_prompts import LongPrompts
from eagle_triton.engine.memory.pages import PAGE_ROWS, PagePool, check_cache_tokens
from eagle_triton.engine.model import one_launch
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prefill import Prefill
from eagle_triton.engine.state import DecodeState, Sequences, capacity_bucket, table_capacity
from eagle_triton.engine.step import Mode
from eagle_triton.engine.step_cache import StepCache
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import TARGET_MATCH, Verification
from eagle_triton.runtime.fallback import KernelError
from eagle_triton.runtime.launch import StreamOrder

log = logging.getLogger(__name__)

KERNEL_REMEDY = "install versions that this package is tested with (docs/support.md), or update the driver"

_AGAIN = "keys and values of earlier prompts are computed again, because a module may have changed"
_BUSY = "another generation is running on this model; finish or close it first (docs/limits.md#threads)"


@dataclass
class Engine:
    """Decodes with one model: holds references to its parts, and what is made for each shape.

    `Sequences` are slots with the caches of their tokens. A `DecodeState` has the tensors of a step that decodes such
    sequences with trees of one shape, and `steps` the launches of that step.

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

    `notes` says what fell back and why. One batch (scheduler/batch.py) runs at a time; a second raises RuntimeError.
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
        self.number = 0  # among the engines of its ranks
        self.device = self.view.device
        if self.view.ranks is not None:
            self._prepare_ranks()
        check_cache_tokens(self.cache_tokens)
        if not self.strict:
            self.ops.on_kernel_error = self._note_kernel_error
        self._lock = threading.Lock()
        self._streams = StreamOrder() if self.view.ranks is None else self.view.ranks.streams
        self.steps = StepCache(self)
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
        self._prefills: dict[Sequences, Prefill] = {}
        self.steps.clear()
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
            self.steps.forget_graphs()
            self.pool.forget()
        weights, before = self.watch.versions(), self._weights
        each_time = self.watch.runs_each_time()
        self.steps.launch_each_time(each_time)
        hidden = each_time or self.watch.unknown_code()
        if hidden is not None and self.prefixes:
            self.notes["prefixes"] = f"{_AGAIN}: {hidden}"
        elif self.notes.get("prefixes", "").startswith(f"{_AGAIN}: "):
            del self.notes["prefixes"]
        if weights is None or weights != before or hidden is not None:
            self._weights = weights
            self.pool.forget()
        return before is not None and weights != before

    def _check_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError("torch.autocast is on, and the engine ignores it: turn it off, or cast the model")

    def _cache_moved(self) -> None:
        self.steps.forget_graphs()
        if self.pool.limit is None and self.device.type == "cuda":
            self.notes["cache"] = "moves when it grows, and then captures graphs again: memory cannot be mapped here"

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
        self.steps.forget(whole)
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
                self.ops, self.view, sequences, packed, share, self.steps.graph_on_repeat, self._long_prompts
            )
        return self._prefills[sequences]

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
