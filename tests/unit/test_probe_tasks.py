"""Tasks of probes, and the comparison of two engines' results."""

import asyncio
import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpilot_cli.probe import command
from kvpilot_probes import agent, codec, reasoning, tasks
from kvpilot_probes.errors import BaselineUnfit
from kvpilot_probes.packs import load
from kvpilot_probes.results import FALSE_ALARM, Task, Tasks, baseline_worse, candidate_worse
from kvpilot_probes.run import capture, measure
from kvpilot_probes.schemas import fault, matches
from kvpilot_probes.session import Settings
from kvpilot_probes.tasks import SAMPLINGS, checked
from support.probe_engine import Body, Handler, Writer, engine, made, reading, respond, serving

FACTS = " ".join(json.loads(task.wanted) for _, _, task in reasoning.tasks(20) if task.kind == "fact")
REFUND = '{"name": "refund", "arguments": {"number": 4711, "reason": "late"}}'


def call(name: str = "refund") -> Task:
    schema = next(tool["parameters"] for tool in agent.TOOLS if tool["name"] == name)
    return Task("call", json.dumps({**json.loads(REFUND), "schema": schema}), 96)


@pytest.mark.parametrize(
    "text",
    [
        REFUND,
        f"<tool_call>\n{REFUND}\n</tool_call>",
        f"Sure. {REFUND} Done.",
        REFUND.replace("arguments", "parameters"),
    ],
)
def test_a_valid_call_is_found_in_any_surrounding_text(text: str) -> None:
    assert checked(call(), text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "I cannot.", "{", REFUND[:-1], REFUND.replace("refund", "ship"), REFUND.replace("4711", "4712")),
        *(REFUND.replace("4711", '"4711"'), REFUND.replace("4711", "true"), REFUND.replace('"late"', '"because"')),
        *('{"name": "refund", "arguments": {"number": 4711}}', '{"name": "refund"}', "[" * 10_000, "{}"),
        '{"name": "refund", "arguments": [4711]}',
    ],
)
def test_a_call_with_a_wrong_name_number_type_or_argument_is_not_valid(text: str) -> None:
    assert not checked(call(), text)


@given(st.integers(0, 2**32))
def test_each_task_is_solved_only_by_its_own_answer(seed: int) -> None:
    found = reasoning.tasks(seed)
    assert found == reasoning.tasks(seed)
    assert len({name for name, _, _ in found}) == len(found) == 3 * reasoning.EACH
    for name, messages, task in found:
        wanted = json.loads(task.wanted)
        assert checked(task, f"It is {wanted}.")
        assert not checked(task, "")
        assert name.startswith("sort") or wanted not in messages[-1].content


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_each_decisive_request_is_solved_by_the_call_shown_in_earlier_rounds(seed: int, many: int) -> None:
    for request, task in agent.decisive(seed, many):
        wanted = json.loads(task.wanted)
        assert matches(wanted["schema"], wanted["arguments"])
        assert str(wanted["arguments"]["number"]) in request
        assert checked(task, json.dumps({k: wanted[k] for k in ("name", "arguments")}))
    assert next(agent.rounds(seed, many)) == next(agent.rounds(seed, many))
    assert all(fault(tool["parameters"]) is None for tool in agent.TOOLS)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_only_a_difference_beyond_chance_fails_an_engine(asked: int, ours: int, theirs: int) -> None:
    assume(ours <= asked and theirs <= asked)
    found = Tasks("agent", asked, ours, theirs)
    assert not (candidate_worse(found) and baseline_worse(found))
    if theirs >= ours:
        assert not candidate_worse(found)
    swapped = Tasks("agent", asked, theirs, ours)
    assert candidate_worse(found) == baseline_worse(swapped)


def test_sixteen_calls_fail_an_engine_that_solves_a_quarter_of_the_baselines() -> None:
    assert candidate_worse(Tasks("agent", 16, 15, 4))
    assert not candidate_worse(Tasks("agent", 16, 12, 7))
    assert not candidate_worse(Tasks("agent", 16, 0, 0))
    assert baseline_worse(Tasks("agent", 16, 0, 10))
    assert 2 * FALSE_ALARM <= 1 / 1000


