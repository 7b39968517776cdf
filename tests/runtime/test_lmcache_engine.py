"""Real engines that share pages through LMCache: pages arrive unchanged, and answers match the oracle.

The engines calibrate themselves, and their free blocks are full of other rows. The test runs if the package `lmcache`
is installed.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import Apart, engines

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.judge import Judge
from support.stepped_engine import Asked, Told

pytest.importorskip("lmcache", reason="pages at LMCache need the package lmcache")
from lmcache_server import Server, server

pytestmark = pytest.mark.timeout(3600)

BLOCK, LONGEST, TOGETHER = 16, 192, 6


def engine(port: int, dtype: str = "k4v4", recent: str = "", **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options and variables of an engine whose cache holds only some of its requests."""
    transfer = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 20,
            "lmcache.mp.heartbeat_interval": 1, "lmcache.mp.mp_transfer_mode": "engine_driven",
        },
    }  # fmt: skip
    every = {
        "kv_cache_dtype": dtype, "block_size": BLOCK, "num_gpu_blocks_override": room(dtype, recent),
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": LONGEST + 64, "max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_transfer_config": transfer,
    }  # fmt: skip
    return every | options, {"KVPILOT_RECENT_TOKENS": recent, "KVPILOT_CALIBRATION": ""}


def room(dtype: str, recent: str) -> int:
    """Return the number of blocks for slightly more than two of the longest requests, or five of the shortest."""
    return max(44, 24 + 5 * formats.parse(dtype).recent_pages(window_of(dtype, recent), 64, BLOCK))


def window_of(dtype: str, recent: str = "") -> int:
    """Return the length of these engines' recent window in tokens."""
    return 0 if recent == "0" else formats.parse(dtype).recent_tokens(None, LONGEST + 64)


