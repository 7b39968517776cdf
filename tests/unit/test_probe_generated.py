"""Generated prompts: lengths, depths and buckets on engines with any context and tokenizer."""

import re
from array import array
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_probes import codec, stats
from kvpilot_probes.codec import Baseline, BaselinePrompt
from kvpilot_probes.errors import EnginesDiffer, NothingFits, PackError
from kvpilot_probes.generated import CHUNKS, HIT, MAX_CONTEXT, QUESTIONS, RESIDUES, SHARED_TOKENS, Rendered, sent_first
from kvpilot_probes.joined import Joined, prefixes
from kvpilot_probes.packs import BUILTIN, load
from kvpilot_probes.run import capture, measure
from kvpilot_probes.sequential import Allowed, Seen, decide
from kvpilot_probes.session import Settings
from support.probe_engine import SETTINGS, Body, Writer, counting, engine, event, made, reading, respond, stream

ANSWER = 32


@settings(max_examples=12, deadline=None)
@given(context=st.integers(600, 12_000), limit=st.sampled_from([0, 512, 4096]))
def test_generated_prompts_fit_any_context_and_are_the_same_each_time(context: int, limit: int) -> None:
    packs = load(["builtin/long-context", "builtin/paths"], context_tokens=limit)
    found = made(packs, context)
    most = min(context, limit or context)
    assert all(len(r.tokens) + r.answer <= most for r in found)
    assert [list(r.tokens) for r in made(packs, context)] == [list(r.tokens) for r in found]
    assert len({r.prompt.name for r in found}) == len(found) <= codec.MAX_PROMPTS
    lengths = {r.prompt.bucket: len(r.tokens) for r in found if r.prompt.bucket.startswith("length-")}
    assert max(lengths.values()) == most - ANSWER
    assert all(name == f"length-{length}" for name, length in lengths.items())


