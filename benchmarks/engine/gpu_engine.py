"""Measure step time, prefill rate and capacity of dtypes in real vLLM: `python -m benchmarks.engine.gpu_engine`.

Each dtype gets an engine in its own process: dummy weights, default compilation and CUDA graphs, prefix caching. The
benchmark measures every case on that engine. If the engine fails or runs out of time, the result holds its error. The
program writes OUT/SHAPE-DTYPE.json and .log, from which `plots.py` makes tables and plots.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine import gpu_engine_report as report
from benchmarks.engine.gpu_engine_measure import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, attention_lines, environment, run_child, say
from benchmarks.engine.gpu_engine_shapes import SHAPES, write

DTYPES = "auto,fp8,k4v4,k4v2"
CASES = "32x16K,32x8K,32x4K,32x2K,32x16,8x1K,1x64K"


def size(text: str) -> int:
    """Parse a number of tokens: `2K` is 2,048."""
    return int(text[:-1]) * 1024 if text.upper().endswith("K") else int(text)


def sizes(text: str) -> list[int]:
    """Parse a list of numbers of tokens, such as `100,400`."""
    return [size(one) for one in text.split(",")]


def case(text: str) -> tuple[int, int]:
    """Parse a case: `32x16K` is 32 sequences, each with a context of 16,384 tokens."""
    batch, _, context = text.partition("x")
    return int(batch), size(context)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=DTYPES, help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--cases", default=CASES, help="cases as batch x context, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--chunked", type=size, default=65536, help="tokens of a long prompt for chunked prefill; 0 for none"
    )
    parser.add_argument("--mixed", action="store_true",
                        help="also time the end of the --chunked prompt together with seven short prompts")  # fmt: skip
    parser.add_argument("--beside", type=sizes, default=[], metavar="NEW,NEW",
                        help="also time steps in which a request with NEW uncached tokens arrives while others decode: "
                        "wall time, kernel time and slowest host functions; vLLM then starts no process of its own for "
                        "the engine")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--model", type=Path, help="model folder with weights, instead of --shape")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the shape has")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of tensor parallelism")
    parser.add_argument("--steps", type=int, default=128, help="number of decode steps of one timing")
    parser.add_argument("--repeats", type=int, default=3, help="number of timings per case, of which the median counts")
    parser.add_argument("--max-model-len", type=size, default=66560)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.90)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--drafts", type=int, default=0,
                        help="number of random draft tokens of each sequence in each step")  # fmt: skip
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=280, help="seconds that one dtype may take")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def model_of(args: argparse.Namespace, scratch: Path) -> tuple[str, int, dict[str, Any]]:
    """Return the model's name, its vocabulary size, and vLLM's arguments for the model and its weights."""
    if args.model:
        config = json.loads((args.model / "config.json").read_text())
        return args.model.name, config["vocab_size"], {"model": str(args.model)}
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    folder = write(scratch / "model", shape, layers, args.max_model_len)
    name = args.shape if layers == shape.layers else f"{args.shape}-{layers}-layers"
    return name, shape.vocab, {"model": str(folder), "load_format": "dummy"}


def alone(args: argparse.Namespace) -> dict[str, str]:
    """Return environment variables that keep vLLM in one process, which `--drafts` and `--beside` require."""
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.drafts or args.beside else {}


def drafted(count: int) -> dict[str, Any]:
    """Return options for n-gram speculation. The child process replaces vLLM's proposer."""
    return {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 2}


def command_line(words: list[str]) -> str:
    """Return the command line as text for the result, without the output folder."""
    kept = list(words)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return shlex.join(["python", "-m", "benchmarks.engine.gpu_engine", *kept])


def measure(args: argparse.Namespace, name: str, dtype: str, job: Job, env: dict[str, str]) -> dict[str, Any]:
    """Run one engine, and return its results together with its job. An error is a result, too."""
    out = Path(job.out)
    log, error = out.with_suffix(".log"), None
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpilot-job-") as scratch:
        job_file = Path(scratch, "job.json")
        job_file.write_text(json.dumps(asdict(job)))
        try:
            run_child("benchmarks.engine.gpu_engine_measure", job_file, log, args.limit, env)
        except ChildFailedError as failure:
            error = str(failure)
    measured = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    facts = {
        "shape": name,
        "dtype": dtype,
        "tp": args.tp,
        "command": command_line(sys.argv[1:]),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "options": {key: value for key, value in job.engine.items() if key != "model"},
        "attention": attention_lines(log),
        **measured,
        "error": error,
    }
    out.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main() -> int:
    """Run every dtype and print the table. Return 1 if no dtype has a complete result."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kvpilot-model-") as scratch, environment(alone(args)) as env:
        name, vocab, model = model_of(args, Path(scratch))
        for dtype in args.dtypes.split(","):
            engine = {
                **model,
                "kv_cache_dtype": dtype,
                "dtype": "bfloat16",
                "skip_tokenizer_init": True,
                "tensor_parallel_size": args.tp,
                "max_model_len": args.max_model_len,
                "max_num_seqs": args.max_num_seqs,
                "gpu_memory_utilization": args.gpu_memory_utilization,
                "enable_prefix_caching": True,
                "enforce_eager": args.enforce_eager,
                **({"speculative_config": drafted(args.drafts)} if args.drafts else {}),
                **args.engine_args,
            }
            more = [f"{word}{n}" for word, n in (("tp", args.tp), ("drafts", args.drafts)) if n > (word == "tp")]
            stem = "-".join([name, *more, dtype])
            cases = [case(text) for text in args.cases.split(",")]
            out = args.out / f"{stem}.json"
            job = Job(engine, cases, args.chunked, args.steps, args.repeats, vocab, args.drafts, str(out),
                      args.mixed, args.beside)  # fmt: skip
            say(f"{stem}: starting")
            runs[dtype] = measure(args, name, dtype, job, env)
            say(f"{stem}: {'failed: ' + runs[dtype]['error'] if runs[dtype]['error'] else 'done'}")
    print(report.results_table(runs), report.bars_table(name, runs), *report.failures(runs), sep="\n")
    return 0 if any(run["error"] is None for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
