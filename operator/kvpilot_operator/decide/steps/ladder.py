"""The ladder of dtypes, and the reasons that rule some of them out now.

A dtype is not ruled out by an unknown fact about model or hardware, so an engine may still refuse an allowed dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Self

from kvpilot_formats import dtypes, formats, hardware
from kvpilot_formats.arguments import read, rules
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Outcome, Reason
from kvpilot_operator.decide.steps.capacity import gain, kept_layers
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Denied
from kvpilot_operator.times import utc

# vLLM's CPU backend accepts these names but computes wrong results: perplexity 40,000 instead of 27 (SmolLM2-135M,
# vLLM 0.32.0).
_NOT_ON_CPU = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant")
# kvpilot does not change the dtype for a smaller gain of capacity, because every replica would have to restart.
MIN_GAIN = 1.2
# At this head dimension, decode with an FP8 cache has 0.82x the speed of 16 bits (docs/benchmarks/h200-decode.md).
_FP8_SLOW_HEAD_DIM = 256


def _unfit_option(dtype: str, spec: Spec) -> str | None:
    """Name the engine option or variable that one of kvpilot's own dtypes does not work with, or return None."""
    stored, engine = dtypes.parse(dtype), spec.engine
    if not stored.ours:
        return None
    fields = [f"--tensor-parallel-size={engine.tensor_parallel}", f"{rules.PIPELINE_PARALLEL}={engine.nodes}"]
    if (offload := spec.kv_cache.offload) is not None:
        fields.append(f"{rules.OFFLOAD}={offload.cpu_memory_gib}")
    arguments = read((*engine.extra_args, *fields))
    variables = {v.name: v.value for v in engine.env if v.value is not None}
    found = rules.beside_ours(arguments, variables)
    if found is None and stored.latent:
        found = rules.first_on(arguments, rules.BESIDE_LATENT)
    return None if found is None else f"{dtype} does not go together with {found[0]} ({found[1]})"


def infeasible(dtype: str, spec: Spec, node: NodeFacts, model: ModelFacts | None) -> str | None:
    """Return the reason why this dtype cannot, or should not, serve this model on this hardware; or None."""
    stored = dtypes.parse(dtype)
    if (fault := hardware_fault(dtype, node, model)) is not None:
        return fault
    if stored.calibrated_only and any(v.name == "KVPILOT_CALIBRATION" and v.value == "off" for v in spec.engine.env):
        return f"{dtype} is not accurate without calibration: leave KVPILOT_CALIBRATION out"
    if stored.latent and spec.offloads:
        return f"{dtype} does not go together with kvCache.offload"
    if (unfit := _unfit_option(dtype, spec)) is not None:
        return unfit
    if model is None or stored.bits_per_element() >= 16:
        return None
    if model.mla and (unserved := hardware.latent_fault(dtype)) is not None:
        return f"{dtype} {unserved}"
    if stored.ours and stored.latent != model.mla:
        others = " or ".join(dtypes.own_names(latent=True))
        instead = f"which has its own dtypes ({others})" if model.mla else "the only attention that it supports"
        lacks = "does not support" if model.mla else "needs a model with"
        return f"{dtype} {lacks} multi-head latent attention, {instead}"
    if stored.ours and not stored.latent and formats.stored_dim(model.head_dim) is None:
        return f"{dtype} supports head_dim {formats.SERVED}; the model has {model.head_dim}"
    skip = spec.kv_cache.skip_layers
    effective = gain(spec.kv_cache.baseline, dtype, model, skip)
    if effective >= MIN_GAIN:
        return None
    return (
        f"{dtype} would hold {effective:.2f}x the tokens of {spec.kv_cache.baseline}: {kept_layers(model, skip)} of "
        f"{model.layers} layers stay in 16 bits (spec.kvCache.skipLayers); a restart needs a gain of {MIN_GAIN}x"
    )


def hardware_fault(dtype: str, node: NodeFacts, model: ModelFacts | None = None) -> str | None:
    """Return the reason why this hardware cannot serve the dtype, or None."""
    if node.gpu == "cpu":
        if dtype.startswith(_NOT_ON_CPU):
            return f"{dtype}: vLLM's CPU backend accepts this dtype but computes wrong answers with it"
        return None
    if not node.cuda:
        # vLLM itself rejects those of its own dtypes that this hardware cannot serve.
        return f"{dtype} needs an NVIDIA GPU; the node has {node.gpu}" if dtypes.parse(dtype).ours else None
    if node.compute_capability is None:
        return None
    head_dim, latent = (None, None) if model is None else (model.head_dim, model.mla)
    fault = hardware.gpu_fault(dtype, node.compute_capability, head_dim, latent)
    return None if fault is None else f"{dtype} {fault}; {node.gpu} has {hardware.shown(node.compute_capability)}"


# Denials for these reasons mean wrong answers, so kvpilot replaces even a serving dtype.
ACCURACY_REASONS = (Reason.ACCURACY_REGRESSED, Reason.ACCURACY_DRIFTED)
# A revision that failed for lack of capacity, or because of errors, may be tried again after this many seconds.
RETRY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Rung:
    """A dtype of the ladder. `outcome` is Vetoed or Denied if it is ruled out, and `message` has the reason."""

    dtype: str
    outcome: Outcome | None = None
    message: str = ""


def rungs(
    spec: Spec, node: NodeFacts, model: ModelFacts | None, denied: Sequence[Denied], now: datetime
) -> tuple[Rung, ...]:
    """Return the baseline and the dtypes of the ladder, from the safest to the smallest, with their outcomes."""

    def rung(dtype: str) -> Rung:
        if (fault := infeasible(dtype, spec, node, model)) is not None:
            return Rung(dtype, Outcome.VETOED, fault)
        standing = denial(dtype, spec, node.gpu, denied, now)
        if standing is None:
            return Rung(dtype)
        return Rung(dtype, Outcome.DENIED, f"{dtype} is denied until {utc(standing.until)} ({standing.reason})")

    found = [rung(dtype) for dtype in (spec.kv_cache.baseline, *spec.kv_cache.ladder)]
    ours_open = any(one.outcome is None and not one.dtype.startswith("fp8") for one in found[1:])
    slow = ours_open and model is not None and model.head_dim >= _FP8_SLOW_HEAD_DIM
    for i, one in enumerate(found):
        if model is not None and slow and one.outcome is None and one.dtype.startswith("fp8"):
            text = f"{one.dtype} is slower than 16 bits at head_dim {model.head_dim}: kvpilot prefers its own dtypes"
            found[i] = Rung(one.dtype, Outcome.VETOED, text)
    return tuple(found)


class Subject(NamedTuple):
    """The subject of a denial: a dtype with one model, image, GPU and recent window."""

    dtype: str
    model: str
    image: str
    gpu: str
    recent_tokens: int | None

    @classmethod
    def of(cls, dtype: str, spec: Spec, gpu: str) -> Self:
        """Return the subject of a new denial of this dtype."""
        return cls(dtype, spec.model.source, spec.engine.image, gpu, spec.kv_cache.recent_tokens_of(dtype))

    def matches(self, d: Denied) -> bool:
        """Return True if a denial is about this subject."""
        return self == (d.dtype, d.model, d.image, d.gpu, d.recent_tokens)


def denial(dtype: str, spec: Spec, gpu: str | None, denied: Sequence[Denied], now: datetime) -> Denied | None:
    """Return the denial of this dtype for this model, image, GPU (None: any) and recent window, if there is one."""
    if spec.rollout.deny_seconds == 0:
        return None
    return next((d for d in denied if d.until > now and Subject.of(dtype, spec, gpu or d.gpu).matches(d)), None)
