"""Errors that a probe raises on purpose. Each message names the subject, the value and the remedy."""

from kvpilot_formats.untrusted import KvpilotError


class ProbeError(KvpilotError):
    """Base of everything that ends a probe without a measurement."""


class PackError(ProbeError):
    """A probe pack that cannot be used."""


class PackTooLarge(PackError):
    """A pack with more prompts or text than a probe may have."""


class NothingFits(PackError):
    """The model's context cannot hold one of the user's own prompts, or cannot hold any prompt."""


class EngineUnreachable(ProbeError):
    """The connection to the engine failed. A retry failed too, unless tokens had already arrived."""


class EngineRefused(ProbeError):
    """The engine answered with an HTTP error."""

    def __init__(self, url: str, status: int, excerpt: str) -> None:
        super().__init__(f"{url}: HTTP {status}: {excerpt or '(no body)'}; see the engine's log")
        self.status = status
        self.excerpt = excerpt


class MalformedAnswer(ProbeError):
    """The engine's answer does not follow its API."""


class EnginesDiffer(ProbeError):
    """The candidate's tokenizer or its context differs from the baseline's, so their answers cannot be compared."""


class ContextNotHeld(ProbeError):
    """The engine failed at a prompt that fills the model's context, or while such prompts filled its KV cache."""


class ProbeTimeout(ProbeError):
    """The probe's deadline passed before every prompt was measured."""


class BaselineUnfit(ProbeError):
    """The 16-bit engine answers nonsense, so its answers cannot be the baseline."""


class BaselineTooLarge(ProbeError):
    """A baseline that would not fit in a ConfigMap."""


class MalformedBaseline(ProbeError):
    """Stored bytes that are not a baseline of this version."""
