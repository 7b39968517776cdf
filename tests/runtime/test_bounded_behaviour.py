"""vLLM's cache manager with our bounded subclasses, which inherit its changes, keeps to the bound."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvpilot_runtime.bounded.spec import BoundedManager, BoundedSpec
from kvpilot_runtime.config.retention import SinksAndWindow
from kvpilot_runtime.errors import PreflightError, UnsupportedEngineError
from kvpilot_runtime.preflight import bounded
from kvpilot_runtime.serve import parse
from kvpilot_runtime.vllm_api import compat, contract

PAGE, CHUNK = 16, 48
LENGTHS = (7, 150, 1000)
"""Lengths of requests in tokens: less than a page, about the window, and far more than the window."""
BOUND = SinksAndWindow(4, 192)
SHAPE: dict[str, Any] = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.uint8}


def kept(bound: SinksAndWindow, computed: int) -> set[int]:
    """Return the earlier pages that tokens from `computed` on attend to."""
    pages = -(-computed // PAGE)
    return {*range(min(bound.sink_pages(PAGE), pages)), *range(bound.first_page(computed, PAGE), pages)}


def test_the_installed_manager_leaves_three_requests_the_pages_that_they_attend_to() -> None:
    bound = SinksAndWindow(4, 100)
    spec = BoundedSpec(**SHAPE, sliding_window=bound.window, sinks=bound.sinks)
    blocks = 1 + len(LENGTHS) * spec.max_admission_blocks_per_request(CHUNK, max(LENGTHS) + CHUNK)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(
        config, max_model_len=max(LENGTHS) + CHUNK, scheduler_block_size=PAGE, hash_block_size=PAGE,
        max_in_flight_tokens=CHUNK, enable_caching=False,
    )  # fmt: skip
    (single,) = manager.coordinator.single_type_managers
    assert isinstance(single, BoundedManager)
    requests = [
        Request(str(length), [1] * length, sampling_params=SamplingParams(max_tokens=1), pooling_params=None)
        for length in LENGTHS
    ]
    for begin in range(0, max(LENGTHS), CHUNK):
        for request in (one for one in requests if len(one.prompt_token_ids) > begin):
            new = min(CHUNK, len(request.prompt_token_ids) - begin)
            assert manager.allocate_slots(request, new) is not None
            request.num_computed_tokens += new
            held = {i for i, block in enumerate(single.req_to_blocks[request.request_id]) if not block.is_null}
            assert held == kept(bound, begin) | {*range(begin // PAGE, -(-(begin + new) // PAGE))}


def test_workers_keep_every_entry_of_a_block_table() -> None:
    bounded_spec = BoundedSpec(**SHAPE, sinks=4, sliding_window=192)
    assert bounded_spec.num_retained_tokens > 2**24  # vLLM 0.33 clears entries below it


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.34.1+cu130", "1.0.0"])
def test_a_version_that_no_bounded_cache_was_run_with_is_refused_by_name(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version_text", lambda: version)
    words = re.escape(f"--retention 4:192 needs vLLM 0.32 to 0.33 (here is {version})")
    with pytest.raises(UnsupportedEngineError, match=words):
        contract.refuse_bound(str(BOUND))
    request = parse(["--model=m", "--retention=4:192"])[0]
    with pytest.raises(PreflightError, match=words):
        bounded.check(SimpleNamespace(ours=True), None, request)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0"])
def test_a_version_that_bounded_caches_were_run_with_serves_them(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version_text", lambda: version)
    contract.refuse_bound(str(BOUND))