def test_prompts_fill_an_eighth_a_half_and_all_of_131072_tokens() -> None:
    found = [r for r in made(load(["builtin/long-context"]), MAX_CONTEXT) if r.prompt.bucket != HIT]
    most = MAX_CONTEXT - ANSWER
    assert [len(r.tokens) for r in found] == [most // 8] * 5 + [most // 2] * 5 + [most] * 5
    # All prompts share one document, so the engine computes it only once, and the baseline stores it only once.
    assert sum(len(r.tokens) for r in found) - sum(p.size for p in prefixes([r.tokens for r in found])) < 1.02 * most
    kept = baseline_of(found)
    data = codec.encode(kept)
    assert len(data) < codec.MAX_BYTES / 2
    assert [list(p.tokens) for p in codec.decode(data).prompts] == [list(p.tokens) for p in kept.prompts]


def baseline_of(found: list[Rendered]) -> Baseline:
    answer = stats.Answers([stats.Logprobs(1, {1: -0.1})])
    return Baseline("i", "m", "auto", tuple(BaselinePrompt(r.prompt.name, "", "", r.tokens, answer) for r in found))


def test_each_question_needs_a_fact_of_its_own_context() -> None:
    found = [r for r in made(load(["builtin/long-context"]), 8192) if r.prompt.bucket != HIT]
    for r in found:
        locker = re.findall(r"\d+", r.prompt.messages[0].content)[0]
        seen = list(r.tokens).count(crc32(locker.encode()) % codec.MAX_TOKEN_ID)
        assert seen == 2, "once in the diary and once in the question"
    early = {r.prompt.name for r in found if len(r.tokens) < 1025}
    assert len(early) == 5


@pytest.mark.parametrize("percent", [0, 5, 50, 90])
@pytest.mark.parametrize("depth", [0, 30, 90])
@pytest.mark.parametrize("context", [512, 40_000])
def test_a_users_prompt_is_filled_to_its_length_with_the_fact_at_its_depth(
    percent: int, depth: int, context: int
) -> None:
    text = (
        f"prompts: [{{name: n, fact: The zebra is blue., fillPercent: {percent}, depthPercent: {depth}, "
        "messages: [{role: user, content: 'Read. {{filler}} Where?'}]}]"
    )
    (only,) = made(load(["configmap/mine"], {"mine": {"prompts.yaml": text}}), context)
    assert len(only.tokens) == pytest.approx(context * percent / 100, abs=40)
    at = list(only.tokens).index(crc32(b"zebra") % codec.MAX_TOKEN_ID)
    assert at == pytest.approx(context * percent * depth / 10_000, abs=40)


def test_prompts_of_every_length_modulo_64_and_beyond_a_chunk_are_sent_without_prefix_hits() -> None:
    found = made(load(["builtin/paths"]), 16_384)
    by = {b: [r for r in found if r.prompt.bucket == b] for b in ("residue", "chunk")}
    assert {len(r.tokens) % RESIDUES for r in by["residue"]} == set(range(64))
    assert [len(r.tokens) for r in by["chunk"]] == [c + more for c in CHUNKS for more in CHUNKS[c]]
    # No two prompts begin with the same block, so the prefix cache has no block of any of them.
    fresh = [*by["residue"], *by["chunk"]]
    assert len({tuple(r.tokens[:32]) for r in fresh}) == len(fresh)
    assert all(not sent_first(r.prompt.bucket, r.tokens) for r in fresh)
    assert list(sent_first("general", (1, 2, 3, 4))) == [1, 2]


def test_each_fact_of_a_text_is_requested_twice_so_that_requests_share_its_pages() -> None:
    hits = [r for r in made(load(["builtin/long-context"]), 4096) if r.prompt.bucket == HIT]
    assert len(hits) >= QUESTIONS
    assert len({tuple(r.tokens[:SHARED_TOKENS]) for r in hits}) == 1
    assert all(list(sent_first(HIT, r.tokens)) == list(r.tokens) for r in hits)


def test_damage_after_a_prefill_chunk_is_found_for_usual_chunk_sizes() -> None:
    found = made(load(["builtin/paths"]), 16_384)
    allowed = Allowed(kl=0.02, disagreement=1.0)
    for size in CHUNKS:
        seen = [Seen(r.prompt.bucket, 0.4 * (r.prompt.bucket == "chunk" and len(r.tokens) > size), 0) for r in found]
        outcome = decide(seen, ("residue", "chunk"), allowed, ended=True)
        assert outcome.failed == "chunk"


def test_all_built_in_packs_fit_into_one_baseline_of_the_longest_context() -> None:
    found = made(load([f"builtin/{name}" for name in BUILTIN]), MAX_CONTEXT + 1024)
    codec.check_limits([r.tokens for r in found if r.image is None], sum(r.answer for r in found))


async def test_damage_beyond_an_eighth_of_the_context_shows_only_in_its_buckets() -> None:
    """In the mean over all prompts this damage is too small to be seen. The buckets of long contexts show it."""
    context = 4096

    async def damaged(path: str, body: Body, writer: Writer) -> None:
        if len(body["prompt"]) < 1024:
            await counting(path, body, writer)
            return
        start = len(body["prompt"])
        steps = range(start, start + body["max_tokens"])
        stream(writer, *(event(f"token_id:{i}", {f"token_id:{i}": -2.0, "token_id:9999": -0.2}) for i in steps))

    prompts = load(["builtin/general", "builtin/long-context"])
    async with engine(reading(context)) as url:
        kept = await capture(url, "m", prompts, identity="i", dtype="auto", settings=Settings(tokens=8))
    seen: dict[str, float] = {}
    async with engine(reading(context, damaged)) as url:
        for one in kept.prompts:
            found = await measure(url, "m", Baseline("i", "m", "auto", (one,)), settings=Settings(tokens=8))
            seen[one.bucket] = max(seen.get(one.bucket, 0.0), found.mean_kl_micronats)
    assert {bucket: kl > 500_000 for bucket, kl in seen.items()} == {
        "general": False, "hit": False, "length-511": False, "length-2044": True, "length-4088": True,
    }  # fmt: skip


def test_a_users_prompt_beyond_the_context_is_an_error_and_a_built_in_one_is_left_out() -> None:
    text = f"prompts: [{{name: long, messages: [{{role: user, content: {'word ' * 300}}}]}}]"
    prompts = load(["builtin/general", "configmap/mine"], {"mine": {"prompts.yaml": text}})
    with pytest.raises(NothingFits, match=r"configmap/mine/long and the 32 tokens .* context \(512 tokens\)"):
        made(prompts, 512)
    assert {r.prompt.bucket for r in made(load(["builtin/general", "builtin/long-context"]), 160)} == {"general"}


def test_an_engine_that_tokenizes_every_text_alike_is_an_error() -> None:
    async def deaf(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, b'{"tokens": [1, 2, 3], "max_model_len": 4096}')

    with pytest.raises(PackError, match="tokenizer"):
        made(load(["builtin/long-context"]), 4096, deaf)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 20), st.lists(st.integers(0, 9), max_size=9), st.data())
def test_joined_tokens_are_parsed_like_an_array(
    document: list[int], size: int, tail: list[int], data: st.DataObject
) -> None:
    size = min(size, len(document))
    plain = array("I", document[:size] + tail)
    joined = Joined(array("I", document), size, array("I", tail))
    a, b = data.draw(st.integers(-30, 30)), data.draw(st.integers(-30, 30))
    assert (len(joined), array("I", joined), joined[a:b]) == (len(plain), plain, plain[a:b])
    assert [joined[i] for i in range(-len(plain), len(plain))] == [plain[i] for i in range(-len(plain), len(plain))]
    assert list(reversed(joined)) == list(reversed(plain))


async def test_another_tokenizer_or_a_shorter_context_is_an_error_and_not_damage() -> None:
    async with engine(reading(4096)) as url:
        kept = await capture(url, "m", load(["builtin/general"]), identity="i", dtype="auto", settings=SETTINGS)
        assert (await measure(url, "m", kept, settings=SETTINGS)).mean_kl_micronats == 0
    for handler, words in ((counting, "other tokens than the baseline's"), (reading(64), "a context of 64 tokens")):
        async with engine(handler) as url:
            with pytest.raises(EnginesDiffer, match=words):
                await measure(url, "m", codec.decode(codec.encode(kept)), settings=SETTINGS)
