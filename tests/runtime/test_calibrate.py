"""Calibration files: made from a real model, loaded again, refused when they are not what they should be."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpilot_demo.models import smollm2_135m, tiny_llama
from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.own import own
from kvpilot_runtime import calibrate, calibration

FACTS = calibration.ModelFacts(layers=3, kv_heads=4, head_dim=64, rope="{}", config_sha256="abc")


def some_layers(facts: calibration.ModelFacts, seed: int = 0) -> list[Factors]:
    rng = torch.Generator().manual_seed(seed)
    shape = (facts.kv_heads, facts.head_dim)
    return [
        Factors(torch.randn(shape, generator=rng), torch.rand(shape, generator=rng) + 0.5,
                torch.randn(shape, generator=rng), torch.rand(shape, generator=rng) + 0.5)
        for _ in range(facts.layers)
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    calibration.save(tmp_path / "c.safetensors", some_layers(FACTS), FACTS)
    return tmp_path / "c.safetensors"


def changed(file: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor | None) -> None:
    """Rewrite the file with other metadata or tensors; None takes one out. Double underscores stand for dots."""
    facts = {name: str(getattr(FACTS, name)) for name in ("layers", "kv_heads", "head_dim", "rope", "config_sha256")}
    data = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file(
        {name: tensor for name, tensor in data.items() if tensor is not None},
        file, {"format": "kvpilot-calibration", "version": "1", **facts, **(metadata or {})},
    )  # fmt: skip


def test_what_is_saved_is_loaded(file: Path) -> None:
    loaded = calibration.load(file, FACTS)
    for wanted, got in zip(some_layers(FACTS), loaded.layers, strict=True):
        assert all(torch.equal(getattr(wanted, n), getattr(got, n)) for n in ("key_mean", "key_scale", "value_mean", "value_scale"))  # fmt: skip  # noqa: E501
    assert loaded.for_layer("model.layers.2.self_attn.attn") is loaded.layers[2]


@pytest.mark.parametrize("name", ["model.layers.3.self_attn.attn", "model.layers.x.attn", "lm_head"])
def test_a_layer_that_was_not_calibrated_is_named(file: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is none of the 3"):
        calibration.load(file, FACTS).for_layer(name)


def test_shards_hold_every_head_once_and_copies_when_ranks_outnumber_heads(file: Path) -> None:
    whole = calibration.load(file, FACTS)
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
        ({"metadata": {"config_sha256": "def"}}, "config_sha256 is 'def' and the model's is 'abc'"),
        ({"metadata": {"head_dim": "128"}}, "head_dim is '128' and the model's is '64'"),
        ({"metadata": {"version": "9"}}, "version '9' is not"),
        ({"metadata": {"format": "other"}}, "format 'other'"),
        ({"layers__1__key_mean": None}, "layers.1.key_mean is missing"),
        ({"layers__0__key_scale": torch.zeros(4, 64)}, "layers.0.key_scale holds the scale 0.0"),
        ({"layers__2__value_mean": torch.full((4, 64), torch.nan)}, "layers.2.value_mean holds 256 numbers"),
        ({"layers__2__value_mean": torch.ones(4, 32)}, r"is torch.float32 \(4, 32\) and should be .*\(4, 64\)"),
        ({"layers__2__value_mean": torch.ones(4, 64).half()}, "is torch.float16"),
    ],
)
def test_a_file_for_another_model_or_with_bad_numbers_is_refused(file: Path, change: dict, message: str) -> None:
    changed(file, **change)
    with pytest.raises(calibration.CalibrationError, match=message):
        calibration.load(file, FACTS)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(calibration.CalibrationError, match="no such file"):
        calibration.load(tmp_path / "none", FACTS)
    (tmp_path / "half").write_bytes(b"half a file")
    with pytest.raises(calibration.CalibrationError, match="no safetensors file"):
        calibration.load(tmp_path / "half", FACTS)
    monkeypatch.delenv(calibration.VARIABLE, raising=False)
    assert calibration.from_environment(FACTS) is None
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(calibration.CalibrationError, match="check KVPILOT_CALIBRATION"):
        calibration.from_environment(FACTS)


def test_copies_of_a_model_have_one_identity_and_another_rope_another() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 3,
              "rope_theta": 1e4, "dtype": "bfloat16"}  # fmt: skip
    facts = calibration.ModelFacts.of(config)
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (3, 2, 64)
    assert calibration.ModelFacts.of({**config, "dtype": "float16", "transformers_version": "9"}) == facts
    assert calibration.ModelFacts.of({"text_config": config}) == facts
    assert calibration.ModelFacts.of({**config, "rope_theta": 5e5}) != facts


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [("p.jsonl", '{"text": "a"}\n{"prompt": "b"}', "line 2 is not"), ("p.jsonl", "{", "line 1 is not JSON"),
     ("p.txt", "  \n", "holds no text"), (None, "", "cannot be read")],
)  # fmt: skip
def test_prompts_that_are_none_are_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, body: str, message: str
) -> None:
    prompts = tmp_path / (name or "absent")
    if name:
        prompts.write_text(body)
    assert calibrate.main([str(tiny_llama()), "--prompts", str(prompts), "--output", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_long_texts_are_cut_and_every_piece_begins_as_a_prompt_does() -> None:
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


def divergence(model: object, tokens: torch.Tensor, layers: list[Factors] | None) -> float:
    """Mean KL against the model's own cache, in nats, with a k4v4 cache for all keys and values."""
    name, fmt = "kvpilot_test", formats.parse("k4v4")

    def attend(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]  # transformers' signature
        codec = own(fmt, layers[module.layer_idx] if layers else None)
        key, value = (
            f(x[0].transpose(0, 1)).transpose(0, 1)[None] for f, x in ((codec.key, key), (codec.value, value))
        )
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    run = partial(model, tokens[None], use_cache=False)  # type: ignore[arg-type]  # a transformers model
    logs = []
    for hook in (sdpa_attention_forward, attend):
        AttentionInterface.register(name, hook)
        model.set_attn_implementation(name)  # type: ignore[attr-defined]
        with torch.inference_mode():
            logs.append(run().logits[0].float().log_softmax(-1))
    base, other = logs
    return float((base.exp() * (base - other)).sum(-1).mean())


def test_a_real_model_is_calibrated_on_one_text_and_does_better_on_another(tmp_path: Path) -> None:
    folder, output = smollm2_135m(), tmp_path / "factors.safetensors"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": TRAINING * n}) for n in (1, 2, 3)))
    arguments = [str(folder), "--prompts", str(prompts), "--output", str(output), "--length", "128", "--tokens", "256"]
    assert calibrate.main(arguments) == 0
    layers = list(calibration.load(output, calibration.ModelFacts.read(folder)).layers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(HELD_OUT, return_tensors="pt").input_ids[0]
    assert divergence(model, tokens, layers) < 0.7 * divergence(model, tokens, None)
