"""Triton's interpreter for our tests, with one bug fixed and repeated work cached."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def mend(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Patch the interpreter by `set_attribute`: `setattr`, or a fixture's version that later undoes the patches."""
    set_attribute(interpreter.InterpreterBuilder, "create_splat", splat)
    set_attribute(interpreter, "_patch_lang", patch_language)
    set_attribute(interpreter, "_patch_builtin", patch_builtins)
    set_attribute(interpreter, "_get_np_dtype", numpy_dtype)
    set_attribute(interpreter.interpreter_semantic, "broadcast_impl_value", broadcast)
    set_attribute(interpreter.interpreter_semantic, "binary_op_type_checking_impl", operands)
    set_attribute(tl.core, "_unwrap_if_constexpr", unwrap)
    set_attribute(tl.core.tensor, "__init__", make_tensor)
    set_attribute(tl.core.block_type, "__init__", make_block_type)
    options = interpreter.interpreter_builder.options
    if not options.debug:
        # Checks for integer overflow would slow down every sum and product, and they report nothing.
        set_attribute(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))


def splat(self: Any, to: Any, scalar: Any) -> Any:
    """Broadcast a scalar to a block.

    Triton 3.9 turns the result of a comparison into an int32, which cannot be used as a mask.
    """
    return interpreter.TensorHandle(np.full(to.shape, scalar.data, scalar.data.dtype), scalar.dtype.scalar)


def patch_language(function: Any) -> Any:
    """Patch the language as Triton does, unless the calling kernel has already patched it."""
    if all(map(is_patched, languages_of(function))):
        return interpreter._LangPatchScope()
    return stock_patch_language(function)


@functools.cache
def languages_of(function: Any) -> tuple[Any, ...]:
    """Return the packages of the language that a function's module imports."""
    return tuple(one for one in (tl, tl.core) if any(one is value for value in function.__globals__.values()))


def is_patched(package: Any) -> bool:
    """Return True if a package's built-in functions are interpreted at the moment."""
    names = builtins_of(package)
    return bool(names) and not tl.core.is_builtin(getattr(package, names[0]))


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Let the interpreter run a package's built-in functions.

    Triton scans the package each time a kernel calls a function, which takes a quarter of a kernel's time here. This
    version patches all built-in functions at once, and restores them afterwards.
    """
    if is_patched(package):
        return
    for name in builtins_of(package):
        scope.set_attr(package, name, interpreted(getattr(package, name)))


@functools.cache
def interpreted(member: Any) -> Any:
    """Return a built-in function that runs without a compiler, with one call less than Triton's own."""
    plain = getattr(member, "__wrapped__", member)

    def run(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return plain(*args, **options)

    return run


@functools.cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """Return the names of a package's built-in functions. The first call must come before a kernel patches them."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def numpy_dtype(kind: Any) -> Any:
    """Return the numpy type of a Triton type. Triton itself builds a table of all types on each call."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else numpy_scalar(scalar)


numpy_scalar = functools.cache(interpreter._get_np_dtype)


CONSTANTS = (tl.constexpr, tl.core.tuple, list, tuple)


def unwrap(x: Any) -> Any:
    """Return the value of a constant, and anything else unchanged."""
    return stock_unwrap(x) if isinstance(x, CONSTANTS) else x


def make_tensor(self: Any, handle: Any, kind: Any) -> None:
    """Replace `tensor.__init__`, which creates the constants of a shape on each call."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = kind.constants if kind.is_block() else constants_of(())


def broadcast(left: Any, right: Any) -> Any:
    """Return two operands with one shape. Triton itself compares equal shapes size by size."""
    # `constants_of` gives equal shapes one object.
    if left.shape is right.shape:
        return left, right
    if not right.type.is_block():
        return left, filled(left, right)
    return stock_broadcast(left, right) if left.type.is_block() else (filled(right, left), right)


def filled(like: Any, scalar: Any) -> Any:
    """Return a block of the shape of `like` in which every element is the scalar."""
    kind = like.type.with_element_ty(scalar.dtype)
    return tl.core.tensor(splat(None, kind, scalar.handle), kind)


def operands(left: Any, right: Any, *pointers: Any, **division: Any) -> Any:
    """Return two operands with one type and shape. Triton itself also looks for a cast between equal types."""
    alike = type(left) is type(right) is tl.core.tensor and left.dtype is right.dtype and not left.dtype.is_ptr()
    # Division may still need a cast.
    if alike and len(pointers) <= 2 and not division:
        return broadcast(left, right)
    return stock_operands(left, right, *pointers, **division)


@functools.cache
def constants_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the shape and the number of elements as Triton constants, cached by shape."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def make_block_type(self: Any, element: Any, shape: Any) -> None:
    """Replace `block_type.__init__`, which checks the shape on each call."""
    self.element_ty = element
    self.shape, self.numel, text, self.constants = checked(tuple(getattr(size, "value", size) for size in shape))
    self.name = f"<{text}, {element}>"


@functools.cache
def checked(shape: tuple[int, ...]) -> tuple[Any, int, str, Any]:
    """Return the shape, the number of elements and the name that Triton's own `block_type` gives to a shape, and its
    constants.

    Raises:
        TypeError, ValueError: `block_type` raises these.
    """
    made = object.__new__(tl.core.block_type)
    stock_block_type(made, tl.int8, list(shape))
    return made.shape, made.numel, str(made.shape), constants_of(tuple(made.shape))


stock_unwrap = tl.core._unwrap_if_constexpr
stock_operands = interpreter.interpreter_semantic.binary_op_type_checking_impl
stock_broadcast = interpreter.interpreter_semantic.broadcast_impl_value
stock_block_type = tl.core.block_type.__init__
stock_patch_language = interpreter._patch_lang
