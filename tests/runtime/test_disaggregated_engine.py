"""Two real engines, one of which prefills for the other over NIXL: pages arrive unchanged, and answers are right.

Both engines calibrate themselves. Free blocks are full of other rows, so that a missing transfer shows. The test runs
if the package `nixl` is installed.
"""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from apart import LEAVE, Apart, engines

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.judge import Judge
from support.stepped_engine import Asked, Told

pytest.importorskip("nixl", reason="separate engines for prefill and decode need the package nixl")
pytestmark = pytest.mark.timeout(3600)

BLOCK, LONGEST, TOGETHER = 16, 192, 5


def engine(role: str, dtype: str = "k4v4", recent: str = "", **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options and variables of an engine, which by default has its dtype's window and calibrates itself."""
    transfer = {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 3600},
    }  # fmt: skip
    every = {
        "kv_cache_dtype": dtype, "block_size": BLOCK, "num_gpu_blocks_override": room(dtype, recent) + 1,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": LONGEST + 64, "max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_transfer_config": transfer,
    }  # fmt: skip
    return every | options, {"KVPILOT_RECENT_TOKENS": recent, "KVPILOT_CALIBRATION": ""}


def room(dtype: str, recent: str = "") -> int:
    """Return the number of blocks for prompts that are prefilled together. Their blocks are kept until all are read."""
    window = 0 if recent else window_of(dtype)
    return TOGETHER * (LONGEST // BLOCK + formats.parse(dtype).recent_pages(window, 64, BLOCK))


def window_of(dtype: str) -> int:
    """Return the length in tokens of a dtype's default window in these engines."""
    return formats.parse(dtype).recent_tokens(None, LONGEST + 64)


class Pair:
    """Prefilling and decoding engine, with their history, and an oracle that judges their answers."""

    def __init__(self, prefill: Apart, decode: Apart, dtype: str, window: int) -> None:
        self.prefill, self.decode, self.dtype = prefill, decode, dtype
        self.window, self.rng, self.poisoned = window, random.Random(20261124), 0
        self.shared = [[self.rng.randrange(3, 49152) for _ in range(100)] for _ in range(2)]
        self.asked = Asked(str(tiny_llama()), dtype, [[]], [[]], {}, recent=window)
        self.told = Told(answers=[[]], block_size=BLOCK)
        self.judged, self.free = 0, room(dtype, "" if window else "0")

    def prompts(self, count: int) -> list[list[int]]:
        """Return random prompts. Many share their beginning, and none is a prefix of another."""
        found = []
        for _ in range(count):
            prefix = [] if self.rng.random() < 0.4 else self.rng.choice(self.shared)[: self.rng.randint(16, 100)]
            more = self.rng.randint(BLOCK + 1, LONGEST - len(prefix))
            found.append(prefix + [self.rng.randrange(3, 49152) for _ in range(more)])
        return found

    def serve(
        self, engine: Apart, prompts: list[list[int]], params: list[Any], left: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return an engine's answers. Each prompt may use the pages that the other engine left for it."""
        tokens = [1 if one is LEAVE else self.rng.randint(4, 24) for one in params]
        found = engine.ask("serve", prompts=prompts, tokens=tokens, params=params)
        first, answers = len(self.told.answers[0]), [one["answer"] for one in found["outputs"]]
        assert [len(answer) for answer in answers] == tokens
        self.asked.rounds[0] += prompts
        self.told.answers[0] += answers
        for step in found["steps"]:  # The block numbers of the two engines are unrelated.
            at, blocks = step["request"], [self.name(engine, block) for block in step["table"]]
            step |= {"request": first + at, "table": blocks}
            read = found["outputs"][at]["read"]
            if read and not any(one["request"] == first + at for one in self.told.steps if "request" in one):
                begin, (here, _) = left[at]["cached"], read[0][0]
                away = left[at]["params"]["remote_block_ids"][0][-len(here) :]
                places = range(self.judged, self.judged + len(here))
                self.judged += len(here)
                pages = ([self.name(one, b) for b in of] for one, of in ((self.prefill, away), (engine, here)))
                stored, loaded = (list(zip(named, places, strict=True)) for named in pages)
                self.told.steps += [
                    step | {"anew": True, "begin": begin, "tokens": step["begin"] - begin},
                    {"stored": stored, "loaded": loaded},
                ]  # fmt: skip
                step["anew"] = False
            self.told.steps.append(step)
        return list(found["outputs"])

    def name(self, engine: Apart, block: int) -> int:
        """Return a number for a block of one engine that is unique among the blocks of both engines."""
        return block * 2 + (engine is self.prefill)

    def leave(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Prefill prompts for the other engine, and return their transfer parameters."""
        for one in (self.prefill, self.decode):
            self.poisoned += one.ask("poison", seed=self.rng.randrange(2**30))["poisoned"]
        return self.serve(self.prefill, prompts, [LEAVE] * len(prompts), [])

    def come(self, prompts: list[list[int]], left: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the decoding engine's answers to prompts whose pages the prefilling engine has `left`."""
        return self.serve(self.decode, prompts, [one["params"] for one in left], left)

    def assert_answers(self) -> None:
        """Check that all answers so far match the oracle, each with the window of its engine's steps."""
        ranks = [[Factors(*map(torch.tensor, layer)) for layer in rank] for rank in self.decode.started["factors"]]
        names = Factors.__dataclass_fields__
        factors = [
            Factors(*(torch.cat([getattr(one, name) for one in layer]) for name in names))
            for layer in zip(*ranks, strict=True)
        ]
        found = Judge(self.asked, self.told, Oracle(tiny_llama(), self.dtype, factors))
        assert not found.wrong
        assert found.judged == sum(map(len, self.told.answers[0]))


def pair(dtype: str, recent: str = "", roles: tuple[str, str] = ("kv_producer", "kv_consumer"), **options: Any) -> Any:
    """Return a context manager that yields two engines, by default one for prefill and one for decode."""
    return engines(tiny_llama(), *(engine(role, dtype, recent, **options) for role in roles))


@pytest.fixture(scope="module")
def both() -> Iterator[Pair]:
    with pair("k4v4") as (prefill, decode):
        yield Pair(prefill, decode, "k4v4", window_of("k4v4"))


def rows(pairs: list[tuple[int, int]]) -> int:
    """Count the copies between two engines' blocks. NIXL merges blocks that are neighbours on both sides."""
    return sum((h - 1, a - 1) != before for (h, a), before in zip(pairs, [None, *pairs], strict=False))


def assert_pages_and_answers(both: Pair, rounds: int, ranks: int = 1, regions: int = 1) -> dict[str, int]:
    """Send random requests that all use transferred blocks with `regions` regions each, and check pages and answers."""
    copies = both.decode.ask("copies")
    seen = {"requests": 0, "blocks": 0, "found at prefill": 0, "found at decode": 0}
    for _ in range(rounds):
        prompts = both.prompts(TOGETHER)
        left = both.leave(prompts)
        there = [both.prefill.ask("digests", blocks=one["params"]["remote_block_ids"]) for one in left]
        came = both.come(prompts, left)
        for one, sent, got in zip(left, there, came, strict=True):
            assert len(got["read"]) == len(sent) == ranks
            for mine, theirs in zip(got["read"], sent, strict=True):
                told = one["params"]["remote_block_ids"]
                pairs = (
                    sorted(zip(here, away[-len(here) :], strict=True))
                    for (here, _), away in zip(mine, told, strict=True)
                    if here
                )
                copies += regions * rows(list(chain(*pairs)))
                for (_, here), away in zip(mine, theirs, strict=True):
                    assert here == away[-len(here) :]
                    seen["blocks"] += len(here)
                seen["found at decode"] += len(mine[0][0]) < len(theirs[0])
            seen["requests"] += 1
            seen["found at prefill"] += one["cached"] > 0
        assert both.prefill.ask("step", seconds=1)["free"] == both.decode.ask("step")["free"] == both.free
    both.assert_answers()
    assert both.decode.ask("copies") == copies
    return seen


def test_transferred_pages_are_unchanged_and_answers_equal_the_models(both: Pair, record_property: Any) -> None:
    seen = assert_pages_and_answers(both, 6) | {"poisoned": both.poisoned}
    for name, value in seen.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert all(seen.values())
    assert both.prefill.started["groups"] == ["FullAttentionSpec"]
    assert [one.started["layout"] for one in (both.prefill, both.decode)] == ["BHLNC", "BHLNC"]


def assert_computed_anew(both: Pair, prompts: list[list[int]], left: list[dict[str, Any]]) -> None:
    assert not any(got["read"] for got in both.come(prompts, left))
    both.assert_answers()


def test_a_prompt_is_computed_anew_if_the_announced_blocks_do_not_match_it(both: Pair) -> None:
    left = both.leave(prompts := both.prompts(TOGETHER))
    told = [one["params"] for one in left]
    told[0]["remote_num_tokens"] -= 1
    told[1]["remote_block_ids"][0].pop()
    told[2]["remote_block_ids"].append([1])
    del told[3]["remote_blocks_expiry_time"]
    told[4]["remote_block_ids"][0].append(1)
    assert_computed_anew(both, prompts, left)
    for what in ("remote_num_tokens", "remote_block_ids", "remote_blocks_expiry_time"):
        assert what in both.decode.log
    # By now, the engine knows that nobody reads these blocks.
    assert both.prefill.ask("step", seconds=1)["free"] == both.free


def test_blocks_that_the_sender_has_reused_are_not_accepted(both: Pair) -> None:
    assert_blocks_given_away_are_not_taken(both)


def assert_blocks_given_away_are_not_taken(both: Pair) -> None:
    both.prefill.ask("lease", seconds=0.2)
    left = both.leave(prompts := both.prompts(3))
    assert both.prefill.ask("step", seconds=1)["free"] == both.free
    given = {block for one in left for block in one["params"]["remote_block_ids"][0]}
    while given:
        done = len(both.told.steps)
        both.serve(both.prefill, both.prompts(TOGETHER), [None] * TOGETHER, [])
        given -= {block // 2 for step in both.told.steps[done:] for block in step["table"]}
    assert_computed_anew(both, prompts, left)
    assert "may have reused its blocks" in both.decode.log


def test_blocks_that_arrive_after_the_senders_lease_are_not_used(both: Pair) -> None:
    both.prefill.ask("lease", seconds=10)
    left = both.leave(prompts := both.prompts(3))
    both.decode.ask("look_away", seconds=12)
    assert_computed_anew(both, prompts, left)


def test_pages_of_an_engine_with_other_factors_are_refused_and_the_prompt_is_prefilled(both: Pair) -> None:
    with engines(tiny_llama(), engine("kv_consumer", max_num_batched_tokens=96)) as (other,):
        said = refused(both, other)
        assert [f"factors {hash_of(one)})" in said for one in (both.prefill, other)] == [True, True]
        assert hash_of(both.prefill) == hash_of(both.decode) != hash_of(other)


def test_a_requested_layout_is_used_and_a_different_one_of_the_sender_causes_a_prefill(
    both: Pair,
) -> None:
    options, variables = engine("kv_consumer")
    with engines(tiny_llama(), (options, variables | {"VLLM_KV_CACHE_LAYOUT": "LBHNC"})) as (other,):
        assert other.started["layout"] == "LBHNC"
        said = refused(both, other)
        assert all(f"layout {name}, factors" in said for name in ("LBHNC", "BHLNC"))


def hash_of(one: Apart) -> str:
    """Return the hash of an engine's factors, from its metrics."""
    line = next(line for line in one.started["metrics"] if line.startswith("kvpilot_calibration_info"))
    return str(line.split('hash="')[1].split('"')[0])


def refused(both: Pair, other: Apart) -> str:
    """Return the message of an engine that refuses another engine's blocks, and so computes the prompt itself."""
    stranger = Pair(both.prefill, other, both.dtype, both.window)
    both.prefill.ask("lease", seconds=0.2)
    left = both.leave(prompts := both.prompts(3))
    assert_computed_anew(stranger, prompts, left)
    assert both.prefill.ask("step", seconds=1)["free"] == both.free
    return next(line for line in other.log.splitlines() if "compatibility hash mismatch" in line)


def test_if_the_sender_dies_the_prompt_is_prefilled(both: Pair) -> None:
    both.prefill.ask("lease", seconds=3600)
    left = both.leave(prompts := both.prompts(TOGETHER))
    for one in left[3:]:
        one["params"]["remote_engine_id"] = "one that was never met"
    both.prefill.kill()
    assert_computed_anew(both, prompts, left)
    assert "REMOTE_DISCONNECT" in both.decode.log
    assert "handshake_setup_failed" in both.decode.log


@pytest.mark.long
@pytest.mark.parametrize("recent", ["0", ""], ids=["no window", "its window"])
@pytest.mark.parametrize("dtype", formats.own_names())
def test_pages_of_every_format_are_transferred_unchanged(dtype: str, recent: str) -> None:
    roles = ("kv_both", "kv_both") if recent else ("kv_producer", "kv_consumer")
    with pair(dtype, recent, roles) as (prefill, decode):
        found = Pair(prefill, decode, dtype, 0 if recent else window_of(dtype))
        assert all(assert_pages_and_answers(found, 4).values())
        # With only one group of layers, vLLM sends block numbers in another form.
        assert_blocks_given_away_are_not_taken(found)


@pytest.mark.long
def test_each_tensor_parallel_rank_reads_from_the_same_rank() -> None:
    with pair("k4v4", tensor_parallel_size=2) as (prefill, decode):
        both = Pair(prefill, decode, "k4v4", window_of("k4v4"))
        assert [one.started["layout"] for one in (prefill, decode)] == ["LBHNC", "LBHNC"]  # Each rank has one KV head.
        assert all(assert_pages_and_answers(both, 4, ranks=2, regions=2).values())
        with engines(tiny_llama(), engine("kv_consumer")) as (alone,):
            said = refused(both, alone)
            assert "tensor parallel 1, layout BHLNC" in said
            assert "tensor parallel 2, layout LBHNC" in said
