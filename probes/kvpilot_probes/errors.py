"""Errors that a probe raises on purpose. Each message names the subject, the value and the remedy."""

from kvpilot_formats.untrusted import KvpilotError


class ProbeError(KvpilotError):
    """Base class of the errors that end a probe without a measurement."""


class PackError(ProbeError):
    """Error for a probe pack that cannot be used."""


class PackTooLarge(PackError):
    """Error for a pack with more prompts or text than a probe may have."""


class NothingFits(PackError):
    """Error if one of the user's own prompts, or every prompt, is too long for the model's context."""


class EngineUnreachable(ProbeError):
    """Error for a failed connection to the engine. A retry failed too, unless tokens had already arrived."""


class EngineRefused(ProbeError):
    """Error for an engine that answers with an HTTP error."""

    def __init__(self, url: str, status: int, excerpt: str) -> None:
        super().__init__(f"{url}: HTTP {status}: {excerpt or '(no body)'}; see the engine's log")
        self.status = status
        self.excerpt = excerpt


class MalformedAnswer(ProbeError):
    """Error for an answer that does not follow the engine's API."""


class EnginesDiffer(ProbeError):
    """Error if the candidate's tokenizer or context differs from the baseline's, so that answers cannot be compared."""


class ContextNotHeld(ProbeError):
    """Error for an engine that fails at a prompt that fills its context, or while such prompts fill its KV cache."""


class ProbeTimeout(ProbeError):
    """Error for a probe whose deadline passes before it has measured every prompt."""


class BaselineUnfit(ProbeError):
    """Error for a 16-bit engine that answers nonsense, so that its answers cannot be the baseline."""


class BaselineTooLarge(ProbeError):
    """Error for a baseline that would not fit in a ConfigMap."""


class MalformedBaseline(ProbeError):
    """Error for stored bytes that are not a baseline of this version."""
