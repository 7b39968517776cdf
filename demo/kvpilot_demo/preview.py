"""Let the model answer a first question while the control plane still compiles."""

import sys
import tempfile
from pathlib import Path

import httpx

from kvpilot_localcluster.engines.real import HANGS, engine
from kvpilot_smallmodels.models import smollm2_135m

QUESTION = "In one short sentence: what is the capital of France?"


def main() -> int:
    """Start an engine with a 16-bit KV cache, print its answer to a question, and end it."""
    body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0}
    print("  5% start vLLM", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvpilot-") as folder,
        engine(smollm2_135m(), "auto", Path(folder), "--kv-cache-memory-bytes=64M") as running,
    ):
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=HANGS, trust_env=False)
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"].strip()
        print(f"> vLLM runs here. You ask: {QUESTION} SmolLM2-135M answers: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
