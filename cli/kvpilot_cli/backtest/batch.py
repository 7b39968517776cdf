"""Data structures of a simulated engine: requests, the pool of KV blocks, and the decoding batch."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """A request. Lengths are in tokens. Times are seconds since the start, or -1 while unknown."""

    number: int
    arrival: float
    prompt: int
    output: int
    session: int = -1
    """ID of the conversation. Requests of one session share the beginning of their prompts."""
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    first_token: float = -1.0
    last_token: float = -1.0
    finished: float = -1.0
    dropped: bool = False
    preempted: int = 0
    epoch: int = 0
    """Number of times that the request left the batch. Ignore an end that was forecast under an earlier epoch."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Engine arguments that limit a batch, and the timeout of clients."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    timeout: float = 120.0
    """Seconds without a first token after which clients give up."""


class Blocks:
    """Pool of `total` KV blocks. Freed blocks remain as a session's cached prefix until a request needs them.

    The oldest prefixes are overwritten first, from their ends.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = total
        self._kept: OrderedDict[int, int] = OrderedDict()  # cached prefix blocks by session, oldest first
        self._kept_sum = 0

    @property
    def available(self) -> int:
        """Return the number of blocks that no running request holds: empty blocks and cached prefixes."""
        return self._empty + self._kept_sum

    @property
    def used(self) -> int:
        """Return the number of blocks that running requests hold."""
        return self.total - self.available

    def take(self, count: int) -> None:
        """Take blocks for a request, empty ones first. The caller checks that enough are available."""
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
        """Free `count` blocks. Of these, `keep` stay as the session's cached prefix, in place of an earlier one."""
        self._empty += count - keep
        if keep:
            older = self._kept.pop(session, 0)
            self._empty += older
            self._kept_sum += keep - older
            self._kept[session] = keep

    def kept(self, session: int) -> int:
        """Return the number of blocks of the session's cached prefix."""
        return self._kept.get(session, 0)

    def reuse(self, session: int, count: int) -> None:
        """Take the first `count` blocks of the session's cached prefix, and mark the rest as empty."""
        kept = self._kept.pop(session, 0)
        self._kept_sum -= kept
        self._empty += kept - count


class Decoding:
    """Batch of decoding requests, over KV blocks of `block_size` tokens.

    Each step adds one token to every request. So requests are counted by length modulo `block_size`: one look-up tells
    how many need a new block in a step.
    """

    def __init__(self, block_size: int) -> None:
        self.tokens = 0
        """Tokens in the contexts of all decoding requests."""
        self._size = block_size
        # Each request by its number, with its length minus `_steps`. This difference stays constant, because both the
        # length and `_steps` grow by 1 a step.
        self._held: dict[int, tuple[Request, int]] = {}
        self._by_remainder = [0] * block_size
        self._ends: list[tuple[int, int, int]] = []  # step at which a request ends, its number and epoch
        self._steps = 0

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> Iterator[tuple[Request, int]]:
        """Yield each request with the tokens in its context."""
        return ((request, offset + self._steps) for request, offset in self._held.values())

    def add(self, request: Request) -> None:
        """Add the request to the batch, from the next step on."""
        offset = request.computed - self._steps
        self._held[request.number] = (request, offset)
        self._by_remainder[offset % self._size] += 1
        self.tokens += request.computed
        heapq.heappush(self._ends, (self._steps + request.output - request.generated, request.number, request.epoch))

    def leave(self, request: Request) -> bool:
        """Remove the request from the batch and write its progress into it. Return False if it was not in the batch."""
        entry = self._held.pop(request.number, None)
        if entry is None:
            return False
        offset = entry[1]
        request.computed = offset + self._steps
        request.generated = request.computed - request.prompt + 1
        request.blocks = -(-request.computed // self._size)
        request.epoch += 1
        self._by_remainder[offset % self._size] -= 1
        self.tokens -= request.computed
        return True

    def step(self, count: int, requests: int) -> None:
        """Record `count` steps, in each of which `requests` requests got one token."""
        self._steps += count
        self.tokens += requests * count

    def needed(self) -> int:
        """Return the number of new blocks for the next step: one for each request whose last block is full."""
        return self._by_remainder[-self._steps % self._size]

    def needed_for(self, count: int) -> int:
        """Return the number of new blocks for the next `count` steps."""
        whole, rest = divmod(count, self._size)
        return whole * len(self) + sum(self._by_remainder[-(self._steps + i) % self._size] for i in range(rest))

    def until_one_ends(self) -> int:
        """Return the number of steps until the first request ends. The batch must not be empty."""
        while self._void(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def ended(self) -> Iterator[Request]:
        """Yield each request that has generated all its tokens."""
        while self._ends and self._ends[0][0] <= self._steps:
            end = heapq.heappop(self._ends)
            if not self._void(end):
                yield self._held[end[1]][0]

    def _void(self, end: tuple[int, int, int]) -> bool:
        entry = self._held.get(end[1])
        return entry is None or entry[0].epoch != end[2]
