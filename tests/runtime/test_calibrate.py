"""Calibration files are created from a real model, loaded again, and refused if they are invalid."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GptOssConfig, Lfm2Config, PreTrainedConfig

from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import command as calibrate
from kvpilot_runtime.calibration import factors_file
from kvpilot_smallmodels.models import smollm2_135m, tiny_llama
from kvpilot_smallmodels.oracle import Oracle

FACTS = factors_file.ModelFacts(layers=3, kv_heads=4, head_dim=64, config_sha256="abc")


def some_layers(facts: factors_file.ModelFacts, seed: int = 0) -> list[Factors]:
    rng = torch.Generator().manual_seed(seed)
    shape = (facts.kv_heads, facts.head_dim)
    return [
        Factors(torch.randn(shape, generator=rng), torch.rand(shape, generator=rng) + 0.5,
                torch.randn(shape, generator=rng), torch.rand(shape, generator=rng) + 0.5,
                torch.randn(shape, generator=rng))
        for _ in range(facts.layers)
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    factors_file.save(tmp_path / "c.safetensors", some_layers(FACTS), FACTS)
    return tmp_path / "c.safetensors"


def changed(file: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor | None) -> None:
    """Rewrite the file with other metadata or tensors. None removes a tensor, and double underscores stand for dots."""
    facts = {name: str(getattr(FACTS, name)) for name in ("layers", "kv_heads", "head_dim", "config_sha256")}
    data = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file(
        {name: tensor for name, tensor in data.items() if tensor is not None},
        file, {"format": "kvpilot-calibration", "version": "2", **facts, **(metadata or {})},
    )  # fmt: skip


def test_a_saved_calibration_file_can_be_loaded(file: Path) -> None:
    loaded = factors_file.load(file, FACTS)
    for wanted, got in zip(some_layers(FACTS), loaded.layers, strict=True):
        assert all(torch.equal(getattr(wanted, f.name), getattr(got, f.name)) for f in dataclasses.fields(Factors))
    assert loaded.for_layer("model.layers.2.self_attn.attn") is loaded.layers[2]


def test_the_hash_of_the_factors_includes_the_means_of_first_keys() -> None:
    layers = some_layers(FACTS)
    other = [*layers[:2], dataclasses.replace(layers[2], key_first=layers[2].key_first + 1)]
    assert factors_file.digest(layers) == factors_file.digest(some_layers(FACTS))
    assert factors_file.digest(layers) != factors_file.digest(other)


def test_sizes_missing_from_a_config_are_the_defaults_of_its_class() -> None:
    corpus = json.loads((Path(__file__).parents[2] / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
    published = {entry["model"]: entry["config"] for entry in corpus}
    facts = factors_file.ModelFacts.of(published["google/gemma-3-4b-it"])
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (34, 4, 256)
    facts = factors_file.ModelFacts.of(published["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (52, 2, 128)
    for name, config in published.items():
        assert factors_file.ModelFacts.of(config).layers, name


@pytest.mark.parametrize("name", ["model.layers.3.self_attn.attn", "model.layers.x.attn", "lm_head"])
def test_a_layer_that_was_not_calibrated_is_named(file: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is none of the 3"):
        factors_file.load(file, FACTS).for_layer(name)


def test_ranks_get_every_heads_factors_once_or_copies_if_there_are_more_ranks_than_heads(file: Path) -> None:
    whole = factors_file.load(file, FACTS)
    halves = [whole.shard(rank, 2) for rank in (0, 1)]
    assert torch.equal(torch.cat([h.layers[1].key_mean for h in halves]), whole.layers[1].key_mean)
    eighths = [whole.shard(rank, 8).layers[0].value_scale for rank in range(8)]
    assert torch.equal(torch.cat(eighths[::2]), whole.layers[0].value_scale)
    assert all(torch.equal(a, b) for a, b in zip(eighths[::2], eighths[1::2], strict=True))
    for rank, size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
            whole.shard(rank, size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"config_sha256": "def"}}, "config_sha256 is 'def', but the model's is 'abc'"),
        ({"metadata": {"head_dim": "128"}}, "head_dim is '128', but the model's is '64'"),
        ({"metadata": {"version": "9"}}, "version '9' is not"),
        ({"metadata": {"format": "other"}}, "format 'other'"),
        ({"layers__1__key_mean": None}, "layers.1.key_mean is missing"),
        ({"layers__1__key_first": None}, "layers.1.key_first is missing"),
        ({"layers__0__key_scale": torch.zeros(4, 64)}, "layers.0.key_scale holds the scale 0.0"),
        ({"layers__2__value_mean": torch.full((4, 64), torch.nan)}, "layers.2.value_mean holds 256 numbers"),
        ({"layers__2__value_mean": torch.ones(4, 32)}, r"is torch.float32 \(4, 32\) and should be .*\(4, 64\)"),
        ({"layers__2__value_mean": torch.ones(4, 64).half()}, "is torch.float16"),
    ],
)
def test_a_file_for_another_model_or_with_bad_numbers_is_refused(file: Path, change: dict, message: str) -> None:
    changed(file, **change)
    with pytest.raises(factors_file.CalibrationError, match=message):
        factors_file.load(file, FACTS)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(factors_file.CalibrationError, match="no such file; check KVPILOT_CALIBRATION"):
        factors_file.load(tmp_path / "none", FACTS)
    (tmp_path / "half").write_bytes(b"half a file")
    with pytest.raises(factors_file.CalibrationError, match="not a safetensors file"):
        factors_file.load(tmp_path / "half", FACTS)


def test_copies_of_a_model_have_one_identity_and_a_changed_rope_changes_it() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 3,
              "rope_theta": 1e4, "dtype": "bfloat16"}  # fmt: skip
    facts = factors_file.ModelFacts.of(config)
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (3, 2, 64)
    assert factors_file.ModelFacts.of({**config, "dtype": "float16", "transformers_version": "9"}) == facts
    assert factors_file.ModelFacts.of({"text_config": config}) == facts
    assert factors_file.ModelFacts.of({**config, "rope_theta": 5e5}) != facts


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [("p.jsonl", '{"text": "a"}\n{"prompt": "b"}', "line 2 is not"), ("p.jsonl", "{", "line 1 is not JSON"),
     ("p.txt", "  \n", "holds no text"), (None, "", "cannot be read")],
)  # fmt: skip
def test_an_invalid_line_of_prompts_is_refused_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, body: str, message: str
) -> None:
    prompts = tmp_path / (name or "absent")
    if name:
        prompts.write_text(body)
    assert calibrate.main([str(tiny_llama()), "--prompts", str(prompts), "--output", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_long_texts_are_cut_and_every_piece_begins_with_the_bos_token() -> None:
    class Tokenizer:
        bos_token_id = 7

        def __call__(self, text: str) -> "Tokenizer":
            self.input_ids = [7, *range(100, 100 + len(text))]
            return self

    pieces = calibrate.sequences(Tokenizer(), ["x" * 10, "y"], length=6, limit=10)
    assert [p.tolist() for p in pieces] == [[7, 100, 101, 102, 103, 104], [7, 105, 106, 107]]


TRAINING = (
    "The cache of a transformer holds one key and one value per token, head and layer. A query is compared with all "
    "keys, and what comes out is the mean of the values, weighted by how well their keys fit. "
)
HELD_OUT = (
    "Rain fell on the harbour all night, and by morning the boats that had come in late stood with their decks full "
    "of water. Nobody had slept; the men drank coffee and waited for the wind to turn."
)


def test_a_real_model_is_calibrated_on_one_text_and_does_better_on_another(tmp_path: Path) -> None:
    folder, output = smollm2_135m(), tmp_path / "factors.safetensors"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": TRAINING * n}) for n in (3, 6)))
    arguments = [str(folder), "--prompts", str(prompts), "--output", str(output), "--length", "128", "--tokens", "256",
                 "--device", "cpu"]  # fmt: skip
    assert calibrate.main(arguments) == 0
    layers = factors_file.load(output, factors_file.ModelFacts.read(folder)).layers
    first, *rest = AutoTokenizer.from_pretrained(folder)(HELD_OUT).input_ids
    exact, with_file, without = (
        Oracle(folder, dtype, factors).predictions([first], rest)
        for dtype, factors in (("auto", None), ("k4v4", layers), ("k4v4", None))
    )
    damage, undamaged = (float((exact.exp() * (exact - found)).sum(-1).mean()) for found in (without, with_file))
    assert undamaged < 0.7 * damage


def tiny(config: PreTrainedConfig, tmp_path: Path) -> Path:
    """Make a model of random weights with a tokenizer."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_135m() / name, tmp_path / name)
    return tmp_path


