"""Compare the simulated engine with a real one: `python -m benchmarks.backtest.backtest_cpu`.

The real engine is vLLM on this machine's CPU with SmolLM2-135M, eager, with one thread, and with a KV cache so small
that it becomes full. The program fits the simulation's costs to engine steps with known batches and contexts. Then it
replays one trace of requests several times on the engine and once in the simulation, and compares latencies,
preemptions and rates. It writes docs/benchmarks/backtest-cpu.json.
"""

import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kvpilot_cli.backtest.batch import Limits, Request
from kvpilot_cli.backtest.costs import Costs
from kvpilot_cli.backtest.engine import Engine
from kvpilot_localcluster.engines.real import Engine as RealEngine
from kvpilot_localcluster.engines.real import engine as real_engine
from kvpilot_smallmodels.models import smollm2_135m

OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "backtest-cpu.json"
BLOCK, BATCHED, SEQS, KV_BYTES = 32, 2048, 64, 96 * 2**20
BATCHES = ((1, 32), (1, 512), (1, 1024), (4, 32), (4, 384), (8, 32), (8, 224), (16, 32), (16, 112), (24, 64))
PROMPTS = (32, 256, 1024, 1900)
OUTPUT, REPEATS, RUNS = 16, 2, 3


def trace(seed: int = 4) -> list[Request]:
    """Return a load of 90 seconds. In the second half, more requests arrive than fit in the cache."""
    chance = random.Random(seed)  # noqa: S311
    now, requests = 0.0, []
    for i in range(90):
        now += chance.expovariate(0.8 if i < 30 else 1.6)
        requests.append(Request(i, now, chance.randint(64, 320), chance.randint(40, 200)))
    return requests


def tokens(chance: random.Random, length: int) -> list[int]:
    """Return a prompt of `length` random tokens, so that the prefix cache has no hit."""
    return [chance.randint(1000, 40000) for _ in range(length)]


async def ask(client: httpx.AsyncClient, prompt: list[int], output: int) -> list[float]:
    """Send a request, and return the arrival times of its tokens on the monotonic clock."""
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return times


async def steps(running: RealEngine) -> dict[str, Any]:
    """Measure the seconds of decode steps by batch and context, and of prefills by length, as medians of repeats."""
    chance = random.Random(1)  # noqa: S311
    async with httpx.AsyncClient(base_url=running.url, timeout=600) as client:
        await ask(client, tokens(chance, 64), 8)
        decode, prefill = [], []
        for batch, context in BATCHES:
            seen = []
            for _ in range(REPEATS):
                asked = (ask(client, tokens(chance, context), OUTPUT) for _ in range(batch))
                answers = await asyncio.gather(*asked)
                began, ended = max(a[0] for a in answers), min(a[-1] for a in answers)
                seen.append((ended - began) / (OUTPUT - 1))
            decode.append({"batch": batch, "context": context + OUTPUT / 2, "seconds": statistics.median(seen)})
        for length in PROMPTS:
            seen = []
            for _ in range(REPEATS + 1):
                began = time.monotonic()
                seen.append((await ask(client, tokens(chance, length), 1))[0] - began)
            prefill.append({"tokens": length, "seconds": statistics.median(seen)})
    return {"decode": decode, "prefill": prefill}


