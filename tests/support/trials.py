"""A service with a running canary in a model cluster, and the invariants of its trial."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from kvpilot_operator.state.status import Status, parse_status
from support.crd import apply_defaults
from support.kstatus import tools_are_told_the_truth
from support.model_cluster import ModelCluster
from support.services import KEY, manifest

OLD, NEW = "auto", "k8v4"
STEPS = [{"weightPercent": 25, "holdSeconds": 90}, {"weightPercent": 50, "holdSeconds": 90}]
ROUTE = [{"backendRefs": [{"name": KEY.name, "port": 80}]}]
BUSY = 200.0
_settled: dict[str, ModelCluster] = {}
"""Converged clusters by their arguments. A test gets a copy."""


def service(
    dtype: str, replicas: int = 3, *, max_unavailable: int | str = 1, paused: bool = False, **canary: Any
) -> dict[str, Any]:
    asked = {"steps": STEPS, "warmUpSeconds": 10, "progressDeadlineSeconds": 600, **canary}
    return manifest(
        replicas=replicas,
        scaling={"mode": "External", "minReplicas": 0, "maxReplicas": 16},
        kvCache={"mode": "Fixed", "dtype": dtype},
        canary=asked,
        disruption={"maxUnavailable": max_unavailable},
        rollout={"paused": paused},
    )


def on_trial(replicas: int = 3, *, cluster: dict[str, Any] | None = None, **spec: Any) -> ModelCluster:
    """Return a model cluster whose service has converged on the dtype OLD, and whose spec now asks for NEW."""
    asked = repr((replicas, cluster, spec))
    if asked not in _settled:
        made = ModelCluster(service(OLD, replicas, **spec), **{"start_ticks": 2, "requests": BUSY, **(cluster or {})})
        made.settle()
        _settled[asked] = made
    made = copied(_settled[asked])
    made.edit(service(NEW, replicas, **spec))
    return made


def copied(cluster: ModelCluster) -> ModelCluster:
    """Return a copy of the cluster that continues independently."""
    samples = [one for many in cluster.samples.values() for one in many]
    return deepcopy(cluster, {id(one): one for one in samples})  # do not copy samples, which are immutable


def edit(cluster: ModelCluster, **spec: Any) -> None:
    """Set these fields of the spec as the user, and remove those that are None."""
    asked = {key: value for key, value in {**cluster.obj["spec"], **spec}.items() if value is not None}
    cluster.edit(apply_defaults({**cluster.obj, "spec": asked}))


def killed_before_each_write(
    make: Callable[[], ModelCluster], watch: Callable[[], Callable[[ModelCluster], None]], end: str
) -> None:
    """Repeat a trial once for each of its writes, and kill the operator just before that write.

    The trial before the kill is always the same, so each run continues from a copy of the undisturbed trial.

    Args:
        make: returns the cluster at the trial's start.
        watch: returns a new callback, which is called after each write.
        end: the end that every run must reach, such as "Promoted".
    """
    cluster = make()
    cluster.watch = watch()
    killed = 0
    for _ in range(600):
        if ended(cluster.parsed()):
            break
        before = copied(cluster)
        cluster.tick()
        for writes in range(cluster.writes - before.writes):
            disturbed = copied(before)
            assert disturbed.tick(cut_after=writes) is None
            disturbed.until(ended, 600)
            assert end_of(disturbed.parsed()) == end
            killed += 1
    assert end_of(cluster.parsed()) == end
    assert killed > 5


def stage(name: str, step: int | None = None) -> Callable[[Status], bool]:
    return lambda s: s.canary is not None and s.canary.stage == name and step in (None, s.canary.step)


def end_of(s: Status) -> str:
    """Return the last stage that the newest trial reached."""
    assert s.last_trial is not None
    return "Promoted" if s.last_trial.verdict == "Passed" else "RolledBack"


def ended(s: Status) -> bool:
    return s.canary is None and s.last_trial is not None


def at_every_moment(cluster: ModelCluster) -> None:
    """Check after every write that users lose no capacity and reach only revisions that may serve."""
    tools_are_told_the_truth(cluster)
    spec = cluster.snapshot().spec
    status = parse_status(cluster.status)
    if spec is None or status.stable is None:
        return
    replaces = status.canary is not None and status.canary.replaces_one
    asked = sum(count for _, count in cluster.deployments.values())
    assert asked <= spec.replicas + 1
    assert not replaces or asked <= spec.replicas or cluster.places is not None
    sides = {part.revision for part in (status.stable, status.canary) if part is not None}
    shares = cluster.shares()
    assert set(shares) <= sides
    if status.canary is not None and status.canary.stage in ("Starting", "Probing"):
        assert status.canary.revision not in shares
    if status.stable.ever_ready:
        # The operator takes a faulty canary out of the traffic at once, even if few stable pods remain.
        canary, no_fault = status.canary, ("Superseded", "ProgressDeadlineExceeded")
        back = canary is not None and canary.stage == "RollingBack" and canary.reason not in no_fault
        least = spec.disruption.least(spec.replicas)
        assert cluster.answering() >= (min(1, least) if back else least)
    for ref in (ref for rule in cluster.rules or () for ref in rule["backendRefs"]):
        assert ref["name"] in (cluster.pools if ref.get("kind") == "InferencePool" else cluster.services)
