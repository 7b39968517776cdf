"""Test the recent window in real vLLM: `python -m benchmarks.accuracy.gpu_window [--model PATH]`.

Several engines answer the same prompts greedily, in the same steps. They have CUDA graphs, prefix caching, small
chunks, and a cache so small that requests are preempted. Two engines overwrite every ring page that a request gets: one
with zeros, the other with another request's ring rows, shifted by one place. An engine must not read another token's
row, so all logprobs of these two engines must be equal. For comparison, one engine has no window, and one has a 16-bit
cache. The program writes OUT/window-MODEL.json.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_equality import MAX_MODEL_LEN, prompts_of, random_model
from benchmarks.accuracy.gpu_equality_compare import agreement
from benchmarks.accuracy.gpu_window_run import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="k4v4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder with weights and tokenizer (default: a random model)")
    parser.add_argument("--recent", type=int, default=64, help="tokens of the window")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="tokens generated per prompt")
    parser.add_argument(
        "--blocks", type=int, default=80, help="number of blocks of 64 tokens; vLLM keeps one of them for itself"
    )
    parser.add_argument("--chunk", type=int, default=128, help="max_num_batched_tokens")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=120, help="time limit of an engine, in seconds")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def main() -> int:
    """Run all engines, compare their answers, and write the result. Return 1 if a run failed or read a wrong row."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kvpilot-window-") as folder:
        scratch = Path(folder)
        model = args.model or random_model(scratch / "random", latent=False, mtp=False)
        prompts = prompts_of(model, args.prompts)
        runs = [("auto", 0, "")]
        for dtype in args.dtypes.split(","):
            runs += [(dtype, 0, ""), (dtype, args.recent, "zeros"), (dtype, args.recent, "others")]
        for dtype, recent, fill in runs:
            name = f"{dtype}/{recent}{'/' + fill if fill else ''}"
            engine = {
                "model": str(model), "kv_cache_dtype": dtype, "dtype": "bfloat16", "skip_tokenizer_init": True,
                "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": args.chunk,
                "block_size": 64, "num_gpu_blocks_override": args.blocks, **args.engine_args,
            }  # fmt: skip
            out, job, log = scratch / "answers.json", scratch / "job.json", args.out / f"{name.replace('/', '-')}.log"
            out.unlink(missing_ok=True)
            job.write_text(json.dumps(asdict(Job(engine, prompts, args.tokens, fill, str(out)))))
            say(f"{name}: starting")
            extra = {"KVPILOT_RECENT_TOKENS": str(recent), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            with environment(extra) as env:
                try:
                    run_child("benchmarks.accuracy.gpu_window_run", job, log, args.limit, env)
                    found[name] = json.loads(out.read_text())
                except ChildFailedError as error:
                    found[name] = {"error": str(error)}
    rows = compare(found, args)
    versions: dict[str, str] = next((run["versions"] for run in found.values() if "versions" in run), {})
    options = {key: value for key, value in vars(args).items() if key not in ("model", "out", "limit")}
    facts = {"model": model.name, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "versions": versions,
             "options": options, "rows": rows}  # fmt: skip
    (args.out / f"window-{model.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row), flush=True)
    return 1 if any("error" in row or row.get("same") is False for row in rows) else 0


def compare(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare every run with the 16-bit run. `same` is True if both runs with overwritten rings gave equal answers."""
    pairs = [(name, "auto/0") for name in found if name != "auto/0"]
    for dtype in args.dtypes.split(","):
        pairs.append((f"{dtype}/{args.recent}/others", f"{dtype}/{args.recent}/zeros"))
    rows = []
    for name, against in pairs:
        run, reference = found[name], found[against]
        row = {"run": name, "against": against, **run.get("counters", {})}
        if error := run.get("error") or reference.get("error"):
            rows.append({**row, "error": error})
            continue
        row |= agreement(reference["answers"], run["answers"])
        if against != "auto/0":
            row["same"] = run["answers"] == reference["answers"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
