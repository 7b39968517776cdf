"""Compare `k4v4` with `auto` for model families in real vLLM: `python -m benchmarks.accuracy.gpu_families --out DIR`.

A small random model of each family (kvpilot_smallmodels.families) answers the same prompts greedily in five engines:

- `auto`, crowded and alone.
- `k4v4` with its default window and its own calibration, crowded and alone.
- The bare *codec*, crowded: `k4v4` without window and factors, whose prefill reads quantized pages. Except for
  rounding, it must predict the same as plain transformers with the same codec.

*Crowded* means many prompts at once, with CUDA graphs, prefix caching, chunks, and a cache so small that requests are
preempted. *Alone* means one prompt at a time, eager, in one chunk and without prefix caching.

The program writes DIR/families-answers.json.gz, and DIR/families-errors.log with the last log lines of failed engines.
gpu_families_page.py judges the answers on any machine. This program needs `smallmodels`, `formats`, `kernels` and
`runtime` on PYTHONPATH.
"""

import argparse
import gzip
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_equality import MAX_MODEL_LEN, prompts_of
from benchmarks.accuracy.gpu_families_ask import Asked
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from kvpilot_smallmodels.families import FAMILIES, make

CODEC = {"KVPILOT_CALIBRATION": "off", "KVPILOT_RECENT_TOKENS": "0", "KVPILOT_PREFILL_FROM_PAGES": "1"}
RUNS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "k4v4/codec": ("k4v4", True, CODEC), "auto/crowded": ("auto", True, {}), "k4v4/crowded": ("k4v4", True, {}),
    "k4v4/alone": ("k4v4", False, {}), "auto/alone": ("auto", False, {}),
}  # fmt: skip
"""Kinds of runs by name: KV-cache dtype, True for a crowded run, and environment variables."""
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment that keeps the engine core in this process, so that the benchmark can take away blocks of its cache."""
LINES, LINE = 150, 500
"""Limits for the log of a failed engine: number of lines, and characters of each. vLLM prints whole configurations."""
CHUNK = 128
ROOM = 1.5
"""Number of requests of `MAX_MODEL_LEN` tokens that fit in the cache of a crowded engine."""
QUICK: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "kernel_config": {"enable_jit_warmup": False},
}
"""Options that make crowded engines start fast: CUDA graphs only for decode, and no compilation."""


@dataclass(frozen=True)
class Case:
    """Settings of the engines for a family.

    Attributes:
        dtype: dtype of weights and activations.
        fields: additional fields of config.json.
        engine: additional arguments of all engines.
        auto: additional arguments of engines with the KV-cache dtype `auto`.
    """

    dtype: str = "float16"
    fields: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    auto: dict[str, Any] = field(default_factory=dict)


# For heads of 512 elements vLLM would use FlashAttention 4, whose packages may be missing.
GEMMA4 = Case(engine={"attention_config": {"flash_attn_version": 3}},
              auto={"attention_config": {"backend": "TRITON_ATTN"}})  # fmt: skip


CASES: dict[str, Case] = {
    # FlashAttention's sinks need bfloat16. Rounding to bfloat16 could select other experts and so change answers, so
    # let every token use all experts.
    "gpt-oss": Case("bfloat16", {"num_experts_per_tok": 4}),
    # vLLM refuses float16 for Gemma 2 and Gemma 3.
    "gemma3": Case("bfloat16"),
    "gemma2": Case("bfloat16"),
    "gemma3n": Case(),
    "gemma4": GEMMA4,
    "gemma4-26b": GEMMA4,
    # On a GPU an attention chunk must consist of whole blocks of 64 tokens.
    "llama-4": Case(fields={"attention_chunk_size": 128}),
    # On Hopper vLLM would use FlashInfer, which may be missing, for this model's linear attention.
    "qwen3-next": Case(engine={"gdn_prefill_backend": "triton"}),
    **{name: Case() for name in ("granite-4", "qwen3-moe", "nemotron-h", "lfm2", "qwen2", "qwen3", "phi3", "stablelm",
                                 "heads-of-192", "shared-kv-head", "plain")},
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--runs", default=",".join(RUNS), help="kinds of runs, comma-separated (default: %(default)s)")
    shared_arguments(parser, engines=8)
    return parser.parse_args()


def shared_arguments(parser: argparse.ArgumentParser, engines: int) -> None:
    """Add the command-line options that gpu_options.py has in common with this program."""
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="tokens generated per prompt")
    parser.add_argument(
        "--at-once", type=int, default=engines, help="number of engines at the same time (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=120, help="time limit of an engine, in seconds")
    parser.add_argument("--within", type=float, default=600, help="time limit of all engines, in seconds")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"))


def engine_options(model: Path, dtype: str, crowded: bool) -> dict[str, Any]:
    """Return arguments of `vllm.LLM`. All engines have the same chunk size, because calibration depends on it."""
    both: dict[str, Any] = {
        "model": str(model), "kv_cache_dtype": dtype, "block_size": 64, "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN, "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.02,
    }  # fmt: skip
    if crowded:
        crowd = {"enable_prefix_caching": True, "max_num_seqs": 16, "long_prefill_token_threshold": CHUNK}
        return {**both, **crowd, **QUICK}
    return {**both, "enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}


def asked(args: argparse.Namespace, name: str, run: str, model: Path, out: Path) -> Asked:
    """Return the job (engine arguments and requests) of one engine for a model family.

    Args:
        name: name of the family, a key of `CASES`.
        run: kind of run, a key of `RUNS`.
        model: folder of the family's model.
        out: folder for the answers.
    """
    case, (dtype, crowded, env) = CASES[name], RUNS[run]
    skip = FAMILIES[name].skip if dtype != "auto" else ()
    engine = {**engine_options(model, dtype, crowded), "dtype": case.dtype, **case.engine}
    engine |= {**(case.auto if dtype == "auto" else {}), **args.engine_args}
    if skip:
        engine["kv_cache_dtype_skip_layers"] = list(skip)
    where = out / f"{name}-{run.replace('/', '-')}.json"
    prompts = prompts_of(model, args.prompts)
    return Asked(engine, prompts, args.tokens, crowded, str(where), {**OWN_PROCESS, **env}, ROOM * crowded)


def made(names: list[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Create the models. Return their folders, and the errors of models that could not be created."""
    found, failed = dict[str, Path](), dict[str, str]()
    for name in names:
        try:
            found[name] = make(name, folder / name, fields=CASES[name].fields)
        except Exception as error:  # A version of transformers may have renamed a class. Then only this family fails.
            failed[name] = f"{type(error).__name__}: {error}"
    return found, failed


