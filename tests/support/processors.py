"""Marks of tests that need what not every processor has."""

import pytest

from kvpilot_demo.processor import serves_quantized

serves_quantized_by_vllm = pytest.mark.skipif(
    not serves_quantized(), reason="vLLM's own quantized KV-cache dtypes need AVX-512 or AMX on x86"
)
