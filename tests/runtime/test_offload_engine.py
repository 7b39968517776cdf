"""A real engine that offloads to host memory: pages return unchanged, and answers equal those without offloading.

The engine's cache holds a fraction of the active conversations, so most hits of a turn come from host memory. Residual
pages are not offloaded, so tokens from host memory are read with the dtype's own bits.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpilot_localcluster.engines.real import HANGS
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.forked_serve import engine
from support.judge import Judge
from support.stepped_engine import Asked, serve

pytestmark = pytest.mark.timeout(3600)


def conversations(dtype: str, count: int, longest: int, blocks: int, **more: Any) -> Asked:
    """Return `count` conversations of three turns each. All requests of a turn are sent together, in a random order."""
    rng = random.Random(20261122)
    texts = [[rng.randrange(3, 49152) for _ in range(longest)] for _ in range(count)]
    rounds = []
    for turn in range(1, 4):
        prompts = [text[: longest * turn // 3 - rng.randrange(8)] for text in texts]
        rounds.append(rng.sample(prompts, count))
    options = {
        "block_size": 16, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": longest + 64, "max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_offloading_size": 0.125,
    }  # fmt: skip
    tokens = [[rng.randint(4, 24) for _ in prompts] for prompts in rounds]
    return Asked(str(tiny_llama()), dtype, rounds, tokens, options, **more)


def test_answers_do_not_depend_on_where_pages_were_stored(
    record_property: Callable[[str, object], None],
) -> None:
    question = conversations("k4v4", 14, 192, 44)
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4"))
    figures = {"judged": found.judged, "windowed": found.windowed, "loaded": told.loaded, "poisoned": told.poisoned,
               "cached": sum(map(sum, told.cached))}  # fmt: skip
    for name, value in figures.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert not found.wrong
    assert told.changed == 0
    assert all(figures.values())
    assert found.judged == sum(map(sum, question.tokens))


def test_aborted_requests_and_late_copies_change_no_answer() -> None:
    rng = random.Random(7)
    question = conversations("k4v4", 14, 192, 44, late=3)
    requests = sum(map(len, question.rounds))
    question.given_up = [(n, rng.randint(1, 40)) for n in rng.sample(range(requests), requests // 3)]
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4"))
    answered = [len(answer) for answers in told.answers for answer in answers]
    asked = [count for tokens in question.tokens for count in tokens]
    cut_short = {n for n, (given, wanted) in enumerate(zip(answered, asked, strict=True)) if given < wanted}
    assert cut_short
    assert cut_short <= {n for n, _ in question.given_up}
    assert told.loaded > 0
    assert told.changed == 0
    assert not found.wrong
    assert found.judged == sum(answered)


@pytest.mark.parametrize("dtype", ["int8", "k2v2"])  # without a window, and with the longest one
def test_offloaded_pages_return_unchanged(dtype: str) -> None:
    assert_bytes_return(conversations(dtype, 10, 192, 90, recent=None))


def test_offloaded_pages_return_unchanged_in_the_layout_with_all_layers_of_a_block_together() -> None:
    assert_bytes_return(conversations("k4v4", 10, 192, 90, recent=None, layout="BHLNC"))


def assert_bytes_return(question: Asked) -> None:
    told = serve(question)
    assert told.loaded > 0
    assert told.changed == 0


def test_a_probe_can_make_a_separate_engine_process_load_from_host_memory(tmp_path: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 49152) for _ in range(160)] for _ in range(2)]
    with engine(
        tiny_llama(), "k4v4", tmp_path, "--dtype=float32", "--recent-tokens=0", "--kv-cache-memory-bytes=64M",
        "--block-size=16", "--max-model-len=256", "--tensor-parallel-size=2", "--kv-offloading-size=0.125",
        env={"KVPILOT_PREFILL_FROM_PAGES": "1", "KVPILOT_CALIBRATION": "off"},
    ) as running:  # fmt: skip
        fresh = [running.tokens(prompt, 3) for prompt in prompts]
        again = [running.tokens(prompt, 3) for prompt in prompts]
        before = loaded(running.page())  # at most each prompt's last block, as the KV cache still has the others
        body = {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                "kv_transfer_params": {"kvpilot_from_connector": True}}  # fmt: skip
        judged = [
            httpx.post(f"{running.url}/v1/completions", json={**body, "prompt": prompt}, timeout=HANGS).json()
            for prompt in prompts
        ]
        after = loaded(running.page())
    assert before <= 2 * 16
    assert after - before >= 2 * 144
    assert again == fresh
    assert [one["choices"][0]["token_ids"] for one in judged] == fresh


def loaded(page: str) -> float:
    """Return the prompt tokens that an engine has loaded from host memory."""
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return sum(s.value for s in samples if s.name == "vllm:external_prefix_cache_hits_total")
