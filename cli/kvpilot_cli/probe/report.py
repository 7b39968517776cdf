"""Report of a comparison: a table for people, and JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvpilot_cli.probe.compare import Comparison
from kvpilot_cli.text_tables import render
from kvpilot_operator.api.rollout import Accuracy
from kvpilot_probes.stats import Measurement

_BAR = 24


def document(found: Comparison, limits: Accuracy, urls: tuple[str, str]) -> dict[str, Any]:
    """Return the comparison as JSON values. KL divergence is in micronats, agreement in permille."""
    return {
        "verdict": found.judgement.verdict,
        "reason": found.judgement.reason,
        "message": found.judgement.message,
        "excess_kl_micronats": found.judgement.excess_kl_micronats,
        "limits": {
            "max_excess_kl_millinats": limits.max_excess_kl_millinats,
            "min_top1_agreement_percent": limits.min_top1_agreement_percent,
        },
        "baseline": {
            "url": urls[0],
            "model": found.models[0],
            "prompts": found.prompts,
            "positions": found.positions,
            "left_out": list(found.left_out),
        },
        "candidate": {"url": urls[1], "model": found.models[1]},
        "control": asdict(found.control),
        "measured": asdict(found.measured),
    }


def text(found: Comparison, urls: tuple[str, str]) -> str:
    """Return the figures of both engines, the KL divergence by position, and the verdict in the last line."""
    control, measured = found.control, found.measured
    rows = [
        ("", "baseline", "candidate"),
        ("mean KL, millinats", _milli(control.mean_kl_micronats), _milli(measured.mean_kl_micronats)),
        ("  standard error", _milli(control.stderr_kl_micronats), _milli(measured.stderr_kl_micronats)),
        ("p99 KL, millinats", _milli(control.p99_kl_micronats), _milli(measured.p99_kl_micronats)),
        ("same first choice", _percent(control), _percent(measured)),
        ("positions compared", f"{control.positions:,}", f"{measured.positions:,}"),
        ("requests", f"{control.requests:,}", f"{measured.requests:,}"),
        ("seconds", f"{control.milliseconds / 1000:.1f}", f"{measured.milliseconds / 1000:.1f}"),
        *(
            (f"solved of {t.asked}: {t.bucket}", f"{t.baseline_solved}", f"{t.candidate_solved}")
            for t in measured.tasks
        ),
    ]
    head = [
        f"baseline   {found.models[0]} at {urls[0]}: {found.positions:,} positions of {found.prompts} prompts",
        f"candidate  {found.models[1]} at {urls[1]}",
    ]
    if found.left_out:
        head.append(f"left out, longer than the context: {', '.join(found.left_out)}")
    parts = ["\n".join(head), _columns(rows), _by_position(measured), _sample(found)]
    judgement = found.judgement
    return "\n\n".join([*filter(None, parts), f"{judgement.verdict}: {judgement.reason}: {judgement.message}"])


def _by_position(measured: Measurement) -> str:
    """Return the KL divergence by context position as text, because a mean would hide damage in long contexts."""
    most = max((b.mean_kl_micronats for b in measured.buckets), default=0)
    rows = [("tokens before", "positions", "mean KL", "same choice", "")]
    for b in measured.buckets:
        bar = "#" * round(_BAR * b.mean_kl_micronats / most) if most else ""
        share = f"{b.top1_agreement_permille / 10:.1f}%"
        span = f"{b.from_position:,}-{b.to_position:,}"
        rows.append((span, f"{b.positions:,}", _milli(b.mean_kl_micronats), share, bar))
    return _columns(rows) if measured.buckets else ""


def _sample(found: Comparison) -> str:
    sample = found.measured.sample
    if sample is None or sample.stable == sample.canary:
        return ""
    said = (("prompt", f"...{sample.prompt[-160:]}"), ("baseline", sample.stable), ("candidate", sample.canary))
    return "\n".join(
        ["the prompt that suffered most:", *(f"  {who:<10}{' '.join(what.split())}" for who, what in said)]
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    last = len(rows[0]) - 1
    return render(rows[0], rows[1:], left=(0, last) if last > 3 else (0,))


def _milli(micronats: int) -> str:
    return f"{micronats / 1000:,.1f}"


def _percent(found: Measurement) -> str:
    return f"{found.top1_agreement_permille / 10:.1f}%"
