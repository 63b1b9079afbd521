"""Triton's interpreter made faster: what it does in every operation of every program is done once, or left out.

And one defect less: a comparison of numbers keeps their type with them, which Triton 3.9 refuses in a mask that a
scalar was spread into.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

KNOWN = triton.__version__.startswith("3.9.")  # whose code the shortcuts stand for; others take the longer way
_patch_language = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}
_languages: dict[object, list] = {}  # by function, the modules of Triton's language that it sees
_patches: dict[tuple, list] = {}  # by such modules, what a launch sets in them


def install() -> None:
    """Let kernels of this process run in it."""
    interpreter._patch_lang = _patch_language_once
    interpreter._get_np_dtype = _np_dtype
    # It looks for overflows, and without `debug` tells nobody.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    kind = type(builder)
    for name in vars(kind).copy():
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(kind, name, _boolean(getattr(kind, name)))
    if KNOWN:
        _shorten_types()
        _shorten_operands()
        _shorten_results()
        interpreter._patch_attr = _patch_attribute


def _patch_language_once(function):
    """Leave alone what the launch has patched: else the language is looked through in every device function."""
    if function not in _languages:
        seen = function.__globals__.values()
        _languages[function] = [language for language in (tl, tl.core) if any(value is language for value in seen)]
    languages = _languages[function]
    if not any(tl.core.is_builtin(language.load) for language in languages):
        return None
    if not KNOWN:
        return _patch_language(function)
    key = tuple(language.__name__ for language in languages)
    if key in _patches:
        scope = interpreter._LangPatchScope()
        for place, name, value in _patches[key]:
            scope.set_attr(place, name, value)
        return scope
    scope = _patch_language(function)
    _patches[key] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
    return scope


def _boolean(compare):
    def compare_as_boolean(builder, left, right):
        return interpreter.TensorHandle(compare(builder, left, right).data, tl.int1)

    return compare_as_boolean


def _np_dtype(kind: tl.dtype) -> np.dtype:
    kind = kind.scalar
    if kind.is_ptr():
        return _get_np_dtype(kind)
    if kind.name not in _np_dtypes:
        _np_dtypes[kind.name] = _get_np_dtype(kind)
    return _np_dtypes[kind.name]


def _patch_attribute(place, name, member, builder, scope):
    """Call a function of the language with the interpreter's meaning of it, without a copy of its arguments."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(place, name, call)


def _shorten_types() -> None:
    """Types and shapes compare and describe themselves quickly; a shape is looked at when it is new."""
    core, unwrap, equal = tl.core, tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    plain = {int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type, tl.tensor}

    def unwrapped(value):
        if type(value) in plain:
            return value
        return value.value if type(value) is tl.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrapped
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    integers, floats = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES), frozenset(tl.dtype.FP_TYPES)
    tl.dtype.is_int = lambda self: self.name in integers
    tl.dtype.is_floating = lambda self: self.name in floats

    validate = interpreter._validate_np_data_size

    def fits(data, dtype):
        return (
            data.itemsize * 8 <= max(dtype.primitive_bitwidth, 8) if type(dtype) is tl.dtype else validate(data, dtype)
        )

    interpreter._validate_np_data_size = fits
    original = tl.block_type.__init__
    tl.dtype.constant_shape, tl.dtype.constant_numel = tl.tuple([]), tl.constexpr(1)

    @functools.cache
    def parts_of(sizes):
        """What block types of a shape and their tensors have in common."""
        block = tl.block_type.__new__(tl.block_type)
        original(block, tl.int1, list(sizes))
        constants = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(block.numel)
        return sizes, block.shape, block.numel, *constants, block.name.removesuffix(f"{tl.int1.name}>")

    def fill(self, element_ty, parts):
        self.parts, self.element_ty = parts, element_ty
        self.sizes, self.shape, self.numel, self.constant_shape, self.constant_numel, name = parts
        self.name = f"{name}{element_ty.name}>"

    def new_block(self, element_ty, shape):
        values = shape.values if type(shape) is tl.tuple else unwrapped(shape)
        sizes = tuple([size if type(size) is int else unwrapped(size) for size in values])
        if not sizes or not all([type(size) is int for size in sizes]):
            return original(self, element_ty, shape)
        fill(self, element_ty, parts_of(sizes))

    def with_element_ty(self, scalar_ty):
        block = tl.block_type.__new__(tl.block_type)
        fill(block, scalar_ty, self.parts)
        return block

    def new_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constant_shape, type.constant_numel

    tl.block_type.__init__, tl.block_type.with_element_ty = new_block, with_element_ty
    tl.tensor.__init__ = new_tensor


