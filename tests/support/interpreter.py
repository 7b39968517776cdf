"""Triton's interpreter as our tests run it: with one mistake mended, and without what it would do again and again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def mend(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Change it, by `setattr` or a fixture's that takes it back."""
    set_attribute(interpreter.InterpreterBuilder, "create_splat", splat)
    set_attribute(interpreter, "_patch_builtin", patch_builtins)


def splat(self: Any, to: Any, scalar: Any) -> Any:
    """Spread a scalar over a block.

    Triton 3.9's own makes an int32 of a comparison, which is then no mask.
    """
    return interpreter.TensorHandle(np.full(to.shape, scalar.data, scalar.data.dtype), scalar.dtype.scalar)


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Let a package's built-in functions be interpreted.

    Triton does that at each call of a function by a kernel, and looks each time through all that the package has: a
    quarter of the time that a kernel takes here.
    """
    for name in builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # else it is done
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """Names of a package's built-in functions, as it is before the first kernel."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))
