"""The runtime's exceptions: every refusal names what was asked, why it cannot be, and what to do instead.

RuntimeRefusal
├── UnsupportedEngineError    this vLLM version is not one that the plugin knows
└── UnsupportedModelError     the model, or an engine option, needs something that our backend lacks
"""


class RuntimeRefusal(ValueError):  # noqa: N818 - a refusal is what it is, and what users see
    """The engine cannot be started as asked."""


class UnsupportedEngineError(RuntimeRefusal):
    """The installed vLLM is not a version that kvpilot works with."""


class UnsupportedModelError(RuntimeRefusal):
    """A layer or an option of the engine is outside what kvpilot's KV-cache dtypes support."""
