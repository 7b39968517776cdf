import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_cli.plan import models
from kvpilot_cli.plan.capacity import cache, memory
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_cli.plan.make import Request, infeasible, make, usual_dtypes
from kvpilot_formats import formats

FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks"
MEASURED = FIGURES / "h200-engine.json"
MEASURED_LATENTS = FIGURES / "h200-mla-engine.json"
PLAIN = [m for m in models.table() if not m.sliding_layers and not m.latent_dim]
WINDOWS = [m for m in models.table() if m.sliding_layers and m.full_layers]
DTYPES = usual_dtypes(latent=False)
EVERY = sorted({*DTYPES, *usual_dtypes(latent=True)})
GB = 10**9


def fits(model, kv, dtype, context, gpus=1):
    return cache(model, dtype, gpus).sequences(kv, context)


def test_capacities_are_within_half_a_percent_of_those_measured_on_an_h200():
    runs = [run for run in json.loads(MEASURED.read_text()) if run["shape"] == "llama3-8b"]
    dtypes = tuple(run["dtype"] for run in runs)
    assert {"auto", "fp8", "int8", "k8v4", "k4v4", "k4v2"} == set(dtypes)
    # This measurement was made before engines had a recent window.
    request = Request(models.find("Llama-3-8B"), find_gpu("H200"), dtypes=dtypes, recent_tokens=0)
    planned = {row.dtype: row.capacities[-1].capacity_tokens for row in make(request).rows}
    for run in runs:
        assert planned[run["dtype"]] == pytest.approx(run["kv_tokens"], rel=0.005)


def test_layers_with_chunked_attention_are_in_the_dtype_and_have_no_residual_pages():
    full = replace(models.find("Llama-3-8B"), sliding_layers=0)
    chunked = replace(full, sliding_layers=24, window=8192, chunked=True)
    small, wide = cache(chunked, "k4v4", 1), cache(chunked, "auto", 1)
    assert small.window_token_bytes == 3 * small.full_token_bytes
    assert small.window_token_bytes < wide.window_token_bytes / 3.5
    assert small.block == small.window_block == cache(full, "k4v4", 1).block
    without = cache(chunked, "k4v4", 1, 0)
    assert small.held(8192) == without.held(8192) + 2 * small.full_groups


def test_the_tokens_of_a_gibibyte_equal_vllms_report_for_smollm2():
    # vLLM 0.32.0 on a CPU reports 46,592 tokens in 16 bits for 1 GiB of cache.
    layout = cache(models.find("SmolLM2-135M-Instruct"), "auto", 1)
    assert layout.tokens(2**30, 8192) == 46_592


# Groups as vLLM 0.32's _get_kv_cache_groups_uniform_page_size makes them: layers, groups of full layers and of windows.
@pytest.mark.parametrize(
    ("name", "layers", "full", "windows"),
    [
        ("gemma-3-27b-it", 10, 1, 6),
        ("gemma-3-12b-it", 8, 1, 5),
        ("gemma-3-4b-it", 5, 1, 6),
        ("gemma-3-1b-it", 4, 1, 6),
        ("gemma-2-9b", 21, 1, 1),
        ("gpt-oss-20b", 12, 1, 1),
    ],
)
def test_layers_with_a_window_are_grouped_as_vllm_does(name, layers, full, windows):
    layout = cache(models.find(name), "auto", 1)
    assert (layout.group_layers, layout.full_groups, layout.window_groups) == (layers, full, windows)


def test_a_page_of_k4v4_at_head_dim_256_wastes_six_percent_of_a_window_layer():
    # docs/model-kinds.md quotes this share. On a GPU our blocks are multiples of 64 tokens.
    layout = cache(models.find("gemma-3-4b-it"), "k4v4", 1)
    assert (layout.block, layout.window_block) == (256, 64)
    stored = layout.window_block * 4 * formats.parse("auto").row_bytes(256)
    assert 1 - stored / layout.page_bytes == pytest.approx(0.06, abs=0.005)


def test_a_window_that_begins_inside_a_block_holds_one_block_more_than_an_aligned_one():
    # Blocks of 16 tokens, a window of 1,024, and one group with full attention beside six with windows.
    layout = cache(models.find("gemma-3-4b-it"), "auto", 1)
    assert layout.held(1024) == 64 + 6 * 64
    assert layout.held(1025) == 65 + 6 * 65


