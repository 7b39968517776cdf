"""The cache never returns to an older version, whatever its source, and drops objects that a list lacks."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.names import KIND
from kvpilot_operator.cluster.cache import Store
from kvpilot_operator.cluster.watch import Reflector
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.state.snapshot import ServiceKey
from support.services import KEY, manifest

CHAT = ServiceKey("a", "chat")


def thing(version: int, value: int = 0, name: str = "x", service: str = "chat", namespace: str = "a") -> dict[str, Any]:
    return {
        "metadata": {"namespace": namespace, "name": name, "resourceVersion": str(version)},
        "service": service,
        "value": value,
    }


class Seen:
    """A `Store` of the objects' values, and the services whose changes it reported."""

    def __init__(self) -> None:
        self.changed: list[ServiceKey] = []
        self.store: Store[ServiceKey, int] = Store(lambda obj: obj["value"], self._service, self.changed.append)

    def _service(self, obj: dict[str, Any]) -> ServiceKey | None:
        return ServiceKey(obj["metadata"]["namespace"], obj["service"]) if obj["service"] else None


def test_only_objects_whose_view_changed_are_reported() -> None:
    seen = Seen()
    for version, value in ((1, 5), (2, 5), (3, 6)):
        seen.store.put(thing(version, value))
    assert seen.changed == [CHAT, CHAT]
    assert seen.store.of(CHAT) == [6]


def test_a_malformed_object_keeps_its_last_view_and_others_are_processed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store: Store[ServiceKey, int] = Store(lambda obj: int(obj["value"]), lambda _: CHAT, lambda _: None)
    store.put(thing(1, 5, "x"))
    for version, odd in enumerate(("hunter2", None, "9" * 10_000), start=2):
        store.put({**thing(version, name="x"), "value": odd})
    store.put(thing(3, 7, "y"))
    assert store.of(CHAT) == [5, 7]
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "hunter2" not in caplog.text
    assert "a/x ignored: ValueError in cache.py:" in caplog.text
    store.put(thing(9, 6, "x"))
    assert store.of(CHAT) == [6, 7]


def test_an_object_that_changes_its_service_is_reported_to_both_services() -> None:
    seen = Seen()
    seen.store.put(thing(1))
    seen.store.put(thing(2, service="other"))
    assert seen.changed == [CHAT, CHAT, ServiceKey("a", "other")]
    seen.store.put(thing(3, service=""))
    assert len(seen.store) == 0


@given(st.permutations(range(1, 7)), st.integers(1, 6))
def test_the_newest_version_wins_in_any_order_of_watch_events_and_answers(order: Sequence[int], deleted: int) -> None:
    seen = Seen()
    for version in order:
        if version == deleted:
            seen.store.take("DELETED", thing(version))
        else:
            seen.store.put(thing(version, version))
    late = [v for v in order[order.index(deleted) + 1 :] if v < deleted]
    newest = [v for v in order if v > deleted]
    assert seen.store.get("a", "x") == max(newest or late, default=None)


def test_a_list_drops_missing_objects_but_no_newer_object_and_no_other_namespace() -> None:
    seen = Seen()
    seen.store.put(thing(5, name="gone"))
    seen.store.put(thing(6, name="kept"))
    seen.store.put(thing(9, name="written meanwhile"))
    seen.store.put(thing(5, name="gone", namespace="b"))
    seen.store.keep_only("a", {("a", "kept")}, "7")
    names = ("gone", "kept", "written meanwhile")
    assert [name for name in names if seen.store.get("a", name) is not None] == ["kept", "written meanwhile"]
    assert seen.store.get("b", "gone") is not None


def test_our_own_write_is_visible_at_once_and_an_older_event_does_not_undo_it() -> None:
    cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
    changed: list[ServiceKey] = []
    cache.on_change = changed.append
    first = manifest()
    cache.services.put(first)
    written = {**first, "metadata": {**first["metadata"], "resourceVersion": "7"}, "status": {"replicas": 3}}
    cache.wrote(KIND, *KEY, written)
    cache.services.put({**first, "metadata": {**first["metadata"], "resourceVersion": "4"}})
    found = cache.services.get(*KEY)
    assert found is not None
    assert (found.status.replicas, found.version) == (3, "7")
    assert changed == [KEY, KEY]
    cache.wrote(KIND, *KEY, None)
    assert cache.services.get(*KEY) is None


