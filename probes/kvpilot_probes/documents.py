"""Make long prompts with an exact number of tokens, from short chats that the engine's own chat template renders.

A *chapter* is a piece of text or a few turns. The engine renders the chat once without a chapter, and once with each
chapter. Each chapter adds some tokens, which are then joined. So the answers of /tokenize stay small even for a prompt
of 131,072 tokens, and a prompt can have any length.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvpilot_probes.answers import Tokenized
from kvpilot_probes.client import EngineClient
from kvpilot_probes.errors import PackError
from kvpilot_probes.joined import Joined, shared
from kvpilot_probes.packs import Message

Chapter = TypeVar("Chapter")

# Give up after this many chapters that add no tokens: a broken tokenizer would never fill a prompt.
_MOST_EMPTY = 8


class Document(Generic[Chapter]):
    """Token ids of a chat that grows by chapters.

    - `chat`: function that returns the messages of a chat with a given chapter (or None) and a given question.
    - `tokens`: token ids so far, without the question.
    - `read`: number of chapters so far.
    - `ends`: number of tokens up to the end of each chapter.
    """

    def __init__(
        self,
        engine: EngineClient,
        chat: Callable[[Chapter | None, str], Sequence[Message]],
        chapters: Iterator[Chapter],
        tools: str = "",
    ) -> None:
        self._engine, self._chat, self._chapters, self._tools = engine, chat, chapters, tools
        self._bare: array[int] = array("I")
        self._head = 0
        self.tokens: array[int] = array("I")
        self.read: list[Chapter] = []
        self.ends: list[int] = []

    async def _rendered(self, chapter: Chapter | None, question: str) -> "array[int]":
        found: Tokenized = await self._engine.tokenize(self._chat(chapter, question), self._tools)
        return array("I", found.tokens)

    async def add(self, chapter: Chapter) -> None:
        """Append the tokens that this chapter adds to the chat."""
        if not self.tokens:
            self._bare = await self._rendered(None, "~")
        with_chapter = await self._rendered(chapter, "~")
        if not self.tokens:
            self._head = shared(self._bare, with_chapter)
            self.tokens.extend(self._bare[: self._head])
        # The common head and tail of both renderings may not overlap, even if the chapter repeats text of the head.
        longest = min(len(self._bare), len(with_chapter)) - self._head
        tail = shared(self._bare[::-1], with_chapter[::-1][: max(longest, 0)])
        self.tokens.extend(with_chapter[self._head : len(with_chapter) - tail])
        self.read.append(chapter)
        self.ends.append(len(self.tokens))

    async def grow(self, length: int) -> None:
        """Add chapters until there are `length` tokens. Raise `PackError` if chapters add no tokens."""
        empty = 0
        while len(self.tokens) < length:
            before = len(self.tokens)
            await self.add(next(self._chapters))
            empty = empty + 1 if len(self.tokens) == before else 0
            if empty > _MOST_EMPTY:
                raise PackError(
                    f"{self._engine.base_url}: the tokens of a chat do not change with its text; check the model's "
                    "tokenizer and its chat template"
                )

    async def tail(self, question: str) -> "array[int]":
        """Return the tokens that end the chat with the question `question`."""
        return (await self._rendered(None, question))[self._head :]

    async def cut(self, length: int, tail: Sequence[int], skipped: int = 0) -> Sequence[int] | None:
        """Return a prompt of exactly `length` tokens that ends with `tail`, or None if no text would fit.

        Leave out the first `skipped` tokens of the chapters, so that prompts do not share a prefix.
        """
        size = length - len(tail)
        await self.grow(size + skipped)
        if size <= self._head:
            return None
        if not skipped:
            return Joined(self.tokens, size, tail)
        return self.tokens[: self._head] + self.tokens[self._head + skipped : size + skipped] + array("I", tail)

    def end_at(self, size: int) -> None:
        """Drop all tokens after the first `size`, but never those that begin the chat."""
        del self.tokens[max(size, self._head) :]
