"""Two operators and one Lease on a real API server with an audit log: one leads, and the other takes over.

No pods run, because the test checks only who writes. Services change all the time, so a leader always has a write to
do.
"""

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from kvpilot_localcluster import build
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.rest import ApiError, until
from support.faulty_plane import Component
from support.operator_pair import SYSTEM, Pair, identity

CRDS = Path(__file__).parents[2] / "crds"
MODELS = "models"
SERVICES = f"/apis/kvpilot.io/v1alpha1/namespaces/{MODELS}/quantizedllmservices"
NAMES = [f"chat-{number}" for number in range(6)]
# Limit for the time from a leader's end to the next leader's first write: up to 17 s on quiet cores, 15 s of them for
# the Lease.
PATIENCE = 60
COUNTER = itertools.count()


def service(name):
    return {
        "apiVersion": "kvpilot.io/v1alpha1",
        "kind": "QuantizedLLMService",
        "metadata": {"name": name, "namespace": MODELS},
        "spec": {
            "model": {"source": "hf://Qwen/Qwen3-8B"},
            "engine": {"image": "kvpilot/runtime:1"},
            "kvCache": {"mode": "Fixed", "dtype": "auto"},
            "scaling": {"minReplicas": 1, "maxReplicas": 4},
        },
    }


class Editor(threading.Thread):
    """User who changes services all the time."""

    def __init__(self, rest, pause=0.25):
        super().__init__(daemon=True)
        self._rest, self._pause = rest, pause
        self._done = threading.Event()

    def run(self):
        for number in itertools.count():
            if self._done.wait(self._pause):
                return
            name = NAMES[1 + number % (len(NAMES) - 1)]
            replicas = 1 + number // len(NAMES) % 3
            with contextlib.suppress(OSError, ApiError):
                self._rest.merge(f"{SERVICES}/{name}", {"spec": {"scaling": {"minReplicas": replicas}}})

    def stop(self):
        self._done.set()
        self.join()


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("ha"), build.build(), audit=True) as running:
        define(running.rest, [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))])
        for name in (SYSTEM, MODELS):
            running.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})
        for name in NAMES:
            running.rest.create(SERVICES, service(name))
        editor = Editor(running.rest)
        editor.start()
        yield running
        editor.stop()


@pytest.fixture(scope="module")
def pair(plane):
    made = Pair(plane)
    yield made
    made.stop()


def report(words):
    sys.stderr.write(f"\n  {words}\n")


def now():
    return datetime.now(UTC)


def seconds(since, moment):
    return (moment - since).total_seconds()


def acted_upon(pair):
    """Change a service, and wait until the operator has processed the change."""
    change = {"spec": {"drain": {"timeoutSeconds": 100 + next(COUNTER) % 100}}}
    generation = pair.rest.merge(f"{SERVICES}/{NAMES[0]}", change)["metadata"]["generation"]

    def seen():
        return pair.rest.get(f"{SERVICES}/{NAMES[0]}").get("status", {}).get("observedGeneration", 0) >= generation

    until(seen, "the change is acted upon", seconds=PATIENCE)


def test_one_of_two_replicas_acts_and_the_other_is_ready_and_writes_nothing(pair):
    began = now()
    leader, standby = pair.settle()
    acted_upon(pair)
    report(f"new cluster: first write after {seconds(began, pair.first_write(pair.holder())):.1f} s")
    assert leader.ready
    assert standby.ready
    assert not standby.leads
    until(lambda: 'name="chat-0"' in leader.ask("/metrics")[1], "the leader shows the service")
    assert 'name="chat-0"' not in standby.ask("/metrics")[1]
    assert [w.what for w in pair.log() if w.user == f"operator-{standby.place}" and w.lease is None] == []
    assert pair.faults() == []


def replaced(pair, number):
    """End the leader by a signal. Return its exit status, its term, and the seconds until the next claim."""
    leader, _ = pair.settle()
    holder, since = pair.holder(), now()
    leader.process.send_signal(number)
    successor = pair.successor(holder)
    acted_upon(pair)
    status = leader.process.wait(PATIENCE)
    term, first = pair.term(holder), pair.first_write(successor)
    moments = [f"{seconds(since, moment):.2f} s" for moment in (term.followed, first)]
    report(f"{number.name}: claimed after {moments[0]}, first write after {moments[1]}")
    assert seconds(since, first) < PATIENCE
    assert pair.faults() == []
    return status, term, seconds(since, term.followed)


def test_on_sigterm_the_lease_is_released_and_the_other_takes_over_within_10_seconds(pair):
    status, term, claimed = replaced(pair, signal.SIGTERM)
    assert status == 0
    assert term.released is not None
    assert claimed < 10


