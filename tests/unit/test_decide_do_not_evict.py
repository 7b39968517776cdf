"""The operator asks cluster autoscalers to leave a pod alone only while the pod is being judged."""

from dataclasses import replace
from datetime import timedelta

from kvpilot_operator.act.pod_marks import mark_do_not_evict
from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.names import DO_NOT_EVICT_ANNOTATION
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.objects import pod_marks
from kvpilot_operator.errors import Conflict
from kvpilot_operator.state.decision import Find, Measure
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import manifest, pod, revision_of, running, spec_of
from support.trials import NEW, OLD, ended, on_trial, service, stage


def names(cluster: ModelCluster, dtype: str) -> set[str]:
    revision = revision_of(cluster.obj, dtype)
    return {p.name for p in cluster.engines.pods if p.revision == revision}


def test_the_pods_of_a_canary_are_marked_until_its_verdict_and_nobody_afterwards():
    cluster = on_trial(3)
    for where in ("Starting", "Shifting"):
        cluster.until(stage(where))
        cluster.tick()
        assert cluster.do_not_evict == names(cluster, NEW) != set()
    cluster.until(stage("Promoting"))
    assert cluster.do_not_evict == set()
    cluster.until(ended)
    assert cluster.do_not_evict == set()


def test_a_probe_marks_the_replica_that_it_asks():
    cluster = ModelCluster(manifest(replicas=3, kvCache={"mode": "Auto"}, scaling={"mode": "External"}))
    asked: set[str] = set()
    for _ in range(20):
        cluster.tick()
        asked |= cluster.do_not_evict
        assert len(cluster.do_not_evict) <= 1
    assert len(asked) == 1
    assert cluster.do_not_evict == set()


def test_a_borrowed_replica_is_marked_with_the_canary_that_needs_it():
    cluster = on_trial(1, cluster={"start_ticks": 4}, steps=[])
    cluster.settle()
    cluster.edit(service("k4v4", 1, steps=[]))
    cluster.baseline, cluster.status["accuracy"] = None, {}
    for _ in range(60):
        cluster.tick()
        if names(cluster, OLD):
            break
    cluster.tick()
    assert cluster.do_not_evict >= names(cluster, OLD) != set()
    cluster.settle()
    assert cluster.do_not_evict == set()


def test_a_paused_trial_keeps_no_node_alive():
    cluster = on_trial(3)
    cluster.until(stage("Shifting"))
    cluster.edit(service(NEW, 3, paused=True))
    cluster.tick()
    assert parse_status(cluster.status).canary is not None
    assert cluster.do_not_evict == set()


REFUSED = manifest(engine={"extraArgs": ["--port=1"]})


def test_a_trial_whose_spec_is_refused_and_soon_mended_keeps_its_pods_marked_throughout():
    cluster = on_trial(3)
    asked = cluster.obj
    cluster.until(stage("Shifting"))
    cluster.tick()
    marked = set(cluster.do_not_evict)
    assert marked == names(cluster, NEW) != set()
    cluster.edit(REFUSED)
    for _ in range(12):
        cluster.tick()
        assert cluster.do_not_evict == marked
    cluster.edit(asked)
    cluster.tick()
    assert cluster.do_not_evict >= marked
    cluster.until(ended)
    assert cluster.do_not_evict == set()


def test_a_spec_that_stays_refused_keeps_no_node_alive():
    cluster = on_trial(3)
    cluster.until(stage("Shifting"))
    cluster.edit(REFUSED)
    began = cluster.now
    while cluster.do_not_evict:
        cluster.tick()
        assert cluster.now - began < timedelta(minutes=11)
    assert parse_status(cluster.status).canary is not None


def test_a_spec_that_is_refused_without_a_trial_marks_nobody():
    s = running(manifest(), "auto")
    s = replace(s, spec=None, faults=(Fault("spec", "is wrong"),), pods=(replace(s.pods[0], do_not_evict=True),))
    assert decide(s).do_not_evict == frozenset()


def test_what_a_killed_operator_left_behind_is_taken_off_by_the_next():
    cluster = on_trial(3)
    cluster.until(stage("Shifting"))
    ghost = next(iter(names(cluster, OLD)))
    cluster.do_not_evict.add(ghost)
    cluster.tick()
    assert ghost not in cluster.do_not_evict


def test_pods_on_their_way_out_and_searches_mark_nobody():
    obj = manifest()
    s = running(obj, "auto")
    leaving = replace(pod(revision_of(obj, "auto")), terminating=True)
    url = "http://10.0.0.1:8000"
    ask = Measure("i", s.pods[0].name, url, "m", "fp8", "c")

    def left_alone(s, request):
        return pod_marks.keep_judged(replace(Context.of(s, spec_of(obj)), probe=request)).do_not_evict

    assert left_alone(s, None) == left_alone(s, Find("i", "b", "c")) == frozenset()
    assert left_alone(s, ask) == {s.pods[0].name}
    assert left_alone(replace(s, pods=(leaving,)), ask) == frozenset()


class Server:
    """API that records each pod's annotations. One of the pods has just been deleted."""

    def __init__(self, gone: str) -> None:
        self.gone = gone
        self.applied: dict[str, dict[str, str]] = {}

    async def apply(self, pod):
        about = pod["metadata"]
        if about["name"] == self.gone:
            raise Conflict("PATCH", about["name"], 409, "uid mismatch")
        assert about["uid"]
        self.applied[about["name"]] = about["annotations"]


async def test_only_pods_whose_annotations_are_not_what_they_should_be_are_written_and_one_that_is_gone_stops_nobody():
    s = running(manifest(), "auto")
    pods = tuple(replace(pod("r"), name=n, uid=n, do_not_evict=n in ("b", "c")) for n in ("gone", "a", "b", "c", "d"))
    server = Server("gone")
    await mark_do_not_evict(server, replace(s, pods=pods), frozenset({"gone", "a", "b"}))
    assert set(server.applied) == {"a", "c"}
    assert server.applied["c"] == {}
    assert server.applied["a"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        DO_NOT_EVICT_ANNOTATION: "true",
    }


def test_a_quiet_service_writes_to_no_pod():
    assert decide(running(manifest(kvCache={"mode": "Fixed", "dtype": "auto"}), "auto")).do_not_evict == frozenset()
