"""A real Prometheus reads our registry and a real vLLM's page: every panel and alert has data at some point.

`test_live.py` does the same with a running operator and engine, which have no rollback and no denied dtype.
"""

import asyncio
import json
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from monitored import Prometheus, discovered
from panels import alerts, panels

from kvpilot_localcluster.engines import PAGE_EARLY, PAGE_LATER
from kvpilot_localcluster.rest import HANGS
from kvpilot_operator.api.names import ENGINE_PORT
from kvpilot_operator.control.http import serve_http
from kvpilot_operator.control.service_metrics import ServiceSeries
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.decide import decide
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.state.accuracy import Accuracy, Measured
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.status import (
    Canary,
    Denied,
    Experience,
    JournalEntry,
    KVCache,
    Status,
)
from support.services import KEY, NOW, manifest, running, samples, spec_of

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
# Possible content of an engine's page if a tenant tampered with the image.
HOSTILE = """
kvpilot_build_info{version="1"} 1
kvpilot_leader 2
kvpilot_condition{namespace="default",name="chat",type="Ready",status="False",reason="Wrong"} 1
kvpilot_model_info{head_dim="64",kv_heads="2",layers="2",window_layers="0",mla="0"} 1
"""
OPERATOR_LABELS = {"app.kubernetes.io/name": "kvpilot", "app.kubernetes.io/component": "operator"}


def address() -> str:
    """Return a random loopback address. Each pod needs its own, because all pods listen on the documented ports."""
    return f"127.{random.randint(128, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"


def pod(namespace: str, name: str, ip: str, labels: dict[str, str], containers: list[dict]) -> dict:
    metadata = {"namespace": namespace, "name": name, "labels": labels}
    return {"metadata": metadata, "spec": {"containers": containers}, "status": {"podIP": ip}}


def eventful(now: datetime) -> Status:
    """Return a status with a trial that was rolled back, its denied dtype, and another trial that runs."""
    trial = Canary(
        revision="r2", dtype="k4v4", from_dtype="auto", stage="Shifting", started_time=now, stage_time=now,
        weight_percent=25,
    )  # fmt: skip
    ended = Experience(
        revision="r1", dtype="k8v4", from_dtype="auto", model="m", image="i", gpu="g", time=now, verdict="Failed",
        reason="AccuracyRegressed",
    )  # fmt: skip
    probe = Measured(
        revision="r1", dtype="k8v4", verdict="Failed", probe_time=now, excess_kl_micronats=50000,
        top1_agreement_permille=820,
    )  # fmt: skip
    denied = Denied(
        dtype="k8v4",
        model="m",
        image="i",
        gpu="g",
        reason="AccuracyRegressed",
        message="",
        until=now + timedelta(days=7),
    )
    entry = JournalEntry(time=now, action="StartCanary", reason="MemoryPressured", message="why")
    return Status(
        canary=trial,
        history=(ended,),
        accuracy=Accuracy(last=probe, failures=1),
        kv_cache=KVCache(denied=(denied,)),
        decisions=(entry,),
    )


def passes(telemetry: Telemetry) -> None:
    """Reconcile the service and record metrics as the operator's loop does. Add past events to the decision."""
    now = datetime.now(UTC).replace(microsecond=0)
    objective = {"metric": "TTFT", "percentile": 95, "milliseconds": 500}
    asked = manifest(scaling={"objectives": [objective]})
    observed = running(asked, "auto")
    seen = samples(usage=0.95, waiting=3)
    flows = Flows(5.0, generation_tokens=500, finished=5, ttft=Histogram((0.5, 1.0), (5, 0, 0), 1.0))
    scrapes = tuple(replace(one, time=one.time + (now - NOW), recent_tokens=64, flows=flows) for one in seen)
    observed = running(asked, "auto", now=now, samples={observed.traffic: scrapes})
    with telemetry.timed_reconcile():
        decision = decide(observed)
    plain = decision.status
    past = eventful(now)
    kept = {name: getattr(past, name) for name in ("canary", "history", "accuracy", "decisions")}
    denied = msgspec.structs.replace(plain.kv_cache, denied=past.kv_cache.denied)
    telemetry.leader.set(1)
    series = ServiceSeries()
    status = msgspec.structs.replace(plain, kv_cache=denied, **kept)
    series.show(observed, replace(decision, status=status))
    telemetry.services(lambda: [(observed.key, series)])
    telemetry.engine_scraped(False)
    telemetry.scraped(0.4)
    for method, kind, status in (("PATCH", "Deployment", 200), ("LIST", "Pod", 0), ("WATCH", "Pod", 200)):
        telemetry.api_request(method, kind, status, 0.02)


