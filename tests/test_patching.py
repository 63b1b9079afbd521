import copy
import pickle

import pytest

from eagle_triton import patching
from eagle_triton.patching import MARKER, MISSING, Facts, Fallback, PatchError, PatchPoint


class Thing:
    def __init__(self):
        self.own = lambda: "own"

    def method(self, x=1):
        return ("method", x)

    def other(self):
        return "other"


def patch(thing, *patch_points, on_change=lambda: None, strict=False):
    facts = Facts("all is well", {"left.alone": "why not"}, {"operation": 3})
    return patching.apply(patch_points, thing, on_change, lambda: facts, strict)


def patch_point(thing, attribute, replacement, adds=False):
    return PatchPoint(thing, attribute, replacement, attribute, "test", adds=adds)


def test_restore_gives_back_the_very_same_objects():
    thing, untouched = Thing(), Thing()
    own, state = thing.own, dict(vars(thing))
    originals = patch(
        thing,
        patch_point(thing, "own", lambda: "new own"),
        patch_point(thing, "method", lambda x=1: ("new", x)),
        patch_point(thing, "extra", lambda x: x, adds=True),
    )
    assert (thing.own(), thing.method(x=2), thing.extra("extra")) == ("new own", ("new", 2), "extra")
    assert untouched.method() == ("method", 1) and "method" not in vars(untouched)
    with pytest.raises(TypeError, match=r"^extra\(\) missing 1 required positional argument: 'x'"):
        thing.extra()
    assert originals["own"] is own and originals["extra"] is MISSING
    assert originals["method"].__func__ is Thing.method
    assert list(originals) == ["own", "method", "extra"] and len(originals) == 3
    with pytest.raises(KeyError):
        originals["nothing"]
    with pytest.raises(TypeError):
        originals["own"] = None

    kept, extra = thing.method, thing.extra
    originals.restore()
    assert kept(x=2) == ("method", 2) and originals.report()[1].calls == 1
    with pytest.raises(RuntimeError, match="extra was added by optimising, and the model was restored since"):
        extra()
    assert vars(thing) == state and thing.own is own
    assert thing.method.__func__ is Thing.method and not hasattr(thing, "extra")
    originals.restore()  # harmless
    assert vars(thing) == state


def test_a_state_of_its_own_is_refused_meanwhile_and_given_back():
    thing = Thing()
    vars(thing)["__getstate__"] = own = lambda: {"saved": True}
    before = dict(vars(thing))
    with patch(thing, patch_point(thing, "own", print), patch_point(thing, "method", print)):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PatchError, match="is optimised and cannot be copied or pickled"):
                copied(thing)
    assert vars(thing) == before and vars(thing)["__getstate__"] is own
    assert vars(copy.copy(thing)) == {"saved": True}


def test_a_constant_is_set_as_it_is_and_given_back():
    thing = Thing()
    thing.available = thing.other_constant = original = object()
    with patch(thing, patch_point(thing, "available", True), patch_point(thing, "missing", 3, adds=True)) as originals:
        assert thing.available is True and thing.missing == 3 and originals["available"] is original
        assert [line.calls for line in originals.report() if line.status == "patched"] == [0, 0]
        thing.available = False
        with pytest.raises(PatchError, match="available was replaced"):
            originals.restore()
        thing.available = True
    assert thing.available is original and not hasattr(thing, "missing")


def test_context_manager_restores_after_an_exception():
    thing = Thing()
    with pytest.raises(ZeroDivisionError), patch(thing, patch_point(thing, "method", lambda: 1 / 0)):
        thing.method()
    assert vars(thing).keys() == {"own"}


def test_a_failure_half_way_rolls_back():
    class Stubborn(Thing):
        def __setattr__(self, name, value):
            if name == "other":
                raise RuntimeError("no")
            super().__setattr__(name, value)

    thing = Stubborn()
    state = dict(vars(thing))
    with pytest.raises(RuntimeError, match="no"):
        patch(
            thing,
            patch_point(thing, "own", print),
            patch_point(thing, "method", print),
            patch_point(thing, "other", print),
        )
    assert vars(thing) == state

    def fail():
        raise RuntimeError("on_change")

    thing = Thing()
    state = dict(vars(thing))
    with pytest.raises(RuntimeError, match="on_change"):
        patch(thing, patch_point(thing, "method", print), on_change=fail)
    assert vars(thing) == state


def test_everything_is_checked_before_anything_is_set():
    thing = Thing()
    state = dict(vars(thing))
    with pytest.raises(PatchError, match="missing does not exist"):
        patch(thing, patch_point(thing, "method", print), patch_point(thing, "missing", print))
    with pytest.raises(PatchError, match="method exists already"):
        patch(thing, patch_point(thing, "own", print), patch_point(thing, "method", print, adds=True))
    assert vars(thing) == state


def test_patching_twice_is_refused_until_restored():
    thing = Thing()
    originals = patch(thing, patch_point(thing, "method", lambda: 1))
    with pytest.raises(PatchError, match="already"):
        patch(thing, patch_point(thing, "method", lambda: 2))
    assert thing.method() == 1 and vars(thing)[MARKER] is originals
    originals.restore()
    with patch(thing, patch_point(thing, "method", lambda: 2)):
        assert thing.method() == 2


def test_restore_refuses_when_somebody_else_patched_since():
    thing = Thing()
    originals = patch(thing, patch_point(thing, "own", print), patch_point(thing, "method", print))
    ours, foreign = vars(thing)["method"], lambda: "foreign"
    thing.method = foreign
    with pytest.raises(PatchError, match="method was replaced by other code"):
        originals.restore()
    assert thing.method is foreign and not originals.restored
    thing.method = ours
    originals.restore()
    assert vars(thing).keys() == {"own"}


