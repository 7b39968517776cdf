"""Compare the interval model with the request-level engine: `python -m benchmarks.backtest.backtest_interval`.

The program simulates the same load with a fixed number of replicas twice: once request by request, and once as 16
copies of the interval (fluid) model. For each load, dtype and number of replicas it prints two lines of Markdown, one
for each simulation. A line has finished and lost requests, KV use and waiting requests in the second half of the time,
preemptions, and latencies.
"""

from statistics import mean

import numpy as np

from benchmarks.backtest.interval import SUBSTEP, Fleet
from benchmarks.backtest.moments import measure
from kvpilot_cli.backtest.buckets import FINE
from kvpilot_cli.backtest.costs import load_profile
from kvpilot_cli.backtest.loads import STEP, cut, synthetic
from kvpilot_cli.backtest.service import Objective, Service
from kvpilot_operator.state.histogram import Histogram

POINTS = (
    ("agents", "auto", 4, 1.0), ("agents", "auto", 2, 1.0), ("agents", "fp8", 2, 1.0), ("agents", "k4v4", 1, 1.0),
    ("chat", "auto", 6, 1.0), ("chat", "auto", 3, 1.0), ("chat", "fp8", 3, 1.0), ("chat", "k4v4", 2, 1.0),
    ("rag", "auto", 2, 1.0), ("rag", "fp8", 1, 1.0),
)  # fmt: skip
DTYPES = ("auto", "fp8", "k8v4", "k4v4")
COPIES, SECONDS = 16, 2400


def main() -> None:
    """Run both simulations at every point, and print the table."""
    profile = load_profile()
    print(
        "| load | dtype, replicas | | finished | lost | KV use | waiting | preemptions | TTFT p50, p95 s | ITL p95 ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, dtype, replicas, size in POINTS:
        load = cut(synthetic(name, 1, 3, size), 11 * 3600, SECONDS)
        service = Service(profile, load, dtype, replicas, objective=Objective(), start_seconds=240, timeout=120)
        use, waiting = [], []
        while service.now < load.seconds:
            service.advance(service.now + STEP)
            sample = service.scrape(dtype)
            if sample is not None:
                use.append(sample.usage)
                waiting.append(sample.waiting)
        o = service.outcome
        line(
            "requests",
            name,
            dtype,
            replicas,
            o.finished,
            o.lost,
            use,
            waiting,
            o.preemptions,
            o.ttft.take(),
            o.itl.take(),
        )
        fleet = Fleet(profile, [measure(load, profile.of(dtype))] * COPIES, DTYPES, 120, 0, 5.0, 0.06, FINE)
        at = np.full(COPIES, DTYPES.index(dtype))
        steps = [fleet.step(np.full(COPIES, r), np.full(COPIES, float(replicas)), at, round(STEP / SUBSTEP))
                 for r in load.rate]  # fmt: skip
        total = {k: float(v.mean()) for k, v in fleet.total.items()}
        line("intervals", name, dtype, replicas, total["finished"], total["lost"],
             [float(s.usage.mean()) for s in steps], [float(s.waiting.mean()) for s in steps], total["preemptions"],
             Histogram(FINE, tuple(fleet.ttft.sum(axis=0))), Histogram(FINE, tuple(fleet.itl.sum(axis=0))))  # fmt: skip


def line(
    kind: str, name: str, dtype: str, replicas: int, finished: float, lost: float, use: list[float],
    waiting: list[float], preemptions: float, ttft: Histogram, itl: Histogram,
) -> None:  # fmt: skip
    """Print one line of the table.

    Args:
        kind: the simulation, `requests` or `intervals`.
        name: the load.
        finished, lost, preemptions: numbers over the whole time.
        use, waiting: KV use and number of waiting requests, one value a minute. The line has means over the second
            half.
        ttft, itl: seconds.
    """
    half = len(use) // 2
    print(f"| {name} | {dtype}, {replicas} | {kind} | {finished:.0f} | {lost:.0f} | {mean(use[half:]):.0%} "
          f"| {mean(waiting[half:]):.0f} | {preemptions:.0f} | {ttft.quantile(0.5):.2f}, {ttft.quantile(0.95):.2f} "
          f"| {itl.quantile(0.95) * 1000:.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
