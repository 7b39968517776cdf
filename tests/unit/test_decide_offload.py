"""Prompt tokens that each tier held, as a metric of services with offloading."""

from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.control.service_metrics import rows
from kvpilot_operator.decide import decide
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.snapshot import Snapshot
from support.services import manifest, running, samples

OFFLOADED = {"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 64}}}
QUERIED = 8000.0
KNOWN = Flows(5.0, prompt_tokens=QUERIED, generation_tokens=200, finished=4, prefill_seconds=0.5, decode_seconds=60)


def service(gpu: float, host: float = 0.0, before: float = 0.9, **sections: Any) -> Snapshot:
    """Return a service whose only replica is full. Its prefix hit rate fell from `before` to `gpu` (plus `host`)."""
    known = [replace(KNOWN, prefix_queries=QUERIED, prefix_hits=before * QUERIED)] * 90
    late = replace(KNOWN, prefix_queries=QUERIED, prefix_hits=gpu * QUERIED, host_hits=host * QUERIED)
    seen = samples(usage=0.97, waiting=20, seconds=900)
    flows = [*known, *[late] * (len(seen) - len(known))]
    s = running(manifest(**sections), "auto")
    return replace(s, samples={s.traffic: tuple(replace(a, flows=b) for a, b in zip(seen, flows, strict=True))})


def shown(s: Snapshot) -> dict[str, float]:
    """Return the metric's value for each tier."""
    return {
        tier: value
        for family, (tier, *_), value in (row for row in rows(s, decide(s)) if row[0] == "kvpilot_prefix_hit_ratio")
    }


def test_a_service_with_two_tiers_has_metrics_of_hits_by_tier() -> None:
    assert shown(service(0.3, 0.45, **OFFLOADED)) == pytest.approx({"gpu": 0.3, "host": 0.45})


def test_a_service_with_one_tier_has_no_metrics_of_hits_by_tier() -> None:
    assert shown(service(0.3)) == {}


def test_hits_are_absent_while_no_prompt_is_looked_up() -> None:
    s = service(0.3, 0.45, **OFFLOADED)
    assert shown(replace(s, samples={s.traffic: samples(usage=0.1, waiting=0)})) == {}


def test_the_hit_ratio_is_between_0_and_1_for_any_metrics() -> None:
    assert shown(service(1e12, 1e300, **OFFLOADED)) == {"gpu": 1, "host": 1}
