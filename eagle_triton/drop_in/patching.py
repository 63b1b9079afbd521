"""Replace attributes of live objects and give the very same originals back. Knows nothing of EAGLE.

A patch is data: a tuple of seams. All are checked before the first is set, a failure half-way rolls back, and only
instance attributes are touched, so that no other object of the same class notices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<no attribute>"})()
"""Stands for the original of a seam where there was no attribute before."""

MARKER = "_eagle_triton_originals"  # set on a patched object, so that a second patch is refused


class PatchError(RuntimeError):
    """A patch could not be applied or taken back. Nothing was changed by the call that raised it."""


@dataclass(frozen=True)
class Seam:
    """One attribute to replace.

    replacement: a callable, whose calls are counted, or a constant, which is set as it is.
    path: the dotted path that people know it by. feature: what the replacement brings, in a few words.
    adds: the attribute does not exist yet (restore removes it again).
    """

    owner: Any
    attribute: str
    replacement: Any
    path: str
    feature: str
    adds: bool = False


@dataclass(frozen=True)
class SeamReport:
    """One line of `Originals.report()`.

    status: "patched" or "restored" for a seam (`calls` of its replacement, `fallbacks` to the original and the last
    one's `reason`), "left" for a part left alone (`reason` says why), "counted" for a counter of the patch (`calls`).
    """

    path: str
    feature: str
    status: str
    calls: int
    fallbacks: int
    reason: str


@dataclass
class _Applied:
    seam: Seam
    own: Any  # the owner's instance attribute before, or MISSING
    original: Any  # what an attribute access gave before, or MISSING
    installed: Any = None
    calls: int = 0
    fallbacks: int = 0
    reason: str = ""


class Originals(Mapping[str, Any]):
    """The originals of a patch by dotted path: read-only, and the way back.

    `restore()` puts every original back; as a context manager it does so at the end of the block. `report()` says what
    was patched, how often it was called, and what was left alone and why.
    """

    def __init__(
        self,
        marked: Any,
        on_change: Callable[[], None],
        skipped: Mapping[str, str],
        counters: Mapping[str, int],
    ):
        self._marked, self._on_change = marked, on_change
        self._skipped, self._counters = skipped, counters
        self._applied: list[_Applied] = []
        self._restored = False

    def __getitem__(self, path: str) -> Any:
        for entry in self._applied:
            if entry.seam.path == path:
                return entry.original
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return (entry.seam.path for entry in self._applied)

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
        """Put every original back. Harmless when done already.

        Raises PatchError, and changes nothing, if somebody has replaced one of the seams since.
        """
        if self._restored:
            return
        foreign = [
            entry.seam.path
            for entry in self._applied
            if vars(entry.seam.owner).get(entry.seam.attribute, MISSING) is not entry.installed
        ]
        if foreign:
            raise PatchError(
                f"cannot restore: {', '.join(foreign)} was replaced by somebody else after optimising; undo that first"
            )
        for entry in reversed(self._applied):
            _put_back(entry)
        vars(self._marked).pop(MARKER, None)
        self._restored = True
        self._on_change()

    def report(self) -> list[SeamReport]:
        """One entry for each seam, patched ones first."""
        status = "restored" if self._restored else "patched"
        patched = [
            SeamReport(e.seam.path, e.seam.feature, status, e.calls, e.fallbacks, e.reason) for e in self._applied
        ]
        left = [SeamReport(path, "", "left", 0, 0, why) for path, why in self._skipped.items()]
        counted = [SeamReport(name, "operation", "counted", calls, 0, "") for name, calls in self._counters.items()]
        return patched + left + counted


def apply(
    seams: tuple[Seam, ...],
    marked: Any,
    on_change: Callable[[], None],
    skipped: Mapping[str, str],
    counters: Mapping[str, int],
) -> Originals:
    """Set every seam. `marked` is the object that counts as patched; `on_change` runs after applying and restoring;
    `skipped` (path to reason) and `counters` (name to count), both live, go into the report.

    Raises PatchError before anything is set if `marked` is patched already, a seam does not exist, or two are one;
    if setting one fails, those set before are put back and the error goes on.
    """
    if MARKER in vars(marked):
        raise PatchError(f"this {type(marked).__name__} is optimised already; restore it first")
    places: dict[tuple[int, str], Seam] = {}
    for seam in seams:
        other = places.setdefault((id(seam.owner), seam.attribute), seam)
        if other is not seam:
            raise PatchError(
                f"{seam.path} and {other.path} are the same attribute of one object: it would be replaced twice"
            )
        if seam.adds == hasattr(seam.owner, seam.attribute):
            raise PatchError(f"{seam.path} {'exists already' if seam.adds else 'does not exist'}")
    originals = Originals(marked, on_change, skipped, counters)
    try:
        for seam in seams:
            entry = _Applied(
                seam,
                vars(seam.owner).get(seam.attribute, MISSING),
                getattr(seam.owner, seam.attribute, MISSING),
            )
            entry.installed = _Installed(entry) if callable(seam.replacement) else seam.replacement
            setattr(seam.owner, seam.attribute, entry.installed)
            originals._applied.append(entry)
        setattr(marked, MARKER, originals)
        on_change()
    except BaseException:
        for entry in reversed(originals._applied):
            _put_back(entry)
        vars(marked).pop(MARKER, None)
        raise
    return originals


class Fallback(Exception):
    """Raised by a replacement, before it has changed anything, to have the original called instead."""


class _Installed:
    """What stands in the place of an original: the replacement, its calls counted.

    On `Fallback` the original runs and the reason is kept for the report.
    """

    def __init__(self, entry: _Applied):
        functools.update_wrapper(self, entry.seam.replacement)
        self._entry = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self._entry
        try:
            result = entry.seam.replacement(*args, **kwargs)
        except Fallback as fallback:
            entry.fallbacks += 1
            entry.reason = str(fallback)
            return entry.original(*args, **kwargs)
        entry.calls += 1
        return result

    def __deepcopy__(self, memo: object) -> _Installed:
        raise PatchError(
            f"{self._entry.seam.path} is optimised and cannot be copied: the copy would decode with the original's "
            "weights; restore it first"
        )

    def __reduce__(self) -> str:
        raise PatchError(f"{self._entry.seam.path} is optimised and cannot be pickled; restore it first")


def _put_back(entry: _Applied) -> None:
    owner, attribute = entry.seam.owner, entry.seam.attribute
    if entry.own is MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, entry.own)
