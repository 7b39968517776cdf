"""Repeated launches of a compiled kernel without Triton's Python launcher.

At every launch, Triton binds, specializes and looks up all arguments in Python. With 40 parameters this takes longer
than the kernels of a small step, so outside a CUDA graph the GPU would wait for the host. `Launches` keeps Triton's
compiled program for each kind of arguments. It passes the arguments of later launches directly to the program's
compiled launcher.

All layers of a step launch the same programs, with different addresses. So arguments are checked, and the program is
looked up, only in the first layer. Addresses are passed as numbers, which the compiled launcher handles faster than
tensors.
"""

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

Pointers = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

Order = Callable[[Any, Any, Any], tuple[Any, ...]]
"""Function that puts the pointers of a launch, of its layer and of its step into the order that the kernel takes."""

UNALIGNED = (15).__and__
"""Function that returns 0 for a multiple of 16, and another number otherwise."""


class First(NamedTuple):
    """Launch in the first layer of a step.

    Attributes:
        kernel: a function of `triton.jit` or `gluon.jit`. Its parameters are pointers, then numbers, then constants.
        step: pointers that are the same for all layers.
        constants: values of the kernel's constants, and options such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, int, int]
    step: Pointers
    order: Order
    numbers: Numbers
    constants: dict[str, Any]


class Kept(NamedTuple):
    """Launch that later layers of the step may repeat.

    Attributes:
        like: properties that a repetition must share, compared by value.
        given: objects that a repetition must share, compared by identity.
        step: addresses that are the same for all layers.
        rest: numbers and constants, which follow the pointers.
    """

    like: tuple[Any, ...]
    given: tuple[Any, ...]
    compiled: CompiledKernel
    grid: tuple[int, int, int]
    device: int
    order: Order
    step: tuple[int, ...]
    rest: tuple[Any, ...]


class Own:
    """Tensors that all launches of one layer get, at addresses that never change.

    Attributes:
        kind: properties of the tensors, and `numbers`. A launch depends on these and on the addresses.

    Args:
        numbers: further values on which a launch depends, such as strides.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], numbers: tuple[Any, ...]) -> None:
        self.tensors, self.kind = tensors, (kinds(tensors, ()), numbers)
        self.addresses = tuple(x.data_ptr() for x in tensors)


class Launches:
    """Launches of all steps. `last` has the last launch of each kernel, which later layers of a step repeat."""

    def __init__(self) -> None:
        self.last: dict[str, Kept] = {}
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, name: str, given: tuple[Any, ...], values: tuple[Any, ...], varying: tuple[torch.Tensor, ...],
                 own: Own, first: Callable[[], First]) -> CompiledKernel | None:  # fmt: skip
        """Repeat a kernel's last launch with new addresses if all else is equal. If not, launch the result of `first`.

        Return the compiled program, or None in Triton's interpreter.

        Args:
            given: objects of the step on which checks and launch depend, compared by identity.
            values: numbers on which checks and launch depend.
            varying: tensors of this launch, compared by dtype, shape and strides.
            first: function that checks all arguments and returns the launch.
        """
        addresses = [x.data_ptr() for x in varying]
        like = own.kind, values, [(x.dtype, x.shape, x.stride()) for x in varying]
        last = self.last.get(name)
        if last is None or last.like != like or not all(map(is_, last.given, given)) or any(map(UNALIGNED, addresses)):
            new = first()
            args = new.order(varying, own.tensors, new.step)
            alignment, *types = kinds(args, new.numbers)
            key = id(new.kernel), *new.constants.values(), *types
            compiled = None if alignment else self._compiled.get(key)
            if compiled is None:
                found = new.kernel[new.grid](*args, *new.numbers, **new.constants)
                if not isinstance(found, CompiledKernel):
                    return None
                if not alignment:
                    self._compiled[key] = found
                return found
            # The compiled launcher takes the constants too, in the kernel's order, and ignores them.
            constants = (new.constants[name] for name in new.kernel.arg_names[len(args) + len(new.numbers) :])
            step = tuple(0 if x is None else x.data_ptr() for x in new.step)
            device, rest = driver.active.get_current_device(), (*new.numbers, *constants)
            last = self.last[name] = Kept(like, given, compiled, new.grid, device, new.order, step, rest)
        compiled, stream = last.compiled, driver.active.get_current_stream(last.device)
        compiled.run(
            *last.grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *last.order(addresses, own.addresses, last.step), *last.rest,
        )  # fmt: skip
        return compiled


def kinds(pointers: Pointers, numbers: Numbers) -> tuple[Any, ...]:
    """Return the properties of arguments by which Triton selects a compiled program.

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