@pytest.mark.parametrize("schema", [{}, {"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}])
def test_a_json_schema_of_the_usual_form_has_no_fault(schema: object) -> None:
    assert fault(schema) is None


@pytest.mark.parametrize("name", ["agent", "reasoning"])
@pytest.mark.parametrize("context", [1024, 2048, 40_000])
def test_the_prompts_and_answers_of_tasks_fit_any_context(name: str, context: int) -> None:
    found = made(load([f"builtin/{name}"]), context)
    assert all(len(r.tokens) + max(r.answer, r.task.tokens) <= context for r in found if r.task is not None)
    assert all(r.task is not None and r.prompt.bucket == name for r in found)
    assert max(len(r.tokens) for r in found) > (0.65 * context if name == "agent" else 100)


def test_the_agents_context_grows_to_tens_of_thousands_of_tokens() -> None:
    found = made(load(["builtin/agent"]), 131_072)
    assert all(60_000 < len(r.tokens) <= 65_536 for r in found)


def speaking(right: bool, facts: str = FACTS) -> Handler:
    """Return an engine that answers with the right tool call (a refund of order 4711) if `right`, else with `facts`."""

    async def handler(_path: str, body: Body, writer: Writer) -> None:
        respond(writer, b"")
        for i in range(body["max_tokens"]):
            token = f"token_id:{len(body['prompt']) + i}"
            text = (REFUND if right else f"{facts} ") if i == 0 else "x"
            logprobs = {"tokens": [token], "token_logprobs": [-0.1], "top_logprobs": [{token: -0.1}]}
            chunk = {"choices": [{"text": text, "logprobs": logprobs, "finish_reason": None}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")

    return reading(4096, handler)


async def test_a_candidate_with_broken_calls_fails_although_its_distributions_agree() -> None:
    settings = Settings(tokens=8, concurrency=8)
    prompts = load(["builtin/agent"])
    async with engine(speaking(right=True)) as url:
        kept = await capture(url, "m", prompts, identity="i", dtype="auto", settings=settings)
        kept = codec.decode(codec.encode(kept))
        ours = [json.loads(p.task.wanted)["name"] == "refund" for p in kept.prompts if p.task is not None]
        # The engine always refunds order 4711, so it fails each prompt that names another order.
        assert [p.done is not None and p.done.asked for p in kept.prompts] == [len(SAMPLINGS)] * len(ours)
        again = await measure(url, "m", kept, settings=settings)
        without = await measure(url, "m", kept, settings=Settings(tokens=8, tasks=False))
    assert again.mean_kl_micronats == 0
    assert again.tasks == (Tasks("agent", 2 * len(ours), 0, 0),)
    assert without.tasks == ()
    assert without.tokens == again.tokens - tasks.cost(p.task for p in kept.prompts) - 2 * sum(
        len(p.tokens) for p in kept.prompts
    )


async def test_a_baseline_that_answers_nonsense_is_refused_even_if_its_canary_is_as_bad() -> None:
    prompts, settings = load(["builtin/reasoning"]), Settings(tokens=8, concurrency=8)
    one_of_four = FACTS.split()[0]
    async with engine(speaking(right=False, facts="")) as url:
        with pytest.raises(BaselineUnfit, match=r"copied 0 of 8 facts from its prompts, .* at least 2"):
            await capture(url, "m", prompts, identity="i", dtype="auto", settings=settings)
    async with engine(speaking(right=False, facts=one_of_four)) as url:
        assert await capture(url, "m", prompts, identity="i", dtype="auto", settings=settings)


async def test_the_gate_shows_the_solved_tasks_of_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--probe-set", "builtin/general", "--probe-set", "builtin/reasoning", "--concurrency", "8")
    async with engine(serving(speaking(right=False), "m")) as one:
        await asyncio.to_thread(command.main, ("--baseline", one, "--candidate", one, *arguments))
        said = capsys.readouterr().out
        await asyncio.to_thread(command.main, ("--baseline", one, "--candidate", one, *arguments, "--json"))
    assert re.search(r"solved of 24: reasoning +8 +8\n", said)
    both = {"bucket": "reasoning", "asked": 24, "baseline_solved": 8, "candidate_solved": 8}
    assert both in json.loads(capsys.readouterr().out)["measured"]["tasks"]
