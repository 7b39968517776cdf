"""From a Snapshot to the Situation that the arbiter judges."""

from __future__ import annotations

from itertools import pairwise

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.judging.gpus import by_product
from kvpilot_operator.decide.judging.situation import Situation
from kvpilot_operator.decide.judging.workload import Workload
from kvpilot_operator.decide.target import Target, render
from kvpilot_operator.decide.trial.rollout import start_fault
from kvpilot_operator.state.snapshot import NodeFacts, Snapshot
from kvpilot_operator.state.status import Scaling

# vLLM's default budget of a step goes by the GPU's memory (EngineArgs.get_batch_defaults).
_LARGEST_MIB, _LARGE_MIB = 160 * 1024, 70 * 1024
_ANY_STEP = Target("", "", None, "DtypeStep", "a change of dtype, whichever")


def situation_of(s: Snapshot, spec: Spec, workload: Workload, scaling: Scaling, replicas: int) -> Situation:
    """The service as the arbiter sees it; `scaling` and `replicas` are what is kept up before the ruling."""
    stable = s.status.stable
    serving = s.traffic or (stable.revision if stable is not None else "")
    last = s.status.last_canary
    undone = last is not None and last.stage == "RolledBack" and last.reason != "Superseded"
    return Situation(
        now=s.now,
        spec=spec,
        workload=workload,
        dtype=stable.dtype if stable is not None else spec.kv_cache.baseline,
        replicas=replicas,
        ready=len(s.ready_pods(serving)),
        node=s.node,
        model=s.model,
        denied=s.status.kv_cache.denied,
        history=s.status.history,
        saturations=scaling.saturations,
        dtype_changed=s.status.kv_cache.changed_time,
        replicas_changed=scaling.changed_time,
        regret=scaling.regret,
        rolled_back=last.stage_time if last is not None and undone else None,
        busy=_busy(s, serving),
        no_canary=_no_canary(s, spec, replicas),
    )


def step_tokens(spec: Spec, node: NodeFacts) -> int:
    """The engine's max_num_batched_tokens: from spec.engine.extraArgs, else vLLM 0.32's default for a server there."""
    arguments = [word for arg in spec.engine.extra_args for word in arg.split("=", 1)]
    for name, value in pairwise(arguments):
        if name == "--max-num-batched-tokens" and value.isdigit() and int(value) > 0:
            return int(value)
    gpu = by_product(node.gpu)
    memory = node.memory_mib or (gpu.memory_mib if gpu is not None else 0)
    if memory >= _LARGEST_MIB:
        return 16_384
    return 8192 if memory >= _LARGE_MIB and "a100" not in node.gpu.lower() else 2048


def _busy(s: Snapshot, serving: str) -> str | None:
    stable, canary = s.status.stable, s.status.canary
    if canary is not None:
        return f"{canary.dtype} is on trial"
    if stable is None or not stable.ever_ready:
        return "the first engines are starting"
    if serving != stable.revision:
        return "traffic is moving to another revision"
    return None


def _no_canary(s: Snapshot, spec: Spec, replicas: int) -> str | None:
    """Why no dtype change may begin. A canary with two changes at once could not say which of them did the damage."""
    stable = s.status.stable
    if spec.rollout.paused:
        return "spec.rollout.paused is set"
    if s.probes.fault is not None:
        return f"the probe sets cannot be used: {s.probes.fault}"
    if stable is not None and render(s, spec, stable.dtype)[0] != stable.revision:
        return "the change of the spec is rolled out first"
    fault = start_fault(s, spec, _ANY_STEP, replicas)
    return None if fault is None else fault.message
