"""Index of an LRU cache in a file: which key is at which of a fixed number of places.

Only one thread uses the index. A place stays taken until its transfers end, even if no job waits for them any more:
the disk may still read or write it.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False)
class Held:
    """One place (a fixed-size slot) of the file, and its content.

    Attributes:
        key: key of the content.
        place: number of the place.
        checksum: checksum of the bytes; None until they are written.
        users: number of unfinished transfers.
        gone: True if lookups no longer find the content; the place is free once it has no users.
    """

    key: bytes
    place: int
    checksum: int | None = None
    users: int = 0
    gone: bool = False


class DiskIndex:
    """LRU index of a file with `places` equal slots. Call `stored` after `to_store`, and `loaded` after `to_load`."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # in LRU order: the least recently used key comes first
        self._free = list(range(places - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Return True if a key has a place in the file, even if its bytes are not written yet."""
        return key in self._held

    def ready(self, key: bytes) -> bool:
        """Return True if a key's bytes can be read. Then mark the key as the most recently used one."""
        held = self._held.get(key)
        if held is None or held.checksum is None:
            return False
        self._held.move_to_end(key)
        return True

    def to_store(self, key: bytes) -> Held | None:
        """Return a place for a new key's bytes; None if transfers use all places. Evict the least recently used key.

        Call `stored` after the write.
        """
        if not self._free:
            idle = next((held for held in self._held.values() if not held.users), None)
            if idle is None:
                return None
            self.drop(idle)
        held = self._held[key] = Held(key, self._free.pop(), users=1)
        return held

    def to_load(self, key: bytes) -> Held | None:
        """Return the place of a key's bytes; None if the file does not have them. Call `loaded` after the read."""
        if not self.ready(key):
            return None
        held = self._held[key]
        held.users += 1
        return held

    def stored(self, held: Held, checksum: int | None) -> None:
        """Record the end of a write. A checksum of None means that it failed."""
        held.checksum = checksum
        if checksum is None:
            self.drop(held)
        self._release(held)

    def loaded(self, held: Held, *, good: bool) -> None:
        """Record the end of a read. `good` is False if the read failed; then drop the content."""
        if not good:
            self.drop(held)
        self._release(held)

    def drop(self, held: Held) -> None:
        """Remove the content of one place from the index."""
        if held.gone:
            return
        held.gone = True
        del self._held[held.key]
        if not held.users:
            self._free.append(held.place)

    def clear(self) -> None:
        """Remove the content of all places from the index."""
        for held in list(self._held.values()):
            self.drop(held)

    def _release(self, held: Held) -> None:
        held.users -= 1
        if held.gone and not held.users:
            self._free.append(held.place)
