"""Find the users per GPU within a latency objective, in real vLLM servers: `python -m benchmarks.engine.gpu_users`.

Each dtype gets a server on its own GPU (dummy weights, default compilation and CUDA graphs, prefix caching). The
servers run side by side. Users hold long conversations. A request has a history of 6,000 to 12,600 tokens and 400 new
tokens. The answer has 200 tokens, and the user then pauses for 20 s on average. The program adds users level by level,
until p95 of the time to first token (TTFT) or of the time between tokens (ITL) misses its objective. The program writes
OUT/users-SHAPE-DTYPE.json, and prints a table.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.engine.gpu_engine import size
from benchmarks.engine.gpu_engine_process import attention_lines, environment, error_lines, say, versions
from benchmarks.engine.gpu_engine_shapes import SHAPES, write
from benchmarks.engine.users import Load, Objectives, Users, summary

LEVELS = "auto=75,100 fp8=150,175 k8v4=150,200 k4v4=225,250,275"
STARTS = 600
"""Time in seconds after which a start of a server counts as failed."""


def levels(text: str) -> dict[str, list[int]]:
    """Parse the numbers of users for each dtype, such as `auto=75,100 fp8=150`."""
    pairs = (word.partition("=") for word in text.split())
    return {dtype: [int(one) for one in numbers.split(",")] for dtype, _, numbers in pairs}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=levels, default=levels(LEVELS),
                        help=f"numbers of users of each dtype, in ascending order (default: {LEVELS})")  # fmt: skip
    parser.add_argument("--arrivals", type=float, default=2.5,
                        help="new users a second, each with a history to compute (default: 2.5)")  # fmt: skip
    parser.add_argument("--settle", type=float, default=20,
                        help="wait in seconds between the last new user and a measurement (default: 20)")  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=50, help="duration of each measurement in seconds (default: 50)"
    )
    parser.add_argument("--ttft", type=float, default=2.0, help="objective: TTFT p95 in seconds (default: 2)")
    parser.add_argument("--itl", type=float, default=0.05, help="objective: ITL p95 in seconds (default: 0.05)")
    parser.add_argument("--history", type=size, default=6000, help="tokens of a new conversation (default: 6000)")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=size, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.90)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--port", type=int, default=8100, help="port of the first server (default: 8100)")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


@contextmanager
def server(model: Path, port: int, place: int, log: Path, options: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Run `vllm serve` with dummy weights on GPU number `place` inside the `with` block. Yield its address and process.

    `options` are further options of `vllm serve`, without dashes. An option without a value has the value True.
    """
    refuse_busy(port)
    all_options = {"host": "127.0.0.1", "port": port, "load-format": "dummy", "dtype": "bfloat16", **options}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in all_options.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *words]
    with environment({"CUDA_VISIBLE_DEVICES": str(place)}) as env, log.open("w") as out:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        say(f"{log.stem}: starting")
        try:
            yield f"http://127.0.0.1:{port}", child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


async def started(session: aiohttp.ClientSession, url: str, child: Any, log: Path) -> None:
    """Wait until the server answers. Raise RuntimeError if it does not answer in time."""
    began = time.monotonic()
    while not await healthy(session, url):
        if time.monotonic() - began > STARTS or child.poll() is not None:
            raise RuntimeError(f"{log.stem}: the server does not answer; see its log")
        await asyncio.sleep(1)
    say(f"{log.stem}: serves after {time.monotonic() - began:.0f} s")


def refuse_busy(port: int) -> None:
    """Raise OSError if another server uses the port, because its answers would be taken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(f"--port: {port} is in use ({error}); end that server, or name another port") from error


def longest(load: Load) -> int:
    """Return the longest context of a conversation, rounded up to a multiple of 1,024 tokens."""
    return -(-(load.history + load.turns * (load.asked + load.answered)) // 1024) * 1024


async def measure(args: argparse.Namespace, url: str, child: Any, dtype: str, log: Path, found: dict[str, Any]) -> None:
    """Add users, level by level, until an objective is missed. Append each level's figures to `found`."""
    objectives, levels = Objectives(args.ttft, args.itl), found.setdefault("levels", [])
    # Use a new connection for each request: the server may close an idle connection just when a user sends on it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await started(session, url, child, log)
        found["kv_tokens"] = await kv_tokens(session, url)
        users = Users(session, url, args.shape, Load(args.history), SHAPES[args.shape].vocab)
        try:
            for level in args.levels[dtype]:
                await asyncio.sleep(users.raise_to(level, args.arrivals) + args.settle)
                before, begin = await counters(session, url), time.perf_counter()
                await asyncio.sleep(args.seconds)
                after = await counters(session, url)
                users.check()
                figures = summary(users.turns, begin, time.perf_counter(), objectives)
                levels.append({"users": level, **figures, **{name: after[name] - before[name] for name in after}})
                say(f"{dtype}: {level} users: {row(levels[-1])}")
                if not figures["held"]:
                    break
        finally:
            await users.close()


