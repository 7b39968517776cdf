"""KV-cache dtypes that vLLM's own backends take on absent GPUs, asked by `support.own_process`.

The question is `[[CAPABILITY, DTYPE, HEAD_DIM, LATENT], ...]`, and the answer a list of booleans. The platform is that
of vLLM for CUDA with another capability. Modules of compiled kernels are empty: nothing runs them here.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_KERNELS = (
    "flashinfer",
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn",
)


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of compiled kernels that a CPU does not have."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find any module of `_KERNELS` and below."""
        ours = any(fullname == name or fullname.startswith(f"{name}.") for name in _KERNELS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Make a module that has any name."""
        made: Any = MagicMock(name=spec.name)
        made.__spec__, made.__path__, made.__name__ = spec, [], spec.name
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""


def main() -> None:
    """Read questions from stdin and write vLLM's answers to stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        sys.meta_path.insert(0, _Kernels())
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            found = [served((*capability,), *rest) for capability, *rest in json.load(sys.stdin)]
    print(json.dumps(found))


def served(capability: tuple[int, int], dtype: Any, head_dim: int, latent: bool) -> bool:
    """Return True if the backend that vLLM chooses there takes the dtype."""
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class Pretended(CudaPlatformBase):  # type: ignore[misc]
        """A GPU of this capability."""

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
    """Return False if the implementation of Triton's backends refuses to be made: the others judge before."""
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


if __name__ == "__main__":
    main()
