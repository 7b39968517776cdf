"""Every parser of tenants' input either parses the input or raises the parser's own type of error.

The texts are hostile ones, cut, joined and changed at random. benchmarks/operator/parsers.py measures their cost.
"""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_localcluster.engines.hostile_texts import BASELINES, CONFIG_MAPS, PAGES, SPECS, TOKENS, YAML, Make
from kvpilot_operator.api.faults import faults
from kvpilot_operator.budget import CANARY_PROBE, CONFIG_MAP_BYTES, METRICS, METRICS_CHUNK_BYTES
from kvpilot_operator.errors import ClusterError, ScrapeError
from kvpilot_operator.observe.page import PageReader
from kvpilot_operator.observe.probe_packs import texts_of
from kvpilot_probes.answers import read_streamed, read_tokens
from kvpilot_probes.codec import decode
from kvpilot_probes.errors import EngineRefused, MalformedAnswer, MalformedBaseline, PackError
from kvpilot_probes.packs import MAX_PACK_BYTES, load


@dataclass(frozen=True)
class DoorTest:
    """A parser, the errors that it may raise, and its input limit in bytes."""

    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    texts: dict[str, Make]
    most: int


def read_page(text: bytes) -> None:
    reader = PageReader()
    for start in range(0, len(text), METRICS_CHUNK_BYTES):
        for _ in reader.steps(text[start : start + METRICS_CHUNK_BYTES]):
            pass
    reader.close()


def read_pack(text: bytes) -> None:
    # The API server sends a ConfigMap's text as UTF-8.
    load(["configmap/mine"], {"mine": {"prompts.yaml": text.decode(errors="replace")}})


def read_spec(text: bytes) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return  # the API server stores only objects
    faults(found)


PARSERS = {
    "page": DoorTest(read_page, (ScrapeError,), PAGES, METRICS.read_bytes),
    "yaml": DoorTest(read_pack, (PackError,), YAML, MAX_PACK_BYTES),
    "tokenize": DoorTest(lambda t: read_tokens("here", t), (MalformedAnswer,), TOKENS, CANARY_PROBE.read_bytes),
    "stream": DoorTest(lambda t: read_streamed("here", t), (MalformedAnswer, EngineRefused), TOKENS, 256 * 1024),
    "baseline": DoorTest(decode, (MalformedBaseline,), BASELINES, 900 * 1024),
    "config map": DoorTest(texts_of, (ClusterError,), CONFIG_MAPS, CONFIG_MAP_BYTES),
    "spec": DoorTest(read_spec, (), SPECS, 64 * 1024),
}
EVERY = [(parser, kind) for parser, one in PARSERS.items() for kind in one.texts]


@st.composite
def mangled(draw: st.DrawFn, texts: dict[str, Make]) -> bytes:
    """Return one to three hostile texts joined together, some of them changed in places."""
    pieces = []
    for kind in draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, max_size=3)):
        text = bytearray(texts[kind](draw(st.integers(60, 2000))))
        for at, byte in draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8)):
            text[at % len(text)] = byte
        pieces.append(bytes(text[draw(st.integers(0, 20)) : draw(st.integers(1, 4000))]))
    return draw(st.sampled_from([b"", b"\n", b",", b"\\", b'"', b"\xff"])).join(pieces)


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_input_is_either_read_or_refused_by_the_parsers_own_error(parser: str, data: st.DataObject) -> None:
    one = PARSERS[parser]
    text = data.draw(st.binary(max_size=300) | mangled(one.texts))
    try:
        one.read(text)
    except one.refuses as error:
        assert len(str(error)) < 8000


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "kind"), EVERY)
def test_the_largest_hostile_input_of_every_kind_takes_little_memory(parser: str, kind: str) -> None:
    one = PARSERS[parser]
    text = one.texts[kind](one.most)
    tracemalloc.start()
    try:
        one.read(text)
    except one.refuses:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # The limit is for one text at a time: no parsed page is kept, and other parsers copy or create their result once.
    assert peak < 24 * 1024 * 1024
