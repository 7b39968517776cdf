"""Properties of Triton and of our kernels, on which launches without Triton's Python launcher rely."""

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from kvpilot_kernels.gpu.decode import kernel as decode
from kvpilot_kernels.gpu.decode import merge as reduce
from kvpilot_kernels.gpu.launch.launches import kinds
from kvpilot_kernels.gpu.prefill import gather
from kvpilot_kernels.gpu.store import kernel as store

KERNELS = {"store": store.store_kernel, "decode": decode.decode_kernel, "reduce": reduce.reduce_kernel,
           "gather": gather.gather_kernel}  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-40, 40), st.sampled_from([2**31 - 1, 2**31, 2**31 + 16, 2**40, -(2**31), -(2**31) - 16]),
    st.floats(-2, 2),
)  # fmt: skip
TENSORS = st.builds(
    lambda dtype, first: torch.zeros(64, dtype=dtype)[first:],
    st.sampled_from([torch.uint8, torch.int32, torch.bfloat16, torch.float32]), st.sampled_from([0, 1, 16]),
)  # fmt: skip


def of_triton(x: Any) -> Any:
    """Return the properties by which Triton's own launcher distinguishes programs."""
    return native_specialize_impl(CUDABackend, x, False, True, True)


@given(NUMBERS, NUMBERS)
def test_numbers_of_one_kind_use_the_same_compiled_program(a: float, b: float) -> None:
    if kinds((), (a,)) == kinds((), (b,)):
        assert of_triton(a) == of_triton(b)


@given(TENSORS, TENSORS)
def test_aligned_tensors_of_one_kind_use_the_same_compiled_program(a: torch.Tensor, b: torch.Tensor) -> None:
    one, other = kinds((a, None), ()), kinds((b, None), ())
    assert (one[0] == 0) == (a.data_ptr() % 16 == 0)
    if one == other and one[0] == 0:
        assert of_triton(a) == of_triton(b)


def test_triton_passes_the_same_arguments_to_a_compiled_kernel_as_we_do() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(JITFunction.run)))
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run"]
    assert [[ast.unparse(arg) for arg in call.args] for call in calls] == [
        ["grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata", "launch_metadata",
         "knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook", "*bound_args.values()"]
    ]  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_arguments_are_pointers_then_numbers_then_constants(name: str) -> None:
    function = getattr(KERNELS[name], "fn", KERNELS[name])
    parameters = inspect.signature(function).parameters
    ranks = [
        0 if arg.endswith("_ptr") else 2 if "constexpr" in str(parameter.annotation) else 1
        for arg, parameter in parameters.items()
    ]
    assert set(ranks) == {0, 1, 2}
    assert ranks == sorted(ranks)
