"""Define `Context`, which each rule of a reconcile takes and returns: observations, new status, earlier results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple, Self

import msgspec

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action, Reason, Stage, TrafficMode, WorkloadKind
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.decide.steps import scaling
from kvpilot_operator.decide.steps.ladder import Subject, denial
from kvpilot_operator.decide.steps.policy import PolicyDecision, nothing_weighed
from kvpilot_operator.decide.traffic_plan import TrafficPlan, traffic_plan
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.state import status
from kvpilot_operator.state.decision import Decision, Event, Manifest, Reference
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Denied, Option, Stable, Status, clip
from kvpilot_operator.times import utc

# Actions that may be recorded while a rollout waits. `hold` looks past their journal entries.
_BESIDE = (Action.SCALE_OUT, Action.SCALE_IN, Action.KEEP_BASELINE, Action.RECOMMEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Decision):
    """The decision so far, and the observations on which it rests. Frozen: every change returns a new Draft."""

    snapshot: Snapshot

    @property
    def now(self) -> datetime:
        """Return the time of the reconcile."""
        return self.snapshot.now

    @property
    def before(self) -> Status:
        """Return the status as the reconcile observed it, before any change."""
        return self.snapshot.status

    @property
    def stable(self) -> Stable | None:
        """Return the serving revision, as decided so far."""
        return self.status.stable

    @property
    def canary(self) -> Canary | None:
        """Return the canary in flight, as decided so far."""
        return self.status.canary

    @property
    def sides(self) -> tuple[str, ...]:
        """Return the serving revision and the canary's revision, if they exist."""
        return tuple(part.revision for part in (self.stable, self.canary) if part is not None)

    def set(self, **changes: Any) -> Self:
        """Replace fields of the status."""
        return replace(self, status=msgspec.structs.replace(self.status, **changes))

    def set_kv(self, **changes: Any) -> Self:
        """Replace fields of `status.kvCache`."""
        return self.set(kv_cache=msgspec.structs.replace(self.status.kv_cache, **changes))

    def set_canary(self, **changes: Any) -> Self:
        """Replace fields of `status.canary`. Raise LookupError if there is no canary."""
        canary = in_flight(self)
        if changes.get("stage", canary.stage) != canary.stage:
            changes.setdefault("stage_time", self.now)
        if "message" in changes:
            changes["message"] = clip(changes["message"])
        return self.set(canary=msgspec.structs.replace(canary, **changes))

    def set_accuracy(self, **changes: Any) -> Self:
        """Replace fields of `status.accuracy`."""
        return self.set(accuracy=msgspec.structs.replace(self.status.accuracy, **changes))

    def set_scaling(self, **changes: Any) -> Self:
        """Replace fields of `status.scaling`."""
        return self.set(scaling=msgspec.structs.replace(self.status.scaling, **changes))

    def record(
        self, action: Action, reason: str, message: str, *, warning: bool = False, event: str = "", **entry: Any
    ) -> Self:
        """Write a decision into the journal, and post it as an event.

        `event` is the event's reason, by default `reason`. `entry` gives further fields of the JournalEntry.
        """
        made = status.JournalEntry(time=self.now, action=action, reason=reason, message=clip(message), **entry)
        recorded = self.set(decisions=(made, *self.status.decisions)[: status.MAX_DECISIONS])
        return recorded.event(event or reason, message, warning=warning)

    def record_trial(self, action: Action, reason: str, message: str, **entry: Any) -> Self:
        """Write a decision about the canary in flight into the journal, as `record` does."""
        canary = in_flight(self)
        return self.record(action, reason, message, from_dtype=canary.from_dtype, to_dtype=canary.dtype, **entry)

    def hold(self, reason: str, message: str, options: tuple[Option, ...] = ()) -> Self:
        """Record why the next dtype or revision must wait, unless the journal's newest entries give this reason."""
        steps = (one for one in self.status.decisions if one.action not in _BESIDE)
        if any(one.reason == reason for one in takewhile(lambda one: one.action == Action.HOLD, steps)):
            return self
        return self.record(Action.HOLD, reason, message, warning=True, options=options)

    def event(self, reason: str, message: str, *, warning: bool = False) -> Self:
        """Post a Kubernetes Event without a journal entry."""
        return replace(self, events=(*self.events, Event("Warning" if warning else "Normal", reason, clip(message))))


def in_flight(draft: Draft) -> Canary:
    """Return the canary. Raise LookupError if there is none."""
    if draft.canary is None:
        raise LookupError("no canary is in flight")
    return draft.canary


