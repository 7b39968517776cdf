"""Measure the share of accepted n-gram drafts by dtype: `python -m benchmarks.accuracy.speculation_acceptance`.

SmolLM2-135M, with its real weights, answers greedily. A prompt is a piece of a text of the accuracy table,
followed by the beginning of that piece. So the model quotes the rest, which is the typical use of n-gram speculation.
Our dtypes have their defaults: calibration by the engine, and their recent window. Each dtype runs in its own process.
Answers and drafts depend on the dtype, so `accepted` counts each dtype's own drafts.

If this machine lacks the documents, first run the program with `--cut` on a machine that has them. It writes the
prompts to a file, which `--texts` reads here. `--model` may then be the model's folder. The program writes
OUT/speculation-acceptance.json, from which speculation_acceptance_report.py makes the page.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.accuracy.accuracy_texts import EVALUATION, text
from benchmarks.engine.gpu_engine_process import environment

PIECE, QUOTED = 192, 48
"""Approximate lengths, in tokens, of a piece of text and of its beginning, which the prompt repeats."""


def prompts(name: str, count: int) -> list[str]:
    """Return prompts. Each has a piece of the text, of about `PIECE` tokens, and then the piece's beginning again."""
    size, whole = 4 * PIECE, text(name)
    starts = [(len(whole) - size) * (i + 1) // (count + 1) for i in range(count)]
    return [f"{(piece := whole[at : at + size])}\n\n{piece[: 4 * QUOTED]}" for at in starts]


def serve(options: argparse.Namespace, asked: dict[str, list[str]]) -> dict[str, Any]:
    """Run an engine in this process, and return its answers and counters."""
    from vllm import LLM, SamplingParams

    if options.model is None:
        from kvpilot_smallmodels.models import smollm2_135m

        options.model = smollm2_135m()
    speculation = {
        "method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4
    }  # fmt: skip
    llm = LLM(
        str(options.model), kv_cache_dtype=options.one, dtype=options.dtype, enforce_eager=True, max_model_len=1024,
        max_num_seqs=16, max_num_batched_tokens=1024, kv_cache_memory_bytes=1 << 30, disable_log_stats=False,
        speculative_config=speculation,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    row: dict[str, Any] = {"dtype": options.one, "texts": {}, "answers": []}
    began, seen = time.perf_counter(), (0, 0)
    for name in EVALUATION:
        found = llm.generate(asked[name], sampling, use_tqdm=False)
        row["answers"] += [list(one.outputs[0].token_ids) for one in found]
        counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        now = counts["vllm:spec_decode_num_draft_tokens"], counts["vllm:spec_decode_num_accepted_tokens"]
        row["texts"][name] = {"drafted": now[0] - seen[0], "accepted": now[1] - seen[1]}
        seen = now
    return row | {"drafted": seen[0], "accepted": seen[1], "seconds": round(time.perf_counter() - began, 1)}


def machine() -> str:
    """Return the name of the GPU, or the kind of CPU if there is no GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def alike(answers: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of tokens, 0 to 1, before the first difference between an answer and its counterpart."""
    same = 0
    for one, other in zip(answers, others, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return same / sum(map(len, answers))


def main() -> int:
    """Run each dtype, compare all answers with those of the first dtype, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--dtypes", nargs="+", default=["auto", "fp8", "k8v4", "k4v4"])
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts from each text")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens of each answer")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens of a sequence in a step")
    parser.add_argument("--dtype", default="float32", help="dtype of weights and activations")
    parser.add_argument("--model", type=Path, help="folder of the model (default: it is downloaded)")
    parser.add_argument("--cut", type=Path, help="write the prompts to this file, and do nothing else")
    parser.add_argument("--texts", type=Path, help="read the prompts from a file that --cut has written")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.texts:
        asked = json.loads(options.texts.read_text())
    else:
        asked = {name: prompts(name, options.prompts) for name in EVALUATION}
    if options.cut:
        options.cut.write_text(json.dumps(asked))
        return 0
    if options.one:
        print(json.dumps(serve(options, asked)), flush=True)
        return 0
    facts: dict[str, Any] = {
        "command": f"python -m benchmarks.accuracy.speculation_acceptance {' '.join(sys.argv[1:])}".strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "vllm": version("vllm"), "torch": version("torch"),
        "python": platform.python_version(), "machine": machine(), "tokens": options.tokens,
        "prompts": sum(map(len, asked.values())), "drafts": options.drafts, "dtype": options.dtype, "rows": [],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    answers: list[list[list[int]]] = []
    for dtype in options.dtypes:
        with environment({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as env:
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.accuracy.speculation_acceptance", *sys.argv[1:], "--one", dtype],
                env=env, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
        row = json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))
        answers.append(row.pop("answers"))
        facts["rows"].append(row | {"like_auto": round(alike(answers[-1], answers[0]), 4)})
        print(facts["rows"][-1], flush=True)
        (options.out / "speculation-acceptance.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
