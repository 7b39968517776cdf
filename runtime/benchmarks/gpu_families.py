"""Families of models in real vLLM, `k4v4` beside `auto`: `python runtime/benchmarks/gpu_families.py --out DIR`.

Of each family a small random model (kvpilot_demo.families) answers the same prompts greedily in five engines: with
each dtype *alone* (one at a time, eager, no prefix caching, a prompt in one piece) and *crowded* (CUDA graphs, prefix
caching, prompts in chunks, many at once, and so little cache that requests are preempted), `k4v4` with its default
window and its own calibration; and crowded with the bare *codec* (no window, no factors, chunks that read themselves
back), whose predictions are those of plain transformers with the same codec (kvpilot_demo.oracle) but for rounding.

Writes DIR/families.json, what is judged, and all answers beside it; `gpu_families_page.py` makes the page.
Needs `demo` on the path beside `runtime` and `kernels`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_engine_process import ChildFailedError, environment, run_child, say
from gpu_equality import MAX_MODEL_LEN, prompts_of
from gpu_families_ask import Asked
from gpu_families_judge import RIGHT, judge

from kvpilot_demo.families import FAMILIES, make

CODEC = {"KVPILOT_CALIBRATION": "off", "KVPILOT_RECENT_TOKENS": "0", "KVPILOT_PREFILL_FROM_PAGES": "1"}
RUNS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "k4v4/codec": ("k4v4", True, CODEC), "auto/crowded": ("auto", True, {}), "k4v4/crowded": ("k4v4", True, {}),
    "k4v4/alone": ("k4v4", False, {}), "auto/alone": ("auto", False, {}),
}  # fmt: skip
"""By name: dtype, whether crowded, and what its environment has."""
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Engine cores run in the engines' own processes, where their caches can be taken."""
CHUNK = 128
ROOM = 1.5
"""Requests of the longest kind (`MAX_MODEL_LEN`) that a crowded engine has cache for."""


@dataclass(frozen=True)
class Case:
    """How a family is served: `dtype` of weights and activations, further `fields` of config.json."""

    dtype: str = "float16"
    fields: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    **{name: Case() for name in FAMILIES},
    # vLLM takes no float16 for these, and FlashAttention no sinks in it.
    **{name: Case("bfloat16") for name in ("gemma2", "gemma3")},
    # All experts of a token: in bfloat16 rounding chooses others, which is a jump.
    "gpt-oss": Case("bfloat16", {"num_experts_per_tok": 4}),
    # On a GPU a chunk has whole blocks of 64 tokens.
    "llama-4": Case(fields={"attention_chunk_size": 128}),
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated per prompt")
    parser.add_argument("--at-once", type=int, default=16, help="engines beside each other")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one engine may take")
    parser.add_argument("--within", type=float, default=600, help="seconds that all engines may take")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def engine_options(model: Path, dtype: str, crowded: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. The largest chunk is the same alone and crowded, and so are the engine's own factors."""
    both: dict[str, Any] = {
        "model": str(model), "kv_cache_dtype": dtype, "block_size": 64, "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN, "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.02,
    }  # fmt: skip
    if crowded:
        return {**both, "enable_prefix_caching": True, "max_num_seqs": 16, "long_prefill_token_threshold": CHUNK}
    return {**both, "enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}


def asked(args: argparse.Namespace, name: str, run: str, model: Path, out: Path) -> Asked:
    """One engine of a family."""
    case, (dtype, crowded, env) = CASES[name], RUNS[run]
    skip = FAMILIES[name].skip if dtype != "auto" else ()
    engine = {**engine_options(model, dtype, crowded), "dtype": case.dtype, **args.engine_args}
    if skip:
        engine["kv_cache_dtype_skip_layers"] = list(skip)
    where = out / f"{name}-{run.replace('/', '-')}.json"
    prompts = prompts_of(model, args.prompts)
    return Asked(engine, prompts, args.tokens, crowded, str(where), {**OWN_PROCESS, **env}, ROOM * crowded)


def made(names: list[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The models, and why one could not be made."""
    found, failed = dict[str, Path](), dict[str, str]()
    for name in names:
        try:
            found[name] = make(name, folder / name, fields=CASES[name].fields)
        except Exception as error:  # a version of transformers that has other classes is to lose one family, not all
            failed[name] = f"{type(error).__name__}: {error}"
    return found, failed


def digest(model: Path) -> str:
    """Of a model's weights, so that it is known elsewhere for the same."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def serve(args: argparse.Namespace, engines: list[Asked]) -> list[dict[str, Any]]:
    """What all engines answered; of one that did not, its error. Their logs' ends are written to OUT, too."""
    log = args.out / f"{args.name}.log"
    with tempfile.TemporaryDirectory(prefix="kvpilot-job-") as folder, environment() as env:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"at_once": args.at_once, "limit": args.limit,
                                   "engines": [asdict(one) for one in engines]}))  # fmt: skip
        try:
            run_child("gpu_families_run.py", job, log, args.within, env)
        except ChildFailedError as error:
            say(f"not all engines ran: {error}")
    found = []
    with (args.out / f"{args.name}-errors.log").open("w") as errors:
        for one in engines:
            out = Path(one.out)
            found.append(json.loads(out.read_text()) if out.exists() else {"error": "it did not end in time"})
            if "error" in found[-1] and (said := out.with_suffix(".log")).exists():
                errors.write(f"== {out.stem}\n{said.read_text()[-8000:]}\n")
    with gzip.open(args.out / f"{args.name}-answers.json.gz", "wt") as file:
        json.dump({Path(one.out).stem: told for one, told in zip(engines, found, strict=True)}, file)
    return found


def write(args: argparse.Namespace, rows: dict[str, dict[str, Any]], told: list[dict[str, Any]]) -> int:
    """Write and print what was found; 1 where something was not served and right."""
    versions = next((run["versions"] for run in told if "versions" in run), {})
    facts = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "versions": versions, "prompts": args.prompts,
             "tokens": args.tokens, "rows": rows}  # fmt: skip
    (args.out / f"{args.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, row in rows.items():
        say(f"{name}: {row['verdict']}")
    return 1 if any(row["verdict"] != RIGHT for row in rows.values()) else 0


def main() -> int:
    """Serve all, judge, print and write; returns 1 when a family was not served and right."""
    args = arguments()
    args.name = "families"
    names, runs = args.families.split(","), args.runs.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpilot-families-") as folder:
        scratch = Path(folder)
        models, failed = made(names, scratch / "models")
        say(f"{len(models)} models made")
        # By run, so that what vLLM and Triton keep of a family is there when its next engine starts.
        keys = [(name, run) for run in runs for name in models]
        engines = [asked(args, name, run, models[name], scratch) for name, run in keys]
        told = serve(args, engines)
        found = dict(zip(keys, told, strict=True))
        say("judging")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gpu_families_judge"])
        with ProcessPoolExecutor(args.at_once, context) as pool:
            judged = {name: pool.submit(judge, models[name], CASES[name].dtype, prompts_of(models[name], args.prompts),
                                        {run: found[name, run] for run in runs}) for name in models}  # fmt: skip
            rows = {name: {"weights": digest(models[name]), **judged[name].result()} for name in models}
    return write(args, rows | {name: {"verdict": f"no model: {error}"} for name, error in failed.items()}, told)


if __name__ == "__main__":
    sys.exit(main())
