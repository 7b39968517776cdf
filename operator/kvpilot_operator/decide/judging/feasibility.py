"""What rules a dtype out, whatever the load: the hardware, the model's architecture, a calibration that is not there.

Facts that are not known rule nothing out: the engine's own preflight still refuses what it cannot serve.
"""

from __future__ import annotations

from kvpilot_kernels import formats
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.judging.capacity import gain, kept_layers
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts

# vLLM's CPU backend accepts these names and computes something else: perplexity 40,000 and more where bf16 has 27
# (SmolLM2-135M, vLLM 0.32.0).
_NOT_ON_CPU = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant")
# Less capacity than this is not worth a restart of every replica.
MIN_GAIN = 1.2
# At this head dimension FP8 attention is slower than 16 bits: 0.82x in decode (docs/benchmarks/h200-decode.md).
_FP8_SLOW_HEAD_DIM = 256


def calibrated(spec: Spec) -> bool:
    """Whether the engine is given a calibration file: KVPILOT_CALIBRATION in its environment, or --calibration."""
    given = [v.value for v in spec.engine.env if v.name == "KVPILOT_CALIBRATION"]
    options = [arg.partition("=") for arg in spec.engine.extra_args]
    given += [value or None for name, _, value in options if name == "--calibration"]
    return any(value not in ("", "off") for value in given)


def infeasible(dtype: str, spec: Spec, node: NodeFacts, model: ModelFacts | None) -> Cause | None:
    """Why this dtype cannot, or should not, serve this model on this hardware; None where nothing speaks against it."""
    hardware = hardware_fault(dtype, node)
    if hardware is not None:
        return Cause("HardwareUnsupported", hardware)
    stored = formats.parse(dtype)
    if stored.calibrated_only and not calibrated(spec):
        return Cause(
            "NotCalibrated", f"{dtype} is accurate only with a calibration: name its file in KVPILOT_CALIBRATION"
        )
    if model is None or stored.bits_per_element() >= 16:
        return None
    if model.mla and stored.ours:
        return Cause(
            "ModelUnsupported", f"{dtype} does not support multi-head latent attention, which has its own formats"
        )
    if stored.ours and model.head_dim not in formats.HEAD_DIMS:
        dims = ", ".join(map(str, formats.HEAD_DIMS))
        return Cause("ModelUnsupported", f"{dtype} supports head_dim {dims}; the model has {model.head_dim}")
    return _little_gain(dtype, spec, model)


def _little_gain(dtype: str, spec: Spec, model: ModelFacts) -> Cause | None:
    skip = spec.kv_cache.skip_layers
    effective = gain(spec.kv_cache.baseline, dtype, model, skip)
    if effective >= MIN_GAIN:
        return None
    return Cause(
        "LittleGain",
        f"{dtype} would hold {effective:.2f}x the tokens of {spec.kv_cache.baseline}: {kept_layers(model, skip)} of "
        f"{model.layers} layers stay in 16 bits (spec.kvCache.skipLayers); {MIN_GAIN}x is the least worth a restart",
    )


def slow_fp8(dtype: str, model: ModelFacts | None) -> str | None:
    """Why an FP8 dtype should not come before one of ours, or None."""
    if not dtype.startswith("fp8") or model is None or model.head_dim < _FP8_SLOW_HEAD_DIM:
        return None
    return f"{dtype} attention is slower than 16 bits at head_dim {model.head_dim}: our formats come first"


def hardware_fault(dtype: str, node: NodeFacts) -> str | None:
    """Why this hardware rules the dtype out, or None."""
    if node.gpu == "cpu":
        if dtype.startswith(_NOT_ON_CPU):
            return f"{dtype}: vLLM's CPU backend accepts it but does not compute it, answers are garbage"
        return None
    if node.compute_capability is None:
        return None
    has = f"{node.gpu} has {'.'.join(map(str, node.compute_capability))}"
    if formats.parse(dtype).ours and node.compute_capability < (8, 0):
        return f"{dtype} needs compute capability 8.0 or newer; {has}"
    # FP8 arithmetic came with Ada and Hopper.
    if dtype.startswith("fp8") and node.compute_capability < (8, 9):
        return f"{dtype} needs compute capability 8.9 or newer; {has}"
    return None
