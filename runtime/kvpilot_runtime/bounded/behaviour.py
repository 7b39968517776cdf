"""Behaviour check: try vLLM's cache manager and block tables with a bounded cache, because no signature shows a change.

Our subclasses inherit whatever a later vLLM changes. So the check gives vLLM three requests of different lengths. It
compares the pages that vLLM keeps with the pages that the next tokens attend to, by `SinksAndWindow`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kvpilot_runtime.bounded.spec import BoundedManager, BoundedSpec
from kvpilot_runtime.config.retention import HeavyHitters, SinksAndWindow
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat

PAGE, CHUNK = 16, 48
LENGTHS = (7, 150, 1000)
"""Lengths of the requests in tokens: less than a page, about the window, and far more than the window."""
BOUND = SinksAndWindow(4, 100)


def kept(bound: SinksAndWindow, page: int, computed: int) -> set[int]:
    """Return the earlier pages that tokens from `computed` on attend to."""
    pages = -(-computed // page)
    return {*range(min(bound.sink_pages(page), pages)), *range(bound.first_page(computed, page), pages)}


def refuse_other_pages() -> None:
    """Refuse a vLLM whose cache manager keeps other pages of a request than the request attends to."""
    try:
        found = _freed()
    except Exception as error:  # a later version may fail in any way
        found = f"three requests cannot be tried ({type(error).__name__}: {error})"
    if found:
        raise _refusal(f"its KV cache manager: {found}")


def _freed() -> str:
    """Try three requests in chunks, and say how their pages differ from the bound's. Return nothing if all agree."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    spec = BoundedSpec(
        block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.uint8, sliding_window=BOUND.window,
        sinks=BOUND.sinks,
    )  # fmt: skip
    blocks = 1 + len(LENGTHS) * spec.max_admission_blocks_per_request(CHUNK, max(LENGTHS) + CHUNK)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(
        config, max_model_len=max(LENGTHS) + CHUNK, scheduler_block_size=PAGE, hash_block_size=PAGE,
        max_in_flight_tokens=CHUNK, enable_caching=False,
    )  # fmt: skip
    (single,) = manager.coordinator.single_type_managers
    if not isinstance(single, BoundedManager):
        return f"bounded pages are managed by {type(single).__name__}"
    requests = [
        Request(str(length), [1] * length, sampling_params=SamplingParams(max_tokens=1), pooling_params=None)
        for length in LENGTHS
    ]
    for begin in range(0, max(LENGTHS), CHUNK):
        for request in requests:
            new = min(CHUNK, len(request.prompt_token_ids) - begin)
            if new <= 0:
                continue
            if manager.allocate_slots(request, new) is None:
                return f"there is no room for {begin + new} tokens of a request"
            request.num_computed_tokens += new
            held = {i for i, block in enumerate(single.req_to_blocks[request.request_id]) if not block.is_null}
            wanted = kept(BOUND, PAGE, begin) | {*range(begin // PAGE, -(-(begin + new) // PAGE))}
            if held != wanted:
                return f"a request of {begin + new} tokens holds pages {sorted(held)}, and not {sorted(wanted)}"
    return ""


def refuse_other_tables(worker: Any, bound: SinksAndWindow) -> None:
    """Refuse a worker whose block tables lack pages that requests attend to, before the first request.

    vLLM's newer runner gathers its tables on the GPU in each step; the older one takes them from the scheduler. The
    rows used here are overwritten by later requests.
    """
    tables: Any = getattr(worker.model_runner, "block_tables", None)
    if not hasattr(tables, "gather_block_tables"):
        return
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    at = next(i for i, group in enumerate(groups) if isinstance(_first(group.kv_cache_spec), BoundedSpec))
    page, capacity = tables.block_sizes[at], tables.block_tables[at].gpu.shape[1]
    rows = min(len(LENGTHS), tables.max_num_reqs)
    asked = (page // 2, bound.window + page, bound.window + 64 * page)
    lengths = [min(length, capacity * page) for length in asked][:rows]
    for row, length in enumerate(lengths):
        pages = [1 + i for i in range(-(-length // page))]
        tables.append_block_ids(row, tuple(pages if i == at else [] for i in range(len(groups))), overwrite=True)
    tables.apply_staged_writes()
    device = tables.block_tables[at].gpu.device
    computed = torch.zeros(tables.max_num_reqs, dtype=torch.int32, device=device)
    computed[:rows] = torch.tensor(lengths, dtype=torch.int32) - 1
    more = {"num_computed_tokens": computed} if _takes(tables.gather_block_tables, "num_computed_tokens") else {}
    gathered = tables.gather_block_tables(torch.arange(rows, dtype=torch.int32, device=device), rows, **more)[at].cpu()
    for row, length in enumerate(lengths):
        tables.append_block_ids(row, tuple([] for _ in groups), overwrite=True)
        every = {*range(-(-length // page))}  # a request with heavy hitters may hold any of its pages
        wanted = every if isinstance(bound, HeavyHitters) else kept(bound, page, length - 1)
        missing = sorted(i for i in wanted if gathered[row, i] != 1 + i)
        if missing:
            raise _refusal(f"its block table: a request of {length} tokens lacks pages {missing}")
    tables.apply_staged_writes()


def _first(spec: Any) -> Any:
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _refusal(why: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"--retention cannot be served by vllm {compat.version_text()}: {why}; leave it out, or use a runtime image "
        f"with vllm {compat.ADVISED}"
    )
