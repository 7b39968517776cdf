"""Inputs of the policy for tests: one replica whose memory is full, and the changes that tests make to it."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action, WorkloadKind
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Denied
from support.services import NOW, manifest, spec_of

H200 = NodeFacts("NVIDIA-H200", (9, 0), 143_771)
A100 = NodeFacts("NVIDIA-A100-SXM4-80GB", (8, 0), 81_920)
LLAMA = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)
DWELL = 21_600


def spec(**changes: Any) -> Spec:
    """Return a spec that lets the operator change both dtype and replicas."""
    return spec_of(
        manifest(
            **{"kvCache": {"mode": "Auto", "ladder": ["fp8", "k8v4", "k4v4"]}, "scaling": {"maxReplicas": 4}} | changes
        )
    )


def workload(
    kind: WorkloadKind = WorkloadKind.MEMORY_BOUND,
    *,
    demand: int = 1000,
    capacity: int = 1000,
    pods: int = 1,
    **changes: Any,
) -> Workload:
    """Return a workload of `pods` replicas.

    Args:
        kind: the resource that limits the service.
        demand: tokens that all requests of the service need.
        capacity: tokens that the KV cache of one replica holds.
        changes: other fields of the Workload.
    """
    base = Workload(
        kind, "evidence", usage_percent=97, waiting=4.0, running=8.0, pods=pods, capacity_tokens=capacity * pods,
        demand_tokens=demand,
    )  # fmt: skip
    return replace(base, **changes)


def policy_input(w: Workload | None = None, **changes: Any) -> PolicyInput:
    """Return an input in which all replicas serve with dtype auto, on H200."""
    w = w or workload()
    base = PolicyInput(NOW, spec(), w, "auto", w.pods, w.pods, H200)
    return replace(base, **changes)


def denied(dtype: str, reason: str = "AccuracyRegressed", **changes: Any) -> Denied:
    """Return a denial of this dtype for the service on H200, which lasts another hour."""
    fields: dict[str, Any] = {
        "dtype": dtype,
        "model": "hf://Qwen/Qwen3-8B",
        "image": "kvpilot/runtime:1",
        "gpu": "NVIDIA-H200",
    }
    return Denied(**fields | changes, reason=reason, message="why", until=NOW + timedelta(hours=1))


def step(decision: PolicyDecision) -> tuple[Action, str, int]:
    """Return the action, the dtype and the number of replicas that the policy chose."""
    return decision.chosen.action, decision.chosen.dtype, decision.chosen.replicas
