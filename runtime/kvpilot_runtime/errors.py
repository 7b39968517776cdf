"""Exceptions of the runtime. Each message names the request, the fault and the remedy.

EngineRefusedError
├── UnsupportedEngineError    vLLM is absent, or lacks a part that the plugin uses
├── UnsupportedModelError     the model, or an engine option, needs something that our backend lacks
└── PreflightError            kvpilot-serve refuses; the operator reports the error's `reason`
"""

import json
import sys
from typing import Literal

from kvpilot_formats.untrusted import shown

Reason = Literal["ModelNotFound", "ModelUnsupported", "DtypeUnsupported", "DoesNotFit", "BadArguments"]


class EngineRefusedError(ValueError):
    """Refusal to start an engine with the requested settings."""


class UnsupportedEngineError(EngineRefusedError):
    """Refusal because vLLM is absent, is too old, or lacks a part that the message names."""


class UnsupportedModelError(EngineRefusedError):
    """Refusal of a layer or an option that kvpilot's KV-cache dtypes do not support."""


class PreflightError(EngineRefusedError):
    """Refusal of a request to `kvpilot-serve`, with `reason` and `message`.

    The message may quote the hub, a file or an address. So unprintable characters and credentials are removed from it.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason: Reason = reason
        self.message = shown(message)
        super().__init__(self.message)


def tell(kind: Literal["refused", "warning"], reason: str, message: str) -> None:
    """Print a refusal or warning (`kind`) as a JSON line on stderr, without credentials or unprintable characters."""
    print(json.dumps({"kvpilot": kind, "reason": reason, "message": shown(message)}), file=sys.stderr, flush=True)
