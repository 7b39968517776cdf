"""Two tensor-parallel ranks of a real engine each have their own KV heads, residual pages and factors.

As in `test_recent_engine.py`, requests share prefixes and come in chunks, and residual pages start with random bytes. A
rank that read another rank's factors or rows would give other answers.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.built_in_factors import factors_of
from support.judge import Judge
from support.stepped_engine import Asked, Told, serve

pytestmark = pytest.mark.timeout(3600)

RANKS, CHUNK, CONTEXT = 2, 128, 224


def asked(model: Path, count: int, seed: int, **more: Any) -> Asked:
    """Return three rounds of random requests. Most requests begin in the same way."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, 49152) for _ in range(120)] for _ in range(2)]

    def prompt() -> list[int]:
        prefix = [] if rng.random() < 0.3 else rng.choice(shared)[: rng.randint(16, 120)]
        return prefix + [rng.randrange(3, 49152) for _ in range(rng.randint(1, 160 - len(prefix)))]

    rounds = [[prompt() for _ in range(count // 3)] for _ in range(3)]
    tokens = [[rng.randint(8, 40) for _ in prompts] for prompts in rounds]
    options = {
        "block_size": 16, "num_gpu_blocks_override": 44, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": CONTEXT, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "tensor_parallel_size": RANKS,
    }  # fmt: skip
    return Asked(str(model), "k4v4", rounds, tokens, options, **more)


def factors_by_rank(told: Told) -> list[list[Factors]]:
    """Return the factors of each rank."""
    return [[Factors(*map(torch.tensor, layer)) for layer in rank] for rank in told.factors]


def joined(ranks: Sequence[Sequence[Factors]]) -> list[Factors]:
    """Join the factors of all ranks to those of the whole model."""
    return [Factors(*(torch.cat([getattr(one, name) for one in layer]) for name in Factors.__dataclass_fields__))
            for layer in zip(*ranks, strict=True)]  # fmt: skip


def assert_answers(question: Asked, told: Told, factors: list[Factors], record: Any) -> None:
    """Check that answers match the factors and windows of all heads, and differ if two ranks exchange factors."""
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4", factors))
    figures = {
        "judged": found.judged, "windowed": found.windowed, "moved": told.moved,
        "cached": sum(map(sum, told.cached)), "poisoned": told.poisoned,
    }  # fmt: skip
    for name, value in figures.items():
        record(name, value)
        print(f"{name}: {value}")
    assert not found.wrong
    assert all(figures.values())
    assert found.judged == sum(map(sum, question.tokens))
    exchanged = joined([[Factors(*(getattr(one, n).flip(0) for n in Factors.__dataclass_fields__)) for one in factors]])
    for other, newest in ((exchanged, None), (factors, 0)):
        wrong = Judge(question, told, Oracle(tiny_llama(), "k4v4", other), rounds=0, newest=newest).wrong
        assert len(wrong) > len(told.answers)


def test_two_ranks_calibrate_themselves_and_answer_as_one_model_under_one_hash(record_property: Any) -> None:
    question = asked(tiny_llama(), 30, seed=20261122, calibration="")
    told = serve(question)
    ranks = factors_by_rank(told)
    assert [one.key_mean.shape for rank in ranks for one in rank] == [(1, 64)] * (RANKS * 2)
    for mine, alone in zip(joined(ranks), factors_of(tiny_llama(), CHUNK, CONTEXT), strict=True):
        for name in Factors.__dataclass_fields__:
            torch.testing.assert_close(getattr(mine, name), getattr(alone, name), rtol=1e-3, atol=1e-3)
    whole = factors_file.join_digests([factors_file.digest(rank) for rank in ranks])
    [line] = [x for x in told.metrics if x.startswith(calibration_info.NAME + "{")]
    assert f'hash="{whole}"' in line
    assert 'source="self"' in line
    assert_answers(question, told, joined(ranks), record_property)


@pytest.mark.long
def test_each_rank_takes_the_factors_of_its_own_heads_from_a_file(tmp_path: Path, record_property: Any) -> None:
    model, file = tiny_llama(), tmp_path / "factors.safetensors"
    facts, rng = factors_file.ModelFacts.read(model), torch.Generator().manual_seed(3)

    def one() -> Factors:
        mean, other, first = (torch.randn(facts.kv_heads, facts.head_dim, generator=rng) / 2 for _ in range(3))
        scales = [(torch.rand(mean.shape, generator=rng) * 2 - 1).exp2() for _ in "kv"]
        return Factors(mean, scales[0], other, scales[1], first)

    layers = [one() for _ in range(facts.layers)]
    factors_file.save(file, layers, facts)
    question = asked(model, 30, seed=20261123, calibration=str(file))
    told = serve(question)
    ranks = factors_by_rank(told)
    for mine, written in zip(joined(ranks), layers, strict=True):
        for name in Factors.__dataclass_fields__:
            assert torch.equal(getattr(mine, name), getattr(written, name))
    whole = factors_file.join_digests([factors_file.digest(rank) for rank in ranks])
    assert any(f'hash="{whole}"' in x and 'source="file"' in x for x in told.metrics)
    assert_answers(question, told, layers, record_property)


def test_keys_that_are_not_finite_on_the_second_rank_alone_end_the_start_of_both(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_llama().iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][64, 0] = torch.nan  # row 64 belongs to the second KV head
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    question = asked(model, 3, seed=1, calibration="")
    with pytest.raises(RuntimeError, match=r"calibration of layer 'model\.layers\.1\.self_attn\.attn': keys are not"):
        serve(question)
