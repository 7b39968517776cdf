"""Every dtype in `formats.FORMATS` has its entries in other files. A failed test names the missing entry.

test_api_crd.py compares the CRD's enum and the order of the ladder with the table.
"""

from pathlib import Path

import pytest

from kvpilot_cli.plan.make import usual_dtypes
from kvpilot_cli.plan.speed import HEAD_DIM_256
from kvpilot_formats import dtypes, formats
from kvpilot_operator.decide.steps.latency import EFFICIENCY

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", formats.own_names())
def test_every_dtype_of_ours_has_a_measured_share_of_bandwidth(name: str) -> None:
    assert 0 < EFFICIENCY[name] < 1, "measure it with benchmarks/kernels/decode.py"
    assert 0 < HEAD_DIM_256[name] < 1, "measure it with benchmarks/kernels/decode.py"


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_dtype_of_ours_below_8_bits_has_a_default_window_that_can_be_served(name: str) -> None:
    fmt = formats.parse(name)
    assert bool(fmt.window) == fmt.has_ring, "say which window is its default: benchmarks/accuracy/accuracy.py measures"
    assert fmt.window in formats.RECENT_CHOICES


@pytest.mark.parametrize("latent", [False, True])
def test_plans_have_all_dtypes_of_ours_and_two_of_vllm(latent: bool) -> None:
    usual = usual_dtypes(latent)
    assert len(set(usual)) == len(usual) == len(dtypes.own_names(latent)) + 2


@pytest.mark.parametrize("name", formats.own_names())
def test_the_page_on_formats_says_what_the_table_says(name: str) -> None:
    fmt = formats.parse(name)
    row = (
        f"| `{name}` | {fmt.key.bits} bits | {fmt.value.bits} bits | {fmt.bits_per_element():g} "
        f"| {16 / fmt.bits_per_element():.2f}x"
    )
    page = (ROOT / "docs" / "formats.md").read_text()
    assert row in page
    if fmt.has_ring:
        ring = f"| {fmt.ring_layout(128, 64).tokens} | {fmt.window} | {fmt.ring_blocks(fmt.window, 128, 64)} |"
        assert any(line.startswith(f"| `{name}` |") and line.endswith(ring) for line in page.splitlines())
