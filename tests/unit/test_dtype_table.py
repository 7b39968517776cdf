"""Every row of `formats.FORMATS` is complete. A failed test names what is missing."""

import pytest

from kvpilot_cli.plan.make import usual_dtypes
from kvpilot_formats import dtypes, formats


@pytest.mark.parametrize("name", formats.own_names())
def test_every_dtype_of_ours_has_a_measured_share_of_bandwidth(name: str) -> None:
    for share in formats.parse(name).read:
        assert 0 < (share or 0) < 1, "measure it with benchmarks/kernels/decode.py"


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_dtype_of_ours_below_8_bits_has_a_default_window_that_can_be_served(name: str) -> None:
    fmt = formats.parse(name)
    assert bool(fmt.window) == fmt.has_residuals, "say its default window: benchmarks/accuracy/accuracy.py measures"
    assert fmt.window in formats.RECENT_CHOICES


@pytest.mark.parametrize("latent", [False, True])
def test_plans_list_all_our_dtypes_and_two_of_vllms(latent: bool) -> None:
    usual = usual_dtypes(latent)
    assert len(set(usual)) == len(usual) == len(dtypes.own_names(latent)) + 2
