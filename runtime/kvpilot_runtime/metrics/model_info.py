"""Report the model's architecture to the operator, by a gauge on the engine's /metrics.

kvpilot-serve reads the model's config before its process becomes vLLM, and passes the architecture on in an environment
variable. The plugin publishes it as ``kvpilot_model_info{head_dim,kv_heads,layers,window_layers,mla} 1``.
"""

import json
import os

from kvpilot_formats.models import Architecture

VARIABLE = "KVPILOT_MODEL_INFO"
"""Environment variable with the gauge's labels in JSON, which kvpilot-serve sets for vLLM."""

NAME = "kvpilot_model_info"
_LABELS = ("head_dim", "kv_heads", "layers", "window_layers", "mla")


def encode(config: Architecture) -> str:
    """Return the variable's value: the gauge's labels in JSON.

    `kv_heads` counts the heads of the whole model, not of one rank. `layers` counts layers with their own KV cache.
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
    """Register the gauge in this process's Prometheus registry, if the variable is set. Return True if it was new.

    vLLM serves the registry of its API server. With several API servers, all processes write metrics to a folder, and
    the gauge's mode "mostrecent" merges their equal series.
    """
    from prometheus_client import REGISTRY, Gauge

    text = os.environ.get(VARIABLE)
    if not text or NAME in REGISTRY._names_to_collectors:
        return False
    found = json.loads(text)
    values = [str(found[label]).lower() for label in _LABELS]
    gauge = Gauge(NAME, "Architecture of the served model.", _LABELS, multiprocess_mode="mostrecent")
    gauge.labels(*values).set(1)
    return True
