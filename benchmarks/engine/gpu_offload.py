"""Measure offloading to host memory under a multi-turn load in real vLLM: `python -m benchmarks.engine.gpu_offload`.

Conversations continue in random order, a fixed number at a time. Their histories together are several times larger than
the GPU's cache. Each dtype has one engine with the host tier and one without (dummy weights). All engines get the same
load, the same host memory, and a GPU cache with the same number of tokens (with `--equal bytes`, of bytes).

`--check` runs each engine with a tier once more, briefly, and compares every block that returns with the block that
left, in all layers. The program writes OUT/offload-SHAPE.json and prints a table.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from benchmarks.engine.gpu_engine_shapes import SHAPES, write
from benchmarks.engine.gpu_offload_run import Job
from kvpilot_formats import formats

BLOCK = 64
MOVED = {"loaded": "load", "stored": "store"}
"""Words for the two directions of transfers, and the prefixes of their figures in the results."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="auto,fp8,k4v4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the shape has")
    parser.add_argument(
        "--gpu-tokens", type=int, default=65536, help="number of tokens of the GPU's cache (default: %(default)s)"
    )
    parser.add_argument("--equal", choices=("tokens", "bytes"), default="tokens",
                        help="property in which the GPU caches of all dtypes agree (default: tokens)")  # fmt: skip
    parser.add_argument("--host-gib", type=float, default=8.5, help="host memory of the tier (default: %(default)s)")
    parser.add_argument("--working-set", type=float, default=4.0,
                        help="tokens of all histories in multiples of --gpu-tokens (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--history", type=int, default=4096, help="number of tokens of a conversation (default: %(default)s)"
    )
    parser.add_argument("--turn", type=int, default=64, help="number of new tokens of a request (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="number of tokens of an answer (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="number of measured requests (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="number of requests in flight (default: %(default)s)")
    parser.add_argument("--without", action=argparse.BooleanOptionalAction, default=True,
                        help="run each dtype without the host tier, too")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare the bytes of every block that comes back")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def runs_of(args: argparse.Namespace) -> list[tuple[str, str, bool]]:
    """Return the engines to run, as (KV-cache dtype, the tier `offload` or empty, True to compare bytes)."""
    found: list[tuple[str, str, bool]] = []
    for dtype in args.dtypes.split(","):
        found += [(dtype, "", False)] if args.without else []
        found += [(dtype, "offload", False)]
        found += [(dtype, "offload", True)] if args.check else []
    return found


def main() -> int:
    """Run all dtypes, print and write the results. Return 1 if a run failed, or a block came back with other bytes."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    rows: list[dict[str, Any]] = []
    out_file = args.out / f"offload-{args.shape}.json"
    with tempfile.TemporaryDirectory(prefix="kvpilot-offload-") as folder:
        scratch = Path(folder)
        longest = args.history + args.turn + args.answer + BLOCK
        model = write(scratch / "model", shape, args.layers or shape.layers, longest)
        for dtype, tier, check in runs_of(args):
            name = "/".join(filter(None, (dtype, tier, "check" * check)))
            tokens = args.gpu_tokens
            if args.equal == "bytes":
                tokens = int(tokens * 16 / formats.parse(dtype).bits_per_element(shape.head_dim))
            engine = {
                "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
                "kv_cache_dtype": dtype, "block_size": BLOCK, "num_gpu_blocks_override": tokens // BLOCK + 1,
                "max_model_len": longest, "max_num_seqs": args.at_once, "enable_prefix_caching": True,
                **({"kv_offloading_size": args.host_gib} if tier else {}), **args.engine_args,
            }  # fmt: skip
            job = Job(
                engine, shape.vocab, int(args.gpu_tokens * args.working_set) // args.history, args.history, args.turn,
                args.answer, min(args.requests, 32) if check else args.requests, args.at_once, check,
                str(scratch / "result.json"),
            )  # fmt: skip
            Path(job.out).unlink(missing_ok=True)
            path, log = scratch / "job.json", args.out / f"offload-{name.replace('/', '-')}.log"
            path.write_text(json.dumps(asdict(job)))
            say(f"{name}: starting")
            row: dict[str, Any] = {"run": name}
            with environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as env:
                try:
                    run_child("benchmarks.engine.gpu_offload_run", path, log, args.limit, env)
                    row |= json.loads(Path(job.out).read_text())
                except ChildFailedError as error:
                    row["error"] = str(error)
            rows.append(row)
            options = {key: str(value) for key, value in vars(args).items() if key != "out"}
            facts = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "options": options, "rows": rows}
            out_file.write_text(json.dumps(facts, indent=1) + "\n")
    table(rows)
    return 1 if any("error" in row or row.get("changed") for row in rows) else 0


def table(rows: list[dict[str, Any]]) -> None:
    """Print a table with one line for each engine."""
    for row in rows:
        if "error" in row:
            say(f"{row['run']}: {row['error']}")
            continue
        hits = " ".join(f"{where} {row[f'{where}_hits'] / row['queried']:.1%}" for where in ("gpu", "host"))
        check = f"; {row['compared']} blocks compared, {row['changed']} changed" if row["checked"] else ""
        moved = ", ".join(
            f"{what} {row[f'{key}_gib']:.2f} GiB in {row[f'{key}_s']:.2f} s" for what, key in MOVED.items()
        )
        say(f"{row['run']}: hits {hits}; TTFT median {row['ttft_ms'][0]:.0f} p95 {row['ttft_ms'][1]:.0f} ms; "
            f"{row['requests_per_s']:.2f} requests/s; {moved}{check}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
