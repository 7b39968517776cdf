"""The operator keeps a new baseline and only a few old ones, even if it fails to list or delete the old ones."""

from collections.abc import AsyncIterator
from typing import Any

from kvpilot_operator.act.perform import MAX_KEPT, MAX_SEEN, Actor
from kvpilot_operator.api.names import SERVICE_LABEL, baseline_name
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.decision import Decision
from kvpilot_probes.codec import Baseline
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
        labels, owners = {SERVICE_LABEL: KEY.name}, [{"uid": owner}]
        about = {"name": name, "uid": name, "labels": labels, "ownerReferences": owners, "creationTimestamp": created}
        self.maps[name] = {"metadata": about}

    async def metadata(
        self, _version: str, _kind: str, _namespace: str, selector: str, *, most: int
    ) -> AsyncIterator[dict[str, Any]]:
        label, _, value = selector.partition("=")
        found = [one["metadata"] for one in self.maps.values() if one["metadata"]["labels"][label] == value]
        for one in found[:most]:
            self.seen += 1
            yield one

    async def delete(self, ref: Ref, *, uid: str) -> None:
        if self.refuses:
            raise ClusterError("DELETE", "/configmaps", 403, "forbidden")
        assert self.maps.pop(ref.name)["metadata"]["uid"] == uid

    async def find(self, ref: Ref) -> dict[str, Any] | None:
        return self.maps.get(ref.name)

    async def create(self, written: dict[str, Any]) -> dict[str, Any]:
        self.put(written["metadata"]["name"], "2026-11-09T00:00:00Z")
        return self.maps[written["metadata"]["name"]]

    async def apply(self, written: dict[str, Any]) -> dict[str, Any]:
        self.maps[written["metadata"]["name"]].update(binaryData=written["binaryData"])
        return written


async def keep(cluster: FakeCluster) -> None:
    s = snapshot(manifest())
    await Actor(cluster).perform(s, Decision(s.status, baseline=BASELINE))  # type: ignore[arg-type]


async def test_the_oldest_baselines_are_deleted_when_a_new_one_is_stored() -> None:
    cluster = FakeCluster()
    await keep(cluster)
    left = {name for name in cluster.maps if name.startswith(baseline_name(KEY.name, ""))}
    assert left == {NAME, *(f"{baseline_name(KEY.name, '')}{day}" for day in (5, 6, 7))}
    assert len(left) == MAX_KEPT
    assert "chat-settings" in cluster.maps


async def test_rewriting_a_baseline_deletes_no_other() -> None:
    cluster = FakeCluster()
    for _ in range(2):
        await keep(cluster)
    assert sum(name.startswith(baseline_name(KEY.name, "")) for name in cluster.maps) == MAX_KEPT


async def test_a_baseline_is_stored_even_if_old_ones_cannot_be_deleted() -> None:
    cluster = FakeCluster()
    cluster.refuses = True
    await keep(cluster)
    assert cluster.maps[NAME]["binaryData"]["baseline"]


async def test_another_owners_object_with_a_baselines_name_is_not_changed() -> None:
    cluster = FakeCluster()
    others = dict.fromkeys((f"{baseline_name(KEY.name, '')}0", NAME), "2020-01-01T00:00:00Z")
    for name, created in others.items():
        cluster.put(name, created, owner="somebody else")
    await keep(cluster)
    assert all("binaryData" not in cluster.maps[name] for name in others)


async def test_a_baseline_is_stored_beside_any_number_of_objects_with_our_label() -> None:
    cluster = FakeCluster()
    for number in range(10 * MAX_SEEN):
        cluster.put(f"filler-{number}", "2020-01-01T00:00:00Z")
    await keep(cluster)
    assert cluster.seen <= MAX_SEEN
    assert NAME in cluster.maps