class Revision(NamedTuple):
    """Pod template rendered from the present spec with one dtype. The revision's name is the template's hash."""

    name: str
    template: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """Revision that should serve. If not `startable`, kvpilot starts no canary for it, and `held` has the reason."""

    dtype: str
    revision: str
    reason: str
    message: str
    held: str | None = None
    recommended: str | None = None
    warning: str | None = None
    options: tuple[Option, ...] = ()
    """Changes of dtype or replicas that the policy compared when it chose this target."""
    startable: bool = True


_NOT_JUDGED = Workload(WorkloadKind.NO_METRICS, "the metrics were not judged")
_NOT_WEIGHED = nothing_weighed("", 0, ())
_NOT_CHOSEN = Target("", "", Reason.RECONCILE_INCOMPLETE, "", startable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Draft):
    """The context of one reconcile. Each rule takes it and returns a changed copy.

    The fields below `plan_traffic` are results of rules, empty until their rule has run.
    """

    spec: Spec
    render: Callable[[str], Revision]
    """Cached function that renders the spec's pod template with a dtype."""
    plan_traffic: Callable[[TrafficMode | None, bool, int], TrafficPlan]
    workload: Workload = _NOT_JUDGED
    policy: PolicyDecision = _NOT_WEIGHED
    target: Target = _NOT_CHOSEN
    storage: tuple[Manifest, ...] = ()
    """The PersistentVolumeClaim for the model's weights."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Target number of replicas by revision."""
    engines: Mapping[str, Manifest] = field(default_factory=dict)
    """Deployment or LeaderWorkerSet by revision."""
    own: tuple[Manifest, ...] = ()
    """The Service, the InferencePool that selects the same pods, and the PodDisruptionBudget."""
    shared: tuple[Manifest, ...] = ()
    """The canary's Service and InferencePool, and the HTTPRoute."""
    absent: tuple[Reference, ...] = ()
    """Objects for the canary's traffic that are no longer needed."""

    @classmethod
    def of(cls, s: Snapshot, spec: Spec) -> Self:
        """Make the context in which nothing is decided yet."""
        render, plan = cache(partial(_rendered, s, spec)), cache(partial(traffic_plan, s, spec))
        return cls(status=s.status, snapshot=s, spec=spec, render=render, plan_traffic=plan)

    @property
    def replicas(self) -> int:
        """Return the target number of replicas, as decided so far."""
        return scaling.target_replicas(self.spec, self.status.scaling)

    def denial(self, dtype: str) -> Denied | None:
        """Return the denial of a dtype, or None. Until a pod has a node, the GPU is unknown, so any GPU matches."""
        gpu = self.snapshot.node.gpu if any(pod.node for pod in self.snapshot.pods) else None
        return denial(dtype, self.spec, gpu, self.status.kv_cache.denied, self.now)

    def deny(self, dtype: str, reason: str, message: str, seconds: int) -> Self:
        """Deny trials of a dtype for `seconds` with this model, image, GPU and recent window. 0 denies nothing."""
        if seconds == 0:
            return self
        of, until = Subject.of(dtype, self.spec, self.snapshot.node.gpu), self.now + timedelta(seconds=seconds)
        denied = Denied(**of._asdict(), reason=reason, message=clip(message, 512), until=until)
        kept = [one for one in self.status.kv_cache.denied if one.until > self.now and not of.matches(one)]
        text = f"{dtype} is denied for this model, image and GPU ({denied.gpu}) until {utc(denied.until)}"
        return self.set_kv(denied=(denied, *kept)[: status.MAX_DENIED]).event("DtypeDenied", text, warning=True)

    @property
    def asked(self) -> str:
        """Return the name of the revision that the spec asks for.

        Its dtype is the spec's in mode Fixed. In other modes it is the dtype of a canary that is not rolled back, else
        the serving dtype, and at first the baseline.
        """
        kv, canary, stable = self.spec.kv_cache, self.canary, self.stable
        if kv.mode == "Fixed" and kv.dtype is not None:
            return self.render(kv.dtype).name
        if canary is not None and canary.stage != Stage.ROLLING_BACK:
            return self.render(canary.dtype).name
        return self.render(stable.dtype if stable is not None else kv.baseline).name

    @property
    def reference(self) -> str:
        """Return the name of the 16-bit revision that gives the baseline."""
        return self.render(self.spec.kv_cache.baseline).name

    @property
    def plan(self) -> TrafficPlan:
        """Return the traffic plan of the canary in flight or, without one, of the next canary."""
        canary = self.canary
        begun, replaces = (canary.traffic_mode, canary.replaces_one) if canary is not None else (None, False)
        return self.plan_traffic(begun, replaces, self.replicas)


def _rendered(s: Snapshot, spec: Spec, dtype: str) -> Revision:
    template = pod_template(s.key.name, spec, dtype, assigned_user=s.server.assigns_users)
    return Revision(revision(template), template)
