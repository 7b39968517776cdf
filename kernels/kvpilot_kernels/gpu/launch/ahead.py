"""Parallel compilation of the kernel variants that launches need, before any of them runs.

Triton compiles a variant at its first launch, in the thread that launches it. Most of the time goes to Triton's passes,
LLVM, the assembler and the C compiler. These release the GIL, so threads can compile in parallel. The results
go to the kernels' own caches, where the real launch finds them.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.driver import driver

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers

MOST_THREADS = 8
"""Largest useful number of threads. More do not help: a tenth of the work holds the GIL, and one variant is slowest."""


class Ahead(AsyncCompileMode):  # type: ignore[misc]  # mypy sees Triton's classes as Any
    """Mode of Triton in which launching an uncompiled variant only queues its compilation in `pool`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.asked = 0
        self.failed: list[Exception] = []

    def submit(self, key: Any, compile_fn: Callable[[], Any], *then: Callable[..., None]) -> None:
        """Submit a compilation as Triton does. Return no kernel, so that Triton launches nothing."""

        def make() -> Any:
            try:
                kernel = compile_fn()
                driver.active.launcher_cls(kernel.src, kernel.metadata)  # Triton 3.6 compiles C code for each signature
            except Exception as error:
                self.failed.append(error)
                raise
            return kernel

        self.asked += key not in self.future_kernels
        super().submit(key, make, *then)


def threads(sharers: int) -> int:
    """Return the number of threads for each of `sharers` processes. All together use about half of the cores."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * sharers)))


def compile_ahead(launch: Callable[[], None], sharers: int = 1) -> None:
    """Compile the kernel variants that `launch` needs in parallel, then call `launch`.

    If the compilation fails, log a warning. The launches then compile one after another as usual, and may raise.

    Args:
        launch: function that launches kernels. It is called twice. The first call runs only variants that were already
            compiled.
        sharers: number of processes on this machine that compile at the same time.
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
