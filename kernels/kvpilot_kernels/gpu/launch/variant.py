"""Repeated launches of a compiled kernel without Triton's Python launcher.

At every launch, Triton binds, specializes and looks up all arguments in Python. With 40 parameters that takes longer
than the kernels of a small step, so outside a CUDA graph the GPU would wait for the host. A `Variant` keeps Triton's
compiled program for each kind of arguments, and passes later arguments directly to its compiled launcher.
"""

from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

Pointers = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]


class Variant:
    """Kernel with fixed constants and launch options.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit` that takes pointers, then numbers, then constants.
        constants: values of the kernel's constants, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel, self._constants = kernel, constants
        self._rest: tuple[Any, ...] = ()
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, grid: tuple[int, int, int], pointers: Pointers, numbers: Numbers) -> CompiledKernel | None:
        """Launch the kernel, and return the compiled program, or None in Triton's interpreter."""
        key = kinds(pointers, numbers)
        compiled = self._compiled.get(key)
        if compiled is None:
            return self._by_triton(key, grid, *pointers, *numbers)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *numbers,
            *self._rest,
        )  # fmt: skip
        return compiled

    def _by_triton(self, key: tuple[Any, ...], grid: tuple[int, int, int], *args: Any) -> CompiledKernel | None:
        found = self._kernel[grid](*args, **self._constants)
        if not isinstance(found, CompiledKernel):
            return None
        # The compiled launcher takes the constants too, in the kernel's order, and ignores them.
        self._rest = tuple(self._constants[name] for name in self._kernel.arg_names[len(args) :])
        if key[0] == 0:
            self._compiled[key] = found
        return found


def kinds(pointers: Pointers, numbers: Numbers) -> tuple[Any, ...]:
    """Return the properties of arguments that decide which compiled program Triton uses.

    The first item is 0 if every address is a multiple of 16.
    """
    unaligned = 0
    for x in pointers:
        if x is not None:
            unaligned |= x.data_ptr()
    return (
        unaligned & 15,
        *[None if x is None else x.dtype for x in pointers],
        *[(n == 1, n & 15 == 0, -(2**31) <= n < 2**31) if type(n) is int else None for n in numbers],
    )
