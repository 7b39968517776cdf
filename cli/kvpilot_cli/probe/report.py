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
        "covered": found.judgement.covered,
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
    """Return the figures of both engines, the KL divergence by bucket, and the verdict in the last line."""
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
        head.append(f"left out, longer than the context or for the named reason: {', '.join(found.left_out)}")
    judgement = found.judgement
    if judgement.covered:
        head.append(f"covered    {judgement.covered}")
    parts = ["\n".join(head), _columns(rows), _by_bucket(measured), _sample(found)]
    return "\n\n".join([*filter(None, parts), f"{judgement.verdict}: {judgement.reason}: {judgement.message}"])


def _by_bucket(measured: Measurement) -> str:
    """Return the KL divergence of each bucket as text, because a mean would hide damage to one kind of prompts."""
    rows = [("bucket", "prompts", "mean KL", "same choice", "")]
    seen = {name: [one for one in measured.seen if one.bucket == name] for name in measured.planned}
    means = {name: sum(one.kl for one in found) / len(found) for name, found in seen.items() if found}
    for name, mean in means.items():
        found, bar = seen[name], "#" * round(_BAR * mean / (max(means.values()) or 1))
        share = f"{100 - 100 * sum(one.disagreement for one in found) / len(found):.1f}%"
        rows.append((name, f"{len(found):,}", f"{1000 * mean:,.1f}", share, bar))
    return _columns(rows) if means else ""


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
