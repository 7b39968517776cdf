"""Which key is in which place of a file of a fixed number of places; the least recently used one makes room.

Pure bookkeeping of one thread. A place that a transfer still uses is never given away, also not where the transfer was
given up: whoever was to read or write it may yet do so.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False)
class Held:
    """What one place holds.

    Attributes:
        place: its number. checksum: of its bytes, None until they are written. users: transfers that are not over.
        gone: nobody finds it any more, and its place is free once it has no users.
    """

    key: bytes
    place: int
    checksum: int | None = None
    users: int = 0
    gone: bool = False


class DiskIndex:
    """Of a file with so many `places`."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # the least recently used first
        self._free = list(range(places - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Whether a key has a place, be it that its bytes are still to be written."""
        return key in self._held

    def ready(self, key: bytes) -> bool:
        """Whether a key's bytes can be read; if so it is the most recently used one."""
        held = self._held.get(key)
        if held is None or held.checksum is None:
            return False
        self._held.move_to_end(key)
        return True

    def to_store(self, key: bytes) -> Held | None:
        """A place to write a new key's bytes to; None where transfers use all of them."""
        if not self._free:
            idle = next((held for held in self._held.values() if not held.users), None)
            if idle is None:
                return None
            self.drop(idle)
        held = self._held[key] = Held(key, self._free.pop(), users=1)
        return held

    def to_load(self, key: bytes) -> Held | None:
        """The place to read a key's bytes from; None where they are not, or no longer, there."""
        if not self.ready(key):
            return None
        held = self._held[key]
        held.users += 1
        return held

    def stored(self, held: Held, checksum: int | None) -> None:
        """A write is over; without a checksum it failed."""
        held.checksum = checksum
        if checksum is None:
            self.drop(held)
        self._release(held)

    def loaded(self, held: Held, *, good: bool) -> None:
        """A read is over; what was not as it had been written is dropped."""
        if not good:
            self.drop(held)
        self._release(held)

    def drop(self, held: Held) -> None:
        """Forget what a place holds."""
        if held.gone:
            return
        held.gone = True
        del self._held[held.key]
        if not held.users:
            self._free.append(held.place)

    def clear(self) -> None:
        """Forget everything."""
        for held in list(self._held.values()):
            self.drop(held)

    def _release(self, held: Held) -> None:
        held.users -= 1
        if held.gone and not held.users:
            self._free.append(held.place)
