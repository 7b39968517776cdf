"""The dtypes that we exclude are those that the pinned vLLM refuses, on GPUs (simulated) and on this CPU."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvpilot_formats import formats, hardware
from kvpilot_operator.decide.steps.ladder import hardware_fault
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import CPU_DTYPES, check
from support.own_process import ask
from support.preflights import asked

_KERNELS = (
    "flashinfer",
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn",
)


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of empty modules in place of compiled kernels that a CPU lacks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find any module of `_KERNELS`, and any module below it."""
        ours = any(fullname == name or fullname.startswith(f"{name}.") for name in _KERNELS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Create an empty module that has an attribute for every name."""
        made: Any = MagicMock(name=spec.name)
        made.__spec__, made.__path__, made.__name__ = spec, [], spec.name
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module unchanged."""


def main() -> None:
    """Read questions from stdin, and write vLLM's answers to stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        sys.meta_path.insert(0, _Kernels())
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            found = [served((*capability,), *rest) for capability, *rest in json.load(sys.stdin)]
    print(json.dumps(found))


def served(capability: tuple[int, int], dtype: Any, head_dim: int, latent: bool) -> bool:
    """Return True if the backend that vLLM chooses for this GPU accepts the dtype."""
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class Pretended(CudaPlatformBase):  # type: ignore[misc]
        """Stand-in for a GPU of this compute capability."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a GPU"

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 108

    vllm.platforms.current_platform = Pretended()
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.") and m is not None]:
        if "current_platform" in vars(module):
            module.current_platform = vllm.platforms.current_platform  # type: ignore[attr-defined]
    wide = torch.bfloat16 if capability >= (8, 0) else torch.float16
    asked = AttentionSelectorConfig(head_dim, wide, dtype, None, use_mla=latent)
    valid, _ = Pretended.get_valid_backends(DeviceCapability(*capability), asked, 32)
    for candidate in sorted(valid, key=lambda candidate: candidate.priority)[:1]:
        return _made(candidate, head_dim, dtype)
    return False


def _made(candidate: Any, head_dim: int, dtype: str) -> bool:
    """Return False if a Triton implementation refuses these arguments. Other backends refuse earlier."""
    if not candidate.backend.name.startswith("TRITON"):
        return True
    more = {} if candidate.backend.name != "TRITON_MLA" else {
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": MagicMock(),
    }  # fmt: skip
    try:
        candidate.backend_class.get_impl_cls()(
            8, head_dim, 1.0, 1 if more else 8, None, None, dtype, None, "decoder", None, **more
        )
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        return False
    return True


CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0))
HEADS = (64, 80, 96, 128, 192, 256, 512)
VLLMS = [name for name in tuple(formats.FORMATS) if not formats.parse(name).ours]
NOT_HERE = ("nvfp4", "turboquant")
"""Dtypes that we never exclude on a GPU, because their backends cannot be imported without one."""

QUESTIONS = [
    (capability, dtype, head_dim, is_latent)
    for capability, dtype in itertools.product(CAPABILITIES, VLLMS)
    for head_dim, is_latent in (*((head_dim, False) for head_dim in HEADS), (576, True))
    if not (is_latent and capability[0] == 10)  # these backends reserve GPU memory when they are imported
]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[object, ...], bool]:
    return dict(zip(QUESTIONS, ask("test_vetoes", QUESTIONS), strict=True))


def test_preflight_and_planner_refuse_exactly_the_dtypes_that_vllm_does_not_serve(
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


def test_the_operator_rules_out_no_dtype_that_vllm_serves(answers: dict[tuple[object, ...], bool]) -> None:
    for (capability, dtype, head_dim, is_latent), served in answers.items():
        model = ModelFacts(head_dim=head_dim, kv_heads=8, layers=32, window_layers=0, mla=is_latent)
        if served:
            assert hardware_fault(dtype, NodeFacts("a GPU", capability), model) is None
            assert hardware_fault(dtype, NodeFacts("a GPU", capability)) is None


def test_dtypes_with_a_warning_on_a_cpu_are_those_that_its_backend_does_not_support() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    named = {str(dtype) for dtype in CPUAttentionBackend.supported_kv_cache_dtypes}
    assert named <= CPU_DTYPES
    assert CPU_DTYPES - named == {"bfloat16", "float16"}  # These are names of the model's own dtype.
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
def test_preflight_refuses_the_block_sizes_that_our_backends_refuse(
    monkeypatch: pytest.MonkeyPatch, platform: machine.Platform, dtype: str
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: platform)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    for size in (1, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 200, 256):
        assert takes(dtype, size) == (size % hardware.BLOCK_STEPS[platform] == 0), size


@pytest.mark.parametrize(("platform", "size", "remedy"), [("cpu", 8, 16), ("cuda", 16, 64), ("cuda", 100, 128)])
def test_the_error_about_a_block_size_names_a_valid_one(
    monkeypatch: pytest.MonkeyPatch, platform: str, size: int, remedy: int
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: platform)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    for arguments in ([f"--block-size={size}"], ["--block-size", str(size)]):
        with pytest.raises(PreflightError, match=f"use --block-size={remedy}, or leave it out"):
            check(asked(*arguments, dtype="k4v4"))
        check(asked(*arguments, dtype="auto"))


@pytest.mark.parametrize("name", ["cpu", "latent_cpu", "latent_cuda"])  # cuda.py needs vLLM's build for GPUs
def test_our_backends_accept_the_block_sizes_that_preflight_accepts(name: str) -> None:
    module = importlib.import_module(f"kvpilot_runtime.backends.{name}")
    backends = [
        value for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "get_supported_kernel_block_sizes")
    ]  # fmt: skip
    assert backends
    step = hardware.BLOCK_STEPS[name.removeprefix("latent_")]
    for backend in backends:
        assert [block.base for block in backend.get_supported_kernel_block_sizes()] == [step]