def test_after_kill_9_the_other_takes_over_in_under_20_seconds(pair):
    _, term, claimed = replaced(pair, signal.SIGKILL)
    assert term.released is None
    assert claimed < 20


def test_a_leader_that_was_stopped_for_30_seconds_writes_nothing_when_it_wakes(pair):
    leader, _ = pair.settle()
    holder, since = pair.holder(), now()
    leader.process.send_signal(signal.SIGSTOP)
    successor = pair.successor(holder)
    acted_upon(pair)
    time.sleep(max(0.0, 30 - seconds(since, now())))
    awake = now()
    leader.process.send_signal(signal.SIGCONT)
    assert leader.process.wait(PATIENCE) == 1
    assert "stopping: Lease" in leader.log.read_text()
    took_over = seconds(since, pair.first_write(successor))
    report(f"SIGSTOP: first write after {took_over:.2f} s; ended {seconds(awake, now()):.2f} s after SIGCONT")
    assert [moment for moment in pair.wrote(holder) if moment > awake] == []
    assert pair.holder() == successor
    assert pair.faults() == []


def test_a_leader_that_is_cut_off_ends_before_the_other_takes_over(pair):
    leader, _ = pair.settle()
    holder, since = pair.holder(), now()
    cable = pair.cables[leader.place]
    cable.unplug()
    try:
        assert leader.process.wait(PATIENCE) == 1
        ended = now()
        successor = pair.successor(holder)
    finally:
        cable.plug()
    acted_upon(pair)
    first = pair.first_write(successor)
    report(f"cut off: ended after {seconds(since, ended):.2f} s, first write {seconds(since, first):.2f} s")
    assert ended < pair.term(holder).followed
    assert seconds(since, first) < PATIENCE
    assert pair.faults() == []


def away(pair, length):
    """Kill the API server, restart it after this many seconds, and return the time of its first answer."""
    server = Component(pair.plane.folder, "kube-apiserver")
    server.kill()
    time.sleep(length)
    server.start()

    def answers():
        try:
            return pair.rest.get("/readyz") or True
        except (OSError, ApiError, ValueError):
            return False

    until(answers, "the API server answers again", pause=0.1)
    return now()


def test_a_restart_of_the_api_server_does_not_end_the_leadership(pair):
    # The API server may take ten times as long to return as on idle cores, where the Lease's default of 15 s is enough.
    with pair.flags("--lease-seconds=150"):
        leader, _ = pair.settle()
        holder = pair.holder()
        back = away(pair, 1)
        acted_upon(pair)
        report(f"API server restarted: a change is acted upon {seconds(back, now()):.2f} s after it answers")
        assert leader.process.poll() is None
        assert pair.holder() == holder
        assert pair.faults() == []


@pytest.mark.long
def test_after_half_a_minute_without_an_api_server_one_replica_leads(pair):
    leader, _ = pair.settle()
    holder = pair.holder()
    back = away(pair, 30)
    assert leader.process.wait(PATIENCE) == 1
    successor = pair.successor(holder)
    acted_upon(pair)
    first = pair.first_write(successor)
    report(f"API server down for 30 s: first write {seconds(back, first):.2f} s after it answers")
    assert pair.faults() == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_only_lease_holders_write_while_a_dozen_leaders_end_at_random_times(pair):
    dice = random.Random(5)
    took = []
    for _ in range(12):
        leader, _ = pair.settle()
        time.sleep(dice.random() * 3)
        holder, since = pair.holder(), now()
        end = dice.choice([signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
        leader.process.send_signal(end)
        successor = pair.successor(holder)
        acted_upon(pair)
        took.append((end.name, seconds(since, pair.first_write(successor))))
        leader.process.send_signal(signal.SIGCONT)
        leader.process.wait(PATIENCE)
    for name in sorted({name for name, _ in took}):
        times = sorted(time for which, time in took if which == name)
        report(f"{name} x {len(times)}: first write after {times[0]:.1f} to {times[-1]:.1f} s")
    assert pair.faults() == []
    assert max(time for _, time in took) < PATIENCE


def test_the_audit_log_shows_the_writes_of_an_operator_without_election(pair):
    """Check that the audit-log check detects a fault: an additional operator without --leader-elect."""
    pair.settle()
    assert pair.faults() == []
    lonely = pair.start("c")
    try:
        until(pair.faults, "the audit log shows the intruder")
    finally:
        lonely.process.kill()
        lonely.process.wait(PATIENCE)
    log = [write for write in pair.log() if write.user == "operator-c"]
    assert {identity(write) for write in log} == {fault.split()[1].rstrip(":") for fault in pair.faults()}
