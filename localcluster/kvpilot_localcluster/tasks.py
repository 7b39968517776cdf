"""Safe cancellation of tasks."""

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended, with or without an error.

    Code that awaits them and suppresses CancelledError could also suppress the caller's own cancellation. The caller
    would then run forever.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
