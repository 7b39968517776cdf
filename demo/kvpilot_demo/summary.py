"""Summary of the demo, for readers who have not read the docs."""

from typing import Any

from kvpilot_demo.story import BAD, GOOD, Record, Size


def summary(record: Record, limit: int, size: Size | None = None) -> list[tuple[str, str]]:
    """Return the lines of the summary, each as (title, text). `limit` is the allowed KL divergence in nats x 1000."""
    good, bad, users = record.good_probe, record.bad_probe, (size or Size()).users
    return [
        ("Problem", f"With 16 bits the KV cache held {record.capacity_before:,} tokens. {users} users filled it."),
        (
            "Change",
            f"kvpilot started an engine with {GOOD} (4 bits) and compared its answers with the 16-bit ones: "
            f"{_damage(good, limit)}. It passed, and took over.",
        ),
        (
            "Gain",
            f"The same memory holds {record.capacity_after:,} tokens, {record.capacity_ratio:.1f} times as many. "
            f"{record.requests} requests ran during the change, {record.failed_requests} failed.",
        ),
        (
            "Mistake",
            f"You asked for {BAD} (2 bits) without its recent window. The engine started and looked healthy.",
        ),
        (
            "Caught",
            f"Its answers differed too much: {_damage(bad, limit)}. "
            f"{'It had' if record.canary_had_traffic else 'It never got'} a user's request. "
            f"{record.final_dtype} kept serving.",
        ),
        *(("Compare", part.strip()) for part in record.bad_answers.split(" | ")),
    ]


def figures(record: Record) -> list[tuple[str, str]]:
    """Return the measurements as lines (title, text). After a failure, return those made so far."""
    lines = [("Step", f"{seconds:6.1f} s  {title}") for title, seconds in record.seconds.items()]
    lines += [("Stage", f"{seconds:6.1f} s  {stage}") for stage, seconds in record.stages.items()]
    lines += [("Trial", f"{dtype}: {seconds:.0f} GPU-seconds") for dtype, seconds in record.trial_seconds.items()]
    for title, users in record.users.items():
        ttft, itl = ("/".join(f"{ms:.0f}" for ms in users[name].values()) for name in ("ttftMs", "itlMs"))
        counts = f"{users['ok']} answered, {users['failed']} failed"
        lines.append(("Users", f"{title}: {counts}, TTFT p50/p95/p99 {ttft} ms, ITL {itl} ms"))
    tokens = f"{record.capacity_before:,} tokens before, {record.capacity_after:,} after"
    return [*lines, ("Capacity", tokens), ("Requests", f"{record.requests}, {record.failed_requests} failed")]


def _damage(probe: dict[str, Any], limit: int) -> str:
    return (
        f"damage {probe['excessKLMicronats'] / 1000:.1f} of {limit} allowed (KL divergence, nats x 1000), "
        f"{probe['top1AgreementPermille'] / 10:.0f}% of the words agree"
    )
