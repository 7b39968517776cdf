"""Rules that judge the load, choose the next step (a change of dtype or replicas), and set the target replicas."""

from dataclasses import replace

from kvpilot_operator.api.words import ConditionType, Reason, Stage, Verdict
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.load.workload import classify, step_tokens
from kvpilot_operator.decide.rollout.starting import start_fault
from kvpilot_operator.decide.steps import scaling
from kvpilot_operator.decide.steps.policy import choose_step, nothing_weighed
from kvpilot_operator.decide.steps.policy_input import PolicyInput


def judge_workload(c: Context) -> Context:
    """Judge which resource limits the service."""
    workload = classify(
        c.snapshot.samples.get(_serving(c), ()),
        c.spec.kv_cache.pressure,
        c.now,
        was_bound=was_pressured(c),
        calm_seconds=c.spec.scaling.scale_down_stabilization_seconds,
        step_tokens=step_tokens(c.spec, c.snapshot.node),
        objectives=c.spec.scaling.objectives,
    )
    return replace(c, workload=workload)


def keep_replicas(c: Context) -> Context:
    """Set the target replicas by the spec and the last decision, before the policy chooses a step."""
    return c.set(scaling=scaling.kept(c.spec, c.status.scaling, c.now))


def weigh_steps(c: Context) -> Context:
    """Let the policy choose the next step."""
    return replace(c, policy=choose_step(policy_input(c)))


def weigh_nothing(c: Context) -> Context:
    """Choose to change nothing, because `weigh_steps` raised an error."""
    return replace(c, policy=nothing_weighed(serving_dtype(c), c.replicas, c.status.scaling.saturations))


def take_replica_step(c: Context) -> Context:
    """Set the target replicas to those of the chosen step, or write them as a recommendation."""
    return c.set(scaling=scaling.after_decision(c.spec, c.status.scaling, c.policy, serving_dtype(c), c.now))


def policy_input(c: Context) -> PolicyInput:
    """Translate the context into the policy's input."""
    s, last, known = c.snapshot, c.status.last_trial, c.status.scaling
    sample = s.last_sample(_serving(c))
    trial, early = c.canary, (Stage.STARTING, Stage.PROBING, Stage.ROLLING_BACK)
    # A surge may abort a canary that was started to free memory and has no traffic yet.
    yields = trial is not None and trial.dtype != trial.from_dtype and trial.stage in early
    yields = yields and c.spec.kv_cache.mode == "Auto" and not c.spec.rollout.paused
    yields = yields and trial is not None and trial.reason != Reason.ACCURACY_DRIFTED
    busy, closed, stable = None, None, c.stable
    if trial is not None:
        busy = f"{trial.dtype} is on trial"
    elif stable is None or not stable.ever_ready:
        busy = "the first engines are starting"
    elif _serving(c) != stable.revision:
        busy = "traffic is moving to another revision"
    if c.spec.rollout.paused:
        closed = "spec.rollout.paused is set"
    elif stable is not None and c.render(stable.dtype).name != stable.revision:
        # A canary with two changes could not show which of them fails, so the spec's change goes first.
        closed = "the change of the spec is rolled out first"
    elif (fault := start_fault(c)) is not None:
        closed = fault.message
    undone = last is not None and last.verdict != Verdict.PASSED and last.reason != Reason.SUPERSEDED
    return PolicyInput(
        now=c.now,
        spec=c.spec,
        workload=c.workload,
        dtype=serving_dtype(c),
        replicas=c.replicas,
        ready=len(s.ready_pods(_serving(c))),
        node=s.node,
        model=s.model,
        recent_tokens=sample.recent_tokens or 0 if sample is not None else 0,
        denied=c.status.kv_cache.denied,
        history=c.status.history,
        saturations=known.saturations,
        dtype_changed=c.status.kv_cache.changed_time,
        replicas_changed=known.changed_time,
        scale_in_backoff=known.scale_in_backoff,
        rolled_back=last.time if last is not None and undone else None,
        busy=busy,
        yields=yields,
        no_canary=closed,
    )


def serving_dtype(c: Context) -> str:
    """Return the serving dtype, or the baseline dtype if the service has no stable revision yet."""
    return c.stable.dtype if c.stable is not None else c.spec.kv_cache.baseline


def was_pressured(draft: Draft) -> bool:
    """Return True if the last reconcile found memory pressure."""
    before = draft.before.condition(ConditionType.MEMORY_PRESSURED)
    return before is not None and before.status == "True"


def _serving(c: Context) -> str:
    return c.snapshot.traffic or (c.stable.revision if c.stable is not None else "")
