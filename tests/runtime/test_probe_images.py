"""Probes with images of real vLLM: damage to the pages of images shows, and prompts of text alone do not show it.

The model is SmolLM2-135M with random vision weights.
"""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gate import engines
from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.decide import described, judge
from kvpilot_probes import codec, packs
from kvpilot_probes.run import capture, control, measure
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Measurement
from kvpilot_smallmodels.models import seeing_smollm2
from support.forked_serve import engine

SETTINGS = Settings(tokens=8, deadline_seconds=1200)


@pytest.mark.timeout(1800)
def test_damage_to_the_pages_of_images_fails_only_their_bucket(tmp_path: Path) -> None:
    prompts = (*packs.load(["builtin/general"])[:2], *packs.load(["builtin/images"]))
    with engines.canary("auto", tmp_path, model=seeing_smollm2(), run=engine) as running:
        kept = asyncio.run(capture(running.url, "m", prompts, identity="i", dtype="auto", settings=SETTINGS))
        noise = asyncio.run(control(running.url, "m", kept, settings=SETTINGS))
        kept = codec.with_control(codec.decode(codec.encode(kept)), noise, datetime.now(UTC))

        def measured() -> Measurement:
            return asyncio.run(measure(running.url, "m", kept, settings=SETTINGS))

        healthy = measured()
        engines.switch(running, tmp_path, "pictures")
        damaged = measured()
    assert kept.left_out == ()
    verdicts = [judge(found, described(kept), Accuracy()) for found in (healthy, damaged)]
    print(*(one.message for one in verdicts), *healthy.seen, *damaged.seen, sep="\n")
    assert [one.verdict for one in verdicts] == [Verdict.PASSED, Verdict.FAILED]
    assert "images" in verdicts[0].covered.partition(";")[0]
    assert verdicts[1].message.startswith("images: ")
    assert max(one.kl for one in damaged.seen if one.bucket == "general") < 0.001
