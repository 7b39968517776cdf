"""A span, and who makes it. These record nothing; those of `otlp` do, and are used in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

Attributes = Mapping[str, str | int | Sequence[str]]
"""By the names of docs/observability.md. Never what users or engines wrote: no prompt, no answer, no error's text."""


class Span:
    """What is done in its `with`, in which other spans are its children; it hears of the exception that ends it."""

    __slots__ = ()

    def tell(self, attributes: Attributes) -> None:
        """Say more of it."""

    def headers(self) -> dict[str, str]:
        """The headers by which a server's spans become its children: W3C's `traceparent` and `tracestate`."""
        return {}

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


NOTHING = Span()


class Tracer:
    """Makes spans."""

    def span(self, name: str, attributes: Attributes, *, root: bool = False) -> Span:
        """A span that begins now, a child of the one around it; with `root` it begins a trace."""
        return NOTHING

    async def close(self) -> None:
        """Send what was not sent yet, within some seconds."""
