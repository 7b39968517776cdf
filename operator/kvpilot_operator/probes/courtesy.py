"""How a probe treats the users of its engine: it lets them go first, and what it spends is bounded."""

from __future__ import annotations

import asyncio
import time

from kvpilot_operator.probes.client import Engine
from kvpilot_operator.probes.errors import EngineBusy

LOOK_AGAIN_SECONDS = 1.0


class Courtesy:
    """Of one probe run: `give_way_seconds` of waiting for users in all, `token_budget` tokens sent and asked for.

    With `insist` a run that has waited for long enough goes on; without it, it ends as `EngineBusy`. None is no bound.
    """

    def __init__(self, engine: Engine, give_way_seconds: float | None, insist: bool, token_budget: int | None) -> None:
        self._engine = engine
        self._left = give_way_seconds
        self._bound = give_way_seconds
        self._insist = insist
        self._budget = token_budget
        self.spent = 0

    async def turn(self) -> None:
        """Return when no request of a user waits in the engine's queue; raises `EngineBusy`."""
        if self._left is None:
            return
        began = time.monotonic()
        while (waiting := await self._engine.waiting()) > 0:
            if self._left is None:
                return
            if time.monotonic() - began >= self._left:
                if not self._insist:
                    raise EngineBusy(
                        f"{self._engine.base_url}: {waiting:.0f} requests still wait after the probe has given way for "
                        f"{self._bound:.0f} s; it is tried again at its next turn"
                    )
                self._left = None
                return
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        if self._left is not None:
            self._left -= time.monotonic() - began

    def afford(self, tokens: int) -> bool:
        """Whether a request of this many tokens, prompt and answer, is still within the budget; if so, it is spent."""
        if self._budget is not None and self.spent + tokens > self._budget:
            return False
        self.spent += tokens
        return True
