"""Features of vLLM with `k4v4` in one real engine: answers match an oracle with the same weights and codec.

Prompts are read from quantized pages and there is no window, so an answer depends only on the codec
(`kvpilot_smallmodels.oracle`). No request has a seed: with a seed and a prompt in chunks, vLLM 0.32 crashes on a CPU
with any dtype.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from kvpilot_localcluster.engines.real import HANGS
from kvpilot_operator.render.engine import pod_template
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.reread import ADAPTERS, ANSWERS, GENERATION
from kvpilot_probes.run import capture, measure
from kvpilot_probes.session import Settings
from kvpilot_smallmodels import adapters
from kvpilot_smallmodels.models import tiny_llama
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.forked_serve import engine
from support.services import manifest, spec_of

pytestmark = pytest.mark.timeout(1800)

PROMPT = [5, 812, 77, 3001, 9, 45000, 18, 2, 404, 31, 27, 1999, 60, 7, 8, 15000] * 3
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city", "warm", "days"],
    "properties": {"city": {"enum": ["Ghent", "Oslo", "Porto"]}, "warm": {"type": "boolean"},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a random adapter for queries, keys and values, and the model with the adapter merged into its weights."""
    adapter, merged = tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("merged")
    adapters.make(tiny_llama(), adapter, merged)
    return adapter, merged


def of_adapters(**folders: Path) -> list[str]:
    """Return the operator's arguments for model.adapters."""
    adapters = [{"name": name, "source": f"file://{folder}"} for name, folder in folders.items()]
    spec = spec_of(manifest(model={"adapters": adapters}))
    arguments: list[str] = pod_template("chat", spec, "k4v4")["spec"]["containers"][0]["args"]
    return arguments[arguments.index("--lora-modules") :]


