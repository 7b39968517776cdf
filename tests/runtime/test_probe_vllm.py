"""Probes against real vLLM and real weights: noise is told from damage, and damage from garbage.

Each dtype is a vLLM of its own on the CPU, one after the other; the weights are those that the runtime's tests prepare.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvpilot_operator.probes import codec, packs
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.run import Measurement, Settings, capture, control, measure

CACHE = Path(os.environ.get("KVPILOT_CACHE", Path.home() / ".cache" / "kvpilot"))
WEIGHTS = CACHE / "models" / "smollm2-135m"
MODEL = "smollm2"
START_SECONDS = 300
SETTINGS = Settings(deadline_seconds=240)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (WEIGHTS / "config.json").exists(), reason=f"no weights at {WEIGHTS}"),
]


@contextmanager
def vllm(dtype: str, log: Path) -> Iterator[str]:
    """Run vLLM with this KV-cache dtype on a free port until the block ends; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(WEIGHTS), "--served-model-name", MODEL, "--kv-cache-dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"),
    ]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            assert process.poll() is None, f"vLLM ended with {process.returncode}: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"vLLM did not start: {log.read_text()[-2000:]}"
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Baseline, Measurement]:
    """What the 16-bit engine answers, as it comes back from being kept, and its noise against itself."""
    prompts = packs.load(["builtin/general"])

    async def both(url: str) -> tuple[Baseline, Measurement]:
        captured = await capture(url, MODEL, prompts, identity="test", dtype="auto", settings=SETTINGS)
        kept = codec.decode(codec.encode(captured))
        return kept, await control(url, MODEL, kept, settings=SETTINGS)

    with vllm("auto", tmp_path_factory.mktemp("auto") / "vllm.log") as url:
        return asyncio.run(both(url))


def measured(dtype: str, baseline: Baseline, folder: Path) -> Measurement:
    with vllm(dtype, folder / "vllm.log") as url:
        return asyncio.run(measure(url, MODEL, baseline, settings=SETTINGS))


def test_a_sixteen_bit_engine_is_quiet_against_itself_in_other_batches(reference: tuple[Baseline, Measurement]) -> None:
    kept, noise = reference
    assert len(kept.prompts) == 8
    assert noise.prompts == 8
    assert noise.positions > 200
    assert noise.mean_kl_micronats < 5_000
    assert noise.top1_agreement_permille >= 950


def test_fp8_does_damage_above_the_noise_that_a_reader_would_not_notice(
    reference: tuple[Baseline, Measurement], tmp_path: Path
) -> None:
    kept, noise = reference
    fp8 = measured("fp8", kept, tmp_path)
    excess = fp8.mean_kl_micronats - noise.mean_kl_micronats
    assert 5_000 < excess < 100_000
    assert fp8.top1_agreement_permille > 850
    assert fp8.positions > 180


def test_a_dtype_that_answers_garbage_is_overwhelming_damage_within_a_bounded_cost(
    reference: tuple[Baseline, Measurement], tmp_path: Path
) -> None:
    kept, noise = reference
    garbage = measured("int4_per_token_head", kept, tmp_path)
    assert garbage.mean_kl_micronats - noise.mean_kl_micronats > 500_000
    assert garbage.top1_agreement_permille < 700
    assert garbage.requests <= 8 * (SETTINGS.max_resumes + 1) + 1
    assert garbage.sample is not None
    assert garbage.sample.canary != garbage.sample.stable
