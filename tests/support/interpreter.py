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
    languages = (one for one in (tl, tl.core) if any(one is value for value in function.__globals__.values()))
    if all(is_patched(one) for one in languages):
        return interpreter._LangPatchScope()
    return stock_patch_language(function)


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
        interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


@functools.cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """Return the names of a package's built-in functions. The first call must come before a kernel patches them."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def numpy_dtype(kind: Any) -> Any:
    """Return the numpy type of a Triton type. Triton itself builds a table of all types on each call."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else numpy_scalar(scalar)


numpy_scalar = functools.cache(interpreter._get_np_dtype)


def make_tensor(self: Any, handle: Any, kind: Any) -> None:
    """Replace `tensor.__init__`, which creates the constants of a shape on each call."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = constants_of(tuple(kind.shape) if kind.is_block() else ())


def broadcast(left: Any, right: Any) -> Any:
    """Return two operands with one shape. Triton itself compares equal shapes size by size."""
    # `constants_of` gives equal shapes one object.
    return (left, right) if left.shape is right.shape else stock_broadcast(left, right)


@functools.cache
def constants_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the shape and the number of elements as Triton constants, cached by shape."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def make_block_type(self: Any, element: Any, shape: Any) -> None:
    """Replace `block_type.__init__`, which checks the shape on each call."""
    self.element_ty = element
    self.shape, self.numel, text = checked(tuple(getattr(size, "value", size) for size in shape))
    self.name = f"<{text}, {element}>"


@functools.cache
def checked(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """Return the shape, the number of elements and the name that Triton's own `block_type` gives to a shape.

    Raises:
        TypeError, ValueError: `block_type` refuses the shape.
    """
    made = object.__new__(tl.core.block_type)
    stock_block_type(made, tl.int8, list(shape))
    return made.shape, made.numel, str(made.shape)


stock_broadcast = interpreter.interpreter_semantic.broadcast_impl_value
stock_block_type = tl.core.block_type.__init__
stock_patch_language = interpreter._patch_lang
