"""`kubectl kvpilot` as a command: its requests to the API server, its error messages and its exit codes."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_api import LoopbackApi, client_configuration

from kvpilot_kubectl import complete
from kvpilot_kubectl.commands import parser
from kvpilot_kubectl.main import main
from kvpilot_operator.api.faults import faults
from support.services import manifest

Run = Callable[..., tuple[int, str, str]]
SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices"
CHAT = f"{SERVICES}/chat"
COMMANDS = ("abort", "export", "pause", "plan", "promote", "resume", "retry", "status", "undeny", "why")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with LoopbackApi(tmp_path) as api:
        api.services["chat"] = manifest()
        yield api


@pytest.fixture
def run(api: LoopbackApi, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command against `api`; return exit code, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([*argv, "--kubeconfig", str(api.kubeconfig)])
        return code, *capsys.readouterr()

    return run


def denied(*dtypes: str) -> dict[str, Any]:
    entries = [
        {"dtype": one, "reason": "AccuracyRegressed", "message": "", "until": "2999-01-01T00:00:00Z"} for one in dtypes
    ]
    return {"kvCache": {"activeDtype": "auto", "denied": entries}}


def refused(run: Run, *argv: str, code: int = 1) -> str:
    """Return the one line that the command ends with."""
    ended, out, err = run(*argv)
    assert (ended, out) == (code, "")
    (line,) = err.splitlines()
    assert line.startswith("kubectl kvpilot: ")
    return line


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["stat"], "stat"),
        (["why"], "SERVICE"),
        (["status", "--everything"], "--everything"),
        (["status", "-o", "xml"], "xml"),
        (["plan", "chat", "-o", "yaml", "--deny"], "--deny"),
        (["promote"], "SERVICE"),
        (["pause", "Chat"], "'Chat' is not a valid name"),
        (["pause", ""], "'' is not a valid name"),
        (["pause", "../../pods/x"], "'../../pods/x' is not a valid name"),
        (["status", "-n", "a b"], "'a b' is not a valid name"),
        (["status", "chat", "-A"], "leave SERVICE out"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_named_in_one_line_before_anything_is_asked(
    run: Run, api: LoopbackApi, argv: list[str], named: str
) -> None:
    assert named in refused(run, *argv, code=2)
    assert api.asked == []


def test_help_tells_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)


def test_the_docs_tell_of_every_command_and_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubectl.md").read_text()
    for part in complete.parts(parser()):
        for action in part._actions:
            for name in [*(action.choices or ()), *action.option_strings]:
                assert name in ("-h", "--help") or re.search(rf"(?<![-\w]){name}(?![-\w])", page), name


def test_options_may_stand_before_the_command_and_after_it(run: Run) -> None:
    outputs = [run("-o", "json", "status"), run("status", "-o", "json")]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0][1])["items"][0]["name"] == "chat"


def test_the_namespace_is_the_contexts_own_unless_one_is_named(run: Run, api: LoopbackApi) -> None:
    for argv in (["status"], ["status", "-n", "other"], ["status", "--context", "bare"], ["status", "-A"]):
        assert run(*argv)[0] == 0
    asked = [path.partition("/v1alpha1/")[2].partition("?")[0] for _, path in api.asked]
    named = [f"namespaces/{one}/quantizedllmservices" for one in ("models", "other", "default")]
    assert asked == [*named, "quantizedllmservices"]


def test_without_services_it_says_so_on_stderr(run: Run, api: LoopbackApi) -> None:
    api.services.clear()
    assert run("status") == (0, "", "no services found in namespace models\n")
    assert run("status", "-o", "json")[1] == '{\n  "items": []\n}\n'


def test_a_long_list_is_read_to_its_end(run: Run, api: LoopbackApi) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        first = "continue=" not in api.asked[-1][1]
        name = "a" if first else "b"
        return 200, {"metadata": {"continue": "t" if first else ""}, "items": [{"metadata": {"name": name}}]}

    api.answer = answer  # type: ignore[method-assign]
    _, out, _ = run("status", "-o", "json")
    assert [one["name"] for one in json.loads(out)["items"]] == ["a", "b"]


def test_a_service_that_is_not_there_is_named_with_where_to_look(run: Run) -> None:
    for command in ("status", "why", "plan", "export", "pause", "resume", "undeny"):
        line = refused(run, command, "chit")
        assert "'chit' not found in namespace models" in line
        assert "`kubectl kvpilot status -n models`" in line


def test_a_cluster_without_kvpilot_is_told_from_one_without_the_service(run: Run, api: LoopbackApi) -> None:
    api.answers[CHAT] = api.answers[SERVICES] = (404, b"404 page not found\n")
    for argv in (["status"], ["status", "chat"]):
        assert "kvpilot is not installed there" in refused(run, *argv)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, b"{}"), "sign in again"),
        ((403, b'{"message": "user x cannot"}'), "kubectl auth can-i get quantizedllmservices.kvpilot.io -n models"),
        ((500, b"etcd is away"), "answers 500"),
        ((503, b'{"message": "starting\\u001b[2J"}'), "(starting [2J)"),
        ((200, b"<html>"), "does not answer like an API server"),
        ((200, b"[]"), ""),
        ((200, b"null"), ""),
    ],
    ids=str,
)
def test_whatever_the_server_answers_is_said_in_a_line(
    run: Run, api: LoopbackApi, answer: tuple[int, bytes], said: str
) -> None:
    api.answers[CHAT] = answer
    if said:
        assert said in refused(run, "status", "chat")
    else:
        assert "no operator has written a status yet" in run("status", "chat")[1]


def test_a_server_that_does_not_answer_is_named(run: Run, api: LoopbackApi) -> None:
    raw = client_configuration("http://127.0.0.1:9")
    api.kubeconfig.write_text(yaml.safe_dump(raw))
    line = refused(run, "status")
    assert "no answer from the API server at http://127.0.0.1:9" in line
    assert "--context" in line


@pytest.mark.parametrize("text", ["", "[]", "a: [", "clusters: 3", "{}", "current-context: x", "\x00"])
def test_a_client_configuration_that_is_none_is_said_with_the_remedy(run: Run, api: LoopbackApi, text: str) -> None:
    api.kubeconfig.write_text(text)
    assert "set KUBECONFIG" in refused(run, "status")


GARBAGE = base64.b64encode(b"x").decode()


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"proxy-url": "gopher://"}, {}, "Proxy URL had unsupported scheme gopher"),
        ({"proxy-url": "http://127.0.0.1:9"}, {}, "Unable to connect to proxy"),
        ({"server": "not a url"}, {}, "no answer from the API server at not a url"),
        ({"server": 3}, {}, "no cluster is configured"),
        ({"certificate-authority": "/no-such-file"}, {}, "/no-such-file"),
        ({"certificate-authority-data": GARBAGE}, {}, "check the certificates in the client configuration"),
        ({}, {"client-certificate-data": GARBAGE, "client-key-data": GARBAGE}, "check the certificates in"),
        ({}, {}, "WRONG_VERSION_NUMBER"),
    ],
    ids=str,
)
def test_a_cluster_that_cannot_be_trusted_or_reached_is_said_in_a_line(
    run: Run, api: LoopbackApi, cluster: dict[str, Any], user: dict[str, Any], said: str
) -> None:
    raw = client_configuration(api.url.replace("http:", "https:"))
    raw["clusters"][0]["cluster"].update(cluster)
    raw["users"][0]["user"].update(user)
    api.kubeconfig.write_text(yaml.safe_dump(raw))
    assert said in refused(run, "status")


def test_a_missing_client_configuration_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--kubeconfig", "/no-such-file"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_an_unknown_context_is_named_with_those_that_are_there(run: Run) -> None:
    line = refused(run, "status", "--context", "elsewhere")
    assert "'elsewhere'" in line
    assert "bare, here" in line


def test_why_goes_without_events_that_may_not_be_read(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = {"decisions": [{"time": "2026-11-21T12:00:00Z", "action": "Serve"}]}
    api.answers["/api/v1/namespaces/models/events"] = (403, b"{}")
    code, out, _ = run("why", "chat")
    assert code == 0
    assert "Serve" in out
    assert "Events are left out: you may not list events in namespace models" in out
    code, out, err = run("why", "chat", "-o", "json")
    assert (code, json.loads(out)["timeline"][0]["action"]) == (0, "Serve")
    assert "Events are left out" in err


def test_pause_and_resume_write_one_field_and_only_where_it_differs(run: Run, api: LoopbackApi) -> None:
    spec = copy.deepcopy(api.services["chat"]["spec"])
    for command, paused, already in (
        ("pause", True, False),
        ("pause", True, True),
        ("resume", False, False),
        ("resume", False, True),
    ):
        code, out, _ = run(command, "chat")
        assert code == 0
        assert ("already" in out) is already
        assert api.services["chat"]["spec"]["rollout"]["paused"] is paused
    assert [method for method, _ in api.asked if method == "PATCH"] == ["PATCH", "PATCH"]
    assert api.services["chat"]["spec"] == spec
    assert json.loads(run("pause", "chat", "-o", "json")[1]) == {
        "namespace": "models",
        "name": "chat",
        "paused": True,
        "changed": True,
    }


def test_a_server_that_drops_the_field_is_not_believed(run: Run, api: LoopbackApi) -> None:
    api.dropped = frozenset({"paused", "denySeconds"})
    assert "the server dropped spec.rollout.paused" in refused(run, "pause", "chat")


def test_a_change_that_is_refused_is_said_with_the_servers_words(run: Run, api: LoopbackApi) -> None:
    before = api.answer
    api.answer = lambda method, *rest: (  # type: ignore[method-assign]
        (422, {"message": "webhook says no"}) if method == "PATCH" else before(method, *rest)
    )
    assert "refuses the change of chat: webhook says no" in refused(run, "pause", "chat")


SERVED = {
    "kvCache": {"activeDtype": "k4v4"},
    "accuracy": {"last": {"dtype": "k4v4", "verdict": "Passed", "probeTime": "2026-11-02T10:00:00Z", "revision": "a",
                          "excessKLMicronats": 3200, "top1AgreementPermille": 991}},
    "history": [{"dtype": "k4v4", "verdict": "Passed", "time": "2026-11-01T10:00:00Z", "image": "r:1",
                 "gpu": "NVIDIA-H200"}],
}  # fmt: skip


def test_export_writes_the_earned_dtype_with_its_evidence_into_a_manifest_without_status(
    run: Run, api: LoopbackApi
) -> None:
    service = api.services["chat"]
    service |= {"status": SERVED}
    service["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "kvpilot.io/canary": "abort@3740aaaa/2026-11-27T12:00:00Z",
        "team": "a",
    }
    before = copy.deepcopy(service)
    code, out, err = run("export", "chat")
    made = yaml.safe_load(out)
    assert code == 0
    assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
    assert made["spec"]["kvCache"]["startDtype"] == "k4v4"
    evidence = made["metadata"]["annotations"].pop("kvpilot.io/start-dtype-evidence")
    for words in ("2026-11-01T10:00:00Z", "NVIDIA-H200", "r:1", "2026-11-02T10:00:00Z", "3.2 millinats", "99.1%"):
        assert words in evidence
        assert words in err
    assert made["metadata"]["annotations"] == {"team": "a"}
    assert faults(made) == ()
    assert json.loads(run("export", "chat", "-o", "json")[1])["spec"] == made["spec"]
    assert api.services["chat"] == before


WORKLOADS = {
    "Deployment": "/apis/apps/v1/namespaces/models/deployments",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/namespaces/models/leaderworkersets",
}
GONE = (404, b'{"message": "not found", "details": {"name": "chat-r1"}}')


def noted(generation: int, spec: dict[str, Any]) -> tuple[int, bytes]:
    """Return an answer with a workload that was rendered from this spec."""
    return noted_as(json.dumps({"generation": generation, "spec": spec}))


def noted_as(note: str) -> tuple[int, bytes]:
    return 200, json.dumps({"metadata": {"annotations": {"kvpilot.io/spec": note}}}).encode()


@pytest.mark.parametrize("kind", WORKLOADS)
def test_export_writes_the_spec_that_serves_if_the_newest_is_refused(run: Run, api: LoopbackApi, kind: str) -> None:
    service = api.services["chat"]
    good = copy.deepcopy(service["spec"])
    service["metadata"]["generation"] = 8
    service["spec"] = {**good, "engine": {**good["engine"], "extraArgs": ["--port=1"]}}
    stalled = {"type": "Stalled", "status": "True", "reason": "SpecInvalid", "message": "--port is reserved"}
    service["status"] = {**SERVED, "stable": {"revision": "r1"}, "conditions": [stalled]}
    api.answers |= {f"{path}/chat-r1": noted(7, good) if one == kind else GONE for one, path in WORKLOADS.items()}
    code, out, err = run("export", "chat")
    assert code == 0
    made = yaml.safe_load(out)
    assert made["spec"] == {**good, "kvCache": {**good["kvCache"], "startDtype": "k4v4"}}
    assert "the spec is that of generation 7, which serves; generation 8 does not (--port is reserved); " in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (noted(8, {"model": "as the object has it"}), ""),
        ((200, b"{}"), ""),
        (noted_as("{"), "the spec that serves is unknown"),
        ((403, b'{"message": "user x cannot"}'), "you may not get deployments"),
        (GONE, "the spec that serves is unknown"),
        (noted_as("[" * 100_000), "the spec that serves is unknown"),
        (noted_as('{"generation": 7, "spec": 3}'), ""),
    ],
    ids=range(7),
)
def test_export_writes_the_newest_spec_if_it_serves_or_nothing_else_is_known(
    run: Run, api: LoopbackApi, answer: tuple[int, bytes], words: str
) -> None:
    service = api.services["chat"]
    service["metadata"]["generation"] = 8
    service["status"] = {"stable": {"revision": "r1"}}
    api.answers |= {f"{path}/chat-r1": answer for path in WORKLOADS.values()}
    code, out, err = run("export", "chat")
    assert code == 0
    assert yaml.safe_load(out)["spec"] == service["spec"]
    assert words in err
    assert ("generation" in err) is False


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": {"kvCache": {"activeDtype": "k4v4"}}}, "no probe that it passed is known"),
        ({"status": {"kvCache": {"activeDtype": "auto"}}}, "no step of kvCache.ladder"),
        ({"status": SERVED, "kvCache": {"mode": "Fixed", "dtype": "k4v4"}}, "mode Fixed"),
        ({}, "no dtype serves"),
    ],
)
def test_export_of_a_dtype_that_is_not_proven_writes_none_and_says_why(
    run: Run, api: LoopbackApi, change: dict[str, Any], why: str
) -> None:
    service = api.services["chat"]
    service["status"] = change.get("status", {})
    service["spec"]["kvCache"] = change.get("kvCache", {**service["spec"]["kvCache"], "startDtype": "fp8"})
    code, out, err = run("export", "chat")
    assert code == 0
    assert why in err
    assert "startDtype" not in yaml.safe_load(out)["spec"]["kvCache"]


def test_undeny_lifts_the_denial_and_says_how_to_set_it_back(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = denied("k4v4")
    api.services["chat"]["spec"]["rollout"]["denySeconds"] = 3600
    code, out, _ = run("undeny", "chat", "k4v4")
    assert code == 0
    assert api.services["chat"]["spec"]["rollout"]["denySeconds"] == 0
    assert "k4v4 (AccuracyRegressed, until 2999-01-01T00:00:00Z)" in out
    assert """kubectl -n models patch qllm chat --type merge -p '{"spec":{"rollout":{"denySeconds":3600}}}'""" in out
    assert "is already 0" in run("undeny", "chat")[1]


def test_undeny_of_one_dtype_is_refused_where_others_would_be_lifted_too(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = denied("k4v4", "k4v2")
    assert "k4v2 is denied, too" in refused(run, "undeny", "chat", "k4v4")
    assert all(method == "GET" for method, _ in api.asked)
    document = json.loads(run("undeny", "chat", "-o", "json")[1])
    assert (document["lifted"], document["denySecondsBefore"], document["changed"]) == (["k4v2", "k4v4"], 604800, True)


def test_undeny_of_what_is_not_denied_changes_nothing(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = denied("k4v4")
    assert "k8v4 is not denied; denied: k4v4" in refused(run, "undeny", "chat", "k8v4")
    api.services["chat"]["status"] = {}
    assert run("undeny", "chat")[:2] == (0, "models/chat: no dtype is denied\n")
    assert all(method == "GET" for method, _ in api.asked)


def test_undeny_of_a_paused_service_says_that_nothing_starts_yet(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = denied("k4v4")
    api.services["chat"]["spec"]["rollout"]["paused"] = True
    assert "kubectl kvpilot resume" in run("undeny", "chat")[1]


def on_trial(stage: str) -> dict[str, Any]:
    started = "2026-11-27T12:00:00Z"
    about = {"dtype": "k4v4", "fromDtype": "auto", "revision": "3740aaaa", "startedTime": started, "stageTime": started}
    return {"canary": {**about, "stage": stage}}


def tried(verdict: str, reason: str = "PerformanceRegressed") -> dict[str, Any]:
    about = {"dtype": "k4v4", "fromDtype": "auto", "revision": "3740aaaa", "time": "2026-11-27T12:09:00Z"}
    return {"history": [{**about, "verdict": verdict, "reason": reason}]}


@pytest.mark.parametrize(
    ("argv", "status", "request_", "said"),
    [
        (["abort"], on_trial("Probing"), "abort@3740aaaa/2026-11-27T12:00:00Z", "nothing is denied"),
        (["abort", "--deny"], on_trial("Shifting"), "deny@3740aaaa/2026-11-27T12:00:00Z", "k4v4 is denied"),
        (["promote"], on_trial("Probing"), "promote@3740aaaa/2026-11-27T12:00:00Z", "once its probes have passed"),
        (["promote"], on_trial("Shifting"), "promote@3740aaaa/2026-11-27T12:00:00Z", "hold times"),
        (["retry"], tried("Failed"), "retry@3740aaaa/2026-11-27T12:09:00Z", "tried again at once"),
        (
            ["retry"],
            {**tried("Passed"), **denied("k4v4")},
            "retry@3740aaaa/2026-11-27T12:09:00Z",
            "tried again at once",
        ),
    ],
)
def test_a_request_names_the_trial_so_that_the_operator_acts_on_it_once(
    run: Run, api: LoopbackApi, argv: list[str], status: dict[str, Any], request_: str, said: str
) -> None:
    api.services["chat"]["status"] = status
    before = copy.deepcopy(api.services["chat"]["spec"])
    code, out, _ = run(argv[0], "chat", *argv[1:])
    assert code == 0
    assert said in out
    assert api.services["chat"]["metadata"]["annotations"] == {"kvpilot.io/canary": request_}
    assert api.services["chat"]["spec"] == before
    assert json.loads(run(argv[0], "chat", *argv[1:], "-o", "json")[1])["request"] == request_


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ("abort", {}, "has no canary"),
        ("promote", tried("Failed"), "has no canary"),
        ("abort", on_trial("RollingBack"), "is being rolled back already"),
        ("promote", on_trial("Promoting"), "is Promoting already"),
        ("retry", on_trial("Probing"), "is in flight: wait for its end, or abort it first"),
    ],
)
def test_a_request_that_would_do_nothing_is_refused_before_anything_is_written(
    run: Run, api: LoopbackApi, argv: str, status: dict[str, Any], said: str
) -> None:
    api.services["chat"]["status"] = status
    assert said in refused(run, argv, "chat")
    assert all(method == "GET" for method, _ in api.asked)


def test_promote_of_a_paused_service_names_the_remedy(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = on_trial("Shifting")
    api.services["chat"]["spec"]["rollout"]["paused"] = True
    assert "run `kubectl kvpilot resume chat` first" in refused(run, "promote", "chat")


@pytest.mark.parametrize("status", [{}, tried("Passed"), tried("Error", "Superseded")])
def test_retry_with_nothing_to_lift_changes_nothing(run: Run, api: LoopbackApi, status: dict[str, Any]) -> None:
    api.services["chat"]["status"] = status
    assert "nothing to lift" in run("retry", "chat")[1]
    api.services["chat"]["status"] = {**status, **denied("k8v4")}
    assert "`kubectl kvpilot undeny` lifts denials (k8v4)" in run("retry", "chat")[1]
    assert all(method == "GET" for method, _ in api.asked)


def test_yaml_holds_what_json_holds(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = {**on_trial("Probing"), **denied("k4v4")}
    for argv in (["status"], ["status", "chat"], ["why", "chat"], ["pause", "chat"]):
        run(*argv)
        assert yaml.safe_load(run(*argv, "-o", "yaml")[1]) == json.loads(run(*argv, "-o", "json")[1])
    assert "use -o json" in refused(run, "plan", "chat", "--gpu", "H200", "-o", "yaml", code=2)


def test_wide_adds_columns_and_keeps_the_others(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = {**tried("Failed"), "url": "http://chat.models.svc"}
    narrow, wide = (run("status", *more)[1].splitlines() for more in ((), ("-o", "wide")))
    assert [one for one in wide[0].split("  ") if one.strip() and one.strip() not in narrow[0]] != []
    assert {"RECOMMENDED", "TOKENS", "LAST TRIAL", "ADDRESS"} <= {one.strip() for one in wide[0].split("  ")}
    assert "k4v4 RolledBack (PerformanceRegressed)" in wide[1]
    assert "http://chat.models.svc" in wide[1]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], list(COMMANDS)),
        (["p"], ["pause", "plan", "promote"]),
        (["status", ""], ["chat"]),
        (["why", "x"], []),
        (["undeny", "chat", ""], ["k4v2", "k4v4"]),
        (["undeny", "chat", "k4v4", ""], []),
        (["status", "--context", ""], ["bare", "here"]),
        (["status", "-n", ""], ["models", "other"]),
        (["status", "--all"], ["--all-namespaces"]),
        (["plan", "chat", "--gpu", "H2"], ["H20", "H200", "H200-NVL"]),
        (["status", "-o", ""], ["json", "wide", "yaml"]),
    ],
    ids=" ".join,
)
def test_completion_knows_commands_options_and_what_the_cluster_has(
    api: LoopbackApi, monkeypatch: pytest.MonkeyPatch, words: list[str], found: list[str]
) -> None:
    api.services["chat"]["status"] = denied("k4v4", "k4v2")
    names = [{"metadata": {"name": one}} for one in ("models", "other")]
    api.answers["/api/v1/namespaces"] = (200, json.dumps({"items": names}).encode())
    before = dict(os.environ)
    # Every argument but the last may name the cluster, too.
    assert complete.candidates(["--kubeconfig", str(api.kubeconfig), *words]) == found
    assert dict(os.environ) == before


def test_completion_without_a_cluster_completes_nothing(api: LoopbackApi) -> None:
    assert complete.candidates(["--kubeconfig", "/no-such-file", "status", ""]) == []


def test_a_shell_that_asks_by_argcompletes_protocol_is_answered() -> None:
    told = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "COMP_LINE": "kubectl-kvpilot p", "COMP_POINT": "17"}
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    asked = ["bash", "-c", f"'{program}' 8>&1 9>/dev/null"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, env={**os.environ, **told}, timeout=600)
    assert sorted(done.stdout.split()) == ["pause", "plan", "promote"]


def test_kubectl_is_told_to_offer_files_only_where_one_is_wanted() -> None:
    program = Path(sys.executable).with_name("kubectl_complete-kvpilot")
    for words, last in ((["sta"], "status\n:4\n"), (["status", "--kubeconfig", ""], ":0\n"), ([], None)):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=True, timeout=600)
        assert done.stderr == ""
        assert done.stdout == last if last is not None else done.stdout.endswith("why\n:4\n")


def test_a_reader_who_leaves_early_gets_no_traceback(api: LoopbackApi) -> None:
    api.services = {f"s{number}": {"metadata": {"name": f"s{number}" * 20}} for number in range(2000)}
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    command = f"'{program}' status -o json --kubeconfig '{api.kubeconfig}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=600)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_user_who_interrupts_gets_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpilot_kubectl.commands.cluster", asked)
    assert run("status") == (130, "", "")


def test_a_terminal_of_few_characters_shows_what_it_can(api: LoopbackApi) -> None:
    api.services["chat"]["status"] = {"decisions": [{"action": "Hold", "message": "≥ 85% …"}]}
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    done = subprocess.run(
        [program, "why", "chat", "--kubeconfig", api.kubeconfig],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "? 85% ?" in done.stdout


def test_without_its_dependencies_it_says_what_to_install(tmp_path: Path) -> None:
    """The operator's image has the script but not the optional dependency."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    done = subprocess.run(
        [program, "status"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kubectl kvpilot: the module rich is not installed: pip install 'kvpilot[kubectl]'")