def test_a_service_that_is_being_deleted_is_not_in_the_cache() -> None:
    cache = InformerCache(None, ())  # type: ignore[arg-type]
    cache.services.put(manifest())
    going = manifest()
    going["metadata"] |= {"resourceVersion": "2", "deletionTimestamp": "2026-11-21T12:00:00Z"}
    cache.services.put(going)
    assert cache.services.get(*KEY) is None


class Server:
    """API server that lists `now` at `version`.

    Each watch plays the next script: a list of events, or an error with which the watch fails.
    """

    def __init__(self, now: list[Any], version: int, *scripts: Any) -> None:
        self.now, self.version, self.scripts = now, version, list(scripts)
        self.lists = 0
        self.since: list[str] = []
        self.after_a_watch: tuple[list[Any], int] | None = None
        """List and resource version that the server has once the watch has started."""

    async def pages(self, *what: str) -> AsyncIterator[tuple[Sequence[Any], str]]:
        self.lists += 1
        for item in self.now:
            yield [item], str(self.version)
        if not self.now:
            yield [], str(self.version)

    async def watch(self, *what: str) -> AsyncIterator[tuple[str, Any]]:
        self.since.append(what[-1])
        if self.after_a_watch is not None:
            self.now, self.version = self.after_a_watch
        for step in self.scripts.pop(0) if self.scripts else [("WAIT", None)]:
            if isinstance(step, Exception):
                raise step
            if step[0] == "WAIT":
                await asyncio.Event().wait()
            yield step


async def reflected(server: Server, seen: Seen) -> None:
    """Run a reflector until the server has played all its scripts."""
    task = asyncio.create_task(Reflector(server, "v1", "Thing", "", "", seen.store).run())  # type: ignore[arg-type]
    watches = len(server.scripts) + 1
    async with asyncio.timeout(60):
        while len(server.since) < watches:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_watch_resumes_where_it_ended() -> None:
    server = Server(
        [thing(3)],
        10,
        [("MODIFIED", thing(12, 7)), ("BOOKMARK", {"metadata": {"resourceVersion": "15"}})],
        [ClusterError("WATCH", "/things", 0, "connection lost")],
    )
    seen = Seen()
    await reflected(server, seen)
    assert server.since == ["10", "15", "15"]
    assert server.lists == 1
    assert seen.store.of(CHAT) == [7]


async def test_watches_that_end_at_once_are_reopened_with_growing_pauses() -> None:
    server = Server([thing(3)], 10, *[[] for _ in range(1000)])
    task = asyncio.create_task(Reflector(server, "v1", "Thing", "", "", Seen().store).run())  # type: ignore[arg-type]
    began = time.monotonic()
    async with asyncio.timeout(30):
        while len(server.since) < 4:
            await asyncio.sleep(0.01)
    task.cancel()
    assert time.monotonic() - began >= 0.2 + 0.4 + 0.8


async def test_an_unexpected_object_does_not_stop_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    server = Server([thing(3)], 10, [("ADDED", {"metadata": {"resourceVersion": "11"}})], [("MODIFIED", thing(12, 7))])
    seen = Seen()
    await reflected(server, seen)
    assert seen.store.of(CHAT) == [7]
    assert server.lists == 2
    assert "watch of Thing failed" in caplog.text


@pytest.mark.parametrize("status", [410, 500])
async def test_an_object_deleted_while_the_watch_was_lost_is_dropped_by_the_next_list(status: int) -> None:
    server = Server([thing(3), thing(4, name="y")], 10, [ClusterError("WATCH", "/things", status, "too old")])
    server.after_a_watch = ([thing(4, name="y")], 20)
    seen = Seen()
    task = asyncio.create_task(Reflector(server, "v1", "Thing", "", "", seen.store).run())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while len(server.since) < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    assert server.since == ["10", "20"]
    assert seen.store.get("a", "y") is not None
    assert len(seen.store) == 1


@pytest.mark.parametrize(("status", "remedy"), [(403, "let the operator's role"), (404, "kubectl apply -f crds/")])
async def test_an_unreadable_collection_is_logged_with_the_remedy(
    status: int, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([], 10, [ClusterError("WATCH", "/things", status, "no")])
    await reflected(server, Seen())
    assert remedy in caplog.text


async def test_a_deleted_object_is_dropped() -> None:
    server = Server([thing(3)], 10, [("DELETED", thing(11))])
    seen = Seen()
    await reflected(server, seen)
    assert len(seen.store) == 0
