"""Keep a dtype from being tried for a while, with this model, image, GPU and recent window."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging.ladder import about
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import MAX_DENIED, Denied, clip


def deny(draft: Draft, s: Snapshot, spec: Spec, dtype: str, reason: str, message: str, seconds: int) -> None:
    """Write the denial into the status and say so, in place of an older one of the same; 0 seconds deny nothing."""
    if seconds == 0:
        return
    entry = Denied(
        dtype=dtype,
        model=spec.model.source,
        image=spec.engine.image,
        gpu=s.node.gpu,
        recent_tokens=spec.kv_cache.recent_tokens_of(dtype),
        reason=reason,
        message=clip(message, 512),
        until=draft.now + timedelta(seconds=seconds),
    )
    kept = [d for d in draft.status.kv_cache.denied if d.until > draft.now and about(d) != about(entry)]
    draft.set_kv(denied=(entry, *kept)[:MAX_DENIED])
    draft.event(
        "DtypeDenied",
        f"{entry.dtype} is denied for this model, image and GPU ({entry.gpu}) until {entry.until:%Y-%m-%dT%H:%M:%SZ}",
        warning=True,
    )