@pytest.fixture(scope="module")
def served(lora: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of the engine."""
    arguments = (
        "--dtype=float32", "--recent-tokens=0", "--kv-cache-memory-bytes=64M", "--max-num-seqs=8",
        "--max-num-batched-tokens=32", "--max-lora-rank=8", *of_adapters(adapter=lora[0], **{"acme/other": lora[0]}),
        "--enable-auto-tool-choice", "--tool-call-parser=hermes",
        # A model with random weights would generate spaces forever.
        "--structured-outputs-config.backend=xgrammar", "--structured-outputs-config.disable_any_whitespace=true",
    )  # fmt: skip
    exact = {"KVPILOT_PREFILL_FROM_PAGES": "1", "KVPILOT_CALIBRATION": "off"}
    compact = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}  # Grammars of strict tool calls allow endless spaces.
    with (
        engine(
            tiny_llama(), "k4v4", tmp_path_factory.mktemp("features"), *arguments, env={**exact, **compact}
        ) as running,
        httpx.Client(base_url=running.url, timeout=HANGS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(tiny_llama(), "k4v4")


@pytest.fixture(scope="module")
def plain() -> Oracle:
    """Return the oracle for the same model with a 16-bit cache, for comparison."""
    return Oracle(tiny_llama(), "auto")


def completed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    answer: dict[str, Any] = client.post("/v1/completions", json=asked).raise_for_status().json()
    return answer


def chatted(client: httpx.Client, **body: Any) -> Any:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Where is it warm?"}], "max_tokens": 200, **body}
    return client.post("/v1/chat/completions", json=asked).raise_for_status().json()["choices"][0]["message"]


def apart(found: list[float], wanted: list[float]) -> float:
    """Return the median difference of log-probabilities. It ignores the few values that lie near a code boundary."""
    assert len(found) == len(wanted)
    return median(abs(a - b) for a, b in zip(found, wanted, strict=True))


def test_prompt_logprobs_equal_those_of_the_codec(served: httpx.Client, oracle: Oracle, plain: Oracle) -> None:
    choice = completed(served, max_tokens=1, prompt_logprobs=0)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    found = [entry[str(token)]["logprob"] for token, entry in zip(PROMPT[1:], others, strict=True)]
    assert apart(found, oracle.logprobs(PROMPT[:1], PROMPT[1:])) < SLACK
    assert apart(found, plain.logprobs(PROMPT[:1], PROMPT[1:])) > 10 * SLACK


def test_parallel_samples_have_the_codecs_probabilities(served: httpx.Client, oracle: Oracle, plain: Oracle) -> None:
    answer = completed(served, n=4, temperature=1.0, max_tokens=24, logprobs=0)
    samples = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in answer["choices"]]
    assert len({tuple(tokens) for tokens, _ in samples}) == 4
    for tokens, found in samples:
        assert apart(found, oracle.logprobs(PROMPT, tokens)) < SLACK
        assert apart(found, plain.logprobs(PROMPT, tokens)) > 10 * SLACK


def test_beam_search_keeps_the_best_beams_of_each_step(served: httpx.Client, oracle: Oracle) -> None:
    answer = completed(served, use_beam_search=True, n=2, max_tokens=4, return_token_ids=None)
    texts = [choice["text"] for choice in answer["choices"]]
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(4):
        longer = [
            ([*tokens, token], total + logprob) for tokens, total in beams
            for token, logprob in oracle.best(PROMPT + tokens, 4)
        ]  # fmt: skip
        beams = sorted(longer, key=lambda beam: -beam[1])[:2]
    wanted = [served.post("/detokenize", json={"model": "m", "tokens": b}).json()["prompt"] for b, _ in beams]
    assert texts == wanted


def test_structured_output_follows_its_schema(served: httpx.Client) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for _ in range(4):
        found = json.loads(chatted(served, response_format=asked)["content"])
        assert set(found) == {"city", "warm", "days"}
        assert found["city"] in ("Ghent", "Oslo", "Porto")
        assert isinstance(found["warm"], bool)
        assert 1 <= found["days"] <= 9
    # Control: without the option, random weights generate no JSON.
    with pytest.raises(json.JSONDecodeError):
        json.loads(chatted(served)["content"])


def test_a_tool_is_called_with_the_arguments_that_it_declares(served: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
    [call] = chatted(
        served, tools=[tool], tool_choice={"type": "function", "function": {"name": "forecast"}}
    )["tool_calls"]  # fmt: skip
    assert call["function"]["name"] == "forecast"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "warm", "days"}


def test_every_adapter_of_a_service_is_served_under_its_own_name(served: httpx.Client) -> None:
    listed = served.get("/v1/models").raise_for_status().json()["data"]
    assert {one["id"] for one in listed} == {"m", "adapter", "acme/other"}
    answers = [completed(served, model=name, max_tokens=24)["choices"][0] for name in ("m", "adapter", "acme/other")]
    base, *adapted = (answer["token_ids"] for answer in answers)
    assert base not in adapted


def test_an_adapter_answers_as_the_model_with_its_weights_added(
    served: httpx.Client, lora: tuple[Path, Path], oracle: Oracle
) -> None:
    tokens = completed(served, model="adapter", max_tokens=24)["choices"][0]["token_ids"]
    merged = Oracle(lora[1], "k4v4")
    assert merged.sound(PROMPT, tokens, rounds=20)
    base = completed(served, max_tokens=24)["choices"][0]["token_ids"]
    assert oracle.sound(PROMPT, base, rounds=20)
    assert base != tokens


async def test_long_answers_of_model_and_adapters_agree_with_the_engines_reading_of_them_as_prompts(
    served: httpx.Client,
) -> None:
    url, settings = str(served.base_url).rstrip("/"), Settings(tokens=8, deadline_seconds=1200)
    chats = [(Message("user", f"Where is it warm in month {i}?"),) for i in range(ANSWERS)]
    prompts = [ProbePrompt("builtin/long-context", f"p{i}", chat) for i, chat in enumerate(chats)]
    kept = await capture(url, "m", prompts, identity="test", dtype="k4v4", settings=settings)
    found = await measure(url, "m", kept, settings=replace(settings, adapters=("adapter", "acme/other")))
    for bucket in (GENERATION, ADAPTERS):
        damage = [one.kl for one in found.seen if one.bucket == bucket]
        assert len(damage) == ANSWERS
        # Here prefill reads the same quantized pages as decode, so only rounding is left.
        assert max(damage) < 1e-3
