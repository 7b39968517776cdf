"""Detection of processors on which vLLM can serve its own quantized KV-cache dtypes."""

import pytest

from kvpilot_smallmodels.processor import can_serve_quantized


@pytest.mark.parametrize(
    ("machine", "flags", "can"),
    [
        ("x86_64", "fpu sse2 avx2 avx512f avx512bw", True),
        ("x86_64", "fpu sse2 avx2 amx_tile", True),
        ("x86_64", "fpu sse2 avx2", False),
        ("x86_64", "", False),
        ("aarch64", "fp asimd", True),
    ],
)
def test_only_x86_processors_without_avx512_and_amx_are_left_out(machine: str, flags: str, can: bool) -> None:
    assert can_serve_quantized(machine, flags.split()) is can
