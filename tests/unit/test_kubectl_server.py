"""`kubectl kvpilot` reports in one line whatever the API server answers, or that it does not answer."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_runs import Run, refused, runner, serving_chat
from loopback_api import LoopbackApi, client_configuration

from kvpilot_kubectl.main import main

SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices"
CHAT = f"{SERVICES}/chat"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with serving_chat(tmp_path) as api:
        yield api


@pytest.fixture
def run(api: LoopbackApi, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(api, capsys)


def test_a_long_list_is_read_to_its_end(run: Run, api: LoopbackApi) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        first = "continue=" not in api.asked[-1][1]
        name = "a" if first else "b"
        return 200, {"metadata": {"continue": "t" if first else ""}, "items": [{"metadata": {"name": name}}]}

    api.answer = answer  # type: ignore[method-assign]
    _, out, _ = run("status")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["a", "b"]


def test_a_missing_service_is_reported_with_the_namespace(run: Run) -> None:
    for command in ("status", "why", "export", "pause", "resume"):
        line = refused(run, command, "chit")
        assert "'chit' not found in namespace models" in line
        assert "`kubectl kvpilot status -n models`" in line


def test_a_cluster_without_kvpilot_is_distinguished_from_one_without_the_service(run: Run, api: LoopbackApi) -> None:
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
def test_any_answer_of_the_server_becomes_one_line(
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
def test_an_invalid_kubeconfig_is_reported_with_the_remedy(run: Run, api: LoopbackApi, text: str) -> None:
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
def test_an_untrusted_or_unreachable_cluster_is_reported_in_one_line(
    run: Run, api: LoopbackApi, cluster: dict[str, Any], user: dict[str, Any], said: str
) -> None:
    raw = client_configuration(api.url.replace("http:", "https:"))
    raw["clusters"][0]["cluster"].update(cluster)
    raw["users"][0]["user"].update(user)
    api.kubeconfig.write_text(yaml.safe_dump(raw))
    assert said in refused(run, "status")


def test_a_missing_kubeconfig_is_reported_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--kubeconfig", "/no-such-file"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_the_error_about_an_unknown_context_lists_the_known_ones(run: Run) -> None:
    line = refused(run, "status", "--context", "elsewhere")
    assert "'elsewhere'" in line
    assert "bare, here" in line


def test_a_server_that_drops_the_field_is_an_error(run: Run, api: LoopbackApi) -> None:
    api.dropped = frozenset({"paused", "denySeconds"})
    assert "the server dropped spec.rollout.paused" in refused(run, "pause", "chat")


def test_a_refused_change_is_reported_with_the_servers_message(run: Run, api: LoopbackApi) -> None:
    before = api.answer
    api.answer = lambda method, *rest: (  # type: ignore[method-assign]
        (422, {"message": "webhook says no"}) if method == "PATCH" else before(method, *rest)
    )
    assert "refuses the change of chat: webhook says no" in refused(run, "pause", "chat")
