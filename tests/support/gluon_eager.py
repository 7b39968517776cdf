"""Run the Gluon decode kernels on a CPU: their own source, line by line over numpy arrays.

Triton interprets its own kernels (TRITON_INTERPRET=1) but not Gluon's. `EagerKernel` takes the functions of a Gluon
module unchanged and gives them another `gl`. Values are arrays, layouts have no effect, and a pointer is a buffer with
byte offsets. Behaviour that the hardware leaves undefined is made as bad as possible, so that a mistake shows:

- An access outside the pointer's tensor, or off its type's alignment, raises an error.
- Shared memory starts as 0xFF everywhere: NaN scales, and the largest codes.
- An asynchronous copy reads its source at once, which is too early if the kernel should have waited for the writer. It
  also overwrites its target at once, which is too early if the kernel still needs the last tile there. Its data arrive
  only at its `wait_group`. Two copies in flight to the same place raise an error.
- One hook before each program and one at its `gdc_wait` can delay the writes of the previous kernel.

Inline PTX works on 32-bit registers, which hold neighbours of the last dimension. This module has only the functions
that `kvpilot_kernels.gpu.decode`, `gpu.mla` and their parts use. Others raise an AttributeError or a ValueError.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia.ampere import async_copy

POISON = 0xFF


class Block(np.ndarray[Any, Any]):
    """Value of a kernel. Values are immutable: `x += y` makes a new one."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> "Block":
        return block(array)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # no overloads: every type that + takes
        return self + other

    __isub__ = __imul__ = __itruediv__ = __ior__ = __iand__ = None  # type: ignore[assignment]

    def to(self, dtype: Any, bitcast: bool = False) -> "Block":
        """Convert to `dtype` or, with `bitcast`, reinterpret the same bits as `dtype`."""
        return block(self.view(dtype) if bitcast else self.astype(dtype))


def block(x: Any) -> Block:
    """Convert any number or array to a kernel's value."""
    result: Block = np.asarray(x).view(Block)
    return result


class PointerType:
    """Stand-in for `gl.pointer_type(dtype)`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


class Pointer:
    """Addresses: the bytes of one tensor, offsets into them in any shape, and the element type."""

    def __init__(self, memory: Any, offsets: Any, dtype: Any) -> None:
        self.memory, self.offsets, self.dtype = memory, np.asarray(offsets, np.int64), np.dtype(dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pointer":
        """Return a pointer to the first element of a tensor. Its end is the tensor's last element."""
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((last + 1,), (1,)) if tensor.numel() else tensor.flatten()
        return cls(flat.numpy().view(np.uint8), 0, flat.numpy().dtype)

    def __add__(self, elements: Any) -> "Pointer":
        steps = np.asarray(elements).astype(np.int64) * self.dtype.itemsize
        return Pointer(self.memory, self.offsets + steps, self.dtype)

    def to(self, kind: PointerType) -> "Pointer":
        """Return the same addresses with another type."""
        return Pointer(self.memory, self.offsets, kind.dtype)

    def bytes_at(self, mask: Any) -> tuple[Any, Any]:
        """Return this pointer's mask, and the byte indices [..., itemsize] where the mask is true.

        Raises:
            IndexError: an address lies outside the tensor.
            ValueError: an address is not aligned to its type.
        """
        offsets, mask = np.broadcast_arrays(self.offsets, np.asarray(mask))
        wanted = offsets[mask]
        if wanted.size and (wanted.min() < 0 or wanted.max() + self.dtype.itemsize > self.memory.size):
            raise IndexError(f"bytes {wanted.min()} to {wanted.max()} of a tensor of {self.memory.size}")
        if (wanted % self.dtype.itemsize).any():
            raise ValueError(f"an address is not a multiple of {self.dtype.itemsize} bytes")
        return mask, wanted[:, None] + np.arange(self.dtype.itemsize)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Block:
    """Stand in for `gl.load`: read the addresses whose `mask` is true, and use `other` elsewhere."""
    mask, at = pointer.bytes_at(mask)
    result = np.full(mask.shape, other, pointer.dtype)
    result[mask] = pointer.memory[at].view(pointer.dtype)[:, 0]
    return block(result)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    """Stand in for `gl.store`: write the value to the addresses whose `mask` is true."""
    shape = np.broadcast_shapes(pointer.offsets.shape, np.shape(value))
    mask, at = (pointer + np.zeros(shape, np.int64)).bytes_at(mask)
    wanted = np.broadcast_to(value, mask.shape)[mask].astype(pointer.dtype)
    pointer.memory[at] = np.ascontiguousarray(wanted)[:, None].view(np.uint8)


