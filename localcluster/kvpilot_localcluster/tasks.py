"""Cancel tasks safely."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, with or without an error.

    A plain await with a suppressed CancelledError could also suppress the caller's own cancellation. The caller and its
    process would then run forever.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
