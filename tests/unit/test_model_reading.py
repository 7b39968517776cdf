"""Facts of a model's KV cache from its config.json, compared with transformers' own classes where they exist."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_formats import formats
from kvpilot_formats.models import ConfigError, Kind, auto_dtype, known, load, read, unsupported

# As published: fields with a default in the class are missing.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 256,
    "hidden_size": 3584, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "sliding_window": 262144, "vocab_size": 200064,
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 256, "hidden_size": 2048,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}  # fmt: skip


def layers(config):
    found = read(config)
    return {group.kind.value: group.layers for group in found.groups}


def test_gemma_3_4b_has_the_heads_that_its_config_leaves_out():
    found = read(GEMMA_3_4B)
    assert layers(GEMMA_3_4B) == {"full": 5, "window": 29}
    assert (found.heads, found.kv_heads, found.head_dim, found.max_positions) == (8, 4, 256, 131_072)
    assert found.doubt == ""


@pytest.mark.parametrize(
    ("config", "expected"),
    [(GEMMA_3_12B, {"full": 8, "window": 40}), (GEMMA_2_9B, {"full": 21, "window": 21}), (PHI_4_MINI, {"full": 32})],
    ids=["gemma-3-12b", "gemma-2-9b", "phi-4-mini"],
)
def test_a_model_with_some_window_layers_also_has_full_layers(config, expected):
    assert layers(config) == expected
    assert unsupported(read(config)) is None


def test_only_the_attention_layers_of_a_hybrid_have_a_cache():
    found = read(QWEN3_NEXT)
    assert (layers(QWEN3_NEXT), found.state_layers) == ({"full": 12}, 36)
    assert found.token_bytes("auto") == 12 * 2 * 2 * 256 * 2


def test_a_soft_cap_missing_from_the_config_is_the_classs_default():
    assert read({k: v for k, v in GEMMA_2_9B.items() if k != "attn_logit_softcapping"}).softcap == 50.0
    assert read(GEMMA_3_12B).softcap is None


@pytest.mark.parametrize(
    "cap",
    [10**400, -1, 0, True, "50", float("inf"), float("nan")],
    ids=["huge", "negative", "zero", "true", "text", "infinite", "no number"],
)
def test_an_invalid_soft_cap_is_ignored(cap):
    assert read({**GEMMA_2_9B, "attn_logit_softcapping": cap}).softcap is None


def test_a_field_that_is_null_is_not_the_classs_default():
    base = {"model_type": "mistral", "num_hidden_layers": 4, "max_position_embeddings": 32768}
    assert layers(base) == {"window": 4}  # the class defaults to a window of 4,096
    assert layers({**base, "sliding_window": None}) == {"full": 4}


def test_layers_that_read_another_layers_cache_have_none():
    found = read({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35}})
    assert (layers({"model_type": "gemma3n"}), found.shared_layers) == ({"full": 4, "window": 16}, 15)
    assert unsupported(found) is None


def test_full_attention_layers_may_have_another_head_dim_than_window_layers():
    text = {"model_type": "gemma4_text", "num_hidden_layers": 30}
    found = read({"model_type": "gemma4", "text_config": text})
    assert {group.kind: group.head_dim for group in found.groups} == {Kind.FULL: 512, Kind.WINDOW: 256}
    assert unsupported(found) is None
    assert "head_dim 1024" in unsupported(
        read({"model_type": "gemma4", "text_config": text | {"global_head_dim": 1024}})
    )


def test_a_latent_cache_has_one_entry_a_layer_and_a_sparse_index_is_added():
    assert read({"model_type": "deepseek_v3"}).token_bytes("auto") == 61 * 576 * 2
    assert read({"model_type": "deepseek_v3"}).token_bytes("fp8") == 61 * 576
    assert read({"model_type": "deepseek_v32"}).token_bytes("auto") == 61 * (576 * 2 + 132)


def test_layers_without_attention_are_not_counted():
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    found = read({"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)})
    assert (found.layers, found.state_layers) == (pattern.count("*"), pattern.count("M"))


def test_a_model_without_attention_has_no_cache_and_is_read_all_the_same():
    found = read({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 64})
    assert (found.layers, found.state_layers, found.token_bytes("auto")) == (0, 64, 0)
    assert "without attention" in unsupported(found)


def test_unknown_kinds_of_layers_are_reported_and_not_counted():
    found = read(
        {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention", "quantum_attention"]}
    )
    assert (found.layers, found.other_layers) == (1, 1)
    assert "quantum_attention" in found.doubt
    assert unsupported(found)


def test_an_unknown_model_is_read_as_a_decoder_and_reported():
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 1024}
    found = read({"model_type": "brand_new", **shape})
    assert (layers({"model_type": "brand_new", **shape}), found.head_dim) == ({"full": 4}, 128)
    assert "'brand_new' is not known" in found.doubt


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text", "jamba", "llama4_text", "cohere2", "gemma2"])
def test_every_dtype_of_vllm_has_a_size_whatever_the_model(kind):
    for dtype in tuple(formats.FORMATS):
        if not formats.parse(dtype).ours:
            assert read({"model_type": kind}).token_bytes(dtype) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers in config.json is 'many', which is not a size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000, which is not a size"),
        ({"num_attention_heads": 7}, "num_attention_heads in config.json is 7 and num_key_value_heads 8"),
        ({"hidden_size": 16}, "which leaves nothing for each"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types in config.json has 31 entries"),
        ({"layer_types": [1] * 32}, "layer_types in config.json holds 1, which names no kind of layer"),
        ({"layer_types": "full_attention"}, "layer_types in config.json is 'full_attention', but must be a list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures in config.json is 'LlamaForCausalLM', but must be"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers in config.json is 32 of 32 layers"),
    ],
)
def test_an_impossible_value_is_reported_with_its_field(changes, said):
    base = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    with pytest.raises(ConfigError) as caught:
        read({**base, **changes})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_without_a_block_config_have_the_usual_number_of_heads():
    block = {"attention": {"no_op": False, "n_heads_in_group": 8}}
    base = {"model_type": "nemotron-nas", "num_attention_heads": 64, "hidden_size": 8192, "num_hidden_layers": 3}
    found = read({**base, "block_configs": [block, {"attention": {"no_op": True}}, block]})
    assert (found.layers, found.kv_heads) == (2, 8)
    kinds = ["full_attention"] * 3
    assert [g.kv_heads for g in read({**base, "layer_types": kinds, "block_configs": [block]}).groups] == [64, 8]
    with pytest.raises(ConfigError, match=r"block_configs in config\.json has 1 entries"):
        read({**base, "block_configs": [block]})


def test_a_file_that_is_not_a_config_is_refused(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"has no config\.json") as caught:
        load(file)
    assert caught.value.missing
    with file.open("wb") as stream:
        stream.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match="104,857,600 bytes"):
        load(file)
    for text in ("", "[]", "{", "\x00", "[" * 100_000, '{"a": ' * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file)


def test_reading_a_model_needs_neither_torch_nor_transformers():
    code = "import sys; import kvpilot_formats.models as m; m.read({'model_type': 'gemma3'}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert not {"torch", "transformers", "numpy", "vllm"} & set(loaded.stdout.split())


def test_the_defaults_are_those_of_the_installed_transformers():
    # `make check` compares the whole table. This test only checks which version the table was made with.
    file = Path(importlib.util.find_spec("kvpilot_formats.models").origin).with_name("defaults.json")
    assert json.loads(file.read_text())["transformers"] == importlib.metadata.version("transformers")
    assert known("gemma3")
    assert not known("brand_new")


LONGCAT = {
    "architectures": ["LongcatFlashForCausalLM"], "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "max_position_embeddings": 131072, "vocab_size": 131072,
}  # fmt: skip
LOOP_CODER = {
    "architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder", "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 27648, "loop_num": 2, "loop_window_size": 64,
    "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "vocab_size": 76800,
}  # fmt: skip
DEEPSEEK_V41 = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
    "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "max_position_embeddings": 1048576,
        "sliding_window": 128, "vocab_size": 129280, "index_topk": 512, "index_head_dim": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20],
    },
}  # fmt: skip


def test_a_layer_that_attends_twice_keeps_two_caches():
    # The published config.json has no model_type.
    found = read(LONGCAT)
    assert (found.model_type, found.full_layers, found.latent) == ("longcat_flash", 56, 576)
    assert found.token_bytes("auto") == 56 * 576 * 2
    assert found.doubt == ""
    # Newer releases of transformers save these fields, too.
    saved = {**LONGCAT, "model_type": "longcat_flash", "num_hidden_layers": 56}
    assert read(saved).full_layers == 56
    del saved["num_layers"]
    assert read(saved).full_layers == 56
    lite = {**LONGCAT, "architectures": ["LongcatFlashNgramForCausalLM"], "num_layers": 14}
    assert read(lite).full_layers == 28


@pytest.mark.parametrize("kind", ["iquestloopcoder", "llama"])
def test_a_model_that_loops_has_a_window_in_each_further_pass_whatever_type_its_config_names(kind):
    assert layers({**LOOP_CODER, "model_type": kind}) == {"full": 80, "window": 80}
    thrice = {**LOOP_CODER, "model_type": kind, "loop_num": 3}
    assert layers(thrice) == {"full": 80, "window": 160}
    assert {group.window for group in read(thrice).groups} == {0, 64}
    with pytest.raises(ConfigError, match="loop_num"):
        read({**LOOP_CODER, "loop_num": 10_000})


@pytest.mark.parametrize("inner", [None, "deepseek_v41_text"])
def test_a_model_that_wraps_a_text_part_keeps_its_own_type_where_the_part_names_none(inner):
    config = {**DEEPSEEK_V41, "text_config": {**DEEPSEEK_V41["text_config"], "model_type": inner}}
    found = read(config)
    assert (found.model_type, found.other_layers, found.groups) == ("deepseek_v41", 40, ())
    assert "compressed_attention" in found.doubt
    plain = {"model_type": "brand_new", "text_config": {"num_hidden_layers": 4, "num_attention_heads": 8,
                                                        "hidden_size": 1024}}  # fmt: skip
    assert "model_type 'brand_new' is not known" in read(plain).doubt


# Configs as nvidia, Neural Magic and Red Hat publish them, with the dtype that vLLM resolves `auto` to.
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {**STATIC, "strategy": "tensor", "symmetric": True},
}
AUTO = {
    "modelopt, by scheme": ({**MODELOPT, "kv_cache_scheme": STATIC}, "fp8_e4m3"),
    "modelopt, by name": ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
    "modelopt, nvfp4": ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    "modelopt, four bits": ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
    "modelopt, dynamic": ({**MODELOPT, "kv_cache_scheme": {**STATIC, "dynamic": True}}, "auto"),
    "modelopt, unknown": ({**MODELOPT, "kv_cache_quant_algo": "INT3"}, "auto"),
    "modelopt, none": (MODELOPT, "auto"),
    "modelopt, a file of its own": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "fp8_e4m3",
    ),
    "modelopt, a file of its own, weights alone": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}},
        "auto",
    ),
    "compressed-tensors": (COMPRESSED, "fp8"),
    "compressed-tensors, other letters": ({**COMPRESSED, "quant_method": "Compressed_Tensors"}, "fp8"),
    "compressed-tensors, weights alone": ({**COMPRESSED, "kv_cache_scheme": None}, "auto"),
    "another method": ({"quant_method": "fp8", "kv_cache_scheme": STATIC}, "auto"),
    "no object": ("fp8", "auto"),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto_follows_the_checkpoints_cache_dtype(case):
    scheme, expected = AUTO[case]
    config = {"model_type": "llama", "quantization_config": scheme}
    assert auto_dtype(config) == expected
    found = read(config)
    assert found.token_bytes("auto") == found.token_bytes(expected)
    assert found.token_bytes("bfloat16") == 32 * 2 * 32 * 128 * 2
    if expected != "auto":  # layers that skip the dtype stay in 16 bits
        assert found.token_bytes("auto", kept=32) == found.token_bytes("bfloat16")


def test_a_latent_cache_ignores_the_scheme_of_compressed_tensors():
    assert read({"model_type": "deepseek_v3", "quantization_config": COMPRESSED}).auto == "auto"
    assert read({"model_type": "deepseek_v3", "quantization_config": AUTO["modelopt, by name"][0]}).auto == "fp8_e4m3"


def test_the_text_config_may_have_the_scheme_of_a_multimodal_model():
    text = {"model_type": "qwen2", "quantization_config": COMPRESSED}
    assert read({"model_type": "qwen2_vl", "text_config": text}).auto == "fp8"


def test_a_separate_file_may_have_the_quantization_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps(AUTO["modelopt, a file of its own"][0]))
    assert read(load(tmp_path / "config.json")).auto == "fp8_e4m3"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": MODELOPT}))
    assert read(load(tmp_path / "config.json")).auto == "auto"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    beside.write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json cannot be read"):
        load(tmp_path / "config.json")
