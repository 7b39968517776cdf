"""The form of times, in messages and objects alike."""

from __future__ import annotations

from datetime import datetime


def utc(moment: datetime) -> str:
    """Kubernetes' form of a time: RFC 3339, whole seconds, UTC; the moment is of that zone."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
