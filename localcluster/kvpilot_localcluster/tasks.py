"""Safe cancellation of tasks."""

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended, with or without an error.

    Use this instead of awaiting tasks and suppressing CancelledError. That could also suppress the caller's own
    cancellation, so that the caller would run forever.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
