"""Check that engines report the KV-cache dtype that kvpilot requested. An image or a checkpoint may override it."""

from kvpilot_formats import dtypes
from kvpilot_operator.state.snapshot import Snapshot

# vLLM has several names for the same cache format.
_SPELLINGS = {"fp8_e4m3": "fp8", "fp8_ds_mla": "fp8"}
_WHOLE = frozenset(name for name in dtypes.names() if dtypes.parse(name).bits_per_element() >= 16)


def same(asked: str, reported: str) -> bool:
    """Return True if both names mean the same dtype. `auto` means the model's own 16-bit dtype."""
    if "auto" in (asked, reported):
        return asked in _WHOLE and reported in _WHOLE
    return _SPELLINGS.get(asked, asked) == _SPELLINGS.get(reported, reported)


def as_asked(s: Snapshot, revision: str, asked: str) -> bool:
    """Return True if the revision's engines have reported their dtype, and it is the requested one."""
    return s.reported_dtype(revision) is not None and mismatch(s, revision, asked) is None


def mismatch(s: Snapshot, revision: str, asked: str) -> str | None:
    """Describe engines whose reported dtype differs from the requested one, and the remedy. Return None without any."""
    sample = s.reported_dtype(revision)
    if sample is None:
        return None
    there = {pod.name for pod in s.pods_of(revision)}
    others = [f"{pod} reports {dtype}" for pod, dtype in sample.other_dtypes if pod in there and not same(asked, dtype)]
    if not same(asked, sample.observed_dtype):
        others = [f"they report {sample.observed_dtype}"]
    if not others:
        return None
    found = f"kvpilot requested the KV-cache dtype {asked} from revision {revision}, but {', '.join(others)}"
    if asked in _WHOLE:
        return (
            f"{found}. If the model's files choose the dtype, name it in the spec. For 16 bits, set kvCache.baseline "
            "to bfloat16 (or float16) and add the same --dtype to engine.extraArgs. Else name it in kvCache.dtype"
        )
    return f"{found}. Find what overrides --kv-cache-dtype: the image's entrypoint, engine.extraArgs or engine.env"
