"""Denials: dtypes that are not tried for a while, with one model, image, GPU and recent window."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.steps.ladder import about
from kvpilot_operator.state.status import MAX_DENIED, Denied, clip
from kvpilot_operator.times import utc


def deny(c: Context, dtype: str, reason: str, message: str, seconds: int) -> Context:
    """Keep a dtype from being tried so long with this model, image, GPU and recent window; 0 seconds deny nothing."""
    if seconds == 0:
        return c
    denied = Denied(
        dtype=dtype,
        model=c.spec.model.source,
        image=c.spec.engine.image,
        gpu=c.snapshot.node.gpu,
        recent_tokens=c.spec.kv_cache.recent_tokens_of(dtype),
        reason=reason,
        message=clip(message, 512),
        until=c.now + timedelta(seconds=seconds),
    )
    kept = [one for one in c.status.kv_cache.denied if one.until > c.now and about(one) != about(denied)]
    text = f"{dtype} is denied for this model, image and GPU ({denied.gpu}) until {utc(denied.until)}"
    return c.set_kv(denied=(denied, *kept)[:MAX_DENIED]).event("DtypeDenied", text, warning=True)