def digest(model: Path) -> str:
    """Return a hash of a model's weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def serve(args: argparse.Namespace, engines: dict[str, Asked], models: dict[str, Path]) -> int:
    """Run all engines and write their answers, with a hash of each model's weights. Return 1 if an engine failed."""
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"{args.name}.log"
    with tempfile.TemporaryDirectory(prefix="kvpilot-job-") as folder, environment() as env:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"at_once": args.at_once, "limit": args.limit,
                                   "engines": [asdict(one) for one in engines.values()]}))  # fmt: skip
        try:
            run_child("benchmarks.accuracy.gpu_families_run", job, log, args.within, env)
        except ChildFailedError as error:
            say(f"not all engines ran: {error}")
    found = {}
    with (args.out / f"{args.name}-errors.log").open("w") as errors:
        for name, one in engines.items():
            out = Path(one.out)
            found[name] = json.loads(out.read_text()) if out.exists() else {"error": "it did not end in time"}
            found[name]["prompts"] = one.prompts
            if "error" in found[name] and (said := out.with_suffix(".log")).exists():
                lines = [line[:LINE] for line in said.read_text().splitlines() if line.strip()]
                errors.write("\n".join([f"== {name}", *lines[-LINES:], ""]))
    versions: Any = next((told["versions"] for told in found.values() if "versions" in told), {})
    facts = {"name": args.name, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "versions": versions,
             "prompts": args.prompts, "tokens": args.tokens, "answers": found,
             "weights": {name: digest(model) for name, model in models.items()}}  # fmt: skip
    with gzip.open(args.out / f"{args.name}-answers.json.gz", "wt") as file:
        json.dump(facts, file)
    return 1 if any("error" in told for told in found.values()) else 0


def main() -> int:
    """Run all engines and write their answers. Return 1 if an engine failed."""
    args = arguments()
    args.name = "families"
    names, runs = args.families.split(","), args.runs.split(",")
    with tempfile.TemporaryDirectory(prefix="kvpilot-families-") as folder:
        scratch = Path(folder)
        models, failed = made(names, scratch / "models")
        say(f"{len(models)} models made; {failed or 'none failed'}")
        # Order engines by run, so that a family's later engines find the code that its first engine compiled.
        engines = {f"{name} {run}": asked(args, name, run, models[name], scratch) for run in runs for name in models}
        return serve(args, engines, models)


if __name__ == "__main__":
    sys.exit(main())
