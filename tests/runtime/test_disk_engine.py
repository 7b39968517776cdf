"""A real engine offloads pages to host memory and then to disk: they return unchanged, whatever fault the disk has.

Host memory holds a fraction of the active conversations, and the GPU's cache even less.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpilot_formats import formats
from kvpilot_localcluster.engines.real import HANGS
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.forked_serve import engine
from support.judge import Judge
from support.stepped_engine import Asked, serve

pytestmark = pytest.mark.timeout(3600)

SHARED = Path("/dev/shm")  # noqa: S108


def conversations(dtype: str, folder: Path, faults: dict[int, str] | None = None, turns: int = 4, **more: Any) -> Asked:
    """Return 20 conversations of up to four turns each. All requests of a turn are sent together, in a random order."""
    rng = random.Random(20261125)
    texts = [[rng.randrange(3, 49152) for _ in range(192)] for _ in range(20)]
    rounds = []
    for turn in range(1, turns + 1):
        prompts = [text[: 192 * turn // 4 - rng.randrange(8)] for text in texts]
        rounds.append(rng.sample(prompts, len(texts)))
    options = {
        "block_size": 16, "num_gpu_blocks_override": 60, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_offloading_size": 0.0005,
    }  # fmt: skip
    tokens = [[rng.randint(4, 12) for _ in prompts] for prompts in rounds]
    disk = {"path": str(folder), "size": 64 << 20, "faults": {str(turn): name for turn, name in (faults or {}).items()}}
    return Asked(str(tiny_llama()), dtype, rounds, tokens, options, **{"disk": disk} | more)


@pytest.mark.parametrize("dtype", [*formats.own_names(), "auto"])
def test_bytes_that_come_back_from_a_disk_are_those_that_left(dtype: str, tmp_path: Path) -> None:
    question = conversations(dtype, tmp_path, turns=3, recent=None)
    question.options["num_gpu_blocks_override"] = 90  # a ring of k2v2 takes many blocks
    if dtype == "auto":  # vLLM's attention on a CPU takes blocks of 32 tokens
        question.options |= {"block_size": 32, "num_gpu_blocks_override": 45, "kv_offloading_size": 0.004}
    told = serve(question)
    assert told.loaded > 0
    assert told.read > 0
    assert told.unread == 0
    assert told.changed == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("faults", "unread", "unwritten"),
    [
        ({}, False, False),
        ({2: "truncated", 3: "garbled"}, True, False),
        ({1: "read_only", 2: "full", 3: "dead"}, True, True),
        ({1: "removed", 2: "silent"}, True, True),
    ],
    ids=["none", "bytes lost and changed", "read-only, full, dead", "folder removed, no answers"],
)
def test_answers_are_those_of_the_codec_whatever_the_disk_does(
    faults: dict[int, str], unread: bool, unwritten: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "claim"
    folder.mkdir()
    question = conversations("k4v4", folder, faults)
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4", recent=64))
    assert told.read > 0
    assert (told.unread > 0) == unread
    assert told.unwritten > 0 or not unwritten  # the engine writes less to a slow disk, with or without a fault
    assert told.changed == 0
    assert not found.wrong
    assert found.judged == sum(map(sum, question.tokens))


def test_an_engine_of_two_processes_says_what_its_disk_gave_and_leaves_nothing_when_it_is_killed(
    tmp_path: Path,
) -> None:
    claim, log = tmp_path / "claim", tmp_path / "log"
    claim.mkdir()
    log.mkdir()
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 49152) for _ in range(160)] for _ in range(8)]
    with engine(
        tiny_llama(), "k4v4", log, "--dtype=float32", "--recent-tokens=0", "--kv-cache-memory-bytes=64M",
        "--block-size=16", "--num-gpu-blocks-override=40", "--max-model-len=256",
        "--tensor-parallel-size=2", "--kv-offloading-size=0.0005",
        f"--kv-offloading-disk-path={claim}", "--kv-offloading-disk-size=0.0625",
        env={"KVPILOT_PREFILL_FROM_PAGES": "1", "KVPILOT_CALIBRATION": "off"},
    ) as running:  # fmt: skip
        fresh = [running.tokens(prompt, 3) for prompt in prompts]
        again = [running.tokens(prompt, 3) for prompt in prompts]
        body = {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                "kv_transfer_params": {"kvpilot_from_host": True}}  # fmt: skip
        judged = [
            httpx.post(f"{running.url}/v1/completions", json={**body, "prompt": prompt}, timeout=HANGS).json()
            for prompt in prompts[:2]
        ]
        samples = [s for f in text_string_to_metric_families(running.page()) for s in f.samples]
        named = list(SHARED.glob("vllm_offload_*"))
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
    assert again == fresh
    assert [one["choices"][0]["token_ids"] for one in judged] == fresh[:2]
    found = {s.labels["source"]: s.value for s in samples if s.name == "vllm:prompt_tokens_cached_by_source_total"}
    assert found["disk"] > 0
    tier = {s.name: s.value for s in samples if s.labels.get("tier") == "1:disk"}
    assert tier["vllm:kv_offload_tiering_read_bytes_total"] > 0
    assert tier["vllm:kv_offload_tiering_write_bytes_total"] > 0
    assert tier["vllm:kv_offload_tiering_chunk_hits_total"] > 0
    assert list(claim.iterdir()) == []
    assert named == []  # host memory never had a name


def test_prompts_that_host_memory_has_no_room_for_come_from_the_disk_as_far_as_it_has_and_nobody_waits(
    tmp_path: Path,
) -> None:
    question = conversations("k4v4", tmp_path)
    question.options["kv_offloading_size"] = 0.00005  # six blocks, while prompts have up to twelve
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4", recent=64))
    assert told.read > 0
    assert told.changed == 0
    assert not found.wrong
    assert found.judged == sum(map(sum, question.tokens))