class Shared:
    """A program's shared memory, or a view of a part of it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @classmethod
    def allocate(cls, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        """Stand in for `gl.allocate_shared_memory`."""
        data = np.empty(shape, dtype)
        data.view(np.uint8)[...] = POISON
        return cls(data)

    def index(self, i: Any) -> "Shared":
        """Return one of the buffers along the first dimension."""
        if not 0 <= i < self.data.shape[0]:
            raise IndexError(f"buffer {i} of {self.data.shape[0]}")
        return Shared(self.data[operator.index(i)])

    def slice(self, start: int, length: int) -> "Shared":
        """Return a part of the first dimension."""
        if start + length > self.data.shape[0]:
            raise IndexError(f"{start} to {start + length} of {self.data.shape[0]}")
        return Shared(self.data[start : start + length])

    def permute(self, order: list[int]) -> "Shared":
        """Return the dimensions in another order."""
        return Shared(self.data.transpose(order))

    def reshape(self, shape: list[int]) -> "Shared":
        """Return the same elements in another shape."""
        seen = self.data.view()
        seen.shape = tuple(shape)  # numpy raises an error if it would have to copy
        return Shared(seen)

    def load(self, layout: Any) -> Block:
        """Return the current content of the shared memory."""
        return block(self.data.copy(order="C"))

    def store(self, value: Any) -> None:
        """Write a value of the same shape and type into the shared memory."""
        if (value.shape, value.dtype) != (self.data.shape, self.data.dtype):
            raise ValueError(f"{value.dtype} {value.shape} into {self.data.dtype} {self.data.shape}")
        self.data[...] = value


class Copies:
    """Asynchronous copies of one program (`async_copy`), with their targets and their data."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the asynchronous copies of the previous program."""
        self.uncommitted: list[tuple[Any, Block]] = []
        self.groups: list[list[tuple[Any, Block]]] = []

    def async_copy_global_to_shared(self, target: Shared, pointer: Pointer) -> None:
        """Start to copy one element for each address.

        Raises:
            RuntimeError: another copy to the same place is in flight, so the final content would be undefined.
        """
        if pointer.offsets.shape != target.data.shape:
            raise ValueError(f"a copy of {pointer.offsets.shape} into {target.data.shape}")
        for other, _ in itertools.chain(self.uncommitted, *self.groups):
            if np.may_share_memory(other, target.data):
                raise RuntimeError("two copies to the same place are on their way")
        read = load(pointer)
        target.data.view(np.uint8)[...] = POISON
        self.uncommitted.append((target.data, read))

    async_load = async_copy_global_to_shared  # its name in Triton 3.9

    def commit_group(self) -> None:
        """Close the group of copies since the last commit."""
        self.groups.append(self.uncommitted)
        self.uncommitted = []

    def wait_group(self, pending: int) -> None:
        """Complete all groups of copies except the last `pending` ones."""
        landed = self.groups[: max(0, len(self.groups) - pending)]
        for target, read in itertools.chain.from_iterable(landed):
            target[...] = read
        del self.groups[: len(landed)]


