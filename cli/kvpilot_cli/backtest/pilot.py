"""Run the operator's own rules as the pilot of one simulated service.

The fields hold what the operator would keep in the status. Probes cannot be simulated. So every canary passes, and the
simulation counts its time and its GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from kvpilot_cli.backtest.costs import BacktestError, Profile
from kvpilot_operator.api.faults import judge
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.load.saturation import backoff
from kvpilot_operator.decide.load.workload import Workload, classify, step_tokens
from kvpilot_operator.decide.steps.policy import PolicyDecision, choose_step
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.gpus import by_product
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Saturation, ScaleInBackoff

DEFAULT: dict[str, Any] = {
    "apiVersion": "kvpilot.io/v1alpha1",
    "kind": "QuantizedLLMService",
    "metadata": {"name": "backtest", "namespace": "default"},
    "spec": {
        "replicas": 4,
        "model": {"source": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "engine": {"image": "ghcr.io/kvpilot/runtime:0.1.0"},
        "kvCache": {"mode": "Auto", "ladder": ["fp8", "k8v4", "k4v4"]},
        "scaling": {"mode": "Operator", "minReplicas": 1, "maxReplicas": 8},
    },
}
"""Manifest of the service that is simulated without --service. Missing fields get the API's defaults."""


def load_spec(path: Path | None) -> Spec:
    """Return the spec of a manifest file, or of DEFAULT if there is no file."""
    try:
        raw = DEFAULT if path is None else yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BacktestError(f"service: {path} cannot be read ({error}); give a QuantizedLLMService manifest") from error
    if not isinstance(raw, dict):
        raise BacktestError(f"service: {path} does not contain a YAML mapping; give one QuantizedLLMService manifest")
    judged = judge({**raw, "metadata": {"name": "backtest", **(raw.get("metadata") or {})}})
    if not isinstance(judged, Spec):
        raise BacktestError("service: " + "; ".join(f"{f.field}: {f.message}" for f in judged))
    return judged


def node_of(profile: Profile) -> NodeFacts:
    """Return the facts of a node with the profile's GPU."""
    gpu = by_product(profile.gpu)
    if gpu is None:
        return NodeFacts(profile.gpu)
    return NodeFacts(profile.gpu, gpu.compute_capability, gpu.memory_mib)


@dataclass(slots=True)
class Pilot:
    """Pilot of one service, with the state that the operator would keep."""

    spec: Spec
    node: NodeFacts
    model: ModelFacts
    dtype: str
    was_bound: bool = False
    dtype_changed: datetime | None = None
    replicas_changed: datetime | None = None
    saturations: tuple[Saturation, ...] = ()
    scaled_in: datetime | None = None
    backoff: ScaleInBackoff | None = None

    def rule(
        self,
        samples: Sequence[Sample],
        now: datetime,
        replicas: int,
        ready: int,
        busy: str | None,
        yields: bool = False,
    ) -> tuple[PolicyDecision, Workload]:
        """Classify the load of these samples and choose a step, by the operator's own code."""
        workload = classify(
            samples, self.spec.kv_cache.pressure, now, was_bound=self.was_bound,
            calm_seconds=self.spec.scaling.scale_down_stabilization_seconds,
            step_tokens=step_tokens(self.spec, self.node), objectives=self.spec.scaling.objectives,
        )  # fmt: skip
        decision = choose_step(
            PolicyInput(
                now=now, spec=self.spec, workload=workload, dtype=self.dtype, replicas=replicas, ready=ready,
                node=self.node, model=self.model, saturations=self.saturations, dtype_changed=self.dtype_changed,
                replicas_changed=self.replicas_changed, scale_in_backoff=self.backoff, busy=busy,
                yields=yields,
            )
        )  # fmt: skip
        self.was_bound = workload.kind == "MemoryBound"
        self.saturations = decision.saturations
        self.scaled_in, self.backoff = backoff(
            decision.chosen.action, self.dtype, replicas, now, self.scaled_in, self.backoff
        )
        return decision, workload