def _shorten_operands() -> None:
    """Operands of the same type need no conversion. They get their common shape, but not its data: numpy spreads what
    it computes with. Constants are kept."""
    semantic = interpreter.interpreter_semantic
    check, spread, compute = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.computation_type_impl,
    )
    convert, scalar = semantic._cast_to_computation_type, semantic.scalar_constant
    types: dict[tuple, tl.dtype] = {}
    constants: dict[tuple, tl.tensor] = {}
    numbers: dict[tuple, tl.tensor] = {}

    def computation_type(left, left_is_scalar, right, right_is_scalar, divides):
        key = (left.name, left_is_scalar, right.name, right_is_scalar, divides)
        if key not in types:
            types[key] = compute(left, left_is_scalar, right, right_is_scalar, divides)
        return types[key]

    def converted(value, dtype):
        if type(value) is not tl.tensor:
            return convert(value, dtype)
        return value if value.dtype is dtype else semantic.cast(value, dtype)

    def constant(value, dtype):
        if type(value) not in (int, bool) or type(dtype) is not tl.dtype:
            return scalar(value, dtype)
        key = (value, type(value), dtype.name)
        if key not in constants:
            constants[key] = scalar(value, dtype)
        return constants[key]

    def operands(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            if lhs.dtype is rhs.dtype and not div_or_mod and type(lhs.dtype) is tl.dtype:
                return alike(lhs, rhs)
            if allow_lhs_ptr and type(lhs.dtype) is tl.pointer_type and rhs.dtype.is_int():
                return alike(lhs, rhs)
        elif arithmetic_check and (left or right):
            value, number = (lhs, rhs) if left else (rhs, lhs)
            if type(number) in (int, bool, float) and type(value.dtype) is tl.dtype:
                number = number_beside(number, value.dtype, left, div_or_mod)
                value = converted(value, number.dtype)
                return alike(value, number) if left else alike(number, value)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def number_beside(number, dtype, left, divides):
        """A constant of the type that it computes in with a tensor, which is on its left or not."""
        key = (number, type(number), dtype.name, left, divides)
        if type(number) is float or key not in numbers:  # 0.0 == -0.0
            kinds = (dtype, False), (semantic.to_tensor_type(number), True)
            kinds = kinds if left else kinds[::-1]
            numbers[key] = converted(number, computation_type(*kinds[0], *kinds[1], divides))
        return numbers[key]

    @functools.cache
    def joined(left, right):
        """A block of the shape that both sizes are spread to, which may have an axis less."""
        return tl.block_type(tl.int1, list(np.broadcast_shapes(left, right)))

    def alike(lhs, rhs):
        """Both with the type of their common shape, and the data that they have."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = type(lhs.type) is tl.block_type, type(rhs.type) is tl.block_type
        if left and right:
            shape = joined(lhs.type.sizes, rhs.type.sizes)
        else:
            shape = lhs.type if left else rhs.type
        return typed(lhs, shape), typed(rhs, shape)

    def typed(value, block):
        if value.shape is block.constant_shape:
            return value
        return tl.tensor(value.handle, block.with_element_ty(value.dtype))

    def broadcast(lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if type(lhs.type) is tl.block_type and type(rhs.type) is not tl.block_type:
            return lhs, filled(lhs.type, rhs)
        if type(rhs.type) is tl.block_type and type(lhs.type) is not tl.block_type:
            return filled(rhs.type, lhs), rhs
        return spread(lhs, rhs)

    def filled(like, value):
        block = like.with_element_ty(value.dtype)
        data = np.full(block.sizes, value.handle.data, interpreter._get_np_dtype(value.dtype))
        return tl.tensor(interpreter.TensorHandle(data, value.dtype), block)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = operands, broadcast
    semantic.computation_type_impl, semantic._cast_to_computation_type = computation_type, converted
    semantic.scalar_constant = constant


def _shorten_results() -> None:
    """Results are not looked at again, and conversions and new axes take one step."""
    semantic, handle = interpreter.interpreter_semantic, interpreter.TensorHandle
    builder = type(interpreter.interpreter_builder)
    cast, expand_dims, binary_op = semantic.cast, semantic.expand_dims, builder.binary_op

    def new_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def compute(self, lhs, rhs, op):
        dtype = lhs.dtype
        if type(dtype) is not tl.dtype or dtype is tl.int1:
            return binary_op(self, lhs, rhs, op)
        data = op(lhs.data, rhs.data)
        if data.itemsize * 8 > max(dtype.primitive_bitwidth, 8):
            data = data.astype(_np_dtype(dtype))
        return handle(data, dtype)

    def converted(value, dtype, fp_downcast_rounding=None):
        kind, before = dtype.scalar, value.dtype
        if before is kind:
            return value
        if type(before) is type(kind) is tl.dtype and before.is_int() and kind.is_int() and kind.name != "int1":
            block = type(value.type) is tl.block_type
            data = handle(value.handle.data.astype(_np_dtype(kind)), kind)
            return tl.tensor(data, value.type.with_element_ty(kind) if block else kind)
        return cast(value, dtype, fp_downcast_rounding)

    def with_new_axis(value, axis):
        if type(value.type) is not tl.block_type or not 0 <= axis <= len(value.type.sizes):
            return expand_dims(value, axis)
        data = value.handle.data[(slice(None),) * axis + (None,)]
        sizes = value.type.sizes
        return tl.tensor(handle(data, value.dtype), tl.block_type(value.dtype, [*sizes[:axis], 1, *sizes[axis:]]))

    handle.__init__, builder.binary_op = new_handle, compute
    semantic.cast, semantic.expand_dims = converted, with_new_axis
