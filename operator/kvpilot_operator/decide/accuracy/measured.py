"""A measurement with its verdict, as the status keeps it."""

from __future__ import annotations

from kvpilot_operator.decide.accuracy.verdict import Judgement
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Bucket, Measured, Sample, clip

MAX_SAMPLE = 500


def measured(s: Snapshot, m: Measurement, judgement: Judgement, *, revision: str, dtype: str, pod: str) -> Measured:
    """What `status.accuracy.last` says of a probe run of this pod."""
    sample = m.sample
    return Measured(
        revision=revision,
        dtype=dtype,
        pod=pod,
        verdict=judgement.verdict,
        probe_time=s.now,
        prompts=m.prompts,
        positions=m.positions,
        mean_kl_micronats=m.mean_kl_micronats,
        p99_kl_micronats=m.p99_kl_micronats,
        excess_kl_micronats=judgement.excess_kl_micronats,
        top1_agreement_permille=m.top1_agreement_permille,
        buckets=tuple(
            Bucket(
                from_position=b.from_position,
                to_position=b.to_position,
                mean_kl_micronats=b.mean_kl_micronats,
                top1_agreement_permille=b.top1_agreement_permille,
            )
            for b in m.buckets
        ),
        sample=None
        if sample is None
        else Sample(
            prompt=clip(sample.prompt, MAX_SAMPLE),
            stable=clip(sample.stable, MAX_SAMPLE),
            canary=clip(sample.canary, MAX_SAMPLE),
        ),
    )
