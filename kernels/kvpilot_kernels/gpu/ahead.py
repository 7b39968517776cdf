"""Compile what launches need before any of them runs, several variants at a time.

Triton compiles a variant where it is first launched: one after the other, in the launching thread. But what takes long
of it, its passes, LLVM, the assembler and the C compiler, runs without Python's lock, so threads compile side by side.
What they compiled is in the kernels' own caches, where the launch itself would have put it: it cannot be missed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.driver import driver

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

MOST_THREADS = 8
"""More gain nothing: about a tenth of the time is Python's, and the longest variant takes as long as it takes."""


class Ahead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types for us
    """While it is entered, launches of what is not compiled do nothing but have it compiled by `pool`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.asked = 0
        self.failed: list[Exception] = []

    def submit(self, key: Any, compile_fn: Callable[[], Any], *then: Callable[..., None]) -> None:
        """As Triton's, which returns what a launch waits for: without a kernel Triton launches nothing."""

        def make() -> Any:
            try:
                kernel = compile_fn()
                driver.active.launcher_cls(kernel.src, kernel.metadata)  # Triton 3.6 compiles C for each signature
            except Exception as error:
                self.failed.append(error)
                raise
            return kernel

        self.asked += key not in self.future_kernels
        super().submit(key, make, *then)


def threads(sharers: int) -> int:
    """Threads of each of so many processes that compile at once: half of the cores for all, as others need some."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * sharers)))


def compile_ahead(launch: Callable[[], None], sharers: int = 1) -> None:
    """Compile what `launch` needs, then launch it.

    Where compiling ahead fails launches compile, as ever, and raise if they must: of that itself there is a warning.

    Args:
        launch: launches kernels; called twice, and the first time none runs that was not compiled before.
        sharers: processes of this machine that do the same.
    """
    began, mode, failed = time.perf_counter(), None, None
    try:
        with ThreadPoolExecutor(threads(sharers), thread_name_prefix="compile") as pool, Ahead(pool) as mode:
            launch()
        failed = next(iter(mode.failed), None)
    except Exception as error:
        failed = error
    if mode and mode.asked:
        log.info(
            "%d variants of kernels were compiled, or found in Triton's cache, in %.1f s, %d at a time",
            mode.asked - len(mode.failed), time.perf_counter() - began, threads(sharers),
        )  # fmt: skip
    if failed is not None:
        log.warning("kernels are compiled one after another, where they are launched first: %s", failed)
    launch()