@given(st.sampled_from(WINDOWS), st.sampled_from(DTYPES), st.integers(1, 2**17))
def test_a_sequence_past_its_windows_grows_only_in_the_full_layers(model, dtype, beyond):
    if infeasible(model, dtype, find_gpu("H200")):
        return
    layout = cache(model, dtype, 1)
    context = model.window + layout.recent_blocks * layout.block + beyond
    grown = layout.held(context + 10 * layout.block) - layout.held(context)
    assert grown == 10 * layout.full_groups


@given(st.sampled_from(WINDOWS), st.integers(1, 2**17))
def test_layers_with_a_window_never_hold_more_than_with_full_attention(model, context):
    everywhere = replace(model, sliding_layers=0, window=0)
    few, many = sorted((model.full_layers, model.sliding_layers))
    padded = -(-many // few) * few / many
    held = [layout.held(context) * layout.page_bytes * layout.group_layers for layout in (cache(m, "auto", 1) for m in (model, everywhere))]  # fmt: skip  # noqa: E501
    block = cache(model, "auto", 1)
    assert held[0] <= held[1] * padded + block.page_bytes * block.group_layers * (block.window_groups + 1)


@given(st.sampled_from(models.table()), st.sampled_from(EVERY), st.integers(1, 2**17), st.integers(0, 2**17))
def test_the_cache_never_holds_more_sequences_if_they_are_longer(model, dtype, context, longer):
    if infeasible(model, dtype, find_gpu("H200")):
        return
    assert fits(model, 60 * GB, dtype, context + longer) <= fits(model, 60 * GB, dtype, context)


@given(st.sampled_from(PLAIN), st.integers(1, 1000), st.integers(1, 200), st.data())
def test_a_dtype_with_fewer_bits_never_holds_fewer_tokens(model, blocks, gigabytes, data):
    dtypes = [d for d in DTYPES if not infeasible(model, d, find_gpu("H200"))]
    by_size = sorted(dtypes, key=lambda d: formats.parse(d).row_bytes(model.head_dim))
    at = data.draw(st.integers(0, len(by_size) - 2))
    context = 64 * blocks  # whole blocks of every dtype
    held = [cache(model, d, 1, 0).tokens(gigabytes * GB, context) for d in by_size[at : at + 2]]
    assert held[0] >= held[1] - 64


@pytest.mark.parametrize(
    ("dtype", "recent", "context", "blocks"),
    [
        # A window of 64 tokens is the newest 2 blocks, one of 128 tokens 3 blocks, and one of 512 tokens 9 blocks.
        ("k4v4", None, 2048, 32 + 2),
        ("k4v4", 0, 2048, 32),
        ("k8v4", None, 2048, 32 + 2),
        ("k4v2", None, 2048, 32 + 3 * 2),
        ("k4v2", 64, 2048, 32 + 2 * 2),
        ("k2v2", None, 2048, 32 + 9 * 3),
        ("k2v2", 512, 30, 1 + 3),  # the sequence has one block
        ("int8", 512, 2048, 32),
        ("fp8", 512, 2048, 128),
    ],
)
def test_every_sequence_holds_the_pages_of_its_recent_window(dtype, recent, context, blocks):
    assert cache(models.find("Llama-3.1-8B"), dtype, 1, recent).held(context) == blocks


def test_the_plan_cuts_a_default_window_to_a_short_context_as_the_engine_does():
    short = replace(models.find("Llama-3.1-8B"), max_positions=300)
    assert cache(short, "k2v2", 1).held(300) == 5 + 5 * 3  # the sequence has all 5 blocks in its window of 256 tokens
    (row,) = make(Request(short, find_gpu("H200"), dtypes=("k2v2",))).rows
    assert (row.recent_tokens, row.capacities[-1].context_tokens) == (256, 300)


def test_only_full_layers_have_a_recent_window():
    # 10 of 62 layers are full. Their blocks have 256 tokens, so a window of 256 tokens is the newest 2 blocks.
    layout, without = (cache(models.find("gemma-3-27b-it"), "k4v4", 1, recent) for recent in (256, 0))
    assert layout.held(8192) == without.held(8192) + 2 * layout.full_groups


@given(st.sampled_from(PLAIN), st.sampled_from(DTYPES), st.integers(1, 2**17), st.data())
def test_the_cache_never_holds_more_tokens_with_a_longer_recent_window(model, dtype, context, data):
    if infeasible(model, dtype, find_gpu("H200")):
        return
    at = data.draw(st.integers(0, len(formats.RECENT_CHOICES) - 2))
    shorter, longer = (
        cache(model, dtype, 1, n).sequences(60 * GB, context) for n in formats.RECENT_CHOICES[at : at + 2]
    )
    assert longer <= shorter


@given(st.sampled_from(PLAIN), st.sampled_from([1, 2, 4, 8]), st.integers(1, 100))
def test_gpus_share_the_cache_of_a_token_until_heads_must_be_copied(model, gpus, gigabytes):
    if model.heads % gpus or (model.kv_heads % gpus and gpus % model.kv_heads):
        return
    alone, shared = cache(model, "auto", 1), cache(model, "auto", gpus)
    copies = max(1, gpus // model.kv_heads)
    assert shared.full_token_bytes * gpus == alone.full_token_bytes * copies


@given(st.sampled_from([1, 2, 4, 8]), st.floats(0.05, 1.0), st.integers(0, 2 * 10**12))
def test_the_kv_cache_gets_the_memory_that_the_other_parts_leave(gpus, utilization, weights):
    split = memory(find_gpu("H100-80GB"), gpus, utilization, weights)
    assert split.kv_bytes == max(0, split.usable_bytes - split.weights_bytes - split.engine_bytes)
    assert split.usable_bytes <= 81_559 * 2**20
    assert split.weights_bytes * gpus >= weights


def test_every_gpu_holds_the_whole_latent_cache():
    model = models.find("DeepSeek-V3")
    # 61 layers of 512 + 64 elements in 16 bits.
    assert cache(model, "auto", 1).full_token_bytes == cache(model, "auto", 8).full_token_bytes == 61 * 576 * 2
    assert cache(model, "mla4", 1).full_token_bytes == cache(model, "mla4", 8).full_token_bytes == 61 * 324


def test_the_gain_of_latents_equals_the_measurement_on_an_h200():
    runs = {run["dtype"]: run["kv_tokens"] for run in json.loads(MEASURED_LATENTS.read_text())}
    model = models.find("DeepSeek-V3")  # each layer has the size of DeepSeek-V2-Lite's
    tokens = {dtype: cache(model, dtype, 1).tokens(100 * GB, 66_560) for dtype in ("auto", "mla8", "mla4")}
    for dtype in ("mla8", "mla4"):
        assert tokens[dtype] / tokens["auto"] == pytest.approx(runs[dtype] / runs["auto"], rel=0.005)


@pytest.mark.parametrize(
    ("name", "dtype", "gpu", "reason"),
    [
        ("Llama-3.1-8B", "fp8", "T4", "compute capability 8.0"),
        ("DeepSeek-V3", "fp8", "A100-80GB", "compute capability 8.9"),
        ("Llama-3.1-8B", "k4v4", "T4", "compute capability 8.0"),
        ("Mistral-7B-v0.1", "k4v4", "H100-80GB", "layers all have a sliding window"),
        ("DeepSeek-V3", "int8", "H200", "multi-head latent attention"),
        ("Llama-3.1-8B", "mla8", "H200", "a model without multi-head latent attention"),
        ("DeepSeek-V3", "mla4", "T4", "compute capability 8.0"),
    ],
)
def test_a_dtype_that_is_ruled_out_has_a_reason(name, dtype, gpu, reason):
    assert reason in infeasible(models.find(name), dtype, find_gpu(gpu))


def test_our_formats_refuse_head_dims_that_their_kernels_lack():
    llama = models.find("Llama-3.1-8B")
    assert "head_dim 32" in infeasible(replace(llama, head_dim=32), "k4v4", find_gpu("H200"))
    assert infeasible(replace(llama, head_dim=32), "fp8", find_gpu("H200")) is None
    assert infeasible(replace(llama, head_dim=80), "k4v4", find_gpu("H200")) is None
    assert infeasible(replace(llama, kv_heads=1), "k4v4", find_gpu("H200")) is None  # 32 query heads to a KV head


def test_heads_of_80_elements_hold_as_many_tokens_as_those_of_96():
    llama = models.find("Llama-3.1-8B")
    padded, native = (replace(llama, head_dim=dim) for dim in (80, 96))
    for dtype in formats.own_names():
        assert cache(padded, dtype, 1) == cache(native, dtype, 1)
    assert cache(padded, "auto", 1).full_token_bytes * 6 == cache(native, "auto", 1).full_token_bytes * 5


def test_dtypes_that_engines_calibrate_themselves_are_planned_without_a_note():
    rows = make(Request(models.find("Llama-3.1-8B"), find_gpu("H200"), dtypes=("k2v2",))).rows
    assert rows[0].notes == ()
    assert rows[0].capacities[0].capacity_tokens > 0
