"""Replace attributes of live objects, and restore the same original objects. Independent of EAGLE.

A patch is data: a tuple of patch points. All are checked before the first is set. If setting one fails, the others are
restored. Only instance attributes change, so other objects of the class are not affected.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

log = logging.getLogger(__name__)

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<no attribute>"})()
"""Stands for the original of a patch point where there was no attribute before."""

MARKER = "_eagle_triton_originals"  # set on a patched object, so that a second patch is refused

STATE = "__getstate__"  # `copy` and `pickle` call it

MAX_REASONS = 50  # counted and logged for each patch point: a reason may name a shape, and differ in each call
OTHER_REASONS = "further reasons, which are not told apart"


class PatchError(RuntimeError):
    """A patch could not be applied or restored. The call that raised it changed nothing."""


@dataclass(frozen=True)
class PatchPoint:
    """One attribute to replace.

    replacement: a callable (its calls are counted), or a constant, which is set as it is.
    path: the dotted path that users know. feature: the replacement's benefit, in a few words.
    adds: the attribute does not exist yet (restore removes it).
    harmless: names of arguments that change nothing here; these are dropped before the replacement is called.
    remedy: the advice in the warning about a call that runs the original.

    If an argument of a call is neither harmless nor in the replacement's signature, the original runs if it takes the
    argument; otherwise a TypeError names it. A replacement with `**kwargs` takes all names and must check them itself.
    """

    owner: Any
    attribute: str
    replacement: Any
    path: str
    feature: str
    adds: bool = False
    harmless: frozenset[str] = frozenset()
    remedy: str = "docs/limits.md#what-falls-back-and-says-so"


class Fallback(Exception):
    """A replacement raises this, before it changes anything, so that the original is called instead.

    reasons: everything in the call that the replacement does not support, each in a few words. `str()` joins them.
    """

    def __init__(self, *reasons: str):
        super().__init__(*reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class PatchPointReport:
    """One line of `Originals.report()`.

    status: "patched" or "restored" for a patch point (`calls` of its replacement, `fallbacks` to the original, the last
    `reason`, and all `reasons` with their counts, the most frequent first), "left" for a part that is not patched
    (`reason` says why), "counted" for a counter of the patch (`calls`).
    """

    path: str
    feature: str
    status: str
    calls: int
    fallbacks: int
    reason: str
    reasons: Mapping[str, int] = field(default_factory=dict)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "SeamReport":  # a former name
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.{name} is called PatchPointReport now", DeprecationWarning, stacklevel=2)
        return PatchPointReport


@dataclass
class _Applied:
    patch_point: PatchPoint
    own: Any  # the owner's former instance attribute, or MISSING
    original: Any  # the former result of an attribute access, or MISSING
    state: Any  # the owner's former __getstate__ of its own, or MISSING
    installed: Any = None
    restored: bool = False
    calls: int = 0
    fallbacks: int = 0
    reason: str = ""
    reasons: Counter[str] = field(default_factory=Counter)


class Report(list[PatchPointReport]):
    """The result of `Originals.report()`: a `PatchPointReport` for each line. `str()` makes a table."""

    def __init__(self, title: str, lines: Iterable[PatchPointReport]):
        super().__init__(lines)
        self.title = title

    def __str__(self) -> str:
        left = [f"{line.path}: {line.reason}" for line in self if line.status == "left"]
        counted = [f"{line.path} {line.calls}" for line in self if line.status == "counted" and line.calls]
        patch_points = [text for paths, patch_point in self.patch_points() for text in _lines(paths, patch_point)]
        operations = [f"operations: {', '.join(counted)}"] if counted else []
        return "\n  ".join([self.title, *patch_points, *left, *operations])

    __repr__ = __str__

    def patch_points(self) -> list[tuple[str, PatchPointReport]]:
        """The patch points by path. Those of several layers with equal counts are one entry, with `*` for the layer."""
        alike: dict[Any, list[PatchPointReport]] = {}
        for line in self:
            if line.status not in ("left", "counted"):
                pattern = re.sub(r"\.\d+\.", ".*.", line.path)
                key = (pattern, line.status, line.calls, line.fallbacks, tuple(line.reasons.items()))
                alike.setdefault(key, []).append(line)
        return [
            (lines[0].path if len(lines) == 1 else f"{pattern} ({len(lines)} of them)", lines[0])
            for (pattern, *_), lines in alike.items()
        ]


def _lines(paths: str, patch_point: PatchPointReport) -> list[str]:
    first = f"{paths}: {_times(patch_point)}" + (f" ({patch_point.feature})" if patch_point.feature else "")
    return [first, *(f"  {count} by the original: {reason}" for reason, count in patch_point.reasons.items())]


def _times(patch_point: PatchPointReport) -> str:
    return f"calls {patch_point.calls}, fallbacks {patch_point.fallbacks}"


class Facts(NamedTuple):
    """What a report shows beside the patch points. summary: in its title, may be empty. skipped: parts that are not
    patched, and why. counters: counts by name."""

    summary: str
    skipped: Mapping[str, str]
    counters: Mapping[str, int]


class Originals(Mapping[str, Any]):
    """The originals of a patch by dotted path, read-only.

    `restore()`, or the end of a `with` block, restores every original. `report()` and `str()` say what was patched, how
    often it was called, and what was not patched and why; `repr()` says it in one line.
    """

    def __init__(self, marked: Any, on_change: Callable[[], None], facts: Callable[[], Facts]):
        self._marked, self._on_change, self._facts = marked, on_change, facts
        self._applied: list[_Applied] = []
        self._restored = False

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        report = self.report()
        patch_points = (f"{paths}: {_times(patch_point)}" for paths, patch_point in report.patch_points())
        return f"<Originals of {'; '.join([report.title, *patch_points])}>"

    def __getitem__(self, path: str) -> Any:
        for entry in self._applied:
            if entry.patch_point.path == path:
                return entry.original
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return (entry.patch_point.path for entry in self._applied)

    def __len__(self) -> int:
        return len(self._applied)

    def __enter__(self) -> Originals:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    @property
    def restored(self) -> bool:
        return self._restored

    def restore(self) -> None:
        """Restore every original. A second call does nothing.

        Raises PatchError, and changes nothing, if an attribute was replaced since.
        """
        if self._restored:
            return
        foreign = [
            entry.patch_point.path
            for entry in self._applied
            if vars(entry.patch_point.owner).get(entry.patch_point.attribute, MISSING) is not entry.installed
        ]
        if foreign:
            raise PatchError(
                f"cannot restore: {', '.join(foreign)} was replaced by other code after optimising; undo that first"
            )
        for entry in reversed(self._applied):
            _put_back(entry)
        vars(self._marked).pop(MARKER, None)
        self._restored = True
        self._on_change()

    def report(self) -> Report:
        """A list with one entry for each patch point, patched ones first. It prints as a table."""
        status, facts = "restored" if self._restored else "patched", self._facts()
        patched = [
            PatchPointReport(
                e.patch_point.path,
                e.patch_point.feature,
                status,
                e.calls,
                e.fallbacks,
                e.reason,
                dict(e.reasons.most_common()),
            )
            for e in self._applied
        ]
        left = [PatchPointReport(path, "", "left", 0, 0, why) for path, why in facts.skipped.items()]
        counted = [PatchPointReport(name, "operation", "counted", n, 0, "") for name, n in facts.counters.items()]
        title = f"{getattr(self._marked, '__name__', type(self._marked).__name__)}, {status}"
        return Report(f"{title}: {facts.summary}" if facts.summary else title, patched + left + counted)


def apply(
    patch_points: tuple[PatchPoint, ...],
    marked: Any,
    on_change: Callable[[], None],
    facts: Callable[[], Facts],
    strict: bool = False,
) -> Originals:
    """Set every patch point. `marked` is the object that counts as patched. `on_change` runs after applying and
    restoring. `facts` is called for each report. strict: a call that would run an original raises ValueError.

    Raises PatchError before anything is set if `marked` is patched already, a patch point does not exist, or two are
    the same. If setting one fails, those set before are restored and the error is raised.
    """
    if MARKER in vars(marked):
        raise PatchError(f"this {type(marked).__name__} is optimised already; restore it first")
    places: dict[tuple[int, str], PatchPoint] = {}
    for patch_point in patch_points:
        other = places.setdefault((id(patch_point.owner), patch_point.attribute), patch_point)
        if other is not patch_point:
            raise PatchError(
                f"{patch_point.path} and {other.path} are the same attribute of one object: it would be replaced twice"
            )
        if patch_point.adds == hasattr(patch_point.owner, patch_point.attribute):
            raise PatchError(f"{patch_point.path} {'exists already' if patch_point.adds else 'does not exist'}")
    originals, warned = Originals(marked, on_change, facts), set[tuple[str, str]]()  # attributes and reasons
    try:
        for patch_point in patch_points:
            entry = _Applied(
                patch_point,
                vars(patch_point.owner).get(patch_point.attribute, MISSING),
                getattr(patch_point.owner, patch_point.attribute, MISSING),
                vars(patch_point.owner).get(STATE, MISSING),
            )
            entry.installed = patch_point.replacement
            if callable(patch_point.replacement):
                entry.installed = _Installed(entry, warned, strict)
            setattr(patch_point.owner, patch_point.attribute, entry.installed)
            vars(patch_point.owner)[STATE] = functools.partial(_refuse_copy, patch_point.path)
            originals._applied.append(entry)
        setattr(marked, MARKER, originals)
        on_change()
    except BaseException:
        for entry in reversed(originals._applied):
            _put_back(entry)
        vars(marked).pop(MARKER, None)
        raise
    return originals


class _Installed:
    """The attribute in the place of an original. It calls the replacement and counts the calls.

    The original runs on `Fallback`, for an argument that only the original takes, and after it is restored. The report
    has the reasons; each is logged once. strict: raise instead of running the original for a reason.
    """

    def __init__(self, entry: _Applied, warned: set[tuple[str, str]], strict: bool):
        replacement: Any = entry.patch_point.replacement
        if "<locals>" in getattr(replacement, "__qualname__", ""):
            replacement.__qualname__ = entry.patch_point.path  # the name in Python's errors of wrong arguments
        functools.update_wrapper(self, replacement)
        self._entry, self._warned, self._strict = entry, warned, strict
        self._names, self._positions = _parameters(entry.patch_point.replacement)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry, taken = self._entry, kwargs
        if entry.restored:  # a reference to this was kept
            if entry.original is MISSING:
                raise RuntimeError(
                    f"{entry.patch_point.path} was added by optimising, and the model was restored since"
                )
            return entry.original(*args, **kwargs)
        if entry.patch_point.harmless:
            taken = {name: value for name, value in kwargs.items() if name not in entry.patch_point.harmless}
        unknown = self._unknown(args, taken)
        if unknown and not _takes(entry.original, args, kwargs):
            raise TypeError(
                f"{entry.patch_point.path}: {'; '.join(unknown)}; its arguments are {', '.join(self._names or ())}"
            )
        reasons = tuple(unknown)
        if not unknown:
            try:
                result = entry.patch_point.replacement(*args, **taken)
            except Fallback as fallback:
                reasons = fallback.reasons or ("no reason given",)
        if reasons and self._strict:
            raise ValueError(
                f"{entry.patch_point.path}: {'; '.join(reasons)} needs the original, which strict=True forbids "
                f"({entry.patch_point.remedy})"
            )
        if reasons:
            self._count(reasons)
            return entry.original(*args, **kwargs)
        entry.calls += 1
        return result

    def _unknown(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """The arguments of a call that the replacement does not have."""
        unknown = []
        if len(args) > self._positions:
            known = f"{self._positions} {'is' if self._positions == 1 else 'are'} known"
            unknown.append(f"{len(args)} positional arguments where {known}")
        if self._names is not None:
            unknown += [f"unknown argument {name}" for name in kwargs if name not in self._names]
        return unknown

    def _count(self, reasons: tuple[str, ...]) -> None:
        entry, patch_point = self._entry, self._entry.patch_point
        entry.fallbacks += 1
        entry.reason = "; ".join(reasons)
        full = len(entry.reasons) >= MAX_REASONS
        told = [OTHER_REASONS if full and reason not in entry.reasons else reason for reason in reasons]
        entry.reasons.update(dict.fromkeys(told, 1))
        new = [reason for reason in dict.fromkeys(told) if (patch_point.attribute, reason) not in self._warned]
        self._warned.update((patch_point.attribute, reason) for reason in new)
        if new:
            log.warning(
                "%s: the original runs, because of: %s. See %s", patch_point.path, "; ".join(new), patch_point.remedy
            )


def _parameters(function: Callable) -> tuple[list[str] | None, float]:
    """The names of a function's arguments (None if it takes all names), and how many it takes by position."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # a built-in function checks its arguments itself
        return None, math.inf
    kinds = [p.kind for p in parameters]
    by_position = sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        None if inspect.Parameter.VAR_KEYWORD in kinds else [p.name for p in parameters if p.kind in by_name],
        math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else by_position,
    )


def _takes(original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an original takes the arguments of a call."""
    if original is MISSING:
        return False
    try:
        inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in function checks its arguments itself
        return True
    return True


def _refuse_copy(path: str) -> None:
    raise PatchError(
        f"{path} is optimised and cannot be copied or pickled: a copy would decode with the original's weights and "
        "settings; restore it first"
    )


def _put_back(entry: _Applied) -> None:
    owner, attribute = entry.patch_point.owner, entry.patch_point.attribute
    entry.restored = True
    for name, former in ((STATE, entry.state), (attribute, entry.own)):
        if former is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
