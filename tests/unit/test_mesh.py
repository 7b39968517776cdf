"""The operator reaches meshed engines by mutual TLS with current certificates, and all others by plain HTTP."""

import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvpilot_localcluster.engines import PAGE_LATER
from kvpilot_operator.api.names import engine_url
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.errors import NoIdentity, ScrapeError
from kvpilot_operator.mesh import CHAIN, KEY, ROOT, Identity
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.options import parse_arguments
from kvpilot_operator.state.decision import Capture, Captured
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes.client import http_client, served_models
from kvpilot_probes.errors import EngineUnreachable
from support.meshed import Mesh, Sidecar, sidecar
from support.observed import pod
from support.probe_engine import counting
from support.probe_engine import engine as probe_engine
from support.scrape_loop import ignore, scraping
from support.services import manifest, spec_of

SERVICE = ServiceKey("models", "chat")
SPEC = spec_of(manifest(accuracy={"probeSets": ["builtin/general"]}))


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path / "mesh")


@pytest.fixture
def ours(mesh: Mesh, tmp_path: Path) -> Path:
    """Return the folder that the operator's agent writes to."""
    return mesh.issue("kvpilot-system", "kvpilot-operator", tmp_path / "ours")


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Serve a vLLM's metrics page and its list of models over plain HTTP."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=PAGE_LATER.read_text())

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "chat", "object": "model"}]})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine_in(mesh: Mesh, tmp_path: Path, **more: Any) -> AsyncIterator[Sidecar]:
    async with engine() as plain, sidecar(plain, mesh.issue("models", "default", tmp_path / "theirs"), **more) as found:
        yield found


async def test_an_engine_in_a_mesh_is_read_by_mutual_tls(mesh: Mesh, ours: Path, tmp_path: Path) -> None:
    async with engine_in(mesh, tmp_path) as meshed, engine() as plain, scraping(Identity(ours)) as reading:
        found = await reading.scrape(SERVICE, meshed.url, ignore)
        assert found == await reading.scrape(SERVICE, plain, ignore)
    assert meshed.let_through == ["spiffe://cluster.local/ns/kvpilot-system/sa/kvpilot-operator"]


async def test_the_operator_offers_the_protocols_by_which_a_permissive_sidecar_recognises_the_mesh(
    mesh: Mesh, ours: Path, tmp_path: Path
) -> None:
    async with (
        engine_in(mesh, tmp_path, speaks=("istio-http/1.1", "istio")) as meshed,
        scraping(Identity(ours)) as reading,
    ):
        await reading.scrape(SERVICE, meshed.url, ignore)
    assert meshed.spoken == ["istio-http/1.1"]


async def test_probes_use_mutual_tls(mesh: Mesh, ours: Path, tmp_path: Path) -> None:
    async with engine_in(mesh, tmp_path) as meshed, http_client(tls=Identity(ours).tls()) as http:
        assert await served_models(meshed.url, http) == ("chat",)
        async with http_client() as stranger:
            with pytest.raises(EngineUnreachable, match="certificate"):
                await served_models(meshed.url, stranger)


async def test_plain_requests_are_refused_by_the_mesh(mesh: Mesh, ours: Path, tmp_path: Path) -> None:
    async with engine_in(mesh, tmp_path) as meshed, scraping(Identity(ours)) as reading:
        with pytest.raises(ScrapeError):
            await reading.scrape(SERVICE, meshed.url.replace("https", "http"), ignore)
    assert meshed.let_through == []


async def test_nothing_is_sent_to_an_engine_of_another_certificate_authority(ours: Path, tmp_path: Path) -> None:
    async with engine_in(Mesh(tmp_path / "another"), tmp_path) as meshed, scraping(Identity(ours)) as reading:
        with pytest.raises(ScrapeError, match=r"(?i)certificate verify failed"):
            await reading.scrape(SERVICE, meshed.url, ignore)
    assert meshed.let_through == []


async def test_renewed_certificates_are_used_from_the_next_connection_on(ours: Path, tmp_path: Path) -> None:
    identity = Identity(ours)
    renewed = Mesh(tmp_path / "renewed")
    async with engine_in(renewed, tmp_path) as meshed, scraping(identity) as reading:
        with pytest.raises(ScrapeError):
            await reading.scrape(SERVICE, meshed.url, ignore)
        renewed.issue("kvpilot-system", "kvpilot-operator", ours)
        await reading.scrape(SERVICE, meshed.url, ignore)
    assert len(meshed.let_through) == 1


def test_files_that_have_not_changed_are_read_once(ours: Path) -> None:
    identity = Identity(ours)
    assert identity.tls() is identity.tls()


