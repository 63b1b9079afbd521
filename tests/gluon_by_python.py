"""A Gluon kernel's own Python, run: its programs one after another, its partitions as threads, on NumPy.

It shows what indices, slots and barriers do, which no interpreter of Gluon does. A product that is asked for reads its
operands when it is waited for, so a slot that is refilled too early gives wrong numbers; a wait that nobody ends raises
TimeoutError. What an earlier kernel makes is NaN, or no number, until a program has waited for that. Layouts, fences
and barriers of the threads of one partition mean nothing here, and numbers are double until a kernel asks for another
kind. It knows what the kernels of hopper_many_rows.py, hopper_fp8.py, hopper_fp8_few_rows.py, hopper_four_bits.py,
hopper_experts.py and attention_hopper.py in ops/ ask for.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from threading import Event
from typing import Any

import numpy as np
import torch

from eagle_triton.runtime.launch import recorded

SECONDS = 20  # a wait may take
LATE = ("x_desc", "x_scale_ptr")  # what an earlier kernel makes, where a test names nothing else
NO_NUMBER = -(2**40)  # an integer that is not there yet
NO_WORD = 0x7FC07FC0  # an int32 of shared memory that nobody has written: two NaN in bf16
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # Triton's names that are not torch's
LATE_SECONDS = 1e-3


class Barrier:
    """A barrier of shared memory: a phase ends when `count` arrivals and all bytes that were promised have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def update(self, arrivals: int = 0, promised: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += promised
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if not self.pending and not self.bytes:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has ended: the one before the first has."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, SECONDS):
                raise TimeoutError("a wait that nobody ends")


class Kind(str):
    """A dtype's name, as a kernel asks for it."""

    @property
    def value(self) -> Kind:
        return self

    def is_bf16(self) -> bool:
        return self == "bfloat16"


def _kind(dtype: torch.dtype) -> Kind:
    return Kind(str(dtype).removeprefix("torch."))


class Tile:
    """Room of shared memory, or a slot of it."""

    layout = None

    def __init__(self, data: Any, dtype: Any = None):
        self.data = data
        self.shape = (len(data), 1) if isinstance(data, list) else data.shape
        self.dtype = dtype

    def index(self, slot: int) -> Any:
        return self.data[slot] if isinstance(self.data, list) else Tile(self.data[slot], self.dtype)

    def permute(self, _: tuple[int, int]) -> Tile:
        return Tile(self.data.T, self.dtype)

    def reinterpret(self, dtype: Any, shape: list[int], _layout: Any) -> Tile:
        """The same room in another shape. An int32 may become two numbers in bf16, whose bits are kept as int16."""
        pairs = self.dtype == "int32" and dtype == "bfloat16"
        return Tile((self.data.view(np.int16) if pairs else self.data).reshape([int(size) for size in shape]), dtype)

    def load(self, _: Any) -> Array:
        found = (self.data.astype(self.dtype) if self.dtype in ("int32", "float32") else self.data.copy()).view(Array)
        found.kind = self.dtype
        return found

    def store(self, value: Any) -> None:
        value = value.done()
        self.data[:] = value.to("int16", bitcast=True) if self.data.dtype == np.int16 else value


class Sum:
    """What a product is added to, once it has been waited for; then all that an Array is."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, before: Any, one: Any, other: Any):
        self.before, self.one, self.other = before, one, other
        self.value: Array | None = None
        self.shape = (one.shape[0], other.shape[1])

    def read(self) -> None:
        before = 0 if self.before is None else _values(self.before)
        one, other = (each.data if isinstance(each, Tile) else _values(each) for each in (self.one, self.other))
        self.value = (before + np.asarray(one) @ np.asarray(other)).view(Array)

    def done(self) -> Array:
        assert self.value is not None, "a sum is used before it is waited for"
        return self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.done(), name)

    def __add__(self, other: Any) -> Array:
        return self.done() + other

    def __mul__(self, other: Any) -> Array:
        return self.done() * other


_asked = threading.local()  # a partition's products that have not been waited for, the oldest first


def _multiply(one: Any, other: Any, acc: Any, is_async: bool, use_acc: bool = True) -> Sum:
    found = Sum(acc if use_acc else None, one, other)
    _asked.products = [*getattr(_asked, "products", []), found]
    if not is_async:
        _wait_for(0, [found])
    return found


def _wait_for(left: int, deps: list[Any]) -> Any:
    """Read all products but the last `left` that this partition asked for."""
    products = getattr(_asked, "products", [])
    count = max(len(products) - left, 0)
    for product in products[:count]:
        product.read()
    _asked.products = products[count:]
    return deps[0] if len(deps) == 1 else tuple(deps)


def _values(value: Any) -> Any:
    return value.done() if isinstance(value, Sum) else value


def _join(one: Any, other: Any) -> Array:
    found = np.stack([one, other], -1).view(Array)
    found.kind = getattr(one, "kind", None)
    return found


def _chosen(of_arrays: Callable, of_numbers: Callable, one: Any, other: Any) -> Any:
    arrays = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
    return (of_arrays if arrays else of_numbers)(one, other)


class Array(np.ndarray):
    """What a program holds in registers. Assigned to, it is another one."""

    type = types.SimpleNamespace(layout=None)
    kind: Any = None  # of what was loaded
    __iadd__, __isub__, __imul__ = np.ndarray.__add__, np.ndarray.__sub__, np.ndarray.__mul__  # type: ignore[assignment]

    def __array_finalize__(self, other: Any) -> None:
        self.kind = getattr(other, "kind", None)

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        """The kind that a kernel has loaded or asked for; without one, NumPy's dtype."""
        return self.kind or np.asarray(self).dtype

    def view(self, kind: Any) -> Array:  # type: ignore[override]
        """The same bytes. NumPy's own would assign to `dtype`."""
        return np.asarray(np.asarray(self).view(kind)).view(Array)

    def to(self, kind: Any, bitcast: bool = False) -> Array:
        if bitcast and self.kind in ("float16", "bfloat16"):
            half = torch.from_numpy(np.asarray(self)).to(getattr(torch, self.kind))
            return half.view(torch.int16).numpy().view(Array)
        if bitcast:
            single = self.astype(np.float32) if np.asarray(self).dtype == np.float64 else self
            return single.view(kind)
        if kind is None:
            return self
        if kind in ("bfloat16", "float8_e4m3fn"):  # which NumPy has not
            found = torch.from_numpy(np.asarray(self)).to(getattr(torch, kind)).float().numpy().view(Array)
        else:
            found = self.astype(kind)
        found.kind = kind
        return found

    def done(self) -> Array:
        return self

    def permute(self, order: tuple[int, ...]) -> Array:
        return self.transpose(order)

    def split(self) -> tuple[Array, Array]:
        return self[..., 0], self[..., 1]

    def broadcast_to(self, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(self, shape, subok=True)


class Real(float):
    """A number of a program with a point."""

    def to(self, _: Any) -> Real:
        return self


class Number(int):
    """An index of a program: what is calculated with it is one too."""

    def to(self, _: Any) -> Number:
        return self


def _calculated(method: Callable) -> Callable:
    def calculate(self: Number, other: Any) -> Any:
        result = method(self, other)
        return Number(result) if isinstance(result, int) else result

    return calculate


_OPERATIONS = "add radd sub rsub mul rmul floordiv mod and rshift ne"
for _name in (f"__{name}__" for name in _OPERATIONS.split()):
    setattr(Number, _name, _calculated(getattr(int, _name)))


class Pointer:
    """Somewhere in a tensor's storage."""

    def __init__(self, data: Any, came: Event, kind: Kind, offset: Any = 0):
        self.data, self.came, self.offset = data, came, offset
        self.dtype = types.SimpleNamespace(element_ty=kind)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.came, self.dtype.element_ty, self.offset + offset)

    def load(self, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Any:
        offset, mask = np.broadcast_arrays(self.offset, mask)
        found = np.where(mask, self.data[np.where(mask, offset, 0)], other)
        if not self.came.is_set():
            found = np.full_like(found, np.nan if found.dtype.kind == "f" else NO_NUMBER)
        if found.ndim:
            found = found.view(Array)
            found.kind = self.dtype.element_ty
            return found
        return Real(found) if found.dtype == np.float64 else Number(found)

    def store(self, value: Any, mask: Any) -> None:
        value = _values(value)
        offset, value, mask = np.broadcast_arrays(self.offset, value, mask)
        self.data[offset[mask]] = value[mask]


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage behind its first element."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())[tensor.storage_offset() :]


class Descriptor:
    """Of a tensor: what lies outside is loaded as 0, and not stored."""

    def __init__(self, descriptor: Any, came: Event, late: Any = True):
        """late: which rows are NaN until that came, bool [rows], or all."""
        whole, self.came, self.late = descriptor.base, came, late
        self.tensor: torch.Tensor = whole.as_strided(descriptor.shape, descriptor.strides)
        self.shape, self.dtype, self.layout = tuple(descriptor.block_shape), _kind(whole.dtype), None
        self.block_type = types.SimpleNamespace(
            shape=list(self.shape), nbytes=int(np.prod(self.shape)) * self.tensor.element_size()
        )

    def _box(self, where: list[int]) -> torch.Tensor:
        """What lies inside of the box that begins there."""
        assert min(where) >= 0 and len(where) == self.tensor.dim()
        return self.tensor[tuple(slice(start, start + size) for start, size in zip(where, self.shape, strict=True))]

    def load(self, where: list[int], barrier: Barrier, tile: Tile, pred: bool = True) -> None:
        if pred:
            part = self._box(where).double()
            if not self.came.is_set():
                rows = slice(where[0], where[0] + len(part))
                part[True if self.late is True else self.late[rows]] = float("nan")
            tile.data[:] = 0
            tile.data[tuple(map(slice, part.shape))] = part.numpy()
            barrier.update(promised=-self.block_type.nbytes)

    def store(self, where: list[int], tile: Tile) -> None:
        part = self._box(where)
        part.copy_(torch.from_numpy(tile.data[tuple(map(slice, part.shape))]))


def _allocated(dtype: Any, shape: list[int], _layout: Any) -> Tile:
    if len(shape) == 2 and shape[1] == 1:
        return Tile([Barrier() for _ in range(shape[0])])
    sizes = [int(size) for size in shape]
    return Tile(np.full(sizes, NO_WORD, np.int32) if dtype == "int32" else np.full(sizes, np.nan), dtype)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _expect(barrier: Barrier, size: int, pred: bool = True) -> None:
    if pred:
        barrier.update(promised=size)
        barrier.update(arrivals=1)


class Constants(tuple):
    """A tuple that a function of constants returns: a kernel may ask for its value, as for that of a constexpr."""

    @property
    def value(self) -> Constants:
        return self


def _of_constants(function: Callable) -> Callable:
    def called(*given: Any) -> Any:
        found = function(*given)
        return Constants(found) if isinstance(found, tuple) else found

    return called


def _plain(names: dict[str, Any]) -> dict[str, Any]:
    """The same with the values of constexprs."""

    def plain(value: Any) -> Any:
        value = value.value if type(value).__name__ == "constexpr" else value
        return Kind(NAMES.get(value.name, value.name)) if type(value).__name__ == "dtype" else value

    return {name: plain(value) for name, value in names.items()}


def _fields(value: tuple) -> Any:
    return getattr(value, "_fields", range(len(value)))


def run_launch(
    launch: Callable[[], Any],
    late: Collection[str] | Mapping[str, Any] = LATE,
    assembly: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """What a kernel was launched with, by name, which it has run on; `late` and `assembly` as for `run`."""
    with recorded() as launches:
        launch()
    (found,) = launches.values()
    given = dict(zip(found.kernel.arg_names, found.args, strict=True))
    run(found.kernel, found.grid, given, late, assembly)
    return given


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    late: Collection[str] | Mapping[str, Any] = LATE,
    assembly: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Run a kernel of a module, [programs], on its arguments by name: descriptors, CPU tensors, views, numbers, None.

    late: what an earlier kernel makes, by name; of a descriptor, by a mapping, rows alone. assembly: what PTX of the
    kernel does, by its text or by the name of the builtin of the module that inserts it.
    """
    module = dict(kernel.fn.__globals__)
    program, errors = [(0, 0, 0)], []
    there, made = Event(), Event()
    there.set()

    def wait_for_x() -> None:
        time.sleep(LATE_SECONDS)
        made.set()

    def specialised(ways: list[tuple[Callable, tuple]], *_: Any) -> Any:
        results = {}

        def start(place: int, way: Callable, given: tuple) -> None:
            try:
                results[place] = way(*given)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=start, args=(i, *way), daemon=True) for i, way in enumerate(ways)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results[0]  # what does not load has some

    def either(condition: Any, one: Any, other: Any) -> Any:
        one, other = _values(one), _values(other)
        if isinstance(condition, np.ndarray):
            return np.where(condition, one, other).view(Array)
        return one if condition else other

    gl = types.SimpleNamespace(
        program_id=lambda axis: Number(program[0][axis]),
        num_programs=lambda axis: Number((*grid, 1, 1)[axis]),
        minimum=partial(_chosen, np.minimum, min),
        maximum=partial(_chosen, np.maximum, max),
        max=lambda values, axis: np.fmax.reduce(_values(values), axis),  # NaN loses
        sum=lambda values, axis: _values(values).sum(axis),
        reduce=lambda values, axis, fold: reduce(fold, np.moveaxis(values, axis, 0)),
        exp2=np.exp2,
        ceil=np.ceil,
        zeros_like=np.zeros_like,
        inline_asm_elementwise=lambda text, _, given, *__, **___: (assembly or {})[text](*map(_values, given)),
        abs=np.abs,
        exp=np.exp,
        fma=lambda one, other, more: _values(one) * _values(other) + _values(more),
        full=lambda shape, value, *_: np.full(shape, value).view(Array),
        convert_layout=lambda value, *_, **__: _values(value),
        cdiv=lambda one, other: -(-one // other),
        where=either,
        static_range=range,
        static_assert=lambda *_: None,
        num_warps=lambda: 8,
        NVMMADistributedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        DistributedLinearLayout=lambda *_, **__: None,
        DotOperandLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        SwizzledSharedLayout=lambda *_: None,
        arange=lambda start, end, _: np.arange(start, end).view(Array),
        zeros=lambda shape, kind, _: np.zeros(shape, kind if "int" in kind else float).view(Array),
        expand_dims=lambda value, axis: np.expand_dims(_values(value), axis),
        join=_join,
        load=lambda pointer, **options: pointer.load(**options),
        store=lambda pointer, value, mask: pointer.store(value, mask),
        allocate_shared_memory=_allocated,
        warp_specialize=specialised,
        **{name: Kind(name) for name in ("float32", "float16", "bfloat16", "uint8", "int16", "int32", "int64")},
    )
    module.update(
        gl=gl,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=_init,
            expect=_expect,
            wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
            arrive=lambda barrier, pred=True: barrier.update(arrivals=1) if pred else None,
        ),
        async_load=lambda desc, *rest, **options: desc.load(*rest, **options),
        async_store=lambda desc, *rest: desc.store(*rest),
        store_wait=lambda _: None,
        reinterpret=lambda tiles, *rest: tiles.reinterpret(*rest),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_for,
        fence_async_shared=lambda: None,
        debug_barrier=lambda: None,
        gdc_wait=wait_for_x,
        gdc_launch_dependents=lambda: None,
        range=lambda *ends: map(Number, range(*ends)),
    )
    module.update(assembly or {})
    waiting, known = list(module.values()), {id(kernel.fn.__globals__)}
    for value in waiting:  # what functions of other modules call
        if isinstance(getattr(value, "fn", None), types.FunctionType) and id(value.fn.__globals__) not in known:
            known.add(id(value.fn.__globals__))
            waiting += value.fn.__globals__.values()
            module = {**value.fn.__globals__, **module}
    module = _plain(module)
    others = []  # what functions of other modules find by name
    for name, value in list(module.items()):
        if isinstance(getattr(value, "fn", None), types.FunctionType):
            names, constant = module, type(value).__name__ == "ConstexprFunction"
            if constant:  # it reads the `value` of constexprs
                names = {**value.fn.__globals__, "gl": gl}
            elif value.fn.__globals__ is not kernel.fn.__globals__:
                others.append(names := _plain(value.fn.__globals__))
            function = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            module[name] = _of_constants(function) if constant else function
    for names in others:
        names.update(module, tl=gl)
    tensors = []

    def given(name: str, value: Any, came: Event = there) -> Any:
        came = made if name in late else came
        if isinstance(value, tuple):  # a view: "out.row" is a field of it
            parts = [given(f"{name}.{field}", part, came) for field, part in zip(_fields(value), value, strict=True)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if hasattr(value, "block_shape"):
            return Descriptor(value, came, late[name] if isinstance(late, Mapping) and name in late else True)
        if isinstance(value, torch.Tensor):
            storage = _storage(value)
            numbers = (storage.double() if storage.is_floating_point() else storage.long()).numpy().copy()
            tensors.append((storage, numbers))
            return Pointer(numbers, came, _kind(value.dtype))
        return Number(value) if type(value) is int else value

    views = {name: given(name, value) for name, value in arguments.items()}
    for place in np.ndindex(*grid):
        program[0] = (*place, 0, 0)
        made.clear()
        module[kernel.fn.__name__](**views)
    for storage, numbers in tensors:
        storage.copy_(torch.from_numpy(numbers))
