"""Effect of scheduling on answers in real vLLM: `python -m benchmarks.accuracy.gpu_equality [--model PATH]`.

For each KV-cache dtype an engine answers the same prompts greedily in several ways:

- *Alone*: one prompt at a time, eager, in one chunk, without prefix caching.
- *Crowded*: many prompts at once, with CUDA graphs, prefix caching, small chunks, and a cache so small that requests
  are preempted.

`--tp N` adds crowded runs on N GPUs, and `--drafters` adds crowded runs with a draft model. The control is the dtype
`auto`: even its *alone* and *crowded* answers differ, because batches of another shape round differently. Each dtype's
*alone* answers are also compared with those of `auto`. The program writes OUT/equality-MODEL.json, from which
`gpu_equality_page.py` makes the page.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_equality_compare import agreement
from benchmarks.accuracy.gpu_equality_run import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say

MAX_MODEL_LEN = 1024
SHARED_PREFIX = 256
"""Number of tokens with which every second prompt begins, so that the prefix cache has hits."""

DRAFTERS, MTP = ("draft_model", "eagle", "eagle3"), "mtp"
"""Methods of speculation with a draft model. MTP needs a target model that has its own draft layer."""


def methods(text: str) -> list[str]:
    """Parse the value of `--drafters`, a list of methods of speculation."""
    found = text.split(",")
    if found != [MTP] and not set(found) <= set(DRAFTERS):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(DRAFTERS)}, or only {MTP}")
    return found


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtypes", default="auto,k4v4", help="KV-cache dtypes, comma-separated, `auto` first (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="model folder with weights and tokenizer (default: a random model)")
    parser.add_argument("--latent", action="store_true", help="use a random model with multi-head latent attention")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and activations")
    parser.add_argument("--tp", type=int, default=1, help="number of GPUs of an additional, tensor-parallel run")
    parser.add_argument("--drafters", type=methods, default=[], help="ways to draft in further runs of a random "
                        f"model, comma-separated: {', '.join(DRAFTERS)}, or {MTP} alone")  # fmt: skip
    parser.add_argument("--drafts", type=int, default=3, help="number of draft tokens in these runs")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="tokens generated per prompt")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=2048, help="number of tokens in the crowded engine's cache")
    parser.add_argument("--chunk", type=int, default=128, help="max_num_batched_tokens of the crowded engine")
    parser.add_argument("--from-pages", action="store_true", help="let prefill read a chunk's own tokens from pages")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=180, help="time limit of an engine, in seconds")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def random_model(folder: Path, latent: bool, mtp: bool) -> Path:
    """Create a model of four layers with seeded random weights, and return its folder.

    It is a Llama with 8 query heads and 2 KV heads of 128 elements. With `latent` it is a DeepSeek V2 with 16 heads.
    With `mtp` it is a Qwen2 with heads of 64 elements, to which `with_drafter` can add a draft layer.
    """
    import torch
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    common: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "max_position_embeddings": MAX_MODEL_LEN, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.04,
    }  # fmt: skip
    torch.manual_seed(20261121)
    model: Any
    if latent:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(
            num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=4, **common,
        ))  # fmt: skip
    elif mtp:
        model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=8, num_key_value_heads=2, **common))
    else:
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=2, head_dim=128, **common))
    with torch.no_grad():
        # As in a trained model, a token's embedding must outweigh the output of a layer, and predictions must be sharp.
        # Otherwise the layers would amplify rounding errors so much that other differences could not be seen.
        model.model.embed_tokens.weight.mul_(10)
        model.lm_head.weight.mul_(4)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def with_drafter(model: Path, method: str, drafts: int) -> dict[str, Any]:
    """Create a draft model for `model`, and return the engine arguments that use it.

    Args:
        method: one of `DRAFTERS`, or `MTP`.
        drafts: number of tokens to draft in each step.
    """
    from kvpilot_smallmodels import draft_models

    folder = model.with_name(f"{model.name}-with-{method}")
    makers = {"draft_model": draft_models.shaken, "eagle": draft_models.eagle, "eagle3": draft_models.eagle3,
              MTP: draft_models.with_mtp}  # fmt: skip
    made, said = str(makers[method](model, folder)), {"method": method, "num_speculative_tokens": drafts}
    if method == MTP:
        return {"model": made, "speculative_config": said}
    return {"speculative_config": {**said, "model": made}}


def token_stream(model: Path) -> list[int]:
    """Return tokens of Python's own manual, or random IDs if the model has no tokenizer."""
    if (model / "tokenizer.json").exists():
        from pydoc_data.topics import topics

        from tokenizers import Tokenizer

        text = "\n\n".join(topics[name] for name in sorted(topics))
        return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    return random.Random(1).choices(range(100, vocab), k=100_000)  # noqa: S311


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Return prompts of 64 to 463 tokens. Every second prompt begins with the same 256 tokens."""
    stream = token_stream(model)
    lengths = [64 + 97 * i % 400 for i in range(count)]
    starts = [SHARED_PREFIX + i * (len(stream) - 1000) // count for i in range(count)]
    own = [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return [(stream[:SHARED_PREFIX] if i % 2 else []) + tokens for i, tokens in enumerate(own)]


def variants(args: argparse.Namespace, model: Path) -> dict[str, tuple[bool, dict[str, Any]]]:
    """Return each variant by name, as (True if it sends all prompts at once, its engine arguments)."""
    alone = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1,
             "max_num_batched_tokens": MAX_MODEL_LEN}  # fmt: skip
    # vLLM keeps one block for itself, so add one.
    blocks = args.kv_tokens // args.block_size + 1
    crowded = {"enforce_eager": False, "enable_prefix_caching": True, "max_num_seqs": 16,
               "max_num_batched_tokens": args.chunk, "num_gpu_blocks_override": blocks}  # fmt: skip
    runs: dict[str, tuple[bool, dict[str, Any]]] = {"alone": (False, alone), "crowded": (True, crowded)}
    if args.tp > 1:
        runs[f"tp{args.tp}"] = (True, {**crowded, "tensor_parallel_size": args.tp})
    for method in args.drafters:
        runs[method] = (True, {**crowded, **with_drafter(model, method, args.drafts)})
    return runs


def answer(args: argparse.Namespace, model: Path, scratch: Path, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the answers (or the error) of each dtype and variant, by "dtype/variant"."""
    prompts, found, runs = prompts_of(model, args.prompts), {}, variants(args, model)
    for dtype in args.dtypes.split(","):
        for variant, (at_once, options) in runs.items():
            engine = {"model": str(model), "kv_cache_dtype": dtype, "dtype": args.dtype, "block_size": args.block_size,
                      "skip_tokenizer_init": True, "max_model_len": MAX_MODEL_LEN, **options,
                      **args.engine_args}  # fmt: skip
            out, log = scratch / "answers.json", args.out / f"equality-{model.name}-{dtype}-{variant}.log"
            out.unlink(missing_ok=True)
            job = scratch / "job.json"
            job.write_text(json.dumps(asdict(Job(engine, prompts, args.tokens, at_once, str(out)))))
            say(f"{dtype}, {variant}: starting")
            try:
                run_child("benchmarks.accuracy.gpu_equality_run", job, log, args.limit, env)
                found[f"{dtype}/{variant}"] = json.loads(out.read_text())
            except ChildFailedError as error:
                found[f"{dtype}/{variant}"] = {"error": str(error)}
    return found


