"""Ask vLLM for the layers of a model of unknown type. A separate process builds them without loading weights."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpilot_formats.models import Architecture, Group, Kind
from kvpilot_runtime.preflight.request import Request

DEADLINE = 600
"""Time limit in seconds. Importing vLLM and building a model without weights takes about 20 s on idle cores."""

_KINDS = {"FullAttentionSpec": Kind.FULL, "MLAAttentionSpec": Kind.FULL, "SlidingWindowSpec": Kind.WINDOW,
          "ChunkedLocalAttentionSpec": Kind.CHUNKED, "MambaSpec": Kind.STATE}  # fmt: skip


def ask(request: Request) -> tuple[Mapping[str, Any] | None, str]:
    """Return the result of `cache_specs.specs` and an empty string, or None and the reason if vLLM fails."""
    revision = [f"--revision={request.revision}"] if request.revision else []
    asked = [f"--model={request.model}", *revision, *request.others]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V1": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvpilot_runtime.vllm_api.cache_specs", *asked], capture_output=True,
            text=True, timeout=DEADLINE, check=False, env={**os.environ, **quiet},
        )  # fmt: skip
        if done.returncode:
            return None, " ".join((done.stderr.strip().splitlines() or ["it ended without a word"])[-1].split())[:200]
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}"
    return (found, "") if isinstance(found, dict) else (None, "its answer cannot be read")


def as_built(config: Architecture, found: Mapping[str, Any]) -> Architecture:
    """Return the architecture, with the layers that vLLM reported instead of those from config.json."""
    groups: list[Group] = []
    counts = dict.fromkeys(Kind, 0)
    latents = {key for spec, _, key, *_ in found["groups"] if spec == "MLAAttentionSpec"}
    for spec, kv_heads, key, value, window, _, layers in found["groups"]:
        kind = _KINDS.get(spec, Kind.OTHER) if len(latents) < 2 else Kind.OTHER
        counts[kind] += layers
        if kind in (Kind.FULL, Kind.WINDOW, Kind.CHUNKED):
            groups.append(Group(kind, layers, kv_heads, key, value, window))
    order = (Kind.FULL, Kind.WINDOW, Kind.CHUNKED)
    return replace(
        config,
        groups=tuple(sorted(groups, key=lambda group: (order.index(group.kind), -group.layers))),
        state_layers=counts[Kind.STATE],
        shared_layers=int(found["shared"]),
        other_layers=counts[Kind.OTHER],
        latent=next(iter(latents), 0) if len(latents) == 1 else 0,
        encoder_decoder=config.encoder_decoder or any(spec == "CrossAttentionSpec" for spec, *_ in found["groups"]),
        doubt="",
    )
