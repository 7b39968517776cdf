"""Dtypes that the hardware, the model or missing calibration exclude."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_operator.decide.steps.capacity import OWN_BLOCK, gain, window_share
from kvpilot_operator.decide.steps.ladder import hardware_fault, infeasible, rungs
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from support.policy_inputs import denied
from support.services import NOW, manifest, spec_of

AMPERE = NodeFacts("NVIDIA-A100-SXM4-80GB", (8, 0))
HOPPER = NodeFacts("NVIDIA-H200", (9, 0))
VOLTA = NodeFacts("Tesla-V100", (7, 0))
LLAMA = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)
SPEC = spec_of(manifest(kvCache={"ladder": ["fp8", "k8v4", "k4v4", "k2v2"]}))


def reason(dtype, spec=SPEC, hardware=HOPPER, model=LLAMA):
    return infeasible(dtype, spec, hardware, model)


def test_fp8_is_ruled_out_if_no_backend_of_vllm_reads_it():
    assert hardware_fault("fp8", HOPPER, LLAMA) is None
    assert hardware_fault("fp8", AMPERE, LLAMA) is None
    assert hardware_fault("fp8", AMPERE) is None
    assert "needs compute capability 8.0 or newer; Tesla-V100 has 7.0" in (hardware_fault("fp8", VOLTA) or "")
    assert "8.9 or newer with head_dim 96" in (hardware_fault("fp8", AMPERE, replace(LLAMA, head_dim=96)) or "")
    mla = replace(LLAMA, mla=True)
    assert "8.9 or newer with multi-head latent attention" in (hardware_fault("fp8", AMPERE, mla) or "")
    assert "8.9" in (hardware_fault("fp8_per_token_head", AMPERE, LLAMA) or "")


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8_per_token_head", "turboquant_k8v4"])
def test_a_dtype_that_no_latent_backend_of_vllm_takes_is_ruled_out_for_such_models(dtype):
    found = infeasible(dtype, SPEC, HOPPER, replace(LLAMA, mla=True))
    assert "use one of fp8, fp8_e4m3" in (found or "")


@pytest.mark.parametrize("dtype", ["int4_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc"])
def test_dtypes_with_wrong_results_on_vllms_cpu_backend_are_ruled_out(dtype):
    assert "wrong answers" in (hardware_fault(dtype, NodeFacts()) or "")
    assert hardware_fault(dtype, HOPPER) is None


@pytest.mark.parametrize("node", [NodeFacts(), HOPPER, AMPERE])
def test_our_formats_need_a_cpu_or_a_gpu_from_ampere_on(node):
    assert hardware_fault("k4v4", node) is None


def test_our_formats_are_not_tried_on_a_gpu_without_their_instructions():
    assert "needs compute capability 8.0 or newer; Tesla-V100 has 7.0" in (hardware_fault("k4v4", VOLTA) or "")


def test_an_unknown_gpu_or_model_rules_no_dtype_out():
    assert reason("fp8", hardware=NodeFacts("unlabelled-gpu"), model=None) is None
    assert reason("k4v4", hardware=NodeFacts("unlabelled-gpu"), model=None) is None


def test_a_model_with_latent_attention_takes_only_latent_dtypes_of_ours():
    mla = replace(LLAMA, mla=True)
    against = infeasible("k4v4", SPEC, HOPPER, mla)
    assert "its own dtypes (mla8 or mla4)" in (against or "")
    for dtype in ("fp8", "mla8", "mla4"):
        assert reason(dtype, model=mla) is None
        assert reason(dtype, model=None) is None
    assert "needs a model with multi-head latent attention" in reason("mla4")
    assert "needs compute capability" in reason("mla4", hardware=VOLTA, model=mla)


def test_latent_dtypes_are_ruled_out_with_offloading():
    spec = spec_of(manifest(kvCache={"offload": {"cpuMemoryGiB": 8}}))
    against = infeasible("mla4", spec, HOPPER, replace(LLAMA, mla=True))
    assert against == "mla4 does not go together with kvCache.offload"


def test_a_ladder_with_latent_and_other_dtypes_serves_models_with_and_without_latents():
    spec = spec_of(manifest(kvCache={"mode": "Auto", "ladder": ["fp8", "mla4", "k4v4"]}))
    for model, left in ((LLAMA, ["auto", "fp8", "k4v4"]), (replace(LLAMA, mla=True), ["auto", "fp8", "mla4"])):
        found = rungs(spec, HOPPER, model, (), NOW)
        assert [rung.dtype for rung in found if rung.outcome is None] == left


def test_an_unsupported_head_dimension_rules_our_formats_out():
    assert reason("k4v4", model=replace(LLAMA, head_dim=32)).endswith("the model has 32")
    assert reason("fp8", model=replace(LLAMA, head_dim=32)) is None


def test_the_gain_of_a_padded_head_dimension_counts_its_padding():
    for dim, bits in ((80, 5.2), (96, 13 / 3), (160, 5.2), (192, 13 / 3)):
        model = replace(LLAMA, head_dim=dim)
        assert reason("k4v4", model=model) is None
        assert gain("auto", "k4v4", model) == pytest.approx(16 / bits)


def test_k2v2_is_ruled_out_if_calibration_is_off():
    assert reason("k2v2") is None
    by_file, off = (
        spec_of(manifest(engine={"image": "i", "env": [{"name": "KVPILOT_CALIBRATION", "value": value}]}))
        for value in ("/models/c", "off")
    )
    assert reason("k2v2", by_file) is None
    assert "is not accurate without calibration" in reason("k2v2", off)
    assert reason("k4v4", off) is None


def test_with_many_16_bit_window_layers_a_dtype_gains_too_little():
    mostly = replace(LLAMA, layers=60, window_layers=50)
    found = infeasible("fp8", SPEC, HOPPER, mostly)
    assert "1.09x" in (found or "")
    assert "50 of 60 layers" in (found or "")
    all_layers = spec_of(manifest(kvCache={"ladder": ["fp8"], "skipLayers": []}))
    assert reason("fp8", all_layers, model=mostly) is None


def test_residual_pages_reduce_the_gain_of_short_sequences():
    # A window of 64 tokens is the newest 2 blocks, with a residual page each in k4v4. One of 512 tokens is the newest 9
    # blocks, with 3 residual pages each in k2v2.
    assert window_share("k4v4", LLAMA, 64, 2048) == 2 * 64 / 2048
    assert window_share("k2v2", None, 512, 2048) == 9 * 3 * 64 / 2048
    assert window_share("k4v4", LLAMA, 64, 1) == 1
    assert window_share("k4v4", LLAMA, 512, 100) == 2 * 64 / 100  # a short sequence has few blocks
    for dtype, recent, held in (("fp8", 64, 2048), ("int8", 64, 2048), ("k4v4", 0, 2048), ("k4v4", 64, None)):
        assert window_share(dtype, LLAMA, recent, held) == 0
    assert gain("auto", "k4v4", LLAMA, (), (0.0, 1 / 32)) == pytest.approx(16 / (4.25 * (1 + 1 / 32)))
    assert gain("k4v4", "auto", LLAMA, (), (1.0, 0.0)) == pytest.approx(8.5 / 16)
    half = replace(LLAMA, window_layers=16)
    assert gain("auto", "k4v4", half, ("sliding_window",), (0.0, 1.0)) == pytest.approx(16 / (8 + 4.25))


@given(
    st.sampled_from(tuple(formats.FORMATS)),
    st.sampled_from(formats.RECENT_CHOICES),
    st.integers(1, 2**17),
    st.integers(0, 2**17),
)
@example("k2v2", 64, 12, 35)
def test_a_windows_pages_grow_with_the_sequence_up_to_those_of_its_newest_blocks(dtype, recent, held, longer):
    stored = formats.parse(dtype)
    for dim in formats.HEAD_DIMS:
        model = replace(LLAMA, head_dim=dim)
        taken, later = (
            window_share(dtype, model, recent, n) * max(n, OWN_BLOCK) / OWN_BLOCK for n in (held, held + longer)
        )
        assert 0 <= taken <= later + 1e-6
        assert later <= stored.recent_pages(recent, dim, OWN_BLOCK) + 1e-6
        assert taken <= stored.residual_pages(dim, OWN_BLOCK) * -(-held // OWN_BLOCK) + 1e-6


def test_a_dtype_denied_with_another_recent_window_may_be_tried():
    def outcome(kv_cache, dtype, **changes):
        spec = spec_of(manifest(kvCache={"ladder": ["fp8", "k4v4"], **kv_cache}))
        found = rungs(spec, HOPPER, LLAMA, (denied(dtype, **changes),), NOW)
        return {rung.dtype: rung.outcome for rung in found}[dtype]

    assert outcome({}, "k4v4") == "Denied"
    assert outcome({"recentTokens": 256}, "k4v4") is None
    assert outcome({"recentTokens": 256}, "k4v4", recent_tokens=256) == "Denied"
    # fp8 has no recent window, so another window changes nothing.
    assert outcome({"recentTokens": 256}, "fp8") == "Denied"


def test_the_gain_of_a_dtype_counts_only_layers_that_it_shrinks():
    half = replace(LLAMA, window_layers=16)
    assert gain("auto", "fp8") == 2.0
    assert gain("auto", "fp8", half, ("sliding_window",)) == pytest.approx(1 / (0.5 + 0.25))
    assert gain("auto", "fp8", LLAMA, ("0", "31", "32")) == pytest.approx(32 / (2 + 15))
    assert gain("fp8", "auto", half, ("sliding_window",)) == pytest.approx(0.75)


def test_at_head_dim_256_fp8_comes_after_our_formats():
    wide = replace(LLAMA, head_dim=256)
    found = {rung.dtype: rung.outcome for rung in rungs(SPEC, HOPPER, wide, (), NOW)}
    assert found == {"auto": None, "fp8": "Vetoed", "k8v4": None, "k4v4": None, "k2v2": None}
    alone = spec_of(manifest(kvCache={"ladder": ["fp8"]}))
    assert [rung.outcome for rung in rungs(alone, HOPPER, wide, (), NOW)] == [None, None]


@pytest.mark.parametrize(
    ("dtype", "engine", "named"),
    [
        ("k4v4", {"extraArgs": ["--enable-db"]}, "--enable-dbo (dual batch overlap)"),
        ("k4v4", {"extraArgs": ["-sc.method=medusa"]}, "--speculative-config (speculative decoding by 'medusa'"),
        ("k8v4", {"extraArgs": ["--spec-method=eagle", "--enable-lora"]}, "--enable-lora (a model that drafts"),
        ("k4v4", {"env": [{"name": "VLLM_BATCH_INVARIANT", "value": "1"}]}, "VLLM_BATCH_INVARIANT (batch invariance)"),
        ("mla4", {"extraArgs": ["--spec-method", "ngram"]}, "--spec-method (speculative decoding)"),
    ],
)
def test_an_unsupported_option_rules_our_dtypes_out(dtype, engine, named):
    spec = spec_of(manifest(engine={"image": "i", **engine}))
    found = infeasible(dtype, spec, HOPPER, None)
    assert named in (found or "")
    assert reason("fp8", spec, model=None) is None
    assert reason(dtype, spec_of(manifest(engine={"image": "i"})), model=None) is None


def test_a_field_rules_out_dtypes_like_the_engine_argument_that_it_renders():
    drafts = {"image": "i", "extraArgs": ["--spec-model=org/draft"]}
    assert reason("k4v4", spec_of(manifest(engine=drafts)), model=None) is None
    offloading = spec_of(manifest(engine=drafts, kvCache={"offload": {"cpuMemoryGiB": 8}}))
    assert "a model that drafts" in reason("k4v4", offloading, model=None)
    parallel = spec_of(manifest(engine={**drafts, "tensorParallelSize": 2}))
    assert "a model that drafts" in reason("k4v4", parallel, model=None)
