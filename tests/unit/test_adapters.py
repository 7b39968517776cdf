"""model.adapters: the LoRA adapters that engines load, and their report in the status."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvpilot_operator.api.faults import faults
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.views import deployment_view
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.status import Stable, Status
from support.answering_server import Answer, Server
from support.observed import OURS, World
from support.observed import pod as pod_object
from support.scrape_loop import ignore, scraping
from support.services import KEY, NOW, manifest, pod, revision_of, running, spec_of

SQL = {"name": "sql", "source": "pvc://adapters.shared/team/sql"}
CHAT = {"name": "acme/chat", "source": "pvc://private"}
BAKED = {"name": "baked", "source": "file:///opt/adapter"}


def service(*adapters: dict[str, str], **engine: Any) -> dict[str, Any]:
    return manifest(model={"source": "pvc://weights/llama", "adapters": list(adapters)}, engine=engine)


def template(*adapters: dict[str, str], **engine: Any) -> dict[str, Any]:
    obj = service(*adapters, **engine)
    assert faults(obj) == ()
    return pod_template(KEY.name, spec_of(obj), "k4v4")


def test_an_engine_is_told_every_adapter_and_has_its_claim() -> None:
    pod = template(SQL, CHAT, BAKED, extraArgs=["--max-lora-rank=64"])["spec"]
    (engine,) = pod["containers"]
    begin = engine["args"].index("--lora-modules")
    assert engine["args"][begin:] == [
        "--lora-modules", "sql=/adapters/adapters.shared/team/sql", "acme/chat=/adapters/private",
        "baked=/opt/adapter", "--enable-lora", "--max-loras=3", "--max-lora-rank=64",
    ]  # fmt: skip
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"][1:]}
    assert claims == {"model": "weights", "adapters-0": "adapters.shared", "adapters-1": "private"}
    mounts = {one["name"]: (one["mountPath"], one.get("readOnly")) for one in engine["volumeMounts"]}
    assert mounts["adapters-0"] == ("/adapters/adapters.shared", True)
    assert mounts["adapters-1"] == ("/adapters/private", True)


def test_a_claim_of_several_adapters_is_mounted_once() -> None:
    pod = template(SQL, {"name": "b", "source": "pvc://adapters.shared/b"})["spec"]
    assert [one["name"] for one in pod["volumes"]] == ["shm", "model", "adapters-0"]


def test_an_adapter_of_the_hub_is_named_as_the_hub_does() -> None:
    obj = manifest(model={"adapters": [{"name": "sql", "source": "hf://org/sql"}]})
    assert faults(obj) == ()
    arguments = pod_template(KEY.name, spec_of(obj), "auto")["spec"]["containers"][0]["args"]
    assert "sql=org/sql" in arguments


def test_a_change_of_adapters_is_a_new_revision_and_none_is_what_it_was() -> None:
    none = manifest(model={"source": "pvc://weights/llama"})
    assert template() == pod_template(KEY.name, spec_of(none), "k4v4")
    assert len({revision(one) for one in (template(), template(SQL), template(SQL, CHAT))}) == 3


def test_the_status_names_the_adapters_that_the_serving_revision_has_loaded() -> None:
    before, after = service(SQL, CHAT), service(SQL)
    name = revision_of(before, "auto")
    made = workload(KEY, "u-1", pod_template(KEY.name, spec_of(before), "auto"), 1, 600)
    for ever_ready, told in ((True, ("sql", "acme/chat")), (False, ())):
        status = Status(stable=Stable(revision=name, dtype="auto", ever_ready=ever_ready, since=NOW))
        # The newest spec drops one adapter, but no engine serves that spec yet.
        observed = running(after, "auto", deployments={name: deployment_view(made)}, pods=())
        assert decide(replace(observed, status=status)).status.adapters == told


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([["sql", "acme/chat"], ["acme/chat", "sql"]], ("sql", "acme/chat")),
        ([["sql", "acme/chat"], ["acme/chat"]], ("acme/chat",)),
        ([["sql", "late"], ["late", "sql", "later"]], ("sql", "late")),
        ([["x" * 129, "sql"], None], ("sql",)),
        ([[], []], ()),
        ([None, None], ("sql", "acme/chat")),
    ],
)
def test_the_status_names_what_every_pod_says_it_has_loaded(
    said: list[list[str] | None], told: tuple[str, ...]
) -> None:
    obj = service(SQL, CHAT)
    name = revision_of(obj, "auto")
    made = workload(KEY, "u-1", pod_template(KEY.name, spec_of(obj), "auto"), 2, 600)
    status = Status(stable=Stable(revision=name, dtype="auto", ever_ready=True, since=NOW))
    pods = tuple(pod(name, name=f"pod-{i}") for i in range(2))
    adapters = {one.name: tuple(names) for one, names in zip(pods, said, strict=True) if names is not None}
    observed = running(obj, "auto", deployments={name: deployment_view(made)}, pods=pods, adapters=adapters)
    assert decide(replace(observed, status=status)).status.adapters == told


LISTED = """{"object": "list", "data": [{"id": "m", "parent": null}, {"id": "sql", "parent": "m"}]}"""


def says(text: str) -> Answer:
    """Answer every request with this text."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    return answer


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    async with Server.up() as engine:
        engine.answer = says(LISTED)
        yield engine


async def test_an_engine_lists_its_adapters_as_models_with_a_parent() -> None:
    async with serving() as engine, scraping() as scraper:
        assert await scraper.adapters(KEY, engine.url, ignore) == ("sql",)
        assert [request.path for request in engine.asked] == ["/v1/models"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"data": [{"id": 5}]}', '{"data": []}' + " " * 65536, "\ud7ff" * 9])
async def test_what_is_no_list_of_models_is_refused_with_its_address(text: str) -> None:
    async with serving() as engine, scraping() as scraper:
        engine.answer = says(text)
        with pytest.raises(ScrapeError, match=f"{engine.url}/v1/models: "):
            await scraper.adapters(KEY, engine.url, ignore)


async def test_only_pods_that_were_told_to_load_adapters_are_asked_and_a_failure_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as engine:
        world = World(monkeypatch)
        monkeypatch.setattr("kvpilot_operator.observe.gather.engine_url", lambda ip, mesh: engine.url)
        world.pages = {engine.url: next(iter(world.pages.values()))}
        await world.scrape()
        assert engine.asked == []
        labels = {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": "r1"}
        about = {"name": "chat-r1", "namespace": KEY.namespace, "labels": labels, "generation": 2, **OURS}
        container = {"name": "engine", "args": ["--lora-modules", "sql=/a", "--enable-lora"]}
        template = {"template": {"spec": {"containers": [container]}}}
        world.put({"kind": "Deployment", "metadata": about, "spec": {"replicas": 1, **template}})
        await world.scrape()
        assert (await world.snapshot()).adapters == {"a": ("sql",)}
        engine.answer = says("none")
        await world.scrape()
        assert (await world.snapshot()).adapters == {}
        engine.answer = says("""{"data": [{"id": "late", "parent": "m"}]}""")
        await world.scrape()
        assert (await world.snapshot()).adapters == {"a": ("late",)}
        world.drop("Pod", "a")
        world.put(pod_object("b", "10.0.0.2"))
        await world.scrape()
        assert (await world.snapshot()).adapters == {"b": ("late",)}
        await world.scraper.close()
