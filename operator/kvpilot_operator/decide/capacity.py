"""What would a dtype buy? Tokens of KV cache in the same memory."""

from __future__ import annotations

from kvpilot_kernels import formats


def projected_tokens(capacity_tokens: int, from_dtype: str, to_dtype: str) -> int:
    """Capacity after a change of dtype: memory is the same, so tokens go with the inverse of the bits an element."""
    before = formats.parse(from_dtype).bits_per_element()
    after = formats.parse(to_dtype).bits_per_element()
    return int(capacity_tokens * before / after)


def smaller(dtype: str, than: str) -> bool:
    """True where `dtype` needs fewer bits an element."""
    return formats.parse(dtype).bits_per_element() < formats.parse(than).bits_per_element()
