"""Record answers of each dtype, to compare versions of vLLM: `python -m benchmarks.accuracy.gpu_versions --out A.json`.

Each case of `CASES` gets an engine in its own process, with a small random model, CUDA graphs and prefix caching. The
engine answers prompts of several lengths greedily in one batch, and once more from the prefix cache. The JSON file has
vLLM's version, the token IDs, and the functions of vLLM that kvpilot replaced in the engine's process.

`--compare a.json b.json` prints how many answers in two such files are equal. To test a version of vLLM without a
network, put it on PYTHONPATH.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_equality import MAX_MODEL_LEN, random_model
from benchmarks.accuracy.gpu_versions_run import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say

CASES = ("auto", "fp8", "k8v4", "k4v4", "k4v2", "mla4")
"""KV-cache dtypes."""
LENGTHS = (5, 63, 64, 200, 470, 900)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--gpu", default="0", help="GPU on which the engines run, one after the other")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--enforce-eager", action="store_true", help="run without compilation and CUDA graphs")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=280, help="time limit of an engine, in seconds")
    parser.add_argument("--out", type=Path, default=Path("versions.json"))
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="compare two result files, and start no engine"
    )
    return parser.parse_args()


def prompts(vocabulary: int) -> list[list[int]]:
    """Return the token ids of the prompts, which are the same in every run."""
    rng = random.Random(20261127)  # noqa: S311
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in LENGTHS]


def compare(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Print the share of equal answers for each case that is in both files. Return True if all answers are equal."""
    print(f"vLLM {one['vllm']} on {one['device']} and vLLM {other['vllm']} on {other['device']}")
    alike = True
    for name in (name for name in one["cases"] if name in other["cases"]):
        found = [document["cases"][name] for document in (one, other)]
        errors = [case["error"] for case in found if case.get("error")]
        pairs = [
            (a, b)
            for x, y in zip(*(case.get("rounds", ()) for case in found), strict=False)
            for a, b in zip(x, y, strict=True)
        ]
        same = sum(a == b for a, b in pairs)
        first = [
            next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), None) for a, b in pairs if a != b
        ]
        alike &= not errors and same == len(pairs) > 0
        print(f"{name}: {same} of {len(pairs)} answers are the same; the others differ from token {first} on; {errors}")
    return alike


def main() -> int:
    """Run every case and write the results. Return 1 if an engine ended with an error."""
    args = arguments()
    if args.compare:
        return int(not compare(*(json.loads(path.read_text()) for path in args.compare)))
    document: dict[str, Any] = {"cases": {}}
    gpu = {"CUDA_VISIBLE_DEVICES": args.gpu, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory(prefix="kvpilot-versions-") as scratch, environment(gpu) as env:
        folder = Path(scratch)
        models = {latent: str(random_model(folder / f"model-{latent}", latent, mtp=False)) for latent in (False, True)}
        for dtype in args.cases.split(","):
            engine = {
                "model": models[dtype.startswith("mla")], "kv_cache_dtype": dtype, "dtype": "bfloat16",
                "skip_tokenizer_init": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16,
                "max_num_batched_tokens": 512, "gpu_memory_utilization": args.gpu_memory_utilization,
                "enforce_eager": args.enforce_eager, "seed": 0, **args.engine_args,
            }  # fmt: skip
            out = folder / f"{dtype}.json"
            job = Job(engine, prompts(8192), args.tokens, str(out))
            (folder / "job.json").write_text(json.dumps(asdict(job)))
            log = args.out.with_name(f"{args.out.stem}-{dtype}.log")
            error = ""
            try:
                run_child("benchmarks.accuracy.gpu_versions_run", folder / "job.json", log, args.limit, env)
            except ChildFailedError as failure:
                error = str(failure)
            found = json.loads(out.read_text()) if out.exists() else {}
            document |= found.pop("versions", {})
            document["cases"][dtype] = {**found, "error": error}
            args.out.write_text(json.dumps(document) + "\n")
            say(f"{dtype}: {error or 'done'}; {len(found.get('replaced', ()))} functions of vLLM replaced")
    print(json.dumps(document))
    return int(any(case["error"] for case in document["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
