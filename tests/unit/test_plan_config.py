import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_cli.plan.command import main
from support.plans import planned, sequences
from support.weight_folders import write_safetensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def folder(tmp_path, **changes):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_without_weights_their_size_is_computed_from_the_config(capsys, tmp_path):
    document = planned(capsys, folder(tmp_path))
    table = planned(capsys, "Llama-3-8B")
    assert any("counted from the shapes" in note for note in document["notes"])
    ours, theirs = (d["memory_per_gpu"]["weights_bytes"] for d in (document, table))
    assert ours == pytest.approx(theirs, rel=0.001)
    assert sequences(document, "k4v4", 8192) == sequences(table, "k4v4", 8192)


def test_an_unknown_model_type_is_read_as_a_decoder_and_reported(capsys, tmp_path):
    document = planned(capsys, folder(tmp_path, model_type="brand_new"))
    assert any("model_type 'brand_new' is not known" in note for note in document["notes"])
    assert not any("is not known" in note for note in planned(capsys, folder(tmp_path))["notes"])


DEEPSEEK_V41 = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "vocab_size": 129280,
    "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "sliding_window": 128, "vocab_size": 129280, "max_position_embeddings": 1048576,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20],
    },
}  # fmt: skip


def test_an_unknown_cache_is_not_planned(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V41))
    assert main([str(tmp_path), "--gpu", "H200", "--gpus", "8", "--kv-gb", "500"]) == 2
    said = capsys.readouterr().err
    assert "'compressed_attention' keep a cache that is not known here" in said
    assert "start an engine" in said


def test_a_model_whose_layers_all_have_a_window_has_bytes_a_token(capsys, tmp_path):
    document = planned(capsys, folder(tmp_path, sliding_window=4096))
    (auto,) = [row for row in document["dtypes"] if row["dtype"] == "auto"]
    assert auto["bytes_per_token"] == 32 * 8 * 2 * 128 * 2
    assert auto["window_bytes_per_sequence"] == 4096 * auto["bytes_per_token"]


def test_auto_is_planned_as_the_checkpoints_dtype(capsys, tmp_path):
    scheme = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    document = planned(capsys, folder(tmp_path, quantization_config=scheme), "--kv-gb", "40")
    rows = {row["dtype"]: row for row in document["dtypes"]}
    assert list(rows)[:3] == ["auto", "bfloat16", "fp8"]
    assert rows["auto"]["bytes_per_token"] == rows["fp8"]["bytes_per_token"] == 32 * 8 * 2 * 128
    assert rows["bfloat16"]["bytes_per_token"] == 2 * rows["auto"]["bytes_per_token"]
    assert any("auto is fp8_e4m3 for this checkpoint" in note for note in document["notes"])
    assert [row["dtype"] for row in planned(capsys, folder(tmp_path))["dtypes"]][:2] == ["auto", "fp8"]
    old = planned(capsys, folder(tmp_path, quantization_config=scheme), "--kv-gb", "10", "--gpu", "T4")
    assert "compute capability 8.0" in old["dtypes"][0]["veto"]


def test_weights_in_the_folder_count_with_their_file_size(capsys, tmp_path):
    name = folder(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", 1_000_003)
    assert planned(capsys, name)["memory_per_gpu"]["weights_bytes"] == 1_000_003
    write_safetensors(tmp_path / "consolidated.safetensors", 1_000_000)
    assert planned(capsys, name)["memory_per_gpu"]["weights_bytes"] == 1_000_000


def test_truncated_weights_are_refused(capsys, tmp_path):
    name = folder(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", 1000)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    assert main([name]) == 2
    assert "the download was cut short" in capsys.readouterr().err


def test_the_text_part_of_a_model_with_images_is_planned(capsys, tmp_path):
    nested = {"model_type": "gemma3", "text_config": {**LLAMA, "num_hidden_layers": 4}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert planned(capsys, str(tmp_path))["dtypes"][0]["bytes_per_token"] == 4 * 8 * 128 * 2 * 2


def test_a_window_as_long_as_the_longest_context_is_ignored(capsys, tmp_path):
    document = planned(capsys, folder(tmp_path, sliding_window=8192))
    assert document["dtypes"][0]["window_bytes_per_sequence"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": None, "model_type": "brand_new"}, "config.json has no num_hidden_layers"),
        ({"vocab_size": None, "model_type": "brand_new"}, "config.json has no vocab_size"),
        ({"num_attention_heads": "many"}, "num_attention_heads in config.json is 'many', which is not a size"),
        ({"num_key_value_heads": -8}, "num_key_value_heads in config.json is -8, which is not a size"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"layer_types": ["linear_attention"] * 32}, "config.json has no attention layers"),
        (
            {"layer_types": ["full_attention"] * 31},
            "layer_types in config.json has 31 entries and num_hidden_layers is 32",
        ),
        ({"num_key_value_heads": 5}, "num_attention_heads in config.json is 32 and num_key_value_heads 5"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "parameters cannot be counted"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512},
            "parameters cannot be counted from its config.json; give --weights-gb",
        ),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method in config.json is 'odd'"),
    ],
)
def test_a_config_that_cannot_be_planned_names_the_field(capsys, tmp_path, changes, said):
    assert main([folder(tmp_path, **changes)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_garbled_config_is_an_error_and_not_a_traceback(capsys, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 300_000) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
)


FIELDS = [*LLAMA, "head_dim", "sliding_window", "sliding_window_pattern", "layer_types", "text_config", "num_experts",
          "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "kv_lora_rank",
          "quantization_config", "tie_word_embeddings", "attn_type_list"]  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
def test_any_config_is_either_planned_or_refused(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    assert main([str(folder), "--gpu", "H200"]) in (0, 2)