@pytest.mark.parametrize("name", [CHAIN, KEY, ROOT])
def test_while_a_file_is_missing_or_broken_the_last_certificates_are_used(
    ours: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity(ours)
    before, whole = identity.tls(), (ours / name).read_bytes()
    for damage in (lambda file: file.unlink(), lambda file: file.write_text("half a file")):
        damage(ours / name)
        assert [identity.tls(), identity.tls()] == [before, before]
    # Log one warning for each fault, even if many connections have it.
    assert caplog.text.count("the old ones stay") == 2
    (ours / name).write_bytes(whole)
    assert identity.tls() is not before


def test_the_old_certificate_stays_until_key_and_certificate_match(mesh: Mesh, ours: Path, tmp_path: Path) -> None:
    identity = Identity(ours)
    before = identity.tls()
    newer = mesh.issue("kvpilot-system", "kvpilot-operator", tmp_path / "newer")
    shutil.copy(newer / KEY, ours / KEY)
    assert identity.tls() is before
    shutil.copy(newer / CHAIN, ours / CHAIN)
    assert identity.tls() is not before


async def test_without_certificates_only_plain_scrapes_work_and_the_error_names_the_files(
    mesh: Mesh, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    async with engine_in(mesh, tmp_path) as meshed, engine() as plain, scraping(Identity(empty)) as reading:
        with pytest.raises(ScrapeError, match=r"empty.*cert-chain.pem.*come from the mesh's agent: does it run\?"):
            await reading.scrape(SERVICE, meshed.url, ignore)
        await reading.scrape(SERVICE, plain, ignore)


def test_no_part_of_a_key_is_logged_or_reported(ours: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = (ours / KEY).read_text().splitlines()[1]
    Identity(ours).tls()
    for broken in ((ours / KEY).read_text().replace("BEGIN", "BEGUN"), (ours / KEY).read_text()[:120]):
        (ours / KEY).write_text(broken)
        with pytest.raises(NoIdentity) as told:
            Identity(ours).tls()
        assert secret[:16] not in str(told.value) + repr(told.value.__cause__) + caplog.text


@pytest.mark.parametrize("operator_has_identity", [False, True])
@pytest.mark.parametrize(
    ("labels", "in_mesh"),
    [({}, False), ({"security.istio.io/tlsMode": "istio"}, True), ({"security.istio.io/tlsMode": "disabled"}, False)],
)
def test_a_pod_is_reached_by_tls_if_its_sidecar_accepts_it_and_the_operator_has_certificates(
    labels: dict[str, str], in_mesh: bool, operator_has_identity: bool
) -> None:
    cache = InformerCache(None, (), mesh=operator_has_identity)  # type: ignore[arg-type]  # nothing is watched
    obj = pod("a", "10.0.0.1")
    obj["metadata"]["labels"] |= labels
    cache.wrote("Pod", obj["metadata"]["namespace"], "a", obj)
    (view,) = cache.pods.of(ServiceKey(obj["metadata"]["namespace"], "chat"))
    scheme = "https" if in_mesh and operator_has_identity else "http"
    assert engine_url(view.ip, view.mesh) == f"{scheme}://10.0.0.1:8000"


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments([]).mesh_certificates is None
    assert parse_arguments([f"--mesh-certificates={tmp_path}"]).mesh_certificates == tmp_path
    with pytest.raises(SystemExit):
        parse_arguments(["--mesh-certificates=/nowhere"])
    assert "--mesh-certificates: /nowhere: is not a folder; mount the volume" in capsys.readouterr().err


class NothingKept:
    """Cluster in which no baseline is kept."""

    async def find(self, *_: str) -> None:
        return None


async def test_a_probe_uses_the_current_certificates(ours: Path, tmp_path: Path) -> None:
    renewed = Mesh(tmp_path / "renewed")
    theirs = renewed.issue("models", "default", tmp_path / "theirs")
    async with (
        probe_engine(counting) as plain,
        sidecar(plain, theirs) as meshed,
        scraping(Identity(ours)) as reading,
    ):
        prober = Prober(NothingKept(), reading)  # type: ignore[arg-type]  # the one method that it uses
        request = Capture("capture/x/0", "p", meshed.url, "m", "0123456789", "chat-baseline")
        with pytest.raises(EngineUnreachable):
            await prober.probe(SERVICE, SPEC, request, uid="u-1")
        renewed.issue("kvpilot-system", "kvpilot-operator", ours)
        found = await prober.probe(SERVICE, SPEC, request, uid="u-1")
    assert isinstance(found, Captured)
    assert meshed.let_through.count("spiffe://cluster.local/ns/kvpilot-system/sa/kvpilot-operator") > 8
