"""Marks for tests that need special processor features."""

import pytest

from kvpilot_smallmodels.processor import serves_quantized

serves_quantized_by_vllm = pytest.mark.skipif(
    not serves_quantized(), reason="vLLM's own quantized KV-cache dtypes need AVX-512 or AMX on x86"
)
quantized_weights_by_vllm = pytest.mark.skipif(
    not serves_quantized(),
    reason="without AVX-512 on x86, vLLM has no kernel for weights of 4 bits, and its products of 8 bits are wrong",
)
