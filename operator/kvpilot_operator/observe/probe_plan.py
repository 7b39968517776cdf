"""Which prompts is accuracy measured on? The packs of a service, read once and named by their content."""

from __future__ import annotations

from collections.abc import Mapping

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.probes import codec, packs, run
from kvpilot_operator.probes.errors import PackError
from kvpilot_operator.probes.packs import ProbePrompt
from kvpilot_operator.state.snapshot import ProbePlan


def probe_prompts(spec: Spec, config_maps: Mapping[str, Mapping[str, str]]) -> tuple[ProbePrompt, ...]:
    """The prompts of `spec.accuracy.probeSets`; raises PackError."""
    context = spec.model.max_model_len or packs.DEFAULT_CONTEXT_TOKENS
    return packs.load(spec.accuracy.probe_sets, config_maps, context)


def probe_plan(spec: Spec, config_maps: Mapping[str, Mapping[str, str]]) -> ProbePlan:
    """The packs' identity, or the fault that keeps them from being used."""
    try:
        prompts = probe_prompts(spec, config_maps)
    except PackError as error:
        return ProbePlan(fault=str(error))
    revision = spec.model.revision or ""
    dtype = spec.kv_cache.baseline
    return ProbePlan(
        identity=codec.identity(spec.model.source, revision, dtype, prompts, run.DEFAULT_TOKENS, run.TOP_K)
    )