def compare(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of figures for each compared pair of runs.

    A dtype's *alone* run is compared with the *alone* run of `auto`. A run on several GPUs is compared with the crowded
    run of its dtype, and every other run with the *alone* run of its dtype.
    """
    rows = []
    for name, run in found.items():
        dtype, variant = name.split("/")
        against = f"{dtype}/crowded" if variant.startswith("tp") else f"{dtype}/alone"
        if variant == "alone":
            against = "auto/alone"
        if name == against:
            continue
        reference = found.get(against, {"error": "was not asked for"})
        row = {"run": name, "against": against, "kv_tokens": run.get("kv_tokens"), **run.get("counters", {})}
        errors = {at: one["error"] for at, one in ((name, run), (against, reference)) if "error" in one}
        rows.append({**row, "errors": errors} if errors else {**row, **agreement(reference["answers"], run["answers"])})
    return rows


def main() -> int:
    """Run all engines, compare their answers, print and write the result. Return 1 if a run failed."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    extra = {"KVPILOT_PREFILL_FROM_PAGES": "1"} if args.from_pages else {}
    with tempfile.TemporaryDirectory(prefix="kvpilot-equality-") as folder, environment(extra) as env:
        scratch = Path(folder)
        model = args.model or random_model(
            scratch / ("random-latent" if args.latent else "random"), args.latent, args.drafters == [MTP]
        )
        found = answer(args, model, scratch, env)
    rows = compare(found)
    versions: dict[str, str] = next((run["versions"] for run in found.values() if "versions" in run), {})
    skipped = ("model", "out", "limit")
    options = {key: value for key, value in vars(args).items() if key not in skipped}
    facts = {"model": model.name, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "versions": versions,
             "options": options, "rows": rows}  # fmt: skip
    pages, gpus = ["pages"] * args.from_pages, [f"tp{args.tp}"] * (args.tp > 1)
    stem = "-".join(["equality", model.name, *pages, *gpus, *args.drafters])
    (args.out / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row), flush=True)
    return 1 if any(row.get("errors") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
