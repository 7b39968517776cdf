"""Compare the pilot with other autoscalers: `python -m benchmarks.backtest.rivals`.

The program takes the options of `kvpilot backtest` and prints Markdown. The other autoscalers are Kubernetes'
HorizontalPodAutoscaler (HPA) and llm-d's Workload Variant Autoscaler (WVA), each with a fixed dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.backtest.hpa import Hpa
from benchmarks.backtest.verdicts import RULE, told
from benchmarks.backtest.wva import Wva
from kvpilot_cli.backtest.command import main
from kvpilot_cli.backtest.compare import POLICIES, Row, Start, Starter
from kvpilot_cli.backtest.costs import Profile
from kvpilot_cli.backtest.policies import SCRAPE
from kvpilot_cli.backtest.report import HEADER, cells, explained
from kvpilot_cli.backtest.service import Objective, Service
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.samples import Sample

HPA_TARGET = 0.5
"""Target of the HPA for mean KV-cache usage.

The usual target of 0.8 would be an unfair rival, because far fewer requests would meet the latency objective.
"""
REQUESTS_TARGET = 16.0
"""Target of the HPA for running plus waiting requests per replica."""

Wanted = Callable[[Service, Sample | None], int]
"""Function that returns the number of replicas for a service and its last sample (None if no replica answered)."""


@dataclass
class Scaled:
    """Policy with a fixed dtype. The function `wanted` sets the number of replicas."""

    dtype: str
    wanted: Wanted

    def judge(self, service: Service, sample: Sample | None) -> None:
        """Scale the service to the number of replicas that `wanted` returns."""
        if (wanted := self.wanted(service, sample)) != len(service.of(self.dtype)):
            service.scale(self.dtype, wanted)
            service.outcome.scalings += 1


def use(sample: Sample) -> float:
    """Return the mean KV-cache usage of all replicas, from 0 to 1."""
    return sample.usage


def in_hand(sample: Sample) -> float:
    """Return the number of running and waiting requests together, per replica."""
    return (sample.running + sample.waiting) / sample.pods


def gauges(service: Service, dtype: str) -> list[tuple[float, float]]:
    """Return KV-cache usage and number of waiting requests of each replica that answers, the oldest replica first."""
    engines = [replica.engine for replica in service.ready(dtype)]
    return [(one.blocks.used / one.blocks.total, float(len(one.waiting))) for one in engines]


def by_hpa(
    spec: Spec, _profile: Profile, _objective: Objective, *, dtype: str, figure: Callable[[Sample], float],
    target: float,
) -> Start:  # fmt: skip
    """Return a policy that scales by a HorizontalPodAutoscaler, and the dtype and number of replicas at its start.

    Args:
        spec: limits of the number of replicas.
        dtype: dtype of all replicas.
        figure: function that returns the figure which the HPA keeps near `target`.
        target: mean of `figure` over ready replicas at which the HPA aims.
    """
    replicas = spec.scaling.clamp(spec.replicas)
    lowest, highest = max(1, spec.scaling.min_replicas), spec.scaling.max_replicas
    hpa = Hpa(np.array([replicas]), target=target, minimum=lowest, maximum=highest, sync_seconds=SCRAPE)

    def wanted(service: Service, sample: Sample | None) -> int:
        have, ready = len(service.of(dtype)), len(service.ready(dtype))
        use = np.array([figure(sample) if sample is not None else 0.0])
        return int(hpa.judge(use, np.array([ready]), np.array([have]))[0])

    return Scaled(dtype, wanted), dtype, replicas


def by_wva(spec: Spec, _profile: Profile, _objective: Objective, *, dtype: str) -> Start:
    """Return a policy that scales as llm-d's WVA does, and the dtype and number of replicas at its start."""
    lowest, highest = max(1, spec.scaling.min_replicas), spec.scaling.max_replicas
    wva = Wva(minimum=lowest, maximum=highest, sync_seconds=SCRAPE)

    def wanted(service: Service, _sample: Sample | None) -> int:
        return wva.judge(gauges(service, dtype), len(service.of(dtype)))

    return Scaled(dtype, wanted), dtype, spec.scaling.clamp(spec.replicas)


def _rivals(name: str, dtype: str) -> dict[str, Starter]:
    found: dict[str, Starter] = {
        f"{name}-hpa": partial(by_hpa, dtype=dtype, figure=use, target=HPA_TARGET),
        f"{name}-requests": partial(by_hpa, dtype=dtype, figure=in_hand, target=REQUESTS_TARGET),
        f"{name}-wva": partial(by_wva, dtype=dtype),
    }
    for target in (8, 32):
        found[f"{name}-requests-{target}"] = partial(by_hpa, dtype=dtype, figure=in_hand, target=target)
    return found


RIVALS: Mapping[str, Starter] = {**_rivals("bf16", "auto"), **_rivals("fp8", "fp8")}
"""Policies by name. A name consists of dtype, autoscaler, and the target if it is not REQUESTS_TARGET."""


def markdown(rows: Sequence[Row], objective: Objective) -> str:
    """Return the results as Markdown: the table, the rule by which policies are compared, and the verdicts."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(r)) + " |" for r in rows]
    return "\n".join([*lines, "", f"{explained(objective)} {RULE}", "", *(f"- {one}" for one in told(rows))])


if __name__ == "__main__":
    raise SystemExit(main(policies={**POLICIES, **RIVALS}, tell=markdown))
