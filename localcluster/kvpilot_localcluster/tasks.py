"""Ending tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    To await a cancelled task and to suppress its CancelledError would suppress the caller's own, too, if that came just
    then: the caller would go on for ever, and with it the process that it looks after.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