def test_report_counts_calls_fallbacks_and_reasons():
    thing = Thing()

    def replacement(x=1):
        if x < 0:
            raise Fallback("negative")
        return "new"

    originals = patch(thing, patch_point(thing, "method", replacement))
    assert [thing.method(1), thing.method(2), thing.method(-1)] == ["new", "new", ("method", -1)]
    report = originals.report()
    method, left, counted = report
    assert (method.status, method.calls, method.fallbacks, method.reason) == ("patched", 2, 1, "negative")
    assert len(report) == 3 and report[0] is method
    lines = [
        "Thing, patched: all is well",
        "method: calls 2, fallbacks 1 (test)",
        "1 by the original: negative",
        "left.alone: why not",
        "operations: operation 3",
    ]
    assert [line.strip() for line in str(originals).splitlines()] == lines
    assert repr(originals) == "<Originals of Thing, patched: all is well; method: calls 2, fallbacks 1>"
    assert (left.path, left.status, left.reason) == ("left.alone", "left", "why not")
    assert (counted.path, counted.status, counted.calls) == ("operation", "counted", 3)
    originals.restore()
    assert originals.report()[0].status == "restored" and "Thing, restored" in str(originals)


def test_layers_whose_numbers_are_the_same_are_one_line_of_the_table():
    things = [Thing() for _ in range(4)]
    patch_points = [
        PatchPoint(thing, "method", lambda: "new", f"layers.{i}.method", "") for i, thing in enumerate(things)
    ]
    originals = patch(things[0], *patch_points)
    things[3].method()
    assert "layers.*.method (3 of them): calls 0" in str(originals) and "layers.3.method: calls 1" in str(originals)
    assert len(originals.report()) == 6


def test_each_new_reason_is_logged_once_and_all_are_counted(caplog):
    things = [Thing(), Thing()]

    def replacement(x=1):
        raise Fallback(*(f"x={value}" for value in range(x)))

    patch_points = [
        PatchPoint(thing, "method", replacement, f"{i}.method", "", remedy="a page") for i, thing in enumerate(things)
    ]
    originals = patch(things[0], *patch_points)
    for x in (1, 2, 2):
        assert [thing.method(x) for thing in things] == [("method", x)] * 2
    warned = [(record.levelname, record.getMessage()) for record in caplog.records]
    said = "0.method: the original runs, because of: x={}. See a page"
    assert warned == [("WARNING", said.format(0)), ("WARNING", said.format(1))]
    row = originals.report()[0]
    assert (row.fallbacks, row.reason, row.reasons) == (3, "x=0; x=1", {"x=0": 3, "x=1": 2})

    for x in range(1, patching.MAX_REASONS + 3):
        things[1].method(x)
    reasons = originals.report()[1].reasons
    assert len(reasons) == patching.MAX_REASONS + 1 and reasons[patching.OTHER_REASONS] == 2


class Newer:
    """Of a later version: it has an argument more, and takes any other."""

    def method(self, x=1, later=None, **options):
        return x, later, options


def test_what_a_replacement_does_not_know_never_reaches_it():
    def replacement(x=1):
        return "new"

    newer, thing = Newer(), Thing()
    originals = patch(newer, PatchPoint(newer, "method", replacement, "method", "", harmless=frozenset({"verbose"})))
    assert [newer.method(), newer.method(x=2, verbose=True)] == ["new", "new"]
    assert newer.method(2, 3) == (2, 3, {}) and newer.method(later=4, surprise=1) == (1, 4, {"surprise": 1})
    row = originals.report()[0]
    names = ("2 positional arguments where 1 is known", "unknown argument later", "unknown argument surprise")
    assert (row.calls, row.fallbacks, row.reasons) == (2, 2, dict.fromkeys(names, 1))

    patch(thing, patch_point(thing, "method", replacement), patch_point(thing, "added", replacement, adds=True))
    for method, name in ((thing.method, "method"), (thing.added, "added")):
        with pytest.raises(TypeError, match=f"{name}: unknown argument surprise; its arguments are x"):
            method(surprise=1)
        with pytest.raises(TypeError, match=f"{name}: 2 positional arguments where 1 is known"):
            method(1, 2)


def test_where_it_is_strict_an_original_never_runs():
    def replacement(x=1):
        raise Fallback("negative", "odd") if x < 0 else NotImplementedError

    newer = Newer()
    originals = patch(newer, patch_point(newer, "method", replacement), strict=True)
    for call, reasons in (
        (lambda: newer.method(-1), "negative; odd"),
        (lambda: newer.method(y=4), "unknown argument y"),
    ):
        with pytest.raises(ValueError, match=f"method: {reasons} needs the original, which strict=True forbids"):
            call()
    with pytest.raises(NotImplementedError):
        newer.method()
    assert (originals.report()[0].calls, originals.report()[0].fallbacks) == (0, 0)
    originals.restore()
    assert newer.method(-1) == (-1, None, {})


def test_one_attribute_is_not_replaced_twice():
    thing = Thing()
    patch_points = (PatchPoint(thing, "method", lambda: 2, "a", ""), PatchPoint(thing, "method", lambda: 3, "b", ""))
    with pytest.raises(PatchError, match="a and a are the same attribute"):
        patch(thing, patch_points[0], PatchPoint(thing, "method", lambda: 4, "a", ""))
    with pytest.raises(PatchError, match="b and a are the same attribute of one object"):
        patch(thing, *patch_points)
    assert "method" not in vars(thing)


def test_a_report_has_its_former_name_too():
    with pytest.warns(DeprecationWarning, match="SeamReport is called PatchPointReport now"):
        assert patching.SeamReport is patching.PatchPointReport
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = patching.Nothing
