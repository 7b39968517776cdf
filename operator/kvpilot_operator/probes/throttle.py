"""How a probe treats the users of its engine: it lets them go first, and what it spends is bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpilot_operator.probes.errors import EngineBusy

LOOK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class GiveWay:
    """To users: `waiting` tells how many of their requests are queued, and for `seconds` in all they go first.

    With `insist` a run that has waited for long enough goes on; without it, it ends as `EngineBusy`.
    """

    waiting: Callable[[], Awaitable[float]]
    seconds: float
    insist: bool = False


class Throttle:
    """Of one probe run: whom it gives way to, and the tokens that it may send and ask for. None is no bound."""

    def __init__(self, url: str, give_way: GiveWay | None, token_budget: int | None) -> None:
        self._url = url
        self._give_way = give_way
        self._left = give_way.seconds if give_way is not None else 0.0
        self._budget = token_budget
        self.spent = 0

    async def let_users_go_first(self) -> None:
        """Return when no request of a user waits in the engine's queue; raises `EngineBusy`."""
        rule = self._give_way
        if rule is None:
            return
        began = time.monotonic()
        while self._give_way is not None and (waiting := await rule.waiting()) > 0:
            if time.monotonic() - began < self._left:
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
            elif rule.insist:
                self._give_way = None
            else:
                raise EngineBusy(
                    f"{self._url}: {waiting:.0f} requests still wait after the probe has given way for "
                    f"{rule.seconds:.0f} s; it is tried again at its next turn"
                )
        self._left -= time.monotonic() - began

    def afford(self, tokens: int) -> bool:
        """Whether a request of this many tokens, prompt and answer, is still within the budget; if so, it is spent."""
        if self._budget is not None and self.spent + tokens > self._budget:
            return False
        self.spent += tokens
        return True
