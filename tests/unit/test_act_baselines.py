"""A captured baseline is kept, and few of them are, whatever the API server says about the old ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvpilot_operator.act.baselines import MAX_KEPT, MAX_SEEN, keep
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.render.names import SERVICE_LABEL, baseline_name
from support.services import KEY, manifest, snapshot

BASELINE = Baseline("0123456789", "org/model", "auto", ())
NAME = baseline_name(KEY.name, BASELINE.identity)


class FakeCluster:
    """ConfigMaps by name."""

    def __init__(self) -> None:
        self.maps: dict[str, dict[str, Any]] = {}
        self.refuses = False
        self.seen = 0
        for day in range(1, 8):
            self.put(f"{baseline_name(KEY.name, '')}{day}", f"2026-11-0{day}T00:00:00Z")
        self.put("chat-settings", "2020-01-01T00:00:00Z")

    def put(self, name: str, created: str, owner: str = "u-1") -> None:
        metadata = {"name": name, "labels": {SERVICE_LABEL: KEY.name}, "creationTimestamp": created}
        self.maps[name] = {"metadata": {**metadata, "ownerReferences": [{"uid": owner}]}}

    async def metadata(
        self, _version: str, _kind: str, _namespace: str, selector: str, *, most: int
    ) -> AsyncIterator[dict[str, Any]]:
        label, _, value = selector.partition("=")
        found = [one["metadata"] for one in self.maps.values() if one["metadata"]["labels"][label] == value]
        for one in found[:most]:
            self.seen += 1
            yield one

    async def delete(self, _version: str, _kind: str, _namespace: str, name: str) -> None:
        if self.refuses:
            raise ClusterError("DELETE", "/configmaps", 403, "forbidden")
        del self.maps[name]

    async def apply(self, written: dict[str, Any]) -> dict[str, Any]:
        self.maps[written["metadata"]["name"]] = written
        return written


async def test_the_oldest_baselines_go_when_a_new_one_is_kept() -> None:
    cluster = FakeCluster()
    await keep(cluster, snapshot(manifest()), BASELINE)  # type: ignore[arg-type]
    left = {name for name in cluster.maps if name.startswith(baseline_name(KEY.name, ""))}
    assert left == {NAME, *(f"{baseline_name(KEY.name, '')}{day}" for day in (5, 6, 7))}
    assert len(left) == MAX_KEPT
    assert "chat-settings" in cluster.maps


async def test_a_baseline_that_is_written_again_costs_no_other_its_place() -> None:
    cluster = FakeCluster()
    for _ in range(2):
        await keep(cluster, snapshot(manifest()), BASELINE)  # type: ignore[arg-type]
        cluster.put(NAME, "2026-11-09T00:00:00Z")
    assert sum(name.startswith(baseline_name(KEY.name, "")) for name in cluster.maps) == MAX_KEPT


async def test_a_baseline_is_kept_although_old_ones_cannot_be_deleted() -> None:
    cluster = FakeCluster()
    cluster.refuses = True
    await keep(cluster, snapshot(manifest()), BASELINE)  # type: ignore[arg-type]
    assert NAME in cluster.maps


async def test_of_what_bears_our_label_and_name_only_what_the_service_owns_is_deleted() -> None:
    cluster = FakeCluster()
    theirs = {f"{baseline_name(KEY.name, '')}0{number}" for number in range(10)}
    for name in theirs:
        cluster.put(name, "2020-01-01T00:00:00Z", owner="somebody-else")
    await keep(cluster, snapshot(manifest()), BASELINE)  # type: ignore[arg-type]
    assert theirs <= cluster.maps.keys()


async def test_however_many_bear_our_label_a_baseline_is_kept_and_few_are_looked_at() -> None:
    cluster = FakeCluster()
    for number in range(10 * MAX_SEEN):
        cluster.put(f"filler-{number}", "2020-01-01T00:00:00Z")
    await keep(cluster, snapshot(manifest()), BASELINE)  # type: ignore[arg-type]
    assert cluster.seen <= MAX_SEEN
    assert NAME in cluster.maps
