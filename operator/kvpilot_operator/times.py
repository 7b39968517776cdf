"""Format times for messages and for Kubernetes objects."""

from datetime import datetime


def utc(moment: datetime) -> str:
    """Format a UTC time as Kubernetes does: RFC 3339, in whole seconds."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