def mma_v2(a: Block, b: Block, acc: Block) -> Block:
    """Return a @ b + acc, computed in float32 for float16 (with subnormal numbers) and in int32 for int8."""
    depth = {"float16": 16, "int8": 32}.get(a.dtype.name, 0)
    sums = np.dtype(np.float32 if depth == 16 else np.int32)
    if not depth or a.dtype != b.dtype or acc.dtype != sums or a.shape[1] % depth or a.shape[0] % 16 or b.shape[1] % 8:
        raise ValueError(f"mma of {a.dtype} {a.shape} and {b.dtype} {b.shape} into {acc.dtype}")
    return block(a.astype(sums) @ b.astype(sums) + acc)


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Block], dtype: Any, is_pure: bool, pack: int
) -> Block:
    """Run the decode kernels' inline PTX on 32-bit registers.

    A register holds `pack` neighbouring elements, the first one in its lowest bits. `dtype` is the result's type.
    """
    if constraints != "=r" + ",r" * (len(set(re.findall(r"\$\d", asm))) - 1):
        raise ValueError(f"{asm} with {constraints}")
    if asm == "cvt.rn.f16x2.f32 $0, $2, $1;":  # d, a, b: a becomes the upper half, b the lower
        (x,) = args
        if (x.dtype, pack, dtype) != (np.float32, 2, np.float16):
            raise ValueError(f"{asm} of {x.dtype} by {pack} as {dtype}")
        return x.to(np.float16)
    if any(x.dtype.itemsize * pack != 4 for x in args) or np.dtype(dtype).itemsize * pack != 4:
        raise ValueError(f"{asm}: {pack} elements of {[x.dtype for x in args]} as {dtype} are no registers")
    if asm == "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;":
        return transpose_registers(args[0]).to(dtype, bitcast=True)
    registers = {f"${i + 1}": np.ascontiguousarray(x).view("<u4") for i, x in enumerate(args)}
    for statement in filter(None, (part.strip() for part in asm.strip("{} ").split(";"))):
        name, _, rest = statement.partition(" ")
        if name == ".reg":
            continue
        if name not in INSTRUCTIONS:
            raise ValueError(f"unknown instruction: {statement}")
        to, *operands = (x.strip() for x in rest.split(","))
        values = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in operands]
        registers[to] = INSTRUCTIONS[name](*values)
    return block(registers["$0"]).to(dtype, bitcast=True)


def lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Apply any function of three bits. Its value is bit 4 a + 2 b + c of `table`."""
    terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1]
    return functools.reduce(operator.or_, terms)


def smaller_halves(a: Any, b: Any) -> Any:
    """Return the smaller float16 in each half of the registers. Prefer a number to NaN."""
    halves = (np.ascontiguousarray(x)[..., None].view(np.float16) for x in (a, b))
    return np.fmin(*halves).view("<u4")[..., 0]


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "and.b32": operator.and_, "shr.u32": operator.rshift, "mov.b32": lambda a: a, "lop3.b32": lop3,
    "min.f16x2": smaller_halves, "setp.eq.u32": operator.eq, "selp.b32": lambda a, b, p: np.where(p, a, b),
}  # fmt: skip


def transpose_registers(x: Block) -> Block:
    """Apply `movmatrix` to every register of a warp that holds [rows, columns] of 16-bit elements.

    The lanes of a warp form 8 rows g and 4 columns t. As in the layout `unpack.SCORES`, a thread holds columns t, t +
    4, ... of rows g, g + 8, .... It counts columns first, two to a register. One register of all threads forms a matrix
    with rows g and columns 2 t (its lower 16 bits) and 2 t + 1 (its upper 16 bits).
    """
    rows, columns = x.shape
    by_thread = np.asarray(x).reshape(rows // 8, 8, columns // 4, 4).transpose(0, 2, 1, 3)
    matrices = by_thread.reshape(-1, 2, 8, 4).transpose(0, 2, 3, 1).reshape(-1, 8, 8).transpose(0, 2, 1)
    back = matrices.reshape(-1, 8, 4, 2).transpose(0, 3, 1, 2).reshape(rows // 8, columns // 4, 8, 4)
    return block(np.ascontiguousarray(back.transpose(0, 2, 1, 3)).reshape(rows, columns))


def where(condition: Any, x: Any, y: Any) -> Block:
    """Stand in for `gl.where`. A number takes the type of the other side; two numbers become float32 or int32."""
    if isinstance(x, (int, float)) and isinstance(y, (int, float)):
        x = np.float32(x) if isinstance(x, float) else np.int32(x)
    return block(np.where(condition, x, y))


def checked_multiple(x: Any, of: int) -> Any:
    """Raise an error if `x` is not a multiple of `of`. The compiler trusts the hint `gl.multiple_of` unchecked."""
    if np.any(np.asarray(x) % of):
        raise ValueError(f"{x} is not a multiple of {of}")
    return x


def language(program: list[int], grid: tuple[int, ...]) -> SimpleNamespace:
    """Return the stand-in for the module `gl` that the program at this position of the grid uses."""
    layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout")
    dtypes = ("int8", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32")
    return SimpleNamespace(
        **{name: lambda *args: None for name in layouts}, **{name: getattr(np, name) for name in dtypes},
        program_id=lambda axis: block(np.int32(program[axis])), num_programs=lambda axis: block(np.int32(grid[axis])),
        pointer_type=PointerType, load=load, store=store, allocate_shared_memory=Shared.allocate,
        static_range=range, multiple_of=checked_multiple, inline_asm_elementwise=inline_asm_elementwise,
        arange=lambda start, end, layout: block(np.arange(start, end, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: block(np.full(shape, value, dtype)),
        where=where, convert_layout=lambda x, layout, assert_trivial=False: x,
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.transpose(order),
        join=lambda x, y: block(np.stack([x, y], -1)), split=lambda x: (x[..., 0], x[..., 1]),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        max=lambda x, axis: x.max(axis), min=lambda x, axis: x.min(axis), maximum=np.maximum, minimum=np.minimum,
        exp2=np.exp2, log2=np.log2, barrier=lambda: None, thread_barrier=lambda: None,
    )  # fmt: skip


class EagerKernel:
    """Kernel of a Gluon module, called like Triton's: `kernel[grid](tensors and numbers, CONSTANT=...)`.

    Args:
        module: the module of the kernel and of the functions that it calls.
        kernel: the kernel's name.
        on_start: callback before each program.
        on_gdc_wait: callback when a program waits for the previous kernel.
    """

    def __init__(self, module: ModuleType, kernel: str, on_start: Callable[[], None] = lambda: None,
                 on_gdc_wait: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.module, self.kernel, self.on_start, self.on_gdc_wait = module, kernel, on_start, on_gdc_wait

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher of a grid. Programs run one after another, and the number of warps has no effect."""

        def launch(*args: Any, num_warps: int, maxnreg: int | None, enable_fp_fusion: bool, launch_pdl: bool = False,
                   **constants: Any) -> None:  # fmt: skip
            pointers = [Pointer.of(x) if isinstance(x, torch.Tensor) else x for x in args]
            program, copies = [0] * len(grid), Copies()
            function = self._function(language(program, grid), copies)
            with np.errstate(all="ignore"):
                for place in itertools.product(*map(range, grid)):
                    program[:] = place
                    self.on_start()
                    copies.begin()
                    function(*pointers, **constants)

        return launch

    def _function(self, gl: SimpleNamespace, copies: Copies) -> Any:
        """Return the kernel as a Python function, with CPU versions of the GPU's functions in all globals it uses."""
        ours = {"gl": gl, "async_copy": copies, "mma_v2": mma_v2, "gdc_wait": self.on_gdc_wait,
                "gdc_launch_dependents": lambda: None}  # fmt: skip
        made: dict[int, dict[str, Any]] = {}

        def scope_of(scope: dict[str, Any]) -> dict[str, Any]:
            if id(scope) in made:
                return made[id(scope)]
            names = made[id(scope)] = dict(scope)
            for name, value in scope.items():
                if type(value).__name__ == "GluonJITFunction":
                    names[name] = FunctionType(value.fn.__code__, scope_of(value.fn.__globals__), name)
                elif type(value).__name__ == "constexpr":
                    names[name] = value.value
                elif getattr(value, "__module__", None) == async_copy.__name__:
                    names[name] = getattr(ours["async_copy"], value.__name__)
                elif getattr(value, "__module__", None) == gluon_language.load.__module__:
                    names[name] = getattr(gl, value.__name__)
            names.update(ours)
            return names

        return scope_of(vars(self.module))[self.kernel]
