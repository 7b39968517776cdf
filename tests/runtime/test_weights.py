"""An engine identifies its weights by a hash."""

from collections.abc import Callable

import pytest
import torch

from kvpilot_runtime.transfer.terms import digest


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    found = torch.nn.Sequential(torch.nn.Linear(70, 30), torch.nn.Linear(30, 70, bias=False)).to(dtype)
    found.register_buffer("rotations", torch.randn(8, 4))
    return found


def changed(change: Callable[[torch.nn.Module], None]) -> str:
    found = model()
    with torch.no_grad():
        change(found)
    return digest(found)


def test_the_same_weights_have_one_digest() -> None:
    assert digest(model()) == digest(model())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.mul_(1.01), lambda m: m[1].weight.add_(1e-3), lambda m: m[0].bias.zero_(),
        lambda m: m.rotations.mul_(2), lambda m: m.half(), lambda m: m.add_module("more", torch.nn.Linear(1, 1)),
    ],
)  # fmt: skip
def test_other_weights_have_another_digest(change: Callable[[torch.nn.Module], None]) -> None:
    assert changed(change) != digest(model())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_digest_distinguishes_weights_of_any_dtype_and_strides(dtype: torch.dtype) -> None:
    ours, others = model(dtype=dtype), model(1, dtype=dtype)
    for one in (ours, others):
        one[0].weight = torch.nn.Parameter(one[0].weight.t(), requires_grad=False)
    assert not ours[0].weight.is_contiguous()
    assert digest(ours) != digest(others)
    assert digest(ours) == digest(ours)
