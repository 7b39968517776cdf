"""Name the resource that limits a service, with the evidence, from the sums of a window of scrapes."""

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.api.words import WorkloadKind
from kvpilot_operator.decide.load.window import SPAN, Sums
from kvpilot_operator.state.samples import Spread

# Nine of ten scrapes must reach a threshold. One may stay below it, because a long request that ends frees its blocks.
SHARE = 0.9
# A service is idle if a replica has fewer running and fewer waiting requests than this, on average.
_IDLE_RUNNING = 0.1
# If prompt tokens fill this share of a step's token budget, they take more than 80% of the step's time, even with a
# full cache. So prompts are the limit: a larger cache would speed the engine up by at most 1.2x. (H200, Llama-3-8B: a
# step of 8,192 prompt tokens takes 240 ms, a step that only reads a full cache takes 32 ms.)
_FULL_STEP = 0.6
# A replica with at least this many preemptions a minute is short of memory.
_PREEMPTIONS = 1
STALLED = (
    "the engines have requests, but generate no token and finish no request: kvpilot changes nothing, and the engines' "
    "liveness probes decide about a restart"
)


def what_binds(
    seen: Sums, pressure: Pressure, was_bound: bool, step_tokens: int, thrown_out: str | None, spread: Spread | None
) -> tuple[WorkloadKind, str]:
    """Return the resource that limits the service, and the evidence in words and numbers.

    `thrown_out` is evidence that cached prefixes were evicted, or None. `spread` compares the fullest engine with all
    others, or is None. The other arguments are those of `classify`.
    """
    memory = (
        f"KV use {seen.usage * 100:.0f}% of {seen.capacity} tokens (limit {pressure.high_percent}%), "
        f"{seen.waiting:.1f} waiting, {seen.preemptions:.1f} preemptions a minute, over {seen.covered:.0f} s"
    )
    sustained = seen.covered >= SPAN * pressure.sustained_seconds
    queue = seen.waiting >= pressure.waiting_per_replica * seen.pods
    starved = queue or seen.preemptions >= _PREEMPTIONS
    full = seen.high >= SHARE * seen.count
    still = was_bound and seen.usage * 100 >= pressure.low_percent
    if sustained and seen.stands_still:
        return WorkloadKind.ENGINES_STALLED, f"{memory}; {STALLED}"
    if spread is not None and seen.uneven >= SHARE * seen.count:
        uneven = (
            f"{memory}; {spread.name} is {spread.usage * 100:.0f}% full and {spread.waiting:.0f} requests wait for it, "
            f"while {spread.roomy * 100:.0f}% of the engines are at most half as full and use is "
            f"{spread.mean * 100:.0f}% on average"
        )
        if not sustained:
            return WorkloadKind.WARMING, f"{uneven}: not sustained for {pressure.sustained_seconds} s yet"
        return WorkloadKind.IMBALANCED, f"{uneven}: uneven load, which neither a smaller dtype nor a replica cures"
    if starved and (full or still):
        if not sustained:
            return WorkloadKind.WARMING, f"{memory}: not sustained for {pressure.sustained_seconds} s yet"
        if thrown_out is not None:
            return WorkloadKind.MEMORY_BOUND, f"{memory}; {thrown_out}: KV memory is the limit"
        if seen.mostly_prompts or seen.prompt_tokens_per_step >= _FULL_STEP * step_tokens:
            text = f"{memory}; {_prompts(seen)}: more KV memory would not speed prompts up"
            return WorkloadKind.PREFILL_BOUND, text
        return WorkloadKind.MEMORY_BOUND, f"{memory}: KV memory is {'' if full else 'still '}the limit"
    if full:
        return WorkloadKind.RELAXED, f"{memory}: the cache is full, but no request waits for it"
    if starved and seen.usage * 100 >= pressure.high_percent:
        return WorkloadKind.WARMING, f"{memory}: the cache is full on average, but not in nine of ten scrapes"
    if queue and seen.queued >= SHARE * seen.count:
        if not sustained:
            return WorkloadKind.WARMING, f"{memory}: requests wait although pages are free, but not long enough yet"
        if seen.mostly_prompts or seen.always_prompts:
            return WorkloadKind.PREFILL_BOUND, f"{memory}; {_prompts(seen)}: prompts are the limit, not memory"
        batch = f"{seen.running / seen.pods:.1f} requests run on a replica"
        return WorkloadKind.COMPUTE_BOUND, f"{memory}; {batch}: the batch is the limit, not memory"
    if max(seen.running, seen.waiting) < _IDLE_RUNNING * seen.pods:
        return WorkloadKind.IDLE, f"{memory}: hardly any request runs"
    return WorkloadKind.RELAXED, f"{memory}: KV memory is not the limit"


def _prompts(seen: Sums) -> str:
    mean = f" of {seen.flows.prompt_tokens / seen.flows.finished:.0f} tokens" if seen.flows.finished else ""
    return (
        f"a replica computes {seen.prompts_in_hand:.1f} prompts{mean} at a time, and "
        f"{seen.prompt_tokens_per_step:.0f} prompt tokens in a step"
    )