def fit(measured: dict[str, Any], kv_tokens: int) -> Costs:
    """Fit the simulation's costs by least squares of relative errors. Set a cost that would be negative to 0."""
    rows = [(1, d["batch"], d["batch"] * d["context"], 0, 0) for d in measured["decode"]]
    rows += [(1, 0, 0, p["tokens"], p["tokens"] ** 2 / 2) for p in measured["prefill"]]
    seconds = np.array([d["seconds"] for d in measured["decode"]] + [p["seconds"] for p in measured["prefill"]])
    columns, features = list(range(5)), np.array(rows, dtype=float) / seconds[:, None]
    while True:
        found = np.linalg.lstsq(features[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            break
        columns.pop(int(np.argmin(found)))
    values = dict(zip(columns, map(float, found), strict=True))
    base, sequence, cached, token, pair = (values.get(i, 0.0) for i in range(5))
    return Costs(base, sequence, cached, token, pair, kv_tokens=kv_tokens, block_size=BLOCK)


def errors(measured: dict[str, Any], costs: Costs) -> dict[str, float]:
    """Return the largest and the mean relative error of the fit, in percent."""
    off = [costs.decode_step(d["batch"], d["batch"] * d["context"]) / d["seconds"] - 1 for d in measured["decode"]]
    off += [(costs.base + costs.prefill(p["tokens"], 0)) / p["seconds"] - 1 for p in measured["prefill"]]
    sizes = [abs(x) * 100 for x in off]
    return {"max_percent": round(max(sizes), 1), "mean_percent": round(statistics.mean(sizes), 1)}


async def replay(running: RealEngine, requests: list[Request]) -> dict[str, float]:
    """Replay the trace on the real engine, and return its latencies, preemptions and rate (see `figures`)."""
    chance = random.Random(time.monotonic_ns())  # noqa: S311
    preempted = running.metric("vllm:num_preemptions_total")
    prompts = [tokens(chance, r.prompt) for r in requests]
    async with httpx.AsyncClient(base_url=running.url, timeout=600, limits=httpx.Limits(max_connections=200)) as client:
        began = time.monotonic()

        async def one(request: Request, prompt: list[int]) -> tuple[float, list[float]]:
            await asyncio.sleep(max(0.0, began + request.arrival - time.monotonic()))
            return began + request.arrival, await ask(client, prompt, request.output)

        answers = await asyncio.gather(*(one(r, p) for r, p in zip(requests, prompts, strict=True)))
    ttft = [times[0] - arrival for arrival, times in answers]
    itl = [b - a for _, times in answers for a, b in pairwise(times)]
    ended = max(times[-1] for _, times in answers) - began
    made = sum(len(times) for _, times in answers)
    return figures(ttft, itl, running.metric("vllm:num_preemptions_total") - preempted, made / ended)


def simulate(requests: list[Request], costs: Costs) -> dict[str, float]:
    """Replay the trace in the simulation, and return the same measurements as `replay`."""
    engine = Engine(costs, Limits(SEQS, BATCHED, timeout=float("inf")))
    for r in requests:
        engine.submit(Request(r.number, r.arrival, r.prompt, r.output))
    gaps: list[float] = []
    engine.on_gap = lambda seconds, times: gaps.extend([seconds] * times)
    while len(engine.done) < len(requests):
        engine.advance(engine.now + 1.0)
    ttft = [r.first_token - r.arrival for r in engine.done]
    return figures(
        ttft, gaps, engine.preemptions, sum(r.output for r in requests) / max(r.finished for r in engine.done)
    )


def figures(ttft: list[float], itl: list[float], preemptions: float, rate: float) -> dict[str, float]:
    """Return the figures by which engine and simulation are compared.

    Args:
        ttft: seconds from each request to its first token.
        itl: seconds between consecutive tokens.
        preemptions: number of preemptions.
        rate: generated tokens per second.
    """

    def at(values: list[float], q: float) -> float:
        return round(float(np.quantile(values, q)) * 1000, 1)

    return {
        "ttft_p50_ms": at(ttft, 0.5),
        "ttft_p95_ms": at(ttft, 0.95),
        "itl_p50_ms": at(itl, 0.5),
        "itl_p95_ms": at(itl, 0.95),
        "preemptions": preemptions,
        "tokens_per_s": round(rate, 1),
    }


def main() -> None:
    """Measure the engine, fit the costs, replay the trace on engine and simulation, and write the results."""
    arguments = (
        f"--block-size={BLOCK}",
        f"--max-num-batched-tokens={BATCHED}",
        f"--max-num-seqs={SEQS}",
        f"--kv-cache-memory-bytes={KV_BYTES}",
    )
    started = datetime.now(UTC)
    with (
        tempfile.TemporaryDirectory() as folder,
        real_engine(smollm2_135m(), "auto", Path(folder), *arguments) as running,
    ):
        config = running.cache_config()
        kv_tokens = int(config["num_gpu_blocks"]) * int(config["block_size"])
        measured = asyncio.run(steps(running))
        runs = [asyncio.run(replay(running, trace())) for _ in range(RUNS)]
        again = asyncio.run(steps(running))
    both = {
        k: [a | {"seconds": (a["seconds"] + b["seconds"]) / 2} for a, b in zip(measured[k], again[k], strict=True)]
        for k in measured
    }
    costs = fit(both, kv_tokens)
    simulated = simulate(trace(), costs)
    result = {
        "date": f"{started:%Y-%m-%d %H:%M}",
        "versions": {"vllm": version("vllm"), "torch": version("torch"), "python": platform.python_version()},
        "arguments": arguments,
        "kv_tokens": kv_tokens,
        "block_size": int(config["block_size"]),
        "steps_before": measured,
        "steps_after": again,
        "costs": {name: getattr(costs, name) for name in Costs.__struct_fields__},
        "fit_error": errors(both, costs),
        "real": runs,
        "simulated": simulated,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"real": runs, "simulated": simulated, "fit": result["fit_error"]}, indent=1))


if __name__ == "__main__":
    main()
