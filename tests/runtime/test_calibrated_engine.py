"""A calibration file in a real engine: the engine applies its factors, and refuses another model's file at start."""

import random
from pathlib import Path

import pytest
import torch

from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import factors_file
from kvpilot_smallmodels.families import VOCABULARY, make
from kvpilot_smallmodels.models import tiny_llama, tiny_qwen3
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.engines_in_turn import refused
from support.stepped_engine import Asked, serve

pytestmark = pytest.mark.timeout(1800)


def write_factors(model: Path, file: Path) -> list[Factors]:
    """Write factors that change answers.

    Means are half of the data's spread (for the first key the whole spread), and scales are at most 2.
    """
    facts, rng = factors_file.ModelFacts.read(model), torch.Generator().manual_seed(3)
    shape = (facts.kv_heads, facts.head_dim)

    def one() -> Factors:
        means = [torch.randn(shape, generator=rng) / 2 for _ in "kv"]
        scales = [(torch.rand(shape, generator=rng) * 2 - 1).exp2() for _ in "kv"]
        return Factors(means[0], scales[0], means[1], scales[1], torch.randn(shape, generator=rng))

    layers = [one() for _ in range(facts.layers)]
    factors_file.save(file, layers, facts)
    return layers


def test_answers_are_those_of_the_calibrated_codec(tmp_path: Path) -> None:
    file = tmp_path / "factors.safetensors"
    layers = write_factors(tiny_llama(), file)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 49152) for _ in range(rng.randint(8, 120))] for _ in range(60)]
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
    question = Asked(str(tiny_llama()), "k4v4", [prompts], [[16] * 60], options, recent=0, calibration=str(file))
    answers = serve(question).answers[0]
    both = list(zip(prompts, answers, strict=True))
    calibrated = Oracle(tiny_llama(), "k4v4", layers)
    wrong = [i for i, (prompt, answer) in enumerate(both) if not calibrated.sound(prompt, answer)]
    assert not wrong
    # Control: the same codec answers differently without factors.
    plain = Oracle(tiny_llama(), "k4v4")
    assert sum(max(plain.shortfalls(prompt, answer)) > SLACK for prompt, answer in both) > 20


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"], ids=["soft cap", "attention sinks"])
def test_sinks_and_soft_caps_apply_to_scores_that_include_the_keys_mean(family: str, tmp_path: Path) -> None:
    model, file = make(family, tmp_path / "model"), tmp_path / "factors.safetensors"
    layers = write_factors(model, file)
    rng = random.Random(6)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(8, 120))] for _ in range(20)]
    options = {"max_num_batched_tokens": 48, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 160, "block_size": 16,
               "kv_cache_dtype_skip_layers": ["sliding_window"], "skip_tokenizer_init": True}  # fmt: skip
    question = Asked(str(model), "k4v4", [prompts], [[16] * 20], options, recent=0, calibration=str(file))
    both = list(zip(prompts, serve(question).answers[0], strict=True))
    calibrated = Oracle(model, "k4v4", layers)
    wrong = [i for i, (prompt, answer) in enumerate(both) if not calibrated.sound(prompt, answer)]
    assert not wrong
    plain = Oracle(model, "k4v4")
    assert sum(max(plain.shortfalls(prompt, answer)) > SLACK for prompt, answer in both) > 5


def test_a_calibration_file_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    file = tmp_path / "factors.safetensors"
    write_factors(tiny_qwen3(), file)
    log = refused(tiny_llama(), {factors_file.VARIABLE: str(file)})
    assert f"calibration file '{file}': head_dim is '128', but the model's is '64'" in log
    assert "run `kvpilot calibrate` with the model that is served" in log
