"""KV blocks of one engine. Freed blocks stay as the cached prefix of a session until they are needed."""

from __future__ import annotations

from collections import OrderedDict


class Blocks:
    """A pool of `total` blocks. Kept prefixes are overwritten in order of age, their ends first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = total
        self._kept: OrderedDict[int, int] = OrderedDict()  # kept blocks by session, oldest first
        self._kept_sum = 0

    @property
    def available(self) -> int:
        """Return the number of blocks that no running request holds: empty blocks and kept prefixes."""
        return self._empty + self._kept_sum

    @property
    def used(self) -> int:
        """Return the number of blocks that running requests hold."""
        return self.total - self.available

    def take(self, count: int) -> None:
        """Take blocks, empty ones first. There must be enough."""
        while count > self._empty:
            session, kept = next(iter(self._kept.items()))
            given = min(kept, count - self._empty)
            self._kept_sum -= given
            self._empty += given
            if given == kept:
                del self._kept[session]
            else:
                self._kept[session] = kept - given
        self._empty -= count

    def give(self, count: int, session: int, keep: int) -> None:
        """Give blocks back and keep `keep` of them as the session's prefix, in place of an older copy."""
        self._empty += count - keep
        if keep:
            older = self._kept.pop(session, 0)
            self._empty += older
            self._kept_sum += keep - older
            self._kept[session] = keep

    def kept(self, session: int) -> int:
        """Return the number of blocks of the session's prefix."""
        return self._kept.get(session, 0)

    def reuse(self, session: int, count: int) -> None:
        """Take the first `count` blocks of the prefix, and empty the rest."""
        kept = self._kept.pop(session, 0)
        self._kept_sum -= kept
        self._empty += kept - count
