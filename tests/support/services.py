"""Builders of Snapshots for tests of decide: a service with defaults, its pods, samples and status."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.objects import DeploymentView, PodView
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import ProbePlan, ServiceKey, Snapshot
from kvpilot_operator.state.status import Stable, Status
from kvpilot_probes.sequential import Seen
from kvpilot_probes.stats import Measurement
from support.crd import apply_defaults

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
KEY = ServiceKey("models", "chat")
PROBES = "abcdef0123"


def manifest(**spec: Any) -> dict[str, Any]:
    """Return a QuantizedLLMService with defaults. Keyword arguments are merged into sections of its spec."""
    base: dict[str, Any] = {
        "apiVersion": "kvpilot.io/v1alpha1",
        "kind": "QuantizedLLMService",
        "metadata": {
            "name": KEY.name,
            "namespace": KEY.namespace,
            "uid": "u-1",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {
            "model": {"source": "hf://Qwen/Qwen3-8B"},
            "engine": {"image": "kvpilot/runtime:1"},
            "kvCache": {"mode": "Auto", "ladder": ["k8v4", "k4v4"]},
        },
    }
    for section, value in spec.items():
        if isinstance(value, Mapping) and isinstance(base["spec"].get(section), dict):
            base["spec"][section] = {**base["spec"][section], **value}
        else:
            base["spec"][section] = value
    return dict(apply_defaults(base))


def spec_of(obj: Mapping[str, Any]) -> Spec:
    """Return the spec of a manifest as the operator parses it."""
    return parse(obj)


def revision_of(obj: Mapping[str, Any], dtype: str) -> str:
    """Return the manifest's revision for this dtype."""
    return revision(pod_template(KEY.name, parse(obj), dtype))


def snapshot(obj: Mapping[str, Any], *, status: Status | None = None, **changes: Any) -> Snapshot:
    """Return a snapshot of the manifest without any workload."""
    broken = faults(obj)
    base = Snapshot(
        now=NOW,
        key=KEY,
        uid="u-1",
        generation=1,
        resource_version=obj["metadata"].get("resourceVersion", "1"),
        faults=broken,
        spec=None if broken else parse(obj),
        status=status or Status(),
        probes=ProbePlan(identity=PROBES),
    )
    return replace(base, **changes)


def pod(revision: str, **changes: Any) -> PodView:
    """Return the view of a ready engine pod of this revision."""
    base = PodView(f"pod-{revision}", revision, "10.0.0.1", "node-1", True, False, 0, None, None, None)
    return replace(base, **changes)


def running(obj: Mapping[str, Any], dtype: str, *, status: Status | None = None, **changes: Any) -> Snapshot:
    """Return a snapshot in which `dtype` serves and no change is in progress."""
    name = revision_of(obj, dtype)
    stable = Stable(revision=name, dtype=dtype, since=NOW - timedelta(hours=1), ever_ready=True)
    base = status or Status()
    return snapshot(
        obj,
        status=Status(
            stable=stable,
            kv_cache=base.kv_cache,
            canary=base.canary,
            history=base.history,
            accuracy=base.accuracy,
            decisions=base.decisions,
            conditions=base.conditions,
        ),
        **{
            "deployments": {name: DeploymentView(name, dtype, 1)},
            "pods": (pod(name),),
            "traffic": name,
            **changes,
        },
    )


def samples(
    *, usage: float, waiting: float, capacity: int = 3000, seconds: int = 400, running: float = 4.0, dtype: str = "auto"
) -> tuple[Sample, ...]:
    """Return equal samples of one pod, one for every 5 of the last `seconds` seconds.

    Args:
        usage: KV cache use, 0 to 1.
        waiting, running: numbers of requests.
        capacity: tokens that the KV cache holds.
        dtype: the dtype that the engine reports.
    """
    return tuple(
        Sample(NOW - timedelta(seconds=back), 1, usage, running, waiting, capacity, dtype)
        for back in range(seconds, -1, -5)
    )


def reporting(*engines: tuple[str, str]) -> dict[str, tuple[Sample, ...]]:
    """Return one scrape of each of these idle revisions, with the dtype that its engines report."""
    return {revision: (Sample(NOW, 1, 0.0, 0, 0, 3000, dtype),) for revision, dtype in engines}


def baseline(**changes: Any) -> Baseline:
    """Return a stored baseline whose control run has little noise."""
    fields: dict[str, Any] = {
        "identity": PROBES,
        "positions": 256,
        "control_mean_kl_micronats": 100,
        "control_top1_agreement_permille": 1000,
    }
    return Baseline(**{**fields, **changes})


def measurement(kl_micronats: int = 5_000, agreement: int = 990, prompts: int = 16) -> Measurement:
    """Return a probe's outcome, with the same damage to each prompt. `agreement` is the top-1 agreement in permille."""
    seen = (Seen("general", kl_micronats / 1e6, 1 - agreement / 1000),) * prompts
    figures = Measurement(prompts, 32 * prompts, 20, 1000, kl_micronats, kl_micronats * 10, 100, agreement, None)
    return replace(figures, seen=seen, planned=("general",))
