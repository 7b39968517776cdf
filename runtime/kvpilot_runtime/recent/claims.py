"""Map from blocks to their residual pages, and the claims of requests on them. Pure Python, without vLLM."""


class Claims:
    """Residual pages of blocks. Requests claim those of their newest blocks. Those of others are *busy* or *idle*.

    Attributes:
        pages: residual pages of each block that has some. Each of these blocks is in one of the next three.
        claimed: requests that claim a block's residual pages, by block. The block with the oldest claims is first.
        busy: blocks that no request claims, but whose residual pages steps in flight may use. By block, the number of
            the last of these steps.
        idle: blocks whose residual pages nobody uses. The block that was released first is first.
    """

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}
        self.claimed: dict[int, set[str]] = {}
        self.busy: dict[int, int] = {}
        self.idle: dict[int, None] = {}
        self._blocks: dict[str, set[int]] = {}
        self._changed: set[int] = set()

    def give(self, block: int, pages: tuple[int, ...], request: str) -> None:
        """Give residual pages to a block that has none, and let a request claim them."""
        self.lend(block, pages)
        self.claim(block, request)

    def lend(self, block: int, pages: tuple[int, ...]) -> None:
        """Give idle residual pages to a block that has none."""
        self.pages[block] = pages
        self._changed.add(block)
        self.idle[block] = None

    def claim(self, block: int, request: str) -> None:
        """Let a request claim the residual pages of a block."""
        self._forget(block)
        self.claimed.setdefault(block, set()).add(request)
        self._blocks.setdefault(request, set()).add(block)

    def claims_of(self, request: str) -> set[int]:
        """Return the blocks that a request claims."""
        return set(self._blocks.get(request, ()))

    def release(self, block: int, *requests: str, last: int = 0) -> None:
        """End the claims of these requests on a block. Without a request, end all claims on it.

        `last` is the number of the last step in flight that may use the residual pages; 0 for none.
        """
        holders = self.claimed.get(block, set())
        for request in requests or tuple(holders):
            holders.discard(request)
            blocks = self._blocks[request]
            blocks.discard(block)
            if not blocks:
                del self._blocks[request]
        if not holders and self.claimed.pop(block, None) is not None:
            if last:
                self.busy[block] = last
            else:
                self.idle[block] = None

    def settle(self, step: int) -> None:
        """Let blocks that were busy until this step become idle."""
        for block in [block for block, last in self.busy.items() if last <= step]:
            del self.busy[block]
            self.idle[block] = None

    def refresh(self, block: int) -> None:
        """Let a block's idle pages be taken back last."""
        if block in self.idle:
            del self.idle[block]
            self.idle[block] = None

    def drop(self, block: int) -> tuple[int, ...]:
        """Take a block's residual pages away, and return them."""
        self.release(block)
        self._forget(block)
        self._changed.add(block)
        return self.pages.pop(block)

    def changes(self) -> dict[int, tuple[int, ...]]:
        """Return the residual pages of blocks whose pages have changed since the last call; empty for none."""
        changed, self._changed = self._changed, set()
        return {block: self.pages.get(block, ()) for block in changed}

    def _forget(self, block: int) -> None:
        self.busy.pop(block, None)
        self.idle.pop(block, None)