@asynccontextmanager
async def engine(host: str, pages: list[str]):
    """Serve the first page once, and then the second one."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=pages.pop(0) if len(pages) > 1 else pages[0])

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, ENGINE_PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    telemetry, operator_ip, engine_ip = Telemetry(), address(), address()
    template = pod_template(KEY.name, spec_of(manifest()), "auto")
    ports = [{"name": "operator", "ports": [{"containerPort": 8080}]}]
    pods = [
        pod("kvpilot-system", "kvpilot-operator-1", operator_ip, OPERATOR_LABELS, ports),
        pod(KEY.namespace, "chat-1", engine_ip, template["metadata"]["labels"], template["spec"]["containers"]),
        pod(KEY.namespace, "disguised", address(), OPERATOR_LABELS, ports),
    ]
    pages = [page.read_text() + HOSTILE for page in (PAGE_EARLY, PAGE_LATER)]
    operator = await serve_http(operator_ip, 8080, telemetry.registry, asyncio.Event())
    try:
        passes(telemetry)
        (folder / "targets.json").write_text(json.dumps(discovered(pods)))
        async with engine(engine_ip, pages), Prometheus.up(folder) as prometheus:
            try:
                async with asyncio.timeout(HANGS):
                    while not _scraped_thrice(await prometheus.query("sum_over_time(up[1m])")):
                        await asyncio.sleep(0.3)
                        telemetry.scraped(0.4)
            except TimeoutError:
                pytest.fail(f"no three scrapes: {await prometheus.ask('targets')}")
            yield prometheus.ask
    finally:
        await operator.cleanup()


def _scraped_thrice(found: list[dict]) -> bool:
    return len(found) == 2 and all(float(one["value"][1]) >= 3 for one in found)


@pytest.mark.parametrize("dashboard", ["fleet", "service"])
async def test_every_panel_has_data_of_a_service_with_a_history(ask, dashboard):
    empty = []
    for panel in panels():
        if panel.dashboard == dashboard:
            text = panel.filled(KEY.namespace, KEY.name)
            if not (await ask("query", query=text))["result"]:
                empty.append(f"{panel.title}: {text}")
    assert empty == []


async def test_panels_of_another_service_are_empty(ask):
    shown = [p.filled(KEY.namespace, "another") for p in panels() if p.dashboard == "service"]
    full = [text for text in shown if (await ask("query", query=text))["result"]]
    assert full == []


async def test_an_engines_metrics_page_adds_no_series_of_the_operator(ask):
    found = (await ask("query", query='{__name__=~"kvpilot_.*", job!="kvpilot-operator"}'))["result"]
    assert {one["metric"]["__name__"] for one in found} == {"kvpilot_model_info"}
    assert not any(label.startswith("__tmp") for one in found for label in one["metric"])


async def test_a_pod_in_another_namespace_is_not_an_operator_whatever_its_labels(ask):
    targets = (await ask("targets"))["activeTargets"]
    operators = [one["labels"]["namespace"] for one in targets if one["labels"]["job"] == "kvpilot-operator"]
    assert operators == ["kvpilot-system"]


async def test_every_alert_is_evaluated_without_an_error_and_the_rollback_and_the_failed_probe_are_reported(ask):
    wanted = {"KvpilotCanaryRolledBack", "KvpilotProbeFailed"}
    found: dict[str, dict[str, str]] = {}
    async with asyncio.timeout(HANGS):
        while not wanted <= found.keys():
            await asyncio.sleep(0.3)
            firing = (await ask("query", query='ALERTS{alertstate="firing"}'))["result"]
            found = {one["metric"]["alertname"]: one["metric"] for one in firing}
    rules = [rule for group in (await ask("rules"))["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alerts()}
    assert [rule for rule in rules if rule["health"] == "err"] == []
    assert found.keys() == wanted
    assert {(one["namespace"], one["name"]) for one in found.values()} == {KEY}
    told = found["KvpilotCanaryRolledBack"]
    assert (told["dtype"], told["reason"]) == ("k8v4", "AccuracyRegressed")
