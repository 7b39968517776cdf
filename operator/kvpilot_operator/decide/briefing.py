"""From a Snapshot to the Situation that the arbiter judges."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
# What vLLM takes for a number of tokens: 8192, 8k (8,000), 8K (8,192), 2.5k.
_TOKENS = re.compile(r"([0-9]{1,12})(\.[0-9]{1,6})?([kKmMgGtT]?)")
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_TOKENS = 2**31 - 1
_ANY_STEP = Target("", "", None, "DtypeStep", "a change of dtype, whichever")


def situation_of(s: Snapshot, spec: Spec, workload: Workload, scaling: Scaling, replicas: int) -> Situation:
    """The service as the arbiter sees it; `scaling` and `replicas` are what is kept up before the ruling."""
    stable = s.status.stable
    serving = s.traffic or (stable.revision if stable is not None else "")
    last, sample = s.status.last_canary, s.last_sample(serving)
    undone = last is not None and last.stage == "RolledBack" and last.reason != "Superseded"
    return Situation(
        now=s.now,
        spec=spec,
        workload=workload,
        dtype=serving_dtype(s, spec),
        replicas=replicas,
        ready=len(s.ready_pods(serving)),
        node=s.node,
        model=s.model,
        recent_tokens=sample.recent_tokens or 0 if sample is not None else 0,
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


def serving_dtype(s: Snapshot, spec: Spec) -> str:
    """The dtype that serves, or the one that a service starts with."""
    return s.status.stable.dtype if s.status.stable is not None else spec.kv_cache.baseline


def step_tokens(spec: Spec, node: NodeFacts) -> int:
    """The engine's max_num_batched_tokens: from spec.engine.extraArgs, else vLLM 0.32's default for a server there."""
    asked = [_tokens(value) for value in _values(spec.engine.extra_args, "--max-num-batched-tokens", "--max-num-b")]
    if asked and asked[-1]:
        return asked[-1]
    gpu = by_product(node.gpu)
    memory = node.memory_mib or (gpu.memory_mib if gpu is not None else 0)
    if memory >= _LARGEST_MIB:
        return 16_384
    return 8192 if memory >= _LARGE_MIB and "a100" not in node.gpu.lower() else 2048


def _values(extra_args: Sequence[str], name: str, shortest: str) -> list[str]:
    """What an option is set to, in order: the last one counts. vLLM takes underscores and a beginning of the name."""
    words = [word for arg in extra_args for word in arg.split("=", 1)]
    options = ((word.replace("_", "-"), value) for word, value in pairwise(words))
    return [value for word, value in options if word.startswith(shortest) and name.startswith(word)]


def _tokens(text: str) -> int | None:
    """A number of tokens as vLLM reads it; None for what it would refuse, or could not use."""
    found = _TOKENS.fullmatch(text.strip())
    if found is None or (found[2] and found[3] not in ("k", "m", "g", "t")):
        return None
    tokens = int(float(found[1] + (found[2] or "")) * _TIMES[found[3]])
    return tokens if 0 < tokens <= _MAX_TOKENS else None


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
