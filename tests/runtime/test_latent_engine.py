"""Multi-head latent attention in a real engine on a CPU with latent pages, compared with an oracle without pages."""

import itertools
import random
from pathlib import Path

import pytest

from kvpilot_formats.latent import names, parse
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.latent_engine import VOCABULARY, make_model, serve

pytestmark = pytest.mark.timeout(3600)

CHUNK, LONGEST, BLOCKS = 48, 128, 21


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mla") / "model")


def some_requests(count: int) -> list[tuple[list[int], int]]:
    """Return random prompts and answer lengths. In groups of 40 requests, half of the prompts share a prefix."""
    rng = random.Random(20261122)

    def drawn(tokens: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]

    shared = [drawn(LONGEST * 3 // 4) for _ in range(count // 40 + 1)]
    found = []
    for i in range(count):
        prefix = [] if rng.random() < 0.5 else shared[i // 40][: rng.randint(16, LONGEST * 3 // 4)]
        tail = drawn(rng.randint(0 if prefix else 1, rng.choice([16, LONGEST - len(prefix)])))
        found.append((prefix + tail, rng.randint(1, 24)))
    return found


@pytest.mark.parametrize("name", names())
def test_paging_changes_no_token_of_latent_attention(name: str, model: Path) -> None:
    requests = some_requests(50)
    told = serve(
        model, name, requests, from_pages=True, max_model_len=LONGEST + 32, max_num_seqs=16,
        max_num_batched_tokens=CHUNK, num_gpu_blocks_override=BLOCKS, kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    answers = told["answers"]
    assert [len(answer) for answer in answers] == [count for _, count in requests]
    assert told["vllm:num_preemptions"] > 0
    assert told["vllm:prefix_cache_hits"] > 0
    assert sum(len(prompt) > CHUNK for prompt, _ in requests) > 12  # these must have come in chunks

    oracle = Oracle(model, name)
    prompts = [prompt for prompt, _ in requests]
    asked = list(zip(prompts, answers, strict=True))
    suspects = [(p, a) for p, a in asked if max(oracle.shortfalls(p, a)) > SLACK]
    # Rounding may change any number of answers, so judge each one alone. A broken engine fails in the first three.
    wrong = list(itertools.islice((p for p, a in suspects if not oracle.sound(p, a)), 3))
    assert not wrong

    # Control: answers differ with a 16-bit cache, or with a misread block.
    plain = Oracle(model, "auto")
    assert sum(max(plain.shortfalls(p, a)) > SLACK for p, a in asked) > len(asked) / 8
    long = [(p, a) for p, a in asked if len(p) > CHUNK and len(a) > 8][:6]
    assert sum(oracle.sound(p, a, misread=len(p) // 2, rounds=10) for p, a in long) <= 1


def test_a_prompt_in_one_chunk_equals_16_bits_and_later_chunks_read_their_context_from_pages(
    model: Path,
) -> None:
    prompts = [prompt for prompt, _ in some_requests(60) if len(prompt) > CHUNK][:12]
    plain = Oracle(model, "auto")
    room = {"max_model_len": 256, "max_num_seqs": 1, "kv_cache_memory_bytes": 2**20, "enable_prefix_caching": False}
    for chunk, near in ((256, True), (CHUNK, False)):
        told = serve(model, "mla4", [(p, 1) for p in prompts], from_pages=False, max_num_batched_tokens=chunk, **room)
        off = [
            abs(first - plain.logprobs(p, a)[0])
            for p, a, first in zip(prompts, told["answers"], told["first"], strict=True)
        ]
        assert max(off) < 1e-3 if near else min(off) > 1e-3, off
        assert told["tokens"] == 2**20 // (2 * 16 * parse("mla4").row_bytes) * 16


def test_the_cuda_backends_metadata_and_kernels_serve_an_engine_in_tritons_interpreter(
    model: Path,
) -> None:
    """Serve prompts in chunks, cached prefixes and mixed steps, with splits for 4 programs and buffers of graphs."""
    requests = [(prompt, min(count, 4)) for prompt, count in some_requests(7)]
    told = serve(
        model, "mla4", requests, from_pages=True, interpreted=True, max_model_len=LONGEST + 32,
        max_num_seqs=4, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=BLOCKS, kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    assert told["vllm:prefix_cache_hits"] > 0
    asked = list(zip([prompt for prompt, _ in requests], told["answers"], strict=True))
    # Rounding queries and weights to float16 changes logits a little; a misread block changes them a lot.
    oracle = Oracle(model, "mla4")
    assert max(max(oracle.shortfalls(p, a)) for p, a in asked) < 0.05
    long = [(p, a) for p, a in asked if len(p) > CHUNK and len(a) > 3]
    assert sum(max(oracle.shortfalls(p, a, misread=len(p) // 2)) > 0.05 for p, a in long) > len(long) / 2
