"""Find arguments of kvpilot-serve that our dtypes do not support, by the rules of `kvpilot_formats.arguments`."""

from collections.abc import Mapping, Sequence

from kvpilot_formats import arguments as vllm
from kvpilot_formats.arguments import rules
from kvpilot_formats.arguments.rules import OFFLOAD, TRANSFER
from kvpilot_runtime.config import connectors

__all__ = ["OFFLOAD", "TRANSFER"]

SERVE = "KVPILOT_SERVE"
"""Environment variable that `kvpilot-serve` sets for its engine, whatever the dtype.

With this variable, an engine loads pages through its KV connector if a request asks for it
(`offload.FROM_CONNECTOR`), and finishes waiting requests when it drains.
"""
WORKSPACE_SHARE = 200
"""Divisor: an engine uses 1/200 of its GPU memory as the workspace into which prefill dequantizes contexts."""
SLIDING = "sliding_window"
"""Value of `--kv-cache-dtype-skip-layers` that keeps all layers with a sliding window in 16 bits."""


def refused(arguments: Sequence[str], environment: Mapping[str, str], device: str) -> tuple[str, str] | None:
    """Return the first option or variable that our dtypes do not support, and the feature's name, or None.

    Args:
        device: `cuda` or `cpu`.
    """
    found = vllm.read(arguments)
    if (what := rules.beside_ours(found, environment)) is not None:
        return what
    if (moves := found.mapping(TRANSFER)) and (unfit := connectors.unsupported(moves, device)) is not None:
        return TRANSFER, unfit
    if moves and (apart := connectors.misplaced(str(moves["kv_connector"]), environment.get(connectors.LAYOUT))):
        return connectors.LAYOUT, apart
    return None
