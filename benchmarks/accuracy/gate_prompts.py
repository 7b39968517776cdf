"""KL divergence of each KV-cache dtype, prompt by prompt: `python -m benchmarks.accuracy.gate_prompts`.

One vLLM after another serves SmolLM2-135M on the CPU. The first vLLM has a 16-bit cache and records the baseline.
Besides the default packs, 28 prompts ask for a summary of a piece of our documentation. The program writes
docs/benchmarks/gate-prompts.json. tests/unit/test_probe_sequential.py draws samples from this file to check the error
rates of verdicts.
"""

import asyncio
import json
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kvpilot_localcluster.engines.real import engine
from kvpilot_operator.api.rollout import Accuracy
from kvpilot_probes import packs, run
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.session import Settings
from kvpilot_smallmodels.models import smollm2_135m

OUT = Path("docs/benchmarks/gate-prompts.json")
PAGES = ("faq", "canary", "planning", "install")
SIZES = (30, 45, 60, 90, 120, 150, 200, 300, 400, 500, 700)
SETTINGS = Settings(deadline_seconds=7200)


def prompts() -> list[ProbePrompt]:
    """Return the prompts of the default packs, and requests to summarise texts of 30 to 700 words."""
    words = " ".join(Path(f"docs/{page}.md").read_text() for page in PAGES).split()
    sizes = [SIZES[n % len(SIZES)] for n in range(28)]
    texts = [" ".join(words[n * 97 : n * 97 + size]) for n, size in enumerate(sizes)]
    asked = [ProbePrompt("extra/text", f"t{n}", (Message("user", f"Summarise: {t}"),)) for n, t in enumerate(texts)]
    return [*packs.load(Accuracy().probe_sets), *asked]


def main() -> None:
    """Record the 16-bit baseline, measure the KL divergence of each dtype, and write the results."""
    found: dict[str, list[float]] = {}
    reference = None
    for dtype in ("auto", *(sys.argv[1:] or ("k4v4", "fp8"))):
        with tempfile.TemporaryDirectory() as folder, engine(smollm2_135m(), dtype, Path(folder)) as running:
            if reference is None:
                asked = run.capture(running.url, "m", prompts(), identity="", dtype=dtype, settings=SETTINGS)
                reference = asyncio.run(asked)
            measured = asyncio.run(run.measure(running.url, "m", reference, settings=SETTINGS))
            found[dtype] = sorted(round(1000 * one.kl, 2) for one in measured.seen)
    about = {"date": datetime.now(UTC).date().isoformat(), "model": "SmolLM2-135M", "vllm": version("vllm")}
    OUT.write_text(json.dumps({**about, "tokens": SETTINGS.tokens, "kl_millinats": found}) + "\n")


if __name__ == "__main__":
    main()
