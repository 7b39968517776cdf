"""The runtime's exceptions: each names what was asked, why it cannot be, and what to do instead.

EngineRefusedError
├── UnsupportedEngineError    this vLLM is absent, or lacks something that the plugin stands on
├── UnsupportedModelError     the model, or an engine option, needs something that our backend lacks
└── PreflightError            kvpilot-serve or kvpilot-prefetch refuses; it carries the reason that the operator reports
"""

from __future__ import annotations

from typing import Literal

from kvpilot_formats.untrusted import shown

Reason = Literal[
    "ModelNotFound", "ModelUnsupported", "DtypeUnsupported", "DoesNotFit", "BadArguments", "VolumeFull",
    "VolumeNotWritable", "HubUnreachable",
]  # fmt: skip


class EngineRefusedError(ValueError):
    """The engine cannot be started as asked."""


class UnsupportedEngineError(EngineRefusedError):
    """vLLM is not installed, or something of it that kvpilot uses is not as it should be; the message names it."""


class UnsupportedModelError(EngineRefusedError):
    """A layer or an option of the engine is outside what kvpilot's KV-cache dtypes support."""


class PreflightError(EngineRefusedError):
    """A request to `kvpilot-serve` or `kvpilot-prefetch` that cannot work. Attributes: `reason`, `message`.

    The message may quote the hub, a file or an address: it is printable and has no credentials.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason: Reason = reason
        self.message = shown(message)
        super().__init__(self.message)
