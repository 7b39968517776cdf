"""Probe packs: built-in ones, valid user packs, and refusals with a remedy."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_probes.errors import PackError, PackTooLarge
from kvpilot_probes.packs import (
    BUILTIN,
    GENERATED,
    MAX_CHARACTERS,
    MAX_LEVELS,
    MAX_PACK_BYTES,
    MAX_PROMPTS,
    Fill,
    ProbePrompt,
    load,
)

USER = "configmap/mine"
GOOD = """
prompts:
- name: hello
  messages:
  - {role: system, content: Be kind.}
  - {role: user, content: Hello}
"""


def load_text(text: str, context_tokens: int = 4096) -> tuple[ProbePrompt, ...]:
    return load([USER], {"mine": {"prompts.yaml": text}}, context_tokens)


def needle(fill: object = 50, depth: object = 50, fact: str = "The key is blue.") -> str:
    return (
        f"prompts: [{{name: n, fact: {fact!r}, fillPercent: {fill}, depthPercent: {depth}, "
        "messages: [{role: user, content: 'Read. {{filler}} Where?'}]}]"
    )


def tool(tools: str) -> str:
    return f"prompts: [{{name: n, messages: [{{role: user, content: x}}], tools: {tools}}}]"


def short_prompts(count: int) -> str:
    return "prompts:\n" + "".join(f"- {{name: p{i}, messages: [{{role: user, content: x}}]}}\n" for i in range(count))


@pytest.mark.parametrize("name", sorted({*BUILTIN} - {*GENERATED}))
def test_a_built_in_pack_holds_six_to_ten_distinct_chats_that_await_an_answer(name: str) -> None:
    prompts = load([f"builtin/{name}"])
    assert 6 <= len(prompts) <= 10
    assert len({p.messages for p in prompts}) == len({p.name for p in prompts}) == len(prompts)
    assert all(p.messages[-1].role == "user" and (p.pack, p.bucket) == (f"builtin/{name}", name) for p in prompts)
    assert not any("{{" in m.content for p in prompts for m in p.messages)


def test_all_built_in_packs_together_are_within_the_bounds() -> None:
    assert len(load([f"builtin/{name}" for name in BUILTIN])) <= MAX_PROMPTS


def test_every_multi_turn_chat_has_earlier_answers() -> None:
    assert all(sum(m.role == "assistant" for m in p.messages) >= 2 for p in load(["builtin/multi-turn"]))


@given(st.integers(0, 90), st.integers(0, 90), st.integers(0, 2**20))
def test_a_filled_prompt_has_a_length_and_the_depth_of_its_fact(fill: int, depth: int, context: int) -> None:
    (prompt,) = load_text(needle(fill, depth), context)
    assert (prompt.fill, prompt.context) == (Fill(fill, depth, "The key is blue."), context)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_pack_waits_for_the_engines_context_length(name: str) -> None:
    (pack,) = load([f"builtin/{name}"], context_tokens=512)
    assert (pack.pack, pack.bucket, pack.messages, pack.context) == (f"builtin/{name}", name, (), 512)


def test_a_users_pack_is_read_in_order_and_a_set_named_twice_counts_once() -> None:
    (prompt,) = load([USER, USER], {"mine": {"prompts.yaml": GOOD}})
    assert (prompt.pack, prompt.name) == (USER, "hello")
    assert [(m.role, m.content) for m in prompt.messages] == [("system", "Be kind."), ("user", "Hello")]


@pytest.mark.parametrize("name", ["builtin/nothing", "general", "configmap/", "", "builtin/../errors", "x" * 5000])
def test_the_error_for_an_unknown_pack_names_the_known_packs(name: str) -> None:
    with pytest.raises(PackError, match="builtin/general") as caught:
        load([name])
    assert len(str(caught.value)) < 400


def test_the_error_names_a_config_map_or_key_that_is_missing() -> None:
    with pytest.raises(PackError, match="'mine'"):
        load([USER], {})
    with pytest.raises(PackError, match=r"prompts\.yaml"):
        load([USER], {"mine": {"other": ""}})


@pytest.mark.parametrize("text", ["", "prompts: []", "prompts:"])
def test_a_pack_without_prompts_is_refused(text: str) -> None:
    with pytest.raises(PackError, match=r"configmap/mine.*at least one"):
        load_text(text)


def test_an_empty_list_of_packs_is_refused() -> None:
    with pytest.raises(PackError, match="probeSets"):
        load([])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[1, 2", "not plain YAML"),
        ("!!python/object/apply:os.getcwd []", "line 1: an anchor, alias or tag"),
        ("prompts:\n- &a x", "line 2: an anchor, alias or tag"),
        ("prompts: [*a]", "an anchor, alias or tag"),
        ("prompts: []\nprompts: [a]", "the key .prompts. is given twice"),
        ("prompts:\n- {name: a, name: b, messages: [x]}", "line 2: the key .name. is given twice"),
        ("prompts: []\n---\nb", "not plain YAML"),
        (f"prompts: {'[' * MAX_LEVELS}", f"more than {MAX_LEVELS} levels"),
        ("just words", "the pack: 'just words': Expected `object`"),
        ("prompts: [hello]", r"prompts\[0\]"),
        ("prompts: [{name: a}]", r"prompts\[0\]"),
        (
            "prompts: [{name: a, messages: [{role: user, content: x}], extra: 1}]",
            r"prompts\[0\].*unknown field `extra`",
        ),
        ("prompts: [{name: 7, messages: [{role: user, content: x}]}]", r"prompts\[0\]\.name"),
        ("prompts: [{name: a, messages: []}]", "messages"),
        ("prompts: [{name: a, messages: [{role: robot, content: x}]}]", r"messages\[0\]\.role: 'robot'"),
        (
            "prompts: [{name: a, messages: [{role: user, content: 12}]}]",
            r"messages\[0\]\.content: 12: Expected `str`.*quotes",
        ),
        ("prompts: [{name: a, messages: [{role: assistant, content: x}]}]", "end with a user's turn"),
        (GOOD + GOOD.replace("\nprompts:\n", ""), "used twice"),
        (needle(fill=95), "fillPercent: 95"),
        (needle(depth="deep"), "depthPercent"),
        (needle(fact=" "), "fact"),
        (tool("[]"), "tools"),
        (tool("[{name: t, description: d}]"), r"tools\[0\]"),
        (tool("[{name: '', description: d, parameters: {}}]"), r"tools\[0\]\.name"),
        (tool("[{name: t, description: d, parameters: [1]}]"), r"tools\[0\]\.parameters"),
        (
            tool("[{name: t, description: d, parameters: {type: text}}]"),
            r"tools\[0\]\.parameters\.type: 'text' is not a type",
        ),
        (
            tool("[{name: t, description: d, parameters: {properties: [a]}}]"),
            r"parameters\.properties must be a mapping",
        ),
        (
            tool("[{name: t, description: d, parameters: {properties: {a: {}}, required: [b]}}]"),
            r"parameters\.required: 'b' is not in properties",
        ),
        (tool("[{name: t, description: d, parameters: {properties: {a: {enum: 1}}}}]"), r"properties\.a\.enum must be"),
        (tool("[{name: t, description: d, parameters: {required: a}}]"), r"parameters\.required must be a list"),
        (tool("[{name: t, description: d, parameters: {items: 3}}]"), r"parameters\.items must be a mapping"),
        (tool("[{name: t, description: d, parameters: {a: 2026-01-01}}]"), "put it in quotes"),
        (tool("[{name: t, description: d, parameters: {a: .nan}}]"), "put it in quotes"),
    ],
)
def test_a_malformed_pack_is_refused_by_field_and_value(text: str, names: str) -> None:
    with pytest.raises(PackError, match=names):
        load_text(text)


def test_a_pack_that_would_cost_too_much_is_refused_with_the_limit() -> None:
    with pytest.raises(PackTooLarge, match=str(MAX_PROMPTS)):
        load_text(short_prompts(MAX_PROMPTS + 1))
    with pytest.raises(PackTooLarge, match=str(MAX_PACK_BYTES)):
        load_text("#" * (MAX_PACK_BYTES + 1))
    long = "x" * (MAX_PACK_BYTES - 200)
    names = [f"configmap/{i}" for i in range(1 + MAX_CHARACTERS // len(long))]
    texts = {
        name[10:]: {"prompts.yaml": f"prompts: [{{name: n, messages: [{{role: user, content: {long}}}]}}]"}
        for name in names
    }
    with pytest.raises(PackTooLarge, match="shorten your texts"):
        load(names, texts)
    fifty = short_prompts(50)
    with pytest.raises(PackTooLarge, match="100 prompts"):
        load([USER, "configmap/other"], {"mine": {"prompts.yaml": fifty}, "other": {"prompts.yaml": fifty}})


@given(st.text(max_size=300))
def test_any_text_is_either_a_pack_or_a_typed_error(text: str) -> None:
    try:
        assert load_text(text)
    except PackError as error:
        assert USER in str(error)


def test_tools_are_stored_as_the_json_that_engines_accept() -> None:
    schema = "{type: object, properties: {city: {type: string, enum: [Oslo, Bergen]}}, required: [city]}"
    (prompt,) = load_text(tool(f"[{{name: t, description: d, parameters: {schema}}}]"))
    (function,) = json.loads(prompt.tools)
    assert function["name"] == "t"
    assert function["parameters"]["properties"]["city"]["enum"] == ["Oslo", "Bergen"]


def test_the_built_in_tool_calls_have_tools_with_typed_arguments() -> None:
    calls = [p for p in load(["builtin/structured"]) if p.tools]
    assert len(calls) >= 3
    for function in (f for p in calls for f in json.loads(p.tools)):
        assert function["parameters"]["type"] == "object"
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])


@pytest.mark.parametrize(
    "text",
    [
        *("prompts: !!int ''", "prompts: !!bool maybe", "prompts: !!timestamp x", "prompts: !!float ''", "!!binary ä"),
        *("? !!set {a}\n: 1", "!!omap [1]", "!!pairs x", "- !<x> y", "!", "*a", "&a", "=", "<<: x", "? [a]\n: 1"),
        *("prompts: 0x_", "a: 0b_", "0x" + "f" * 4000, "9" * 5000, "{{a: 1}: 2}", "---\n---\n", "\0", "\ufeff"),
        *('"\\ud800"', '"\\UFFFFFFFF"', "prompts: \ud800", "%YAML 1." + "1" * 5000 + "\n--- a"),
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_a_malformed_pack_is_a_typed_error_that_names_it(text: str) -> None:
    with pytest.raises(PackError, match=USER):
        load_text(text)


def test_a_pack_of_the_largest_size_is_read() -> None:
    (prompt, *_) = load_text(short_prompts(MAX_PROMPTS) + "#" * (MAX_PACK_BYTES - len(short_prompts(MAX_PROMPTS))))
    assert prompt.name == "p0"


YAML_WORDS = (
    "a", "<<", "=", "~", "yes", "1", "0x_", "0x" + "f" * 40, "1e999", "1.0e+999", ".nan", "-.inf", "1_0", "1:59",
    ":59" * 40, "2026-01-01", "2026-13-45", "12 of 3", "'q'", '"\\ud800"', '"\\x00"', "*a", "&a x", "|\n  x", "%", "@",
    "?", ":", "-", "#", ",", "[", "]", "{", "}", "\n", " ", "\n  ", "\t", "---", "...", "\ufeff", "\u2028", "\ud800",
    "!!bool", "!!timestamp", "!!set", "!!python/name:os.system",
)  # fmt: skip


@given(st.lists(st.sampled_from(YAML_WORDS), max_size=40), st.sampled_from(["", " ", "\n", "\n- "]))
def test_any_yaml_is_read_in_linear_time_or_refused(words: list[str], between: str) -> None:
    text = between.join(words)
    indented = "\n".join(f"        {line}" for line in text.split("\n"))
    prompt_with_tool = (
        "prompts:\n- name: n\n  messages: [{role: user, content: x}]\n  tools:\n"
        "  - name: t\n    description: d\n    parameters:\n      x:\n"
    )
    pack = prompt_with_tool + indented
    try:
        (prompt,) = load_text(pack)
    except PackError as error:
        assert USER in str(error) and len(str(error)) < 500
    else:
        assert len(prompt.tools) <= 10 * len(pack)
