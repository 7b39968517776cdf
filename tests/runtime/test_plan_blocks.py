"""vLLM's scheduler gives a request as many blocks as `kvpilot plan` counts, with residual pages."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvpilot_cli.plan import models
from kvpilot_cli.plan.capacity import cache
from kvpilot_formats import formats
from kvpilot_operator.decide.steps.capacity import OWN_BLOCK
from kvpilot_runtime.recent.residual_scheduler import extend
from kvpilot_runtime.recent.window import VARIABLE

CONTEXT, BLOCKS = 4096, 256


def manager_of(dtype: str, recent: int) -> KVCacheManager:
    """Return vLLM's manager of an engine with this dtype and recent window."""
    spec = FullAttentionSpec(block_size=OWN_BLOCK, num_kv_heads=8, head_size=128, dtype=torch.uint8)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, CONTEXT, OWN_BLOCK, OWN_BLOCK, enable_caching=False)
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=dtype), model_config=SimpleNamespace(max_model_len=CONTEXT),
        parallel_config=SimpleNamespace(distributed_executor_backend=None), kv_transfer_config=None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(recent))
        extend(SimpleNamespace(vllm_config=engine, kv_cache_manager=manager))
    return manager


@given(
    dtype=st.sampled_from(formats.own_names()), recent=st.sampled_from(formats.RECENT_CHOICES),
    prompt=st.integers(1, CONTEXT // 2), chunk=st.integers(1, CONTEXT), answer=st.integers(0, 300),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_a_request_takes_the_blocks_that_the_plan_counts(
    dtype: str, recent: int, prompt: int, chunk: int, answer: int
) -> None:
    layout = cache(models.find("Llama-3.1-8B"), dtype, 1, recent)
    manager = manager_of(dtype, recent)
    free = manager.block_pool.get_num_free_blocks()
    request = Request("one", [0] * prompt, SamplingParams(max_tokens=answer + 1), None)
    for start in range(0, prompt, chunk):
        new = min(chunk, prompt - start)
        assert manager.allocate_slots(request, new) is not None
        request.num_computed_tokens += new
    assert free - manager.block_pool.get_num_free_blocks() == layout.held(prompt)
    for length in range(prompt + 1, prompt + answer + 1):
        request.append_output_token_ids(0)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        assert free - manager.block_pool.get_num_free_blocks() == layout.held(length)
