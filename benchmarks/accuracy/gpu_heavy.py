"""Heavy hitters in real vLLM: `python -m benchmarks.accuracy.gpu_heavy`.

An engine serves a random model with `HeavyHitters`, prefix caching, prompts in small chunks, and a cache so small that
requests are preempted. It answers the same requests four times:

- twice unchanged,
- once with every freed page overwritten before the next step,
- once with every request's first page overwritten, to prove that answers change if an overwritten page is read.

Plain transformers in float32, with the same codec and pages, compute each page's share of attention (its mass) and the
pages that should be freed. The program writes OUT/heavy.json. It returns 1 if a freed page was read, a page was not
returned, or masses differ from those of plain transformers by more than `--masses-off`. With `--ahead` steps are
scheduled asynchronously. The freed pages then depend on the results that arrive in time, so answers of two turns may
differ. The program then judges by the share of tokens that plain transformers would also choose.
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

import torch

from benchmarks.accuracy.gpu_equality import MAX_MODEL_LEN, random_model
from benchmarks.accuracy.gpu_heavy_plain import Plain, judge
from benchmarks.accuracy.gpu_heavy_run import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from kvpilot_runtime.config.retention import HeavyHitters


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="k4v4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--budget", type=int, default=320, help="tokens, with 4 sinks (default: %(default)s)")
    parser.add_argument("--window", type=int, default=100, help="tokens of it (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=36, help="of the cache, one of them vLLM's own")
    parser.add_argument("--chunk", type=int, default=128, help="max_num_batched_tokens")
    parser.add_argument("--sharp", type=float, default=2, help="factor on queries, so that pages weigh unlike")
    parser.add_argument("--masses-off", type=float, default=0.05, help="the mean difference of a page's mass, of a "
                        "mean page's, that is rounding (default: %(default)s)")  # fmt: skip
    parser.add_argument("--ahead", action="store_true", help="schedule asynchronously")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def sharpened(model: Path, factor: float) -> Path:
    """Scale up the model's queries in place, so that attention is less uniform."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight.mul_(factor)
    made.save_pretrained(model)
    return model


def requests(vocabulary: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return three rounds of prompts, and the number of tokens of each answer.

    Round 1 has several requests, round 2 has one. Round 3 has one that extends the prompt of round 2, and one that
    repeats a prompt of round 1.
    """
    rng = random.Random(20261124)  # noqa: S311
    lengths = (430, 40, 620, 10, 250, 33, 500, 90, 128)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    more = [rng.randrange(3, vocabulary) for _ in range(400)]
    rounds = [prompts[:-1], [prompts[-1]], [[*prompts[-1], *more], prompts[4]]]
    return rounds, [[380, 330, 150, 700, 260, 500, 300, 400], [4], [120, 60]]


def main() -> int:
    """Run the engine and plain transformers, judge the results, print and write them."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    bound = HeavyHitters(4, args.window, args.budget)
    found: dict[str, Any] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "bound": str(bound)}
    right = True
    with tempfile.TemporaryDirectory(prefix="kvpilot-heavy-") as folder:
        scratch = Path(folder)
        model = sharpened(random_model(scratch / "random", latent=False, mtp=False), args.sharp)
        vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        rounds, tokens = requests(vocabulary)
        exact = {"KVPILOT_RETENTION": str(bound), "KVPILOT_CALIBRATION": "off", "KVPILOT_PREFILL_FROM_PAGES": "1",
                 "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        with environment(exact) as env:
            for dtype in args.dtypes.split(","):
                engine = {
                    "model": str(model), "kv_cache_dtype": dtype, "dtype": args.dtype, "skip_tokenizer_init": True,
                    "max_model_len": MAX_MODEL_LEN, "block_size": args.block_size, "max_num_seqs": 8,
                    "max_num_batched_tokens": args.chunk, "num_gpu_blocks_override": args.blocks,
                    "kv_cache_memory_bytes": 2**30, "enable_prefix_caching": True, "async_scheduling": args.ahead,
                    **args.engine_args,
                }  # fmt: skip
                out = scratch / f"{dtype}.json"
                (scratch / "job.json").write_text(json.dumps(asdict(Job(engine, rounds, tokens, str(out)))))
                say(f"{dtype}: {len(rounds[0])} requests at once")
                try:
                    run_child(
                        "benchmarks.accuracy.gpu_heavy_run",
                        scratch / "job.json",
                        args.out / f"heavy-{dtype}.log",
                        args.limit,
                        env,
                    )
                except ChildFailedError as error:
                    found[dtype], right = {"error": str(error)}, False
                    say(f"{dtype}: {error}")
                    continue
                told = json.loads(out.read_text())
                plain = Plain(model, dtype)
                prompts = [prompt for one in rounds for prompt in one]
                result = judge(told.pop("turns"), prompts, plain, bound, args.block_size)
                found[dtype] = {**told, **result}
                right = right and sound(result, args.masses_off, args.ahead)
                say(f"{dtype}: {json.dumps(result)}")
    (args.out / "heavy.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), "sound" if right else "NOT SOUND", flush=True)
    return 0 if right else 1


def sound(result: dict[str, Any], most: float, ahead: bool) -> bool:
    """Return True if the results show no fault. `most` is `--masses-off`, and `ahead` is `--ahead`."""
    equal, best = result["answers_equal"], result["tokens_that_are_the_best"]
    unread = equal["left again"] == equal["freed pages overwritten"] == result["requests"]
    if ahead:
        unread = result["tokens_that_are_the_best_with_freed_pages_overwritten"] > (best["held"] + best["whole"]) / 2
    return (
        unread
        and equal["first pages overwritten"] < result["requests"] // 2
        and result["pages_left"] == 0 and result["pages_freed"] > 20 and result["preempted"] > 0
        and result["masses"]["mean_off"] <= most and result["freed_over_lightest"]["mean"] <= 1 + most
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
