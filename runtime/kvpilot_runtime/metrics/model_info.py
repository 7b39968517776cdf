"""What the operator must know of a model's architecture, published on the engine's own /metrics.

kvpilot-serve has read the model's config when it becomes vLLM; an environment variable carries what it found across,
and the plugin makes of it the gauge ``kvpilot_model_info{head_dim,kv_heads,layers,window_layers,mla} 1``.
"""

from __future__ import annotations

import json
import logging
import os

from kvpilot_formats.models import Architecture

VARIABLE = "KVPILOT_MODEL_INFO"
"""The environment variable; set by kvpilot-serve for the process that it becomes, and only there."""

NAME = "kvpilot_model_info"
_LABELS = ("head_dim", "kv_heads", "layers", "window_layers", "mla")

log = logging.getLogger(__name__)


def encode(config: Architecture) -> str:
    """The variable's value: a JSON object of the gauge's labels. Heads and layers count the whole model, not a rank.

    Layers are those with a KV cache of their own.
    """
    labels = {
        "head_dim": config.head_dim,
        "kv_heads": config.kv_heads,
        "layers": config.layers,
        "window_layers": config.window_layers,
        "mla": bool(config.latent),
    }
    return json.dumps(labels)


def publish() -> bool:
    """Register the gauge with this process's Prometheus registry; once, and only where the variable is set.

    vLLM serves the registry of its API server. With several API servers it serves what all processes wrote to a
    folder: there "mostrecent" makes one series of the same line from each. A value that cannot be read is logged and
    costs the gauge, never the engine.
    """
    from prometheus_client import REGISTRY, Gauge

    text = os.environ.get(VARIABLE)
    if not text or NAME in REGISTRY._names_to_collectors:
        return False
    try:
        found = json.loads(text)
        values = [str(found[label]).lower() for label in _LABELS]
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is %r and not a model's description (%s): no %s on /metrics", VARIABLE, text, error, NAME)
        return False
    gauge = Gauge(NAME, "The architecture of the model that is served.", _LABELS, multiprocess_mode="mostrecent")
    gauge.labels(*values).set(1)
    return True
