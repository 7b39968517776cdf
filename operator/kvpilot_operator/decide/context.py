"""One reconcile of a service: the status under decision, the journal entries and events that explain each change, the
input of every rule, and the findings of earlier rules.
"""

from __future__ import annotations

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
from kvpilot_operator.decide.steps.ladder import about, denial, subject
from kvpilot_operator.decide.steps.policy import PolicyDecision, nothing_weighed
from kvpilot_operator.decide.traffic_plan import TrafficPlan, traffic_plan
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.state.decision import Event, Figures, Manifest, Objects, Request
from kvpilot_operator.state.questions import Unanswered
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import (
    MAX_DECISIONS,
    MAX_DENIED,
    Canary,
    Denied,
    JournalEntry,
    Option,
    Stable,
    Status,
    clip,
)
from kvpilot_operator.times import utc

# Decisions that neither start nor end a hold on the next dtype or revision.
_BESIDE = (Action.SCALE_OUT, Action.SCALE_IN, Action.KEEP_BASELINE, Action.RECOMMEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The observations of a service and the decisions so far. Frozen: every change returns a new one."""

    snapshot: Snapshot
    status: Status
    """The status as decided so far; `before` is the status as observed."""
    events: tuple[Event, ...] = ()
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates to be opened or closed, by pod."""
    do_not_evict: frozenset[str] = frozenset()
    """Pods that autoscalers are asked to leave alone."""
    unanswered: tuple[Unanswered, ...] = ()

    @property
    def now(self) -> datetime:
        """Return the time of the reconcile."""
        return self.snapshot.now

    @property
    def before(self) -> Status:
        """Return the status as it was observed."""
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
        """Replace fields of `status.canary`; LookupError if there is none."""
        canary = in_flight(self)
        if changes.get("stage", canary.stage) != canary.stage:
            changes.setdefault("stage_time", self.now)
        if "message" in changes:
            changes["message"] = clip(changes["message"])
        return self.set(canary=msgspec.structs.replace(canary, **changes))

    def set_accuracy(self, **changes: Any) -> Self:
        """Replace fields of `status.accuracy`."""
        return self.set(accuracy=msgspec.structs.replace(self.status.accuracy, **changes))

    def record(
        self,
        action: Action,
        reason: str,
        message: str,
        *,
        from_dtype: str | None = None,
        to_dtype: str | None = None,
        warning: bool = False,
        event: str | None = None,
        options: tuple[Option, ...] = (),
    ) -> Self:
        """Write a decision into the journal and post it as an event. `event` replaces the event's default reason."""
        entry = JournalEntry(
            time=self.now,
            action=action,
            reason=reason,
            message=clip(message),
            from_dtype=from_dtype,
            to_dtype=to_dtype,
            options=options,
        )
        recorded = self.set(decisions=(entry, *self.status.decisions)[:MAX_DECISIONS])
        return recorded.event(event or reason, message, warning=warning)

    def record_trial(
        self, action: Action, reason: str, message: str, *, event: str | None = None, options: tuple[Option, ...] = ()
    ) -> Self:
        """Write a decision about the canary in flight into the journal, as `record` does."""
        before, dtype = in_flight(self).from_dtype, in_flight(self).dtype
        return self.record(action, reason, message, from_dtype=before, to_dtype=dtype, event=event, options=options)

    def holds(self, reason: str) -> bool:
        """Return True if the journal already has a hold on the next dtype or revision for this reason."""
        steps = (one for one in self.status.decisions if one.action not in _BESIDE)
        return any(one.reason == reason for one in takewhile(lambda one: one.action == Action.HOLD, steps))

    def event(self, reason: str, message: str, *, warning: bool = False) -> Self:
        """Post an event without a journal entry."""
        return replace(self, events=(*self.events, Event("Warning" if warning else "Normal", reason, clip(message))))


def in_flight(draft: Draft) -> Canary:
    """Return the canary; LookupError if there is none."""
    if draft.canary is None:
        raise LookupError("no canary is in flight")
    return draft.canary


class Revision(NamedTuple):
    """The present spec with one dtype: the template of its pods, and the hash of it that names the revision."""

    name: str
    template: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """The revision to converge to. If `startable` is False, no canary is started, and `held` has the reason."""

    dtype: str
    revision: str
    reason: str
    message: str
    held: str | None = None
    recommended: str | None = None
    warning: str | None = None
    options: tuple[Option, ...] = ()
    """The steps that the policy weighed for this target."""
    startable: bool = True


class Placed(NamedTuple):
    """Manifests to be applied, and (apiVersion, kind, name) of objects that must not be there."""

    apply: tuple[Manifest, ...] = ()
    absent: tuple[tuple[str, str, str], ...] = ()


_NOT_JUDGED = Workload(WorkloadKind.NO_METRICS, "the metrics were not judged")
_NOT_WEIGHED = nothing_weighed("", 0, ())
_NOT_CHOSEN = Target("", "", Reason.RECONCILE_INCOMPLETE, "", startable=False)
_NOTHING = Placed()
_NO_FIGURES = Figures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Draft):
    """The context of one reconcile. Each rule takes it and returns a changed copy.

    `render` and `plan_traffic` cache their results. The fields below them are results of rules and stay empty until
    their rule has run, in the order of `decide.RULES`.
    """

    spec: Spec
    render: Callable[[str], Revision]
    """The present spec with a dtype."""
    render_reference: Callable[[], Revision]
    """The revision of the 16-bit engine that accuracy is measured against. It keeps the whole cache, even if
    spec.kvCache.retention is set."""
    plan_traffic: Callable[[TrafficMode | None, bool, int], TrafficPlan]
    workload: Workload = _NOT_JUDGED
    policy: PolicyDecision = _NOT_WEIGHED
    target: Target = _NOT_CHOSEN
    storage: Placed = _NOTHING
    """The claim that keeps the weights, and the Job that fills it."""
    request: Request | None = None
    """The probe to run."""
    captured: Baseline | None = None
    """A baseline to keep before the status names it."""
    figures: Figures = _NO_FIGURES
    """Measurements that only the operator's metrics show."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Replicas by revision."""
    engines: Mapping[str, Manifest] = field(default_factory=dict)
    """Deployments by revision."""
    own: Placed = _NOTHING
    """The Service and its disruption budget."""
    shared: Placed = _NOTHING
    """The canary's Service, and the HTTPRoute."""
    objects: Objects | None = None
    """All manifests above, in the order in which they are written. None leaves every object unchanged."""

    @classmethod
    def of(cls, s: Snapshot, spec: Spec) -> Context:
        """Make the context in which nothing is decided yet."""

        def made(dtype: str, of: Spec) -> Revision:
            template = pod_template(s.key.name, of, dtype, assigned_user=s.server.assigns_users)
            return Revision(revision(template), template)

        @cache
        def render(dtype: str) -> Revision:
            return made(dtype, spec)

        @cache
        def render_reference() -> Revision:
            dtype, of = spec.kv_cache.baseline, spec.as_reference()
            return render(dtype) if of is spec else made(dtype, of)

        plan = cache(partial(traffic_plan, s, spec))
        return cls(
            snapshot=s,
            status=s.status,
            spec=spec,
            render=render,
            render_reference=render_reference,
            plan_traffic=plan,
        )

    @property
    def replicas(self) -> int:
        """Return the target number of replicas, as decided so far."""
        return scaling.target_replicas(self.spec, self.status.scaling)

    def denial(self, dtype: str) -> Denied | None:
        """Return the denial of a dtype, if there is one. The GPU is unknown while no pod has a node."""
        s = self.snapshot
        gpu = s.node.gpu if any(pod.node for pod in s.pods) else None
        return denial(dtype, self.spec, gpu, self.status.kv_cache.denied, self.now)

    def deny(self, dtype: str, reason: str, message: str, seconds: int) -> Context:
        """Deny trials of a dtype for `seconds` with this model, image, GPU and recent window. 0 denies nothing."""
        if seconds == 0:
            return self
        of, until = subject(dtype, self.spec, self.snapshot.node.gpu), self.now + timedelta(seconds=seconds)
        denied = Denied(**of._asdict(), reason=reason, message=clip(message, 512), until=until)
        kept = [one for one in self.status.kv_cache.denied if one.until > self.now and about(one) != of]
        text = f"{dtype} is denied for this model, image and GPU ({denied.gpu}) until {utc(denied.until)}"
        return self.set_kv(denied=(denied, *kept)[:MAX_DENIED]).event("DtypeDenied", text, warning=True)

    @property
    def asked(self) -> str:
        """Return the revision that the spec asks for. In mode Fixed it has the spec's dtype, else the dtype in use."""
        kv, canary, stable = self.spec.kv_cache, self.canary, self.stable
        if kv.mode == "Fixed" and kv.dtype is not None:
            return self.render(kv.dtype).name
        if canary is not None and canary.stage != Stage.ROLLING_BACK:
            return self.render(canary.dtype).name
        return self.render(stable.dtype if stable is not None else kv.baseline).name

    @property
    def reference(self) -> str:
        """Return the 16-bit revision that accuracy is measured against."""
        return self.render_reference().name

    @property
    def plan(self) -> TrafficPlan:
        """Return how the canary, or the next one, gets live traffic."""
        canary = self.canary
        begun, replaces = (canary.traffic_mode, canary.replaces_one) if canary is not None else (None, False)
        return self.plan_traffic(begun, replaces, self.replicas)
