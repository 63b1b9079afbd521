"""The launches of an engine: compiled ahead, captured as graphs, and kept."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagle_triton.engine import skipped_features
from eagle_triton.engine.graph import LaunchGraph, StepGraph, median_milliseconds, takes_captures
from eagle_triton.engine.state import DecodeState, Sequences
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
from eagle_triton.runtime.fallback import KernelError

if TYPE_CHECKING:
    from eagle_triton.engine.engine import Engine
    from eagle_triton.engine.megakernel_step import MegakernelStep

log = logging.getLogger(__name__)

CAPTURES = 3  # failed captures after which a step stays without a graph


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


class StepCache:
    """Makes each step of an engine once: compiles its kernels, captures it as a graph where graphs are on, and keeps
    it. Reading prompts and catching up after plain steps are captured here, too."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._each_time: str | None = None  # why launches are not captured
        self.clear()

    def clear(self) -> None:
        """Drop all launches."""
        self.forget_graphs()
        self._failures: Counter[tuple[Any, ...]] = Counter()  # how many captures failed, by key

    def forget_graphs(self) -> None:
        """Drop all launches, because tensors that they read have moved."""
        # by state and mode; mode None: the draft's catching up
        self._kept: dict[tuple[DecodeState, Mode | None], Callable[[], None]] = {}
        self._compiled: set[tuple[DecodeState, Mode | None]] = set()  # keys that were compiled ahead
        self._launched: set[tuple[Any, ...]] = set()  # keys of prompts' launches that have run once
        self._prompt_launches: dict[tuple[Any, ...], Callable[[], None]] = {}

    def forget(self, sequences: Sequences) -> None:
        """Drop the graphs of sequences and their family, because their tensors were replaced."""
        gone = sequences.family
        self._kept = {key: step for key, step in self._kept.items() if key[0].sequences not in gone}
        kept = {key for key in self._launched if not {key[0], getattr(key[0], "sequences", None)} & {*gone}}
        self._launched = kept
        self._prompt_launches = {key: launch for key, launch in self._prompt_launches.items() if key in kept}
        self._compiled = {key for key in self._compiled if key[0].sequences not in gone}

    def launch_each_time(self, reason: str | None) -> None:
        """Use no graphs for this reason, or use them again. Raises RuntimeError if `strict` forbids that."""
        if reason == self._each_time:
            return
        if self._engine.cuda_graph and reason is not None:
            if self._engine.strict:
                raise RuntimeError(f"{reason}, which a CUDA graph would not run each time, as strict=True demands one")
            log.warning("steps without a CUDA graph, several times slower: %s", reason)
            self._engine.notes["cuda_graph"] = f"not used, which is several times slower: {reason}"
        elif self._each_time is not None:
            self._engine.notes.pop("cuda_graph", None)
        self._each_time = reason
        self.forget_graphs()

    @property
    def _captures(self) -> bool:
        """Whether launches are captured in graphs."""
        return self._engine.cuda_graph and self._each_time is None

    def of(self, state: DecodeState, mode: Mode) -> Callable[[], None]:
        """The decode step for a state: a graph, captured on the first call. A step with a judge on the host is not
        captured; one with grammars is a SplitStep, of several graphs."""
        if mode.judge is not None:
            self.compile_ahead(state, mode)
            return self._launches(state, mode)
        key = (state, mode)
        if key not in self._kept:
            self.compile_ahead(state, mode)
            megakernel = None if mode.masked else self._megakernel_step(state)
            made: Callable[[], None]
            if mode.masked:
                made = self._split_step(state, mode)
            elif megakernel is not None and self._engine.megakernel is None:
                made = self._faster_of(state, mode, megakernel)
            else:
                made = self._launchable(state, mode, megakernel)
            if not self._is_final(key):
                return made
            self._kept[key] = made
        return self._kept[key]

    def has(self, state: DecodeState) -> bool:
        """Whether a step for this state has been captured in at least one mode, or needs no capture."""
        return not self._captures or any(known is state for known, _ in self._kept)

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
            both = megakernel is not None and self._engine.megakernel is None  # both are measured
            for which in [megakernel, None] if both else [megakernel]:
                try:
                    self._launches(state, mode, which)()
                except KernelError:  # without the megakernel the step still runs
                    if not both or which is None:
                        raise

        self._compile_ahead(state, mode, launch_all)

    def catch_up(self, state: DecodeState) -> Callable[[], None]:
        """The launches with which the draft takes in up to skipped_features.ROWS tokens of each sequence that plain
        steps committed. A graph, captured on the first call."""
        key = (state, None)
        if key not in self._kept:
            ops, draft = self._engine.ops, self._engine.draft
            assert draft is not None, "without a draft nothing catches up"
            rows = skipped_features.ROWS  # a fixed number, for the graph; some may hold no token
            launches = functools.partial(skipped_features.catch_up, ops, draft, state.sequences, rows)
            self._compile_ahead(state, None, launches)
            self._kept[key] = self._as_graph(key, launches, state, "catch_up_graph", "catching up after plain steps")
        return self._kept[key]

    def _compile_ahead(self, state: DecodeState, mode: Mode | None, launch_all: Callable[[], None]) -> None:
        """Compile in parallel what `launch_all` launches, once for a state and a mode; mode None: catching up."""
        if (state, mode) in self._compiled or not self._engine.ops.kernels:
            return
        from eagle_triton.runtime.compile_ahead import can_compile_ahead, compiled_ahead  # needs Triton

        if not can_compile_ahead(self._engine.device):
            return
        calls = Counter(self._engine.ops.calls)
        try:
            while True:
                with state.unchanged(), compiled_ahead() as failed:
                    launch_all()
                if not failed:
                    break  # otherwise try again, with fallbacks of kernels that do not compile here
        except Exception as error:  # the launch or the step itself will raise it again
            if self._engine.view.ranks is not None:  # the other ranks are in the middle of an exchange
                raise
            if self._engine.strict and isinstance(error, KernelError):
                raise
            log.warning("kernels are compiled one after another: compiling them ahead failed: %s", error)
            self._engine.notes["compile_ahead"] = f"kernels are compiled one after another: {error}"
        finally:
            self._engine.ops.calls.clear()  # calls while compiling do not count
            self._engine.ops.calls.update(calls)
        self._compiled.add((state, mode))

    def disable_megakernel(self) -> MegakernelError:
        """Stop using the megakernel after a failed step. Returns the error to raise."""
        self._engine.megakernel, self._kept, self._compiled = False, {}, set()
        self._engine.notes["megakernel"] = "given up: a program did not arrive at a grid barrier"
        return MegakernelError(
            "a program of the megakernel did not arrive at a grid barrier; this generation is lost, the next ones run "
            "without the megakernel"
        )

    def _split_step(self, state: DecodeState, mode: Mode) -> SplitStep:
        """A step with grammars: a graph of each part if graphs are on; each reads what the earlier ones wrote. The
        megakernel is not used."""
        if self._engine.megakernel:
            self._engine.notes["grammar"] = "steps with a grammar run without the megakernel"
        outputs = list[TreeOutputs]()
        verified = list[VerifiedTree]()

        def forward() -> None:
            outputs[:] = [forward_tree(self._engine.ops, self._engine.view, self._engine.draft, state, mode)]

        def verify() -> None:
            verified[:] = [verify_tree(self._engine.ops, state, mode, outputs[0])]

        def draft() -> None:
            draft_tree(self._engine.ops, self._engine.draft, state, mode, outputs[0], verified[0])

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
        launches = self._launches(state, mode, megakernel)
        return self._as_graph((state, mode), launches, state, "cuda_graph", "a step")

    def _launches(self, state: DecodeState, mode: Mode, megakernel: MegakernelStep | None = None) -> Callable[[], None]:
        """Launches a step, kernel by kernel."""
        engine = self._engine
        return functools.partial(decode_step, engine.ops, engine.view, engine.draft, state, mode, megakernel)

    def _as_graph(
        self, key: tuple[Any, ...], launches: Callable[[], None], state: DecodeState, path: str, what: str
    ) -> Callable[[], None]:
        """Launches over a state, as a graph if graphs are on and the capture works. If it fails, a note under `path`
        says why."""
        if not (self._captures and state.tokens.is_cuda):
            return launches
        ops, ranks = self._engine.ops, self._engine.view.ranks
        capture = functools.partial(StepGraph, launches, state, ops, ranks=ranks, what=what)
        return self._captured(key, lambda: capture(pool=self._pool()), launches, path, what)

    def _captured(
        self, key: tuple[Any, ...], capture: Callable[[], LaunchGraph], eager: Callable[[], None], path: str, what: str
    ) -> Callable[[], None]:
        """The graph; `eager` and a note under `path` if the capture fails. See `_is_final`."""
        try:
            graph = capture()
            if self._failures.pop(key, 0):
                self._engine.notes.pop(path, None)
            return graph
        except RuntimeError as error:  # an operation cannot be captured, or there is no memory for it
            if self._engine.strict or self._engine.view.ranks is not None:  # the other ranks may have captured it
                raise
            reason = "there was no memory for it" if isinstance(error, torch.OutOfMemoryError) else str(error)
            self._failures[key] += 1
            if path not in self._engine.notes:
                log.warning("%s without a CUDA graph, several times slower: %s", what, reason)
            self._engine.notes[path] = f"not used, which is several times slower; capturing {what} failed: {reason}"
            return eager

    def _is_final(self, key: tuple[Any, ...]) -> bool:
        """Whether the result for a key is final. A failed capture is tried again a few times."""
        return self._failures[key] in (0, CAPTURES)

    def _pool(self) -> Any:
        """The memory pool that all graphs share, freed with the last of them. A new one after a failed capture."""
        steps: list[Callable[[], None]] = []
        for step in self._kept.values():
            steps += step.parts if isinstance(step, SplitStep) else [step]
        graphs = (*steps, *self._prompt_launches.values())
        pools = (graph.graph.pool() for graph in graphs if isinstance(graph, LaunchGraph))
        return next(filter(takes_captures, pools), None) or torch.cuda.graph_pool_handle()

    def graph_on_repeat(self, key: tuple[Any, ...], launches: Callable[[], None]) -> Callable[[], None]:
        """Run the launches directly the first time a key is seen, then as a captured graph where graphs are on.

        A key begins with the sequences or with a state of them.
        """
        if not (self._captures and self._engine.ops.kernels and self._engine.device.type == "cuda"):
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
            lambda: LaunchGraph(launches, self._engine.ops, self._pool(), self._engine.view.ranks),
            launches,
            "prompt_graph",
            "reading prompts",
        )
        if self._is_final(key):
            self._prompt_launches[key] = made
        return made

    def _megakernel_step(self, state: DecodeState) -> MegakernelStep | None:
        """The megakernel for a state; None if it is turned off or cannot be used."""
        if self._engine.megakernel is False or not self._engine.ops.kernels or not state.spec.drafts:
            return None
        from eagle_triton.engine import megakernel_step  # needs Triton

        if self._engine.megakernel is None:
            if not state.tokens.is_cuda:
                return None
            name = torch.cuda.get_device_name(state.tokens.device)
            if megakernel_step.FASTER.get(name) is False:
                self._engine.notes["megakernel"] = f"not used: measured slower than separate kernels on {name}"
                return None
        reason = megakernel_step.unsupported(self._engine.draft, state)
        if reason is not None:
            self._engine.notes["megakernel"] = f"not used: {reason}"
            return None
        return megakernel_step.MegakernelStep(self._engine.view, self._engine.draft, state)

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
            self._engine.notes["megakernel"] = f"not used: it does not run here: {error}"
            self._engine.notes.pop("cuda_graph", None)  # the note was about the trial
            return without
        verb = "used" if ours < others else "not used"
        self._engine.notes["megakernel"] = f"{verb}: measured {ours:.3f} ms a step with it, {others:.3f} ms without"
        return with_megakernel if ours < others else without
