"""External text is printable and has no password wherever it enters kvpilot or is shown.

Each test passes arbitrary Unicode to a text function, with an address and its password in the middle.
"""

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from service_states import settled

from kvpilot_formats.untrusted import KvpilotError
from kvpilot_kubectl import fields
from kvpilot_kubectl.errors import ToolError
from kvpilot_operator.api.names import ENGINE_CONTAINER
from kvpilot_operator.control.logs import FIELDS, JsonLines
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError, Rejected, ScrapeError
from kvpilot_operator.observe.api_reads import refusal_of
from kvpilot_operator.observe.views import deployment_view, pod_view
from kvpilot_operator.state.objects import Rejection
from kvpilot_operator.state.status import clip
from kvpilot_probes.answers import read_models, read_streamed, read_tokens
from kvpilot_probes.client import http_client, served_models
from kvpilot_probes.errors import EngineRefused, ProbeError
from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from support.answering_server import Server, status
from support.metrics_pages import parse_page
from support.scrape_loop import ignore, scraping
from support.services import KEY

SECRET = "PASSW0RD"
ADDRESS = f"https://user:{SECRET}@hub.example/m"
NASTY = f"a\x1b]0;owned\x07\x9b31m\u202eb\u2066c\u200bd\ue000\x7f\u2028e {ADDRESS} f"
ODD = st.text(st.characters(codec="utf-8"), max_size=20)
TEXT = st.builds(lambda before, after: f"{before} {ADDRESS} {after}", ODD, ODD)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON, structs and tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*texts(key), *texts(one))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from texts(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from texts(getattr(value, name))


def check(*values: Any) -> None:
    """Assert that the texts contain no password, and no unprintable characters except line breaks."""
    for text in texts(values):
        assert text.replace("\n", "").isprintable(), ascii(text)
        assert SECRET not in text
        text.encode()


def pod(text: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat-1"},
        "spec": {"nodeName": "n"},
        "status": {
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}],
            "initContainerStatuses": [{"name": "first", "state": {"waiting": {"reason": text, "message": text}}}],
            "containerStatuses": [
                {
                    "name": ENGINE_CONTAINER,
                    "state": {"waiting": {"reason": text, "message": text}},
                    "lastState": {"terminated": {"reason": text, "message": text, "exitCode": 1}},
                }
            ],
        },
    }


@given(TEXT)
def test_messages_of_kubelets_schedulers_and_controllers_become_printable(text: str) -> None:
    said = pod(text)
    check(pod_view(said))
    del said["status"]["containerStatuses"][0]["lastState"]["terminated"]["message"]
    check(pod_view(said))
    del said["status"]["containerStatuses"][0]["lastState"]
    check(pod_view(said))
    failing = {"type": "ReplicaFailure", "status": "True", "message": text}
    check(deployment_view({"metadata": {}, "status": {"conditions": [failing]}}).failure)
    check(refusal_of([{"reason": "FailedCreate", "message": f"create Pod failed error: {text}"}]))


@given(TEXT, st.sampled_from(["cache_dtype", "num_gpu_blocks", "hash", "tokens", "le"]))
def test_texts_of_metrics_pages_become_printable(text: str, label: str) -> None:
    for series in (
        f'vllm:cache_config_info{{{label}="{text}"}} 1',
        f'kvpilot_calibration_info{{{label}="{text}"}} 1',
        f'vllm:time_to_first_token_seconds_bucket{{{label}="{text}"}} 1',
        f"vllm:num_requests_running {text}",
    ):
        try:
            check(parse_page(f"vllm:kv_cache_usage_perc 0.5\n{series}\n"))
        except ScrapeError as error:
            check(str(error))


@given(TEXT)
def test_answers_to_probes_become_printable(text: str) -> None:
    said = json.dumps(
        {"error": {"message": text, "code": 500}, "tokens": text, "data": [{"name": text}]}, ensure_ascii=False
    )
    for data in (said.encode(), text.encode()):
        for read in (read_tokens, read_models, read_streamed):
            with pytest.raises(ProbeError) as caught:
                read("http://10.0.0.1:8000", data)
            check(str(caught.value), getattr(caught.value, "excerpt", ""))


@given(TEXT)
def test_errors_and_messages_become_printable(text: str) -> None:
    check(clip(text), str(KvpilotError(text)), str(ToolError(text)), fields.text(text))
    error = Rejected("PATCH", "/x", 422, text)
    check(str(error), error.message)
    assert clip(text).isprintable()


@given(TEXT)
def test_lines_of_the_log_become_printable(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        about = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kvpilot_operator", logging.WARNING, "", 0, "said: %s", (text,), about)
    record.__dict__ |= dict.fromkeys(FIELDS, text)
    line = JsonLines().format(record)
    check(line, json.loads(line))


@given(TEXT)
def test_refusals_of_kvpilot_serve_become_printable(text: str) -> None:
    words = io.StringIO()
    with contextlib.redirect_stderr(words):
        assert serve.main(["--model=m", f"--max-model-len={text}"]) == serve.REFUSED
    check(words.getvalue(), json.loads(words.getvalue()))
    check(PreflightError("ModelNotFound", text).message)


@settings(max_examples=20)
@given(TEXT, st.booleans())
def test_status_and_events_are_printable_for_any_observation(text: str, starting: bool) -> None:
    s = settled().snapshot()
    refused = json.dumps({"kvpilot": "refused", "reason": "DoesNotFit", "message": text})
    views = tuple(
        replace(one, ready=not starting, containers_ready=not starting, restarts=3, exit_message=refused)
        for one in s.pods
    )
    rejections = (Rejection("Service", "chat", "Invalid", text, (("spec.ports", text),)),)
    written = {"canary_annotation": text, "autoscaler": text}
    decision = decide(replace(s, pods=views, rejections=rejections, backed_off={s.pods[0].name: text}, **written))
    check(decision.status.as_written(), decision.events)


async def test_http_answers_of_engines_become_printable() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=500, text=NASTY, headers={"Content-Encoding": "x"})

    async with Server.up() as server, http_client() as http, scraping() as scraper:
        server.answer = refuse
        with pytest.raises(EngineRefused) as caught:
            await served_models(server.url, http)
        check(str(caught.value), caught.value.excerpt)
        with pytest.raises(ScrapeError) as failed:
            await scraper.scrape(KEY, server.url, ignore)
        check(str(failed.value))


@pytest.mark.parametrize("code", [400, 404, 409, 422, 429, 500])
async def test_answers_of_the_api_server_become_printable(code: int) -> None:
    async with Server.up() as server:
        server.answer = status(code, NASTY)
        with pytest.raises(ClusterError) as caught:
            await server.cluster.apply(
                {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "a", "name": "b"}}
            )
    check(str(caught.value), caught.value.message)
