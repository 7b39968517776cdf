"""Our exclusions against the pinned vLLM: its backends on GPUs that are not here, and on this CPU."""

from __future__ import annotations

import importlib
import itertools

import pytest

from kvpilot_formats import formats, hardware
from kvpilot_operator.decide.steps.ladder import hardware_fault
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import CPU_DTYPES, check
from support.own_process import ask
from support.preflights import asked

CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0))
HEADS = (64, 80, 96, 128, 192, 256, 512)
VLLMS = [name for name in formats.names() if not formats.parse(name).ours]
NOT_HERE = ("nvfp4", "turboquant")
"""Dtypes that we never exclude on a GPU; their backends do not load without one."""

QUESTIONS = [
    (capability, dtype, head_dim, is_latent)
    for capability, dtype in itertools.product(CAPABILITIES, VLLMS)
    for head_dim, is_latent in (*((head_dim, False) for head_dim in HEADS), (576, True))
    if not (is_latent and capability[0] == 10)  # these backends reserve memory of the GPU as they load
]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[object, ...], bool]:
    return dict(zip(QUESTIONS, ask("support.vllm_vetoes", QUESTIONS), strict=True))


def test_preflight_and_planner_veto_what_vllm_does_not_serve_and_nothing_else(
    answers: dict[tuple[object, ...], bool],
) -> None:
    wrong = []
    for (capability, dtype, head_dim, is_latent), served in answers.items():
        fault = hardware.gpu_fault(dtype, capability, head_dim, is_latent)
        fault = fault or (hardware.latent_fault(dtype) if is_latent else None)
        if dtype.startswith(NOT_HERE) and not is_latent:
            assert fault is None
        elif served == (fault is not None):
            wrong.append((capability, dtype, head_dim, is_latent, fault))
    assert wrong == []
    assert sum(answers.values()) > len(answers) // 4


def test_the_operator_vetoes_no_dtype_that_vllm_serves(answers: dict[tuple[object, ...], bool]) -> None:
    for (capability, dtype, head_dim, is_latent), served in answers.items():
        model = ModelFacts(head_dim=head_dim, kv_heads=8, layers=32, window_layers=0, mla=is_latent)
        if served:
            assert hardware_fault(dtype, NodeFacts("a GPU", capability), model) is None
            assert hardware_fault(dtype, NodeFacts("a GPU", capability)) is None


def test_dtypes_that_are_called_wrong_on_a_cpu_are_those_that_its_backend_does_not_name() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    named = {str(dtype) for dtype in CPUAttentionBackend.supported_kv_cache_dtypes}
    assert named <= CPU_DTYPES
    assert CPU_DTYPES - named == {"bfloat16", "float16"}  # the model's own dtype by name
    for dtype in VLLMS:
        assert (hardware_fault(dtype, NodeFacts()) is None) == (dtype in CPU_DTYPES), dtype


def takes(dtype: str, size: int) -> bool:
    try:
        check(asked(f"--block-size={size}", dtype=dtype))
    except PreflightError as error:
        assert error.reason == "BadArguments"
        assert f"--block-size {size}" in error.message
        assert "use --block-size=" in error.message
        return False
    return True


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["k4v4", "int8"])
def test_blocks_are_refused_where_our_backends_refuse_them(
    monkeypatch: pytest.MonkeyPatch, platform: machine.Platform, dtype: str
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: platform)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    for size in (1, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 200, 256):
        assert takes(dtype, size) == (size % hardware.BLOCK_STEPS[platform] == 0), size


@pytest.mark.parametrize(("platform", "size", "remedy"), [("cpu", 8, 16), ("cuda", 16, 64), ("cuda", 100, 128)])
def test_a_block_size_is_refused_with_one_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, platform: str, size: int, remedy: int
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: platform)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    for arguments in ([f"--block-size={size}"], ["--block-size", str(size)]):
        with pytest.raises(PreflightError, match=f"use --block-size={remedy}, or leave it out"):
            check(asked(*arguments, dtype="k4v4"))
        check(asked(*arguments, dtype="auto"))


@pytest.mark.parametrize("name", ["cpu", "latent_cpu", "latent_cuda"])  # cuda.py needs vLLM's build for GPUs
def test_our_backends_take_the_blocks_that_preflight_lets_through(name: str) -> None:
    module = importlib.import_module(f"kvpilot_runtime.backends.{name}")
    backends = [
        value for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "get_supported_kernel_block_sizes")
    ]  # fmt: skip
    assert backends
    step = hardware.BLOCK_STEPS[name.removeprefix("latent_")]
    for backend in backends:
        assert [block.base for block in backend.get_supported_kernel_block_sizes()] == [step]
