"""Rules about GPUs that cannot serve a KV-cache dtype with vLLM 0.32. Preflight, operator and planner apply them.

tests/runtime/test_vetoes.py checks each refusal against vLLM's backends.
"""

from kvpilot_formats import dtypes, formats
from kvpilot_formats.dtypes import Dtype

Capability = tuple[int, int]

OLDEST_GPU: Capability = (8, 0)
"""Lowest compute capability that our kernels support. It is the first one with bfloat16."""

BLOCK_STEPS = {"cpu": 16, "cuda": 64}
"""Unit of block sizes in our formats, in tokens, by device. On a GPU, a decode tile must lie in one page."""

_FP8_EVERYWHERE: Capability = (8, 9)
"""First compute capability at which every backend of vLLM reads fp8 caches."""

_FP8_BY_FLASHINFER: Capability = (8, 0)
"""First compute capability at which FlashInfer reads fp8 caches, for heads of `_FLASHINFER_HEADS` and without MLA."""
_FLASHINFER_HEADS = (64, 128, 256, 512)
_FLASHINFER_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")

_LATENT = ("fp8", "fp8_e4m3")
"""Dtypes of vLLM below 16 bits that its backends for multi-head latent attention (MLA) support."""


def gpu_fault(
    dtype: str, capability: Capability, head_dim: int | None = None, latent: bool | None = None
) -> str | None:
    """Return why an NVIDIA GPU of this compute capability cannot serve the dtype, or None.

    The text completes a sentence that begins with the dtype. Give None for an unknown `head_dim` or `latent`; no GPU is
    then excluded because of it.
    """
    oldest = _oldest(dtype, head_dim, latent)
    if capability >= oldest:
        return None
    beside = ""
    if oldest == _FP8_EVERYWHERE and dtype in _FLASHINFER_DTYPES:
        beside = " with multi-head latent attention" if latent else f" with head_dim {head_dim}"
    return f"needs compute capability {shown(oldest)} or newer{beside}"


def latent_fault(dtype: str) -> str | None:
    """Return why vLLM cannot serve multi-head latent attention with this dtype, or None. Return None for our dtypes."""
    stored = _stored(dtype)
    if stored is None or stored.ours or dtype in _LATENT or stored.bits_per_element() >= 16:
        return None
    return f"does not serve multi-head latent attention in vLLM; use one of {', '.join(_LATENT)}"


def shown(capability: Capability) -> str:
    """Return a compute capability in the usual form, such as 9.0."""
    return ".".join(map(str, capability))


def _oldest(dtype: str, head_dim: int | None, latent: bool | None) -> Capability:
    stored = _stored(dtype)
    if (stored is not None and stored.ours) or dtype == "bfloat16":
        return OLDEST_GPU
    if not dtype.startswith("fp8"):
        return (0, 0)
    known_to_fit = (head_dim is None or head_dim in _FLASHINFER_HEADS) and not latent
    return _FP8_BY_FLASHINFER if dtype in _FLASHINFER_DTYPES and known_to_fit else _FP8_EVERYWHERE


def _stored(dtype: str) -> Dtype | None:
    return None if dtype in formats.VLLM_DTYPES_LEFT_OUT else dtypes.parse(dtype)
