"""kvpilot-serve and our backend in real vLLM: capacity and drain."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvpilot_localcluster.engines.real import HANGS, Engine
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.state.snapshot import ModelFacts
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama
from support import forked_serve
from support.engines_in_turn import Turn, serve
from support.metrics_pages import parse_page

pytestmark = pytest.mark.timeout(1800)

# Window and chunk are small, so the full layer needs most of a long request's memory.
LONG = ("--kv-cache-memory-bytes=64M", "--max-model-len=4096", "--max-num-batched-tokens=64", "--max-num-seqs=8")


def capacity(model: Path, dtype: str, folder: Path, *arguments: str) -> int:
    """Return the capacity of the engine's KV cache in tokens, as the engine reports it."""
    with forked_serve.engine(model, dtype, folder, *arguments) as running:
        labels = running.cache_config()
        assert labels["cache_dtype"] == dtype
        return int(labels["kv_cache_size_tokens"])


@dataclass(frozen=True)
class Life:
    """Record of one engine with our dtype, from its start until SIGTERM ends it during an answer."""

    capacity: int
    text: str
    page: PodMetrics
    """Metrics of the engine while it answered, as parsed."""
    in_flight: bool
    """True if the request still ran after the signal was sent."""
    answer: list[int]
    url: str


# The answer takes seconds, and the test polls every few milliseconds.
ANSWER_TOKENS = 500
SAME = ("--kv-cache-memory-bytes=64M",)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    arguments = (*SAME, f"--shutdown-timeout={HANGS}")
    with (
        forked_serve.engine(tiny_llama(), "k4v4", tmp_path_factory.mktemp("life"), *arguments) as running,
        ThreadPoolExecutor(1) as user,
    ):
        tokens = int(running.cache_config()["kv_cache_size_tokens"])
        answer = user.submit(running.tokens, [7] * 8, ANSWER_TOKENS)
        text, page = running_page(running, answer)
        os.kill(running.process.pid, signal.SIGTERM)
        in_flight = not answer.done()
        answered = answer.result(HANGS)
        running.process.wait(HANGS)
    return Life(tokens, text, page, in_flight, answered, running.url)


def running_page(running: Engine, answer: Future[list[int]]) -> tuple[str, PodMetrics]:
    """Return the first metrics page on which the request runs. All assertions use this page."""
    while not answer.done():
        text = running.page()
        if (page := parse_page(text)).running:
            return text, page
    raise AssertionError(f"the request ended before a page showed it: {answer.result()[:8]}")


def test_a_request_in_flight_is_finished_after_sigterm(life: Life) -> None:
    assert life.in_flight, "the request ended before the signal: ask for more tokens"
    assert len(life.answer) == ANSWER_TOKENS
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{life.url}/health", timeout=2)


def test_the_operator_reads_the_engines_metrics_while_it_answers(life: Life) -> None:
    assert life.page.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
    assert (life.page.dtype, life.page.running) == ("k4v4", 1)
    assert life.page.process_start is not None
    assert life.page.totals.ttft.bounds
    assert life.page.totals.itl.bounds


def test_the_metrics_page_reports_the_self_calibration(life: Life) -> None:
    [line] = [line for line in life.text.splitlines() if line.startswith(calibration_info.NAME + "{")]
    assert 'source="self"' in line


@pytest.fixture(scope="module")
def sixteen_bits() -> dict[Path, int]:
    """Return the capacity in tokens of a 16-bit cache, by model, with the memory that the other tests use."""
    models = {tiny_llama(): 2048, tiny_gemma3(): 4096}
    most = {"kv_cache_memory_bytes": 64 << 20}
    few = {tiny_llama(): {}, tiny_gemma3(): {"max_num_batched_tokens": 64, "max_num_seqs": 8}}
    turns = [
        Turn(str(model), "auto", [], [], {**most, **few[model], "max_model_len": length})
        for model, length in models.items()
    ]
    return dict(zip(models, (told.capacity for told in serve(turns)), strict=True))


def test_the_same_memory_holds_at_least_3_5_times_the_tokens(life: Life, sixteen_bits: dict[Path, int]) -> None:
    # The cache has 3.76 times the blocks. vLLM counts no residual pages.
    assert life.capacity >= 3.5 * sixteen_bits[tiny_llama()]


def test_window_layers_in_16_bits_share_the_pool_and_leave_most_of_the_gain(
    sixteen_bits: dict[Path, int], tmp_path: Path
) -> None:
    ours = capacity(tiny_gemma3(), "k4v4", tmp_path, *LONG)
    assert ours >= 2.5 * sixteen_bits[tiny_gemma3()]
    # No argument named the layers to skip; kvpilot-serve added them.
    [log] = tmp_path.glob("k4v4-*.log")
    assert "'kv_cache_dtype_skip_layers': ['sliding_window']" in log.read_text()
