"""Let one engine load another engine's KV cache from LMCache: `python -m benchmarks.engine.gpu_lmcache`.

The program starts a server of LMCache without a GPU and, for each dtype, two engines (dummy weights), one after the
other. The first engine computes prompts one by one and stores them. The second engine starts with an empty cache and
gets the same prompts. The results are:

- tokens and bytes stored and loaded,
- the time to the first token in both engines,
- a comparison of every block's bytes,
- the number of equal answer tokens.

The program writes OUT/lmcache-SHAPE.json after each dtype and prints a table.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from benchmarks.engine.gpu_engine_shapes import SHAPES, write
from benchmarks.engine.gpu_lmcache_run import Job

BLOCK = 64
QUICK = {"enforce_eager": True, "kernel_config": {"enable_jit_warmup": False}}
"""Options that make engines start faster."""
QUIET = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}
"""Environment variables that prevent the server and the engines from using the network."""
READY = "cache server is running"
WAIT = 60
"""Time limits in seconds: for the server's start, and for one of its answers."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="auto,k4v4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the shape has")
    parser.add_argument("--prompts", type=int, default=8, help="number of measured prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="number of tokens of a prompt, in whole chunks (default: %(default)s)"
    )
    parser.add_argument("--answer", type=int, default=8, help="number of tokens of an answer (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="number of tokens of a chunk (default: %(default)s)")
    parser.add_argument(
        "--server-gib", type=float, default=8, help="memory of the server in GiB (default: %(default)s)"
    )
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[int]:
    """Run LMCache's server inside the `with` block, and yield the port for engines.

    Raises:
        ChildFailedError: the server did not start; the message has the end of its log.
    """
    sockets = [socket.socket() for _ in range(3)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    options = [
        *(f"--{name}={port}" for name, port in zip(("port", "http-port", "prometheus-port"), ports, strict=True)),
        f"--l1-size-gb={args.server_gib}", "--l1-init-size-gb=1", "--eviction-policy=LRU", "--disable-observability",
        f"--chunk-size={args.chunk}", "--supported-transfer-mode=engine_driven",
    ]  # fmt: skip
    log = args.out / "lmcache-server.log"
    variables = {**os.environ, **QUIET, "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "lmcache.cli.main", "server", *options], env=variables,
                                   stdin=subprocess.DEVNULL, stdout=said, stderr=said)  # fmt: skip
    try:
        began = time.monotonic()
        while READY not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > began + WAIT:
                raise ChildFailedError(f"no server of LMCache: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        say(f"LMCache's server started in {time.monotonic() - began:.0f} s")
        yield ports[0]
    finally:
        process.kill()
        process.wait()


def run(args: argparse.Namespace, dtype: str, model: Path, port: int, scratch: Path) -> dict[str, Any]:
    """Run the two engines of a dtype. Return the report of each, and the comparison."""
    transfer = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": WAIT,
            "lmcache.mp.mp_transfer_mode": "engine_driven",
        },
    }  # fmt: skip
    engine = {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "kv_cache_dtype": dtype, "block_size": BLOCK, "max_num_seqs": 4,
        # Reserve blocks for all prompts. Otherwise another request could get a block before its bytes are compared.
        "num_gpu_blocks_override": (args.tokens // BLOCK + 8) * (args.prompts + 2),
        "max_model_len": args.tokens + args.answer + BLOCK, "max_num_batched_tokens": args.tokens + BLOCK,
        "gpu_memory_utilization": 0.8, "kv_transfer_config": transfer, **QUICK, **args.engine_args,
    }  # fmt: skip
    sides = []
    for side in ("computes", "loads"):
        job = Job(engine, SHAPES[args.shape].vocab, args.prompts, args.tokens, args.answer, WAIT,
                  str(scratch / f"{dtype}-{side}-result.json"))  # fmt: skip
        path, log = scratch / f"{dtype}-{side}.json", args.out / f"lmcache-{dtype}-{side}.log"
        path.write_text(json.dumps(asdict(job)))
        say(f"{dtype}, which {side}: starting")
        try:
            with environment({**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as env:
                run_child("benchmarks.engine.gpu_lmcache_run", path, log, args.limit, env)
        except ChildFailedError as error:
            return {"dtype": dtype, "error": f"the engine that {side}: {error}"}
        sides.append(json.loads(Path(job.out).read_text()))
    return {"dtype": dtype} | judged(*sides)


def judged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare the checksums in the reports of the two engines. Return the counts, and the reports without checksums."""
    seen = dict.fromkeys(("compared", "changed", "not stored", "tokens_alike"), 0)
    for left, came in zip(first["prompts"], second["prompts"], strict=True):
        kept, loaded = left["stored"], came["loaded"]
        for place, found in loaded.items():
            seen["not stored"] += place not in kept
            seen["compared"] += place in kept
            seen["changed"] += place in kept and kept[place] != found
        for one in (left, came):
            one |= {what: len(one[what]) for what in ("stored", "loaded")}
        seen["tokens_alike"] += sum(a == b for a, b in zip(left["answer"], came["answer"], strict=True))
    return seen | {"computes": first, "loads": second}


def table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the comparison as a table, one line for each dtype."""
    print("| KV cache | stored, tokens | MiB a prompt | loaded, tokens | MiB a prompt | computed: first token, ms | "
          "loaded: first token, ms | of which LMCache, ms | message, ms | kept after the answer, ms | equal blocks | "
          "equal tokens |")  # fmt: skip
    print("|---" * 12 + "|")
    for row in rows:
        if "error" in row:
            print(f"{row['dtype']}: {row['error']}")
            continue
        left, came = row["computes"]["prompts"], row["loads"]["prompts"]

        def middle(of: list[dict[str, Any]], key: str, scale: float = 1e3) -> str:
            return f"{scale * statistics.median(one[key] for one in of):.1f}"

        later = [{"kept": one["kept_s"] - one["answered_s"]} for one in left]
        print("|", " | ".join([
            row["dtype"], str(sum(one["stored"] for one in left) * BLOCK), middle(left, "write_bytes", 2**-20),
            f"{sum(one['hits'] for one in came):.0f}", middle(came, "read_bytes", 2**-20), middle(left, "first_s"),
            middle(came, "first_s"), middle(came, "load_s"), middle(came, "read_s"), middle(later, "kept"),
            f"{row['compared'] - row['changed']}/{row['compared'] + row['not stored']}",
            f"{row['tokens_alike']}/{args.answer * args.prompts}",
        ]), "|")  # fmt: skip


def main() -> int:
    """Run all dtypes, print and write results. Return 1 if a run failed, bytes differ, or no block arrived."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    shape, rows = SHAPES[args.shape], []
    with tempfile.TemporaryDirectory(prefix="kvpilot-lmcache-") as folder, server(args) as port:
        scratch = Path(folder)
        model = write(scratch / "model", shape, args.layers or shape.layers, args.tokens + args.answer + BLOCK)
        for dtype in args.dtypes.split(","):
            rows.append(run(args, dtype, model, port, scratch))
            options = {key: str(value) for key, value in vars(args).items() if key != "out"}
            facts = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "options": options, "rows": rows}
            (args.out / f"lmcache-{args.shape}.json").write_text(json.dumps(facts, indent=1) + "\n")
    table(args, rows)
    return int(any("error" in row or row["changed"] or row["not stored"] or not row["compared"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
