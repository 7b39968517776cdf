import re

import pytest

from kvpilot_cli.plan import models
from kvpilot_cli.plan.capacity import weight_bytes
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.facts_config import from_config
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_operator.gpus import GPUS, by_product

TABLE = models.table()


def as_config(model):
    """Return a config.json with the facts of a model in the table."""
    config = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": model.max_positions,
    }
    if model.experts:
        config |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_intermediate,
        }
    if model.sliding_layers:
        kinds = ["sliding_attention"] * model.sliding_layers + ["full_attention"] * model.full_layers
        config |= {"sliding_window": model.window, "layer_types": kinds}
    return config


# The table has no shapes for latent attention.
@pytest.mark.parametrize("model", [m for m in TABLE if not m.latent_dim], ids=lambda model: model.name)
def test_the_parameters_of_the_table_follow_from_its_shapes(model):
    # Not counted: norms, biases and the image tower of the larger Gemma 3 models (0.42e9 parameters).
    images = 420e6 if model.name.startswith("google/gemma-3-") and "1b" not in model.name else 0
    counted = from_config(as_config(model), model.name)
    assert counted.parameters + images == pytest.approx(model.parameters, rel=0.002)
    assert (counted.sliding_layers, counted.window) == (model.sliding_layers, model.window)


def test_no_two_models_share_a_name():
    names = [name.lower() for model in TABLE for name in (model.name, *model.also)]
    assert len(names) == len(set(names))
    short = [name.rpartition("/")[2] for name in names]
    assert len(short) == len(set(short))


def test_every_model_says_where_its_facts_come_from():
    assert all(model.source for model in TABLE)
    assert len(TABLE) >= 30


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_the_size_of_mxfp4_weights_equals_the_model_card(name, gib):
    model = models.find(name)
    assert weight_bytes(model, model.published) / 2**30 == pytest.approx(gib, abs=0.06)


def test_smaller_weights_take_less_memory_and_embeddings_keep_16_bits():
    model = models.find("Qwen3-8B")
    sizes = [weight_bytes(model, dtype) for dtype in ("bfloat16", "fp8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] > 2 * model.embedding_parameters + (model.parameters - model.embedding_parameters) // 2


def test_every_gpu_has_labels_of_its_own():
    labels = [label for gpu in GPUS for label in gpu.products]
    assert len(labels) == len(set(labels))
    assert all(by_product(label) is gpu for gpu in GPUS for label in gpu.products)


def test_a_mig_slice_is_not_taken_for_the_whole_gpu():
    assert by_product("NVIDIA-H100-80GB-HBM3") is not None
    assert by_product("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb") is None
    assert by_product("NVIDIA-H100-80GB-HBM3-SHARED") is None
    assert by_product("cpu") is None


@pytest.mark.parametrize("name", models.published())
def test_every_documented_model_can_be_planned_by_name_unless_its_cache_is_unknown(name):
    try:
        found = models.find(name)
    except PlanError as error:
        assert f"MODEL {name!r}: " in str(error)
        assert re.search("not known here|no attention layers|is_encoder_decoder", str(error))
    else:
        assert found.name == name


@pytest.mark.parametrize("model", TABLE, ids=lambda model: model.name)
def test_a_model_with_the_facts_of_another_model_keeps_its_own_name(model):
    for name in (model.name, *model.also):
        called = name if "/" in name else model.name
        assert models.find(name.upper()).name == models.find(name.rpartition("/")[2]).name == called


def test_an_unknown_name_never_selects_another_model():
    for name in ("meta-llama/Llama-3.3-71B", "acme/Qwen3-8B-tuned", "Qwen3", "Qwen/Qwen3-30B-A3B-Instruct-2507", "8B"):
        with pytest.raises(PlanError, match="neither a folder nor in the table"):
            models.find(name)


def test_a_short_gpu_name_lists_every_gpu_that_begins_with_it():
    with pytest.raises(PlanError, match="use one of H100-80GB, H100-NVL, H100-PCIe, or"):
        find_gpu("h100")
    with pytest.raises(PlanError, match=r"use one of B200, H200, .*, T4, or"):
        find_gpu("MI300X")
