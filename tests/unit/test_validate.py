"""`kvpilot validate` judges manifests as the API server and the operator do, without either."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_cli import command
from kvpilot_cli.validate import schema
from kvpilot_cli.validate.command import judge, main
from support.bad_manifests import BAD, GOOD, Bad
from support.crd import root_schema

ROOT = Path(__file__).parents[2]


def validate(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([*map(str, argv)])
    return code, *capsys.readouterr()


def written(folder: Path, *objects: Any, name: str = "a.yaml") -> Path:
    file = folder / name
    file.write_text(yaml.safe_dump_all(objects))
    return file


@pytest.mark.parametrize("bad", [one for one in BAD if one.judge != "kubernetes"], ids=lambda bad: bad.name)
def test_validate_reports_the_field_of_a_wrong_manifest_and_who_refuses_it(bad: Bad) -> None:
    found = {fault.field: fault for fault in judge(bad.manifest)}
    assert bad.field in found
    judges = {"rule": ("rule", "operator"), "administrator": ("operator",), "operator": ("operator",)}
    assert found[bad.field].judge in judges.get(bad.judge, ("schema", "operator"))
    assert not any("PASSWORD" in fault.message for fault in found.values())


def test_every_example_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = validate(capsys, "-f", *sorted((ROOT / "examples").glob("*.yaml")))
    assert code == 0, out
    assert "accepted  qwen3-8b-fp8 (" in out
    assert "not judged: whether named Secrets" in out


def test_all_files_lists_and_documents_are_judged_and_other_kinds_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**GOOD, "metadata": {"name": "bad", "namespace": "models"}, "spec": {**GOOD["spec"], "replicas": -1}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [GOOD, broken]}
    first = written(tmp_path, listed, {"apiVersion": "v1", "kind": "Secret"}, None)
    second = written(tmp_path, GOOD, name="b.yaml")
    code, out, _ = validate(capsys, "-f", first, "-f", second, "-o", "json")
    document = json.loads(out)
    assert code == 1
    assert [(one["name"], one["accepted"]) for one in document["services"]] == [
        ("good", True), ("models/bad", False), ("good", True),
    ]  # fmt: skip
    assert [fault["field"] for fault in document["services"][1]["faults"]] == ["spec.replicas"]
    assert document["leftOut"] == 1


def test_a_manifest_in_json_is_read_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(GOOD)))
    assert command.main(["validate", "-f", "-"]) == 0
    assert capsys.readouterr().out.startswith("accepted  good (-)\n1 accepted, 0 refused\n")


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    engine = {**GOOD["spec"]["engine"], "env": [{"nmae": "A", "value": "hunter2"}]}
    found = {one.field: one.message for one in judge({**GOOD, "spec": {**GOOD["spec"], "engine": engine, "modle": 1}})}
    assert found["spec.modle"] == "is not a field of the API: did you mean model?"
    assert "did you mean name?" in found["spec.engine.env[0].nmae"]
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is neither YAML nor JSON (line "),
        ("&a [*a]", "is neither YAML nor JSON"),
        ("a: .nan", "is neither YAML nor JSON"),
        (
            "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 99))]),
            "fewer YAML aliases",
        ),
        ("- 1", "holds a list instead of an object"),
        ("", "no QuantizedLLMService to judge (found: nothing)"),
        ("kind: Secret", "no QuantizedLLMService to judge (found: Secret)"),
        (None, "cannot be read"),
    ],
)
def test_an_unreadable_file_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    code, out, err = validate(capsys, "-f", file)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert said in line


def test_an_error_names_a_folder_or_missing_file_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = validate(capsys, "-f", tmp_path)
    assert (code, f"{tmp_path}/*.yaml" in err) == (2, True)
    code, _, err = validate(capsys)
    assert (code, "-f/--file" in err) == (2, True)


def test_a_name_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, {**GOOD, "metadata": {"name": "ch\x1b[2Jat\u202e"}})
    code, out, _ = validate(capsys, "-f", file)
    assert code == 1
    assert all(character.isprintable() or character == "\n" for character in out)


def test_another_version_of_the_api_is_refused() -> None:
    (fault,) = judge({**GOOD, "apiVersion": "kvpilot.io/v1"})
    assert (fault.field, fault.message) == ("apiVersion", "is 'kvpilot.io/v1': use kvpilot.io/v1alpha1")


def test_access_to_nodes_is_refused_unless_the_operator_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {**GOOD["spec"]["engine"], "podTemplate": {"spec": {"hostNetwork": True}}}
    file = written(tmp_path, {**GOOD, "spec": {**GOOD["spec"], "engine": engine}})
    assert validate(capsys, "-f", file)[0] == 1
    assert validate(capsys, "-f", file, "--allow-host-access", "hostNetwork")[0] == 0


def test_every_rule_of_the_definition_is_judged_and_none_compares_with_the_stored_object() -> None:
    def rules(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [one["rule"] for one in node.get("x-kubernetes-validations", ()) if isinstance(one, dict)]
            return own + [rule for value in node.values() for rule in rules(value)]
        return [rule for one in node for rule in rules(one)] if isinstance(node, list) else []

    shipped, whole = rules(schema.root_schema()), rules(root_schema())
    assert sorted(shipped) == sorted(whole)
    assert shipped
    assert not any("oldSelf" in rule for rule in shipped)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from(sorted(schema.root_schema()["properties"]["spec"]["properties"])), value=JSON)
@settings(max_examples=40, deadline=None)
def test_any_file_is_judged_without_an_error(field: str, value: Any) -> None:
    for obj in ({**GOOD, "spec": {**GOOD["spec"], field: value}}, {**GOOD, "spec": value}, {**GOOD, "metadata": value}):
        for fault in judge(obj):
            assert fault.message
