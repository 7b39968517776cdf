"""Measure the time of GPU launches in a CUDA graph, and the rate of memory copies on the GPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton

Value = TypeVar("Value")

LAUNCHES = 32


def microseconds(launch: Callable[[], object]) -> float:
    """Return the microseconds of a launch: the median over ten replays of a CUDA graph of `LAUNCHES` launches."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return sorted(times)[len(times) // 2]


def layers_for(size: int) -> int:
    """Return the number of caches of `size` bytes that launches rotate over, so that none stays in the L2 cache.

    Together the caches have about 1 GB, but there are at least 2 and at most `LAUNCHES` of them.
    """
    return max(2, min(LAUNCHES, -(-(10**9) // size)))


def copy_rate(device: torch.device) -> float:
    """Return the rate of a large copy within GPU memory in bytes per second. It counts bytes read and bytes written."""
    source = torch.randint(0, 256, (4 * 2**30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() / milliseconds * 1000


def always(value: Value, *_: Any) -> Value:
    """Return `value`, and ignore the other arguments. A benchmark puts this in place of a function of `tuning`."""
    return value
