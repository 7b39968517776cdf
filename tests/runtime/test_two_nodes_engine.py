"""Two kvpilot-serve processes form one engine, as on two nodes, and each computes one rank."""

import random
from pathlib import Path

import pytest
import torch

from kvpilot_kernels.factors import Factors
from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.engines import real
from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long]

FLOAT32 = {"KVPILOT_PREFILL_FROM_PAGES": "1", "HF_HUB_OFFLINE": "1"}


def random_factors(facts: factors_file.ModelFacts) -> list[Factors]:
    """Return different factors for each layer and head. A rank with another rank's factors would answer differently."""
    rng = torch.Generator().manual_seed(5)

    def one() -> Factors:
        mean, other, first = (torch.randn(facts.kv_heads, facts.head_dim, generator=rng) / 2 for _ in range(3))
        scales = [(torch.rand(mean.shape, generator=rng) * 2 - 1).exp2() for _ in "kv"]
        return Factors(mean, scales[0], other, scales[1], first)

    return [one() for _ in range(facts.layers)]


def of_rank(layers: list[Factors], rank: int) -> list[Factors]:
    return [Factors(*(getattr(one, name)[rank : rank + 1] for name in Factors.__dataclass_fields__)) for one in layers]


def test_two_nodes_answer_as_the_model_with_the_factors_of_each_rank(tmp_path: Path) -> None:
    model, file, master = tiny_llama(), tmp_path / "factors.safetensors", free_port()
    facts = factors_file.ModelFacts.read(model)
    layers = random_factors(facts)
    factors_file.save(file, layers, facts)
    group = (
        "--tensor-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={master}",
        "--distributed-executor-backend=mp", "--dtype=float32", "--kv-cache-memory-bytes=64M", "--block-size=16",
        "--recent-tokens=0",
    )  # fmt: skip
    worker = (
        real.SERVE, f"--model={model}", "--kv-cache-dtype=k4v4", "--max-model-len=2048", "--enforce-eager", *group,
        "--node-rank=1", "--headless",
    )  # fmt: skip
    variables = {**FLOAT32, "KVPILOT_CALIBRATION": str(file)}
    rng = random.Random(20261123)
    prompts = [[rng.randrange(3, 49152) for _ in range(length)] for length in (20, 47, 130)]
    with (
        real.process_group(worker, tmp_path / "worker.log", variables) as second,
        real.engine(model, "k4v4", tmp_path, *group, "--node-rank=0", env=variables) as leader,
    ):
        answers = [leader.tokens(prompt, 24) for prompt in prompts]
        whole = factors_file.join_digests([factors_file.digest(of_rank(layers, rank)) for rank in range(2)])
        [line] = [one for one in leader.page().splitlines() if one.startswith(calibration_info.NAME + "{")]
        assert f'hash="{whole}"' in line
        assert second.poll() is None
    right, exchanged = Oracle(model, "k4v4", layers), Oracle(model, "k4v4", layers[::-1])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert right.sound(prompt, answer)
        assert not exchanged.sound(prompt, answer, rounds=3)
