"""Do all engines of a revision quantize alike? Those with other calibration factors give other answers."""

from __future__ import annotations

from kvpilot_operator.state.snapshot import Snapshot


def mixed(s: Snapshot, revision: str) -> str | None:
    """Which of a revision's pods have other factors than most of them, with the remedy; None where none has.

    Within a revision, model, text, context and tensor parallelism are the same, and so are the factors on one kind of
    GPU (docs/calibration.md). Accuracy is measured on one pod, and holds for those with its factors.
    """
    sample = s.last_sample(revision)
    if sample is None:
        return None
    there = {pod.name for pod in s.pods_of(revision)}
    others = [f"{pod} has {factors}" for pod, factors in sample.mixed if pod in there]
    if not others:
        return None
    return (
        f"the calibration factors of revision {revision} differ: {', '.join(others)}, where others have "
        f"{sample.factors}. Delete these pods if the model's files have changed meanwhile, keep all engines on one "
        "kind of GPU (spec.engine.nodeSelector), or give them one file (KVPILOT_CALIBRATION in spec.engine.env)"
    )