class Shared:
    """Engines with one model and dtype, their history, and an oracle that judges their answers."""

    def __init__(self, each: list[Apart], dtype: str, window: int) -> None:
        self.each, self.dtype, self.window, self.rng = each, dtype, window, random.Random(20261125)
        self.asked = Asked(str(tiny_llama()), dtype, [[]], [[]], {}, recent=window)
        self.told = Told(answers=[[]], block_size=BLOCK)
        self.places: dict[str, int] = {}
        self.left: dict[tuple[str, int], str] = {}  # content of the block that was stored first, by key and rank
        self.seen = dict.fromkeys(("stored", "loaded", "changed", "from the other", "preempted", "poisoned"), 0)
        self.by: dict[str, Apart] = {}
        self.texts = [[self.rng.randrange(3, 49152) for _ in range(LONGEST)] for _ in range(3 * TOGETHER)]

    def prompts(self, turn: int) -> list[list[int]]:
        """Return the prompts of the first, second, or third turn of conversations."""
        return [text[: LONGEST * turn // 3 - self.rng.randrange(8)] for text in self.rng.sample(self.texts, TOGETHER)]

    def serve(self, engine: Apart, prompts: list[list[int]]) -> int:
        """Send prompts to an engine, and return the number of blocks that it loaded."""
        self.seen["poisoned"] += engine.ask("poison", seed=self.rng.randrange(2**30))["poisoned"]
        tokens = [self.rng.randint(4, 60) for _ in prompts]
        found = engine.ask("serve", prompts=prompts, tokens=tokens, params=[None] * len(prompts))
        first, before = len(self.told.answers[0]), self.seen["loaded"]
        self.asked.rounds[0] += prompts
        self.told.answers[0] += [one["answer"] for one in found["outputs"]]
        assert [len(answer) for answer in self.told.answers[0][first:]] == tokens
        for step in found["steps"]:
            if "moved" in step:
                self.told.steps += self.moved(engine, step["moved"])
                continue
            table = [self.name(engine, block) for block in step["table"]]
            self.told.steps.append(step | {"request": first + step["request"], "table": table})
        return self.seen["loaded"] - before

    def moved(self, engine: Apart, ranks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the blocks that each rank stored or loaded. If two blocks are equal, LMCache keeps the first one."""
        for rank, move in enumerate(ranks):
            for what, blocks in move.items():
                self.seen[what] += len(blocks)
                pairs = []
                for block, place, digest in blocks:
                    number = self.places.setdefault(place, len(self.places))
                    if what == "loaded":
                        self.seen["changed"] += self.left[place, rank] != digest
                        self.seen["from the other"] += self.by[place] is not engine
                    elif (place, rank) in self.left:
                        continue
                    else:
                        self.left[place, rank], self.by[place] = digest, engine
                    pairs.append((self.name(engine, block), number))
                if rank == 0:
                    yield {what: pairs}

    def name(self, engine: Apart, block: int) -> int:
        """Return a number for a block of one engine that is unique among the blocks of all engines."""
        return block + 10_000 * self.each.index(engine)

    def assert_answers(self) -> None:
        """Check that all answers so far match the oracle, each with the window of its engine's steps."""
        ranks = [[Factors(*map(torch.tensor, layer)) for layer in rank] for rank in self.each[0].started["factors"]]
        names = Factors.__dataclass_fields__
        factors = [
            Factors(*(torch.cat([getattr(one, name) for one in layer]) for name in names))
            for layer in zip(*ranks, strict=True)
        ]
        found = Judge(self.asked, self.told, Oracle(tiny_llama(), self.dtype, factors))
        self.seen["preempted"] = found.preempted
        assert not found.wrong
        assert found.judged >= sum(map(len, self.told.answers[0]))


def assert_shared(both: Shared, rounds: int) -> None:
    """Send turns of conversations to the two engines at random, and check blocks and answers."""
    for turn in [1, 2, 3] * rounds:
        for one in both.rng.sample(both.each, len(both.each)):
            both.serve(one, both.prompts(turn))
    both.assert_answers()
    assert both.seen["changed"] == 0
    assert all(both.seen[what] for what in ("stored", "loaded", "from the other", "poisoned")), both.seen


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("lmcache")) as one:
        yield one


@pytest.fixture(scope="module")
def both(cache: Server) -> Iterator[Shared]:
    with engines(tiny_llama(), *[engine(cache.port)] * 2, module="shared_engine") as each:
        yield Shared(each, "k4v4", window_of("k4v4"))


def test_pages_from_lmcache_are_unchanged_and_answers_equal_those_after_a_prefix_hit(
    both: Shared, record_property: Any
) -> None:
    assert_shared(both, 2)
    for name, value in both.seen.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert both.seen["preempted"] > 0
    assert both.each[0].started["groups"] == ["FullAttentionSpec"]


def test_an_engine_with_other_factors_finds_none_of_the_pages(both: Shared, cache: Server) -> None:
    with engines(tiny_llama(), engine(cache.port, max_num_batched_tokens=96), module="shared_engine") as (one,):
        stranger = Shared([one], both.dtype, both.window)
        assert both.serve(both.each[0], prompts := both.prompts(3)) >= 0
        assert both.serve(both.each[1], prompts) > 0
        assert stranger.serve(one, prompts) == 0
        stranger.assert_answers()
        assert filed_under(one) != filed_under(both.each[0]) == filed_under(both.each[1])


def filed_under(one: Apart) -> str:
    return one.log.split("LMCache stores pages under ")[1].split()[0]


def test_if_the_server_dies_prompts_are_prefilled(both: Shared, cache: Server) -> None:
    cache.end()
    for one in both.each:
        assert both.serve(one, both.prompts(3)) == 0
    both.assert_answers()


def test_a_server_that_shares_memory_is_refused(tmp_path: Path) -> None:
    with (
        server(tmp_path, "--shm-name=kvpilot-test", "--no-l1-use-lazy") as cache,
        pytest.raises(RuntimeError, match="LMCache's server was started with --shm-name"),
        engines(tiny_llama(), engine(cache.port), module="shared_engine"),
    ):
        pass


def test_pages_on_a_disk_outlive_the_server_and_the_engine(tmp_path: Path) -> None:
    folder, shared = tmp_path / "disk", Shared([], "k4v4", window_of("k4v4"))
    folder.mkdir()
    disk = {"type": "fs_native", "base_path": str(folder), "max_capacity_gb": 1, "eviction": {"eviction_policy": "LRU"}}
    for turns in ((1, 2, 3), (3, 3, 2)):
        with (
            server(tmp_path, f"--l2-adapter={json.dumps(disk)}") as cache,
            engines(tiny_llama(), engine(cache.port), module="shared_engine") as (one,),
        ):
            shared.each.append(one)
            for turn in turns:
                shared.serve(one, shared.prompts(turn))
    shared.assert_answers()
    assert shared.seen["from the other"] > 0
    assert shared.seen["changed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("recent", ["0", ""], ids=["no window", "its window"])
@pytest.mark.parametrize("dtype", formats.own_names())
def test_pages_of_every_format_are_stored_and_loaded_unchanged(dtype: str, recent: str, tmp_path: Path) -> None:
    with (
        server(tmp_path) as cache,
        engines(tiny_llama(), *[engine(cache.port, dtype, recent)] * 2, module="shared_engine") as each,
    ):
        assert_shared(Shared(each, dtype, window_of(dtype, recent)), 1)


@pytest.mark.long
def test_each_tensor_parallel_rank_shares_with_the_same_rank(tmp_path: Path) -> None:
    with (
        server(tmp_path) as cache,
        engines(tiny_llama(), *[engine(cache.port, tensor_parallel_size=2)] * 2, module="shared_engine") as each,
    ):
        assert_shared(Shared(each, "k4v4", window_of("k4v4")), 1)