async def healthy(session: aiohttp.ClientSession, url: str) -> bool:
    """Return True if the server answers its health check."""
    try:
        async with session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def page(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Return the lines of the server's metrics page."""
    async with session.get(f"{url}/metrics") as answer:
        return (await answer.text()).splitlines()


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return vLLM's counters of preemptions, prompt tokens, generated tokens and prefix hits."""
    wanted = {
        "preemptions": "vllm:num_preemptions_total{",
        "prompt_tokens": "vllm:prompt_tokens_total{",
        "generated_tokens": "vllm:generation_tokens_total{",
        "prefix_hits": "vllm:prefix_cache_hits_total{",
    }
    lines = await page(session, url)
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))
        for name, start in wanted.items()
    }


async def kv_tokens(session: aiohttp.ClientSession, url: str) -> int:
    """Return the capacity of the server's KV cache in tokens, from vLLM's own metric."""
    for line in await page(session, url):
        if line.startswith("vllm:cache_config_info{"):
            return int(line.partition('kv_cache_size_tokens="')[2].partition('"')[0] or 0)
    return 0


def row(level: dict[str, Any]) -> str:
    """Return the figures of one level (number of users) as a line of text, with times in milliseconds."""
    ttft, itl = ([round(1e3 * value, 1) for value in level[name]] for name in ("ttft", "itl"))
    held = "holds" if level["held"] else "misses"
    return f"TTFT p50/p95/p99 {ttft} ms, ITL {itl} ms, {level['turns_per_second']:.1f} turns/s: {held}"


def run(args: argparse.Namespace, model: Path, place: int, dtype: str) -> None:
    """Measure one dtype on one GPU, and write its file.

    Even after an error or an interruption, write the levels that were measured, and the error.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the server on SIGTERM, too
    out = result(args, dtype)
    log = out.with_suffix(".log")
    facts = {
        "shape": args.shape, "dtype": dtype, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "command": " ".join(["python", "-m", "benchmarks.engine.gpu_users", *sys.argv[1:]]), **versions(),
        "arrivals": args.arrivals, "settle": args.settle, "seconds": args.seconds,
        "objectives": {"ttft_p95": args.ttft, "itl_p95": args.itl}, "error": "interrupted",
    }  # fmt: skip
    options = {
        "kv-cache-dtype": dtype, "max-model-len": longest(Load(args.history)), "max-num-seqs": args.max_num_seqs,
        "served-model-name": args.shape, "max-num-batched-tokens": args.max_num_batched_tokens,
        "gpu-memory-utilization": args.gpu_memory_utilization, "skip-tokenizer-init": True,
        **({"enforce-eager": True} if args.enforce_eager else {}),
    }  # fmt: skip
    try:
        with server(model, args.port + place, place, log, options) as (url, child):
            asyncio.run(measure(args, url, child, dtype, log, facts))
        facts["error"] = None
    except (RuntimeError, OSError, aiohttp.ClientError) as failure:
        facts["error"] = "; ".join([str(failure), *(error_lines(log) if log.exists() else ())])
        say(f"{dtype}: failed: {facts['error']}")
    finally:
        facts["attention"] = attention_lines(log) if log.exists() else []
        out.write_text(json.dumps(facts, indent=1) + "\n")


def result(args: argparse.Namespace, dtype: str) -> Path:
    """Return the path of a dtype's result file."""
    return Path(args.out, f"users-{args.shape}-{dtype}.json")


def run_all(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Measure all dtypes at the same time. Each has its own process, so that its load does not delay the others."""
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=run, args=(args, model, *one)) for one in enumerate(args.levels)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join()
    finally:
        for child in children:
            child.terminate()
            child.join()
    return [json.loads(result(args, dtype).read_text()) for dtype in args.levels]


def main() -> int:
    """Run every dtype, and print the table. Return 1 if one failed."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the children on SIGTERM, too
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpilot-model-") as scratch:
        shape = SHAPES[args.shape]
        model = write(Path(scratch, "model"), shape, shape.layers, longest(Load(args.history)))
        runs = run_all(args, model)
    print("| dtype | users | TTFT p50 / p95 / p99, ms | ITL p50 / p95 / p99, ms | turns/s | preemptions | |")
    print("|---|---|---|---|---|---|---|")
    for one in runs:
        for level in one.get("levels", ()):
            ttft, itl = (" / ".join(f"{1e3 * value:.1f}" for value in level[name]) for name in ("ttft", "itl"))
            held = "holds" if level["held"] else "misses"
            print(f"| {one['dtype']} | {level['users']} | {ttft} | {itl} | {level['turns_per_second']:.1f} | "
                  f"{level['preemptions']:.0f} | {held} |")  # fmt: skip
    return 1 if any(one["error"] for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
