"""How many replicas?"""

from __future__ import annotations

from kvpilot_operator.api.spec import Spec


def desired_replicas(spec: Spec) -> int:
    """`spec.replicas` (what `/scale` writes) within the limits of `spec.scaling`."""
    return spec.scaling.clamp(spec.replicas)
