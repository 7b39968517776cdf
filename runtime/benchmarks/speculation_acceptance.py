"""How many of ngram's drafts are accepted, by KV-cache dtype: `python runtime/benchmarks/speculation_acceptance.py`.

SmolLM2-135M's real weights in float32 on a CPU, greedy, continuing pieces of the texts of docs/benchmarks/accuracy.md;
our dtypes as they are served, calibrated by the engine itself and with their default window. Each dtype runs in a
process of its own over the same prompts. An answer changes with the dtype and so does what is drafted for it:
`accepted` is of each dtype's own drafts. Writes OUT/speculation-acceptance.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_texts import EVALUATION, text

from kvpilot_demo.models import smollm2_135m

PROMPT = 192


def prompts(count: int) -> list[str]:
    """Pieces of each text in turn, evenly over its length, in characters of about `PROMPT` tokens."""
    size, found = 4 * PROMPT, []
    for i in range(count):
        whole = text(EVALUATION[i % len(EVALUATION)])
        begin = (len(whole) - size) * (i // len(EVALUATION)) // max(1, count // len(EVALUATION))
        found.append(whole[begin : begin + size])
    return found


def serve(dtype: str, asked: list[str], tokens: int, drafts: int) -> dict[str, Any]:
    """Ask an engine of this process."""
    from vllm import LLM, SamplingParams

    speculation = {
        "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4
    }  # fmt: skip
    llm = LLM(
        str(smollm2_135m()), kv_cache_dtype=dtype, dtype="float32", enforce_eager=True, max_model_len=1024,
        max_num_seqs=16, max_num_batched_tokens=1024, kv_cache_memory_bytes=1 << 30, disable_log_stats=False,
        speculative_config=speculation,
    )  # fmt: skip
    began = time.perf_counter()
    answers = llm.generate(asked, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted, accepted = (
        counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )  # fmt: skip
    return {
        "dtype": dtype, "drafted": drafted, "accepted": accepted, "rate": round(accepted / drafted, 4),
        "tokens": sum(len(a.outputs[0].token_ids) for a in answers), "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    """Run each dtype and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--dtypes", nargs="+", default=["auto", "k8v4", "k4v4", "k4v2", "k2v2"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens of a sequence in a step")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = serve(options.one, prompts(options.prompts), options.tokens, options.drafts)
        print(json.dumps(row), flush=True)
        return 0
    facts: dict[str, Any] = {
        "command": f"python runtime/benchmarks/speculation_acceptance.py {' '.join(sys.argv[1:])}".strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "vllm": version("vllm"), "rows": [],
    }  # fmt: skip
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    for dtype in options.dtypes:
        ended = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", dtype], env=environment, stdout=subprocess.PIPE,
            text=True, check=True,
        )  # fmt: skip
        facts["rows"].append(json.loads(ended.stdout.splitlines()[-1]))
        print(facts["rows"][-1], flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "speculation-acceptance.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