SHAPE = {
    "vocab_size": 49152, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
SOFT_CAP = Gemma2Config(**SHAPE, head_dim=64, num_hidden_layers=2, sliding_window=32, attn_logit_softcapping=5.0,
                        layer_types=["sliding_attention", "full_attention"])  # fmt: skip
SINKS = GptOssConfig(**SHAPE, head_dim=64, num_hidden_layers=2, sliding_window=32, num_local_experts=2,
                     num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"])  # fmt: skip
HYBRID = Lfm2Config(
    **{**SHAPE, "hidden_size": 256}, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
)


@pytest.mark.parametrize(
    ("config", "attending"), [(SOFT_CAP, 1), (SINKS, 1), (HYBRID, 1)], ids=["soft cap", "sinks", "convolutions"]
)
def test_layers_without_our_pages_get_identity_factors(
    config: PreTrainedConfig, attending: int, tmp_path: Path
) -> None:
    folder, prompts, output = tiny(config, tmp_path), tmp_path / "prompts.txt", tmp_path / "factors"
    facts = factors_file.ModelFacts.read(folder)
    prompts.write_text(TRAINING * 4)
    arguments = [str(folder), "--prompts", str(prompts), "--output", str(output), "--length", "64", "--tokens", "128",
                 "--device", "cpu"]  # fmt: skip
    assert calibrate.main(arguments) == 0
    layers = factors_file.load(output, facts).layers
    for number, layer in enumerate(layers):
        assert bool(layer.key_mean.any()) == (number == attending)


def test_a_layer_of_another_shape_is_refused_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompts = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(tiny_llama(), folder)
    prompts.write_text(TRAINING)
    facts = dataclasses.replace(factors_file.ModelFacts.read(folder), kv_heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors_file.ModelFacts, "read", lambda _: facts)
        assert calibrate.main([str(folder), "--prompts", str(prompts), "--length", "32", "--tokens", "32", "--device",
                               "cpu"]) == 2  # fmt: skip
    assert "layer 0 has 2 heads of 64 elements in its keys, and config.json says 1 of 64" in capsys.readouterr().err
    assert not (folder / "kvpilot-calibration.safetensors").exists()
