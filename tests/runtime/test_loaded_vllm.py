"""Probes of a real vLLM judge pages that a KV connector has loaded: from host memory, or from LMCache's server.

The engine serves real weights with a 16-bit cache. A plugin damages it on request.
"""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gate import engines
from kvpilot_localcluster.engines.real import Engine
from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.decide import Judgement, allowed, described, judge
from kvpilot_probes import codec, loaded, packs
from kvpilot_probes.codec import Baseline
from kvpilot_probes.run import capture, control, measure
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Measurement

SETTINGS = Settings(tokens=16, deadline_seconds=1200)
LIMITS = Accuracy()
HOST, LMCACHE = "OffloadingConnector", "LMCacheMPConnector"

pytestmark = pytest.mark.timeout(3600)


class Served:
    """Engine with a KV connector, the answers to compare with, and the file that names the mode of damage."""

    def __init__(self, engine: Engine, connector: str, mode: Path) -> None:
        self.engine, self.connector, self.mode = engine, connector, mode
        self.kept, self.noise = asyncio.run(self._captured())
        self.known = described(self.kept)
        self.limits = allowed(self.known, LIMITS)

    async def _captured(self) -> tuple[Baseline, Measurement]:
        prompts = packs.load(["builtin/multi-turn"])[:5]  # the fewest prompts that may pass
        kept = await capture(self.engine.url, "m", prompts, identity="i", dtype="auto", settings=SETTINGS)
        noise = await control(self.engine.url, "m", kept, settings=SETTINGS)
        return codec.with_control(kept, noise, datetime.now(UTC)), noise

    async def tokens(self) -> float:
        """Return the number of tokens that the connector has loaded so far."""
        return self.engine.metric("vllm:external_prefix_cache_hits_total")

    def judged(self, found: Measurement) -> Judgement:
        """Return the verdict on the engine by `found` and by answers over pages from the connector."""
        one = loaded.Connector(self.connector, self.tokens)
        both = loaded.extended(self.engine.url, "m", self.kept, found, one, allowed=self.limits, settings=SETTINGS)
        return judge(asyncio.run(both), self.known, LIMITS)


@pytest.fixture(scope="module", params=[HOST, LMCACHE])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        arguments = "--kv-offloading-size=0.25"
        if request.param == LMCACHE:
            if importlib.util.find_spec("lmcache") is None:
                pytest.skip("pages at LMCache need the package lmcache")
            from lmcache_server import server

            port = stack.enter_context(server(folder, "--chunk-size=64")).port
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port,
                     "lmcache.mp.mp_transfer_mode": "engine_driven"}  # fmt: skip
            transfer = {"kv_connector": LMCACHE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
            arguments = f"--kv-transfer-config={json.dumps(transfer)}"
        yield Served(stack.enter_context(engines.canary("auto", folder, arguments)), request.param, folder / "mode")


def test_a_sound_engine_passes_with_the_pages_that_its_connector_has_loaded(served: Served) -> None:
    before = asyncio.run(served.tokens())
    found = served.judged(served.noise)
    assert found.verdict == Verdict.PASSED, found.message
    assert f"from-{served.connector}" in found.covered.split("; not:")[0]
    assert before == 0 < sum(len(one.tokens) // 64 * 64 for one in served.kept.prompts) <= asyncio.run(served.tokens())


def test_damage_to_loaded_pages_alone_fails_in_the_bucket_of_the_connector(served: Served) -> None:
    served.mode.write_text("loaded")
    own = asyncio.run(measure(served.engine.url, "m", served.kept, allowed=served.limits, settings=SETTINGS))
    assert judge(own, served.known, LIMITS).verdict == Verdict.PASSED
    found = served.judged(own)
    assert found.verdict == Verdict.FAILED
    assert found.message.startswith(f"from-{served.connector}: ")
