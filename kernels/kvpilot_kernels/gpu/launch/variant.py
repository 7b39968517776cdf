"""Repeated launches of a compiled kernel without Triton's Python launcher.

At every launch, Triton binds, specializes and looks up all arguments in Python. With 40 parameters that takes longer
than the kernels of a small step, so outside a CUDA graph the GPU would wait for the host. `Launches` keeps Triton's
compiled program for each kind of arguments, and passes later arguments directly to its compiled launcher.

All layers of a step launch the same programs, with other addresses. So arguments are checked, and the program is looked
up, only in the first layer. Addresses are passed as numbers, which cost the compiled launcher less than tensors.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

Pointers = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

First = tuple[Any, tuple[int, int, int], Pointers, Callable[[Any, Any, Any], tuple[Any, ...]], Numbers, dict[str, Any]]
"""Launch of a step's first layer: a kernel that takes pointers, then numbers, then constants; its grid; the pointers
that are the same for all layers; a function that puts pointers into the kernel's order, and takes the varying ones, the
layer's and the step's; numbers; and constants with options such as `num_warps`."""

UNALIGNED = (15).__and__
"""Function that returns 0 for a multiple of 16."""


class Own:
    """Tensors of a layer that its launches pass. Their addresses must not change.

    Attributes:
        kind: properties on which a launch depends, besides addresses.

    Args:
        numbers: further values on which a launch depends, such as strides.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], numbers: tuple[Any, ...]) -> None:
        self.tensors, self.kind = tensors, (kinds(tensors, ()), numbers)
        self.addresses = tuple(x.data_ptr() for x in tensors)


class Launches:
    """Launches of all steps. `last` has the last launch of each kernel, which later layers of the step repeat."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[Any, ...]] = {}
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, name: str, given: tuple[Any, ...], values: tuple[Any, ...], varying: tuple[torch.Tensor, ...],
                 own: Own, first: Callable[[], First]) -> CompiledKernel | None:  # fmt: skip
        """Repeat a kernel's last launch with other addresses if all else is the same, or launch what `first` returns.

        Return the compiled program, or None in Triton's interpreter.

        Args:
            given: the step's objects on which checks and launch depend. They are the same if they are identical.
            values: numbers on which they depend.
            varying: tensors of this launch. They are the same if their types, shapes and strides are equal.
            first: function that checks all arguments.
        """
        addresses = [x.data_ptr() for x in varying]
        like = own.kind, values, [(x.dtype, x.shape, x.stride()) for x in varying]
        last = self.last.get(name)
        if last is None or last[0] != like or not all(map(is_, last[1], given)) or any(map(UNALIGNED, addresses)):
            kernel, grid, pointers, order, numbers, constants = first()
            args = order(varying, own.tensors, pointers)
            alignment, *types = kinds(args, numbers)
            key = id(kernel), *constants.values(), *types
            compiled = None if alignment else self._compiled.get(key)
            if compiled is None:
                found = kernel[grid](*args, *numbers, **constants)
                if not isinstance(found, CompiledKernel):
                    return None
                if not alignment:
                    self._compiled[key] = found
                return found
            # The compiled launcher takes the constants too, in the kernel's order, and ignores them.
            rest = (constants[name] for name in kernel.arg_names[len(args) + len(numbers) :])
            last = self.last[name] = (
                like, given, compiled, grid, driver.active.get_current_device(), order,
                tuple(0 if x is None else x.data_ptr() for x in pointers), (*numbers, *rest),
            )  # fmt: skip
        _, _, compiled, grid, device, order, step, numbers = last
        compiled.run(
            *grid, driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata, None, None,
            None, *order(addresses, own.addresses, step), *numbers,
        )  # fmt: skip
        return compiled


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
