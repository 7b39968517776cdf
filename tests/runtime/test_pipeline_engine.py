"""Two stages of pipeline parallelism calibrate themselves: the text passes both, and each has its own factors."""

import pytest
import torch

from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_smallmodels.models import tiny_llama
from support.built_in_factors import factors_of
from support.stepped_engine import Asked, serve

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long]

STAGES, CHUNK, CONTEXT = 2, 128, 224


def test_pipeline_stages_have_the_same_factors_and_hash_as_one_process() -> None:
    options = {
        "block_size": 16, "num_gpu_blocks_override": 44, "kv_cache_memory_bytes": 64 << 20, "max_model_len": CONTEXT,
        "max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "pipeline_parallel_size": STAGES,
    }  # fmt: skip
    told = serve(Asked(str(tiny_llama()), "k4v4", [], [], options, calibration=""))
    stages = [[Factors(*map(torch.tensor, layer)) for layer in stage] for stage in told.factors]
    assert [len(stage) for stage in stages] == [1] * STAGES
    whole = factors_of(tiny_llama(), CHUNK, CONTEXT)
    for [mine], alone in zip(stages, whole, strict=True):
        for name in Factors.__dataclass_fields__:
            torch.testing.assert_close(getattr(mine, name), getattr(alone, name), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(stages[0][0].key_mean, whole[1].key_mean, rtol=1e-3, atol=1e-3)
    digest = factors_file.join_digests([factors_file.digest(stage) for stage in stages])
    [line] = [x for x in told.metrics if x.startswith(calibration_info.NAME + "{")]
    assert f'hash="{digest}"' in line
    assert 'source="self"' in line
