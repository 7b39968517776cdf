"""A real Prometheus, set up as the docs say, fills the dashboards, and the commands of the runbooks work unchanged."""

import asyncio
import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import pytest_asyncio
from draw import draw
from monitored import NAME, NAMESPACE, OPERATOR, Monitored
from panels import alerts, panels

from kvpilot_demo.load import Load
from kvpilot_localcluster.engines.real import HANGS
from kvpilot_localcluster.toolbox.kubectl import kubectl

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.asyncio(loop_scope="module")]
RUNBOOKS = sorted((Path(__file__).parents[2] / "docs" / "runbooks").glob("Kvpilot*.md"))
# Panels that have data only during or after a trial.
TRIAL = {
    "Canary", "Canaries by stage", "Canary's share of the requests", "Last trial", "Excess KL of the last probe",
    "Excess KL of the last probe, the ten highest", "Top-1 agreement of the last probe",
}  # fmt: skip
# Panels that have data only after a rollback or with objectives. This service has no rollback and no objectives.
OTHERS = {
    "Dtypes that are denied", "Latency objectives",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def monitored(tmp_path_factory):
    async with Monitored.up(tmp_path_factory.mktemp("monitored")) as running:
        load = Load(await running.engine_url(), NAME, users=8, prompt_tokens=200, output_tokens=32)
        await load.start()
        await asyncio.sleep(15)
        yield running
        await load.stop()
        assert load.stats.ok > 0
        assert load.stats.failed == 0, list(load.stats.failures)


async def silent(monitored, wanted):
    """Return the titles of panels with an expression that has no data."""
    asked = {panel: panel.filled(NAMESPACE, NAME) for panel in panels() if wanted(panel.title)}
    return {f"{p.title}: {text}" for p, text in asked.items() if not await monitored.query(text)}


async def test_every_panel_of_the_dashboards_has_data(monitored):
    assert await silent(monitored, lambda title: title not in TRIAL | OTHERS) == set()


async def test_the_engines_series_carry_the_labels_that_panels_group_by(monitored):
    (found,) = await monitored.query(f'vllm:kv_cache_usage_perc{{namespace="{NAMESPACE}"}}')
    labels = found["metric"]
    assert (labels["kvpilot_io_service"], labels["kvpilot_io_dtype"]) == (NAME, "auto")
    assert re.fullmatch("[0-9a-f]{8}", labels["kvpilot_io_revision"])
    assert labels["pod"].startswith(f"{NAME}-{labels['kvpilot_io_revision']}-")


async def test_the_operators_metrics_agree_with_the_engines(monitored):
    capacity = float((await monitored.query(f'kvpilot_kv_capacity_tokens{{name="{NAME}"}}'))[0]["value"][1])
    blocks = (await monitored.query("vllm:cache_config_info"))[0]["metric"]
    assert capacity == int(blocks["num_gpu_blocks"]) * int(blocks["block_size"])
    (running,) = await monitored.query('sum(rate(kvpilot_api_requests_total{code="200"}[1m]))')
    assert float(running["value"][1]) > 0


async def test_prometheus_evaluates_every_alert_and_a_healthy_service_raises_no_critical_one(monitored):
    groups = (await monitored.ask("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alerts()}
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    assert await monitored.query('ALERTS{severity="critical"}') == []


def run(monitored, command):
    environment = {
        **os.environ,
        "KUBECONFIG": str(monitored.kubeconfig),
        "PATH": f"{kubectl().parent}:{os.environ['PATH']}",
        "NAMESPACE": NAMESPACE,
        "NAME": NAME,
        "OPERATOR": OPERATOR,
    }
    return subprocess.run(
        ["sh", "-euc", command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


async def test_kubectl_get_shows_the_service_in_one_line(monitored):
    ended = await asyncio.to_thread(run, monitored, "kubectl -n $NAMESPACE get qllm")
    heads, line = (row.split() for row in ended.stdout.splitlines())
    assert heads == [
        "NAME", "READY", "SERVING", "REASON", "DTYPE", "MODE", "CANARY", "KV%", "LOAD", "ACCURACY", "REPLICAS", "AGE",
    ]  # fmt: skip
    assert line[:4] == [NAME, "True", "Serving", "auto"]
    assert "Reference" in line
    wide = await asyncio.to_thread(run, monitored, "kubectl -n $NAMESPACE get qllm -o wide")
    assert "MESSAGE" in wide.stdout
    assert "auto serves" in wide.stdout


async def test_events_describe_what_happened_to_the_service(monitored):
    ended = await asyncio.to_thread(run, monitored, "kubectl -n $NAMESPACE describe qllm $NAME")
    assert re.search(r"Normal\s+EngineReady\s+\S+(?: \(x\d+ over \S+\))?\s+kvpilot-operator", ended.stdout), (
        ended.stdout
    )


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
async def test_the_commands_of_a_runbook_run_unchanged(monitored, path):
    before, mitigation = path.read_text().split("\n## Mitigation\n")
    blocks = re.findall(r"```sh\n(.*?)```", before, re.DOTALL)
    blocks += [
        re.sub(r"^( *kubectl .*)$", r"\1 --dry-run=server", block, flags=re.MULTILINE)
        for block in re.findall(r"```sh\n(.*?)```", mitigation, re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        ended = await asyncio.to_thread(run, monitored, block)
        assert ended.returncode == 0, f"{block}\n{ended.stdout}{ended.stderr}"
        assert "rror" not in ended.stderr, f"{block}\n{ended.stderr}"


async def test_a_trial_shows_in_every_panel_that_is_about_trials(monitored, tmp_path):
    began = time.time()
    await monitored.patch({"kvCache": {"dtype": "k4v4"}})
    seen: set[str] = set()

    def promoted(status):
        return "canary" not in status and bool(status.get("history")) and status["history"][0]["verdict"] == "Passed"

    async def watch():
        while True:
            for panel in panels():
                if panel.title in TRIAL and await monitored.query(panel.filled(NAMESPACE, NAME)):
                    seen.add(panel.title)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await monitored.until(promoted)
    # Wait until Prometheus has scraped the end of the trial.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANGS):
            while seen != TRIAL:
                await asyncio.sleep(0.5)
    watching.cancel()
    assert seen == TRIAL
    latencies = "Inter-token latency, p95"
    (panel,) = (panel for panel in panels() if panel.title == latencies)
    dtypes = {one["metric"]["kvpilot_io_dtype"] for one in await monitored.query(panel.filled(NAMESPACE, NAME))}
    assert "k4v4" in dtypes
    # KVPILOT_IMAGES=docs/images renews the figures of docs/observability.md.
    folder = Path(os.environ.get("KVPILOT_IMAGES") or tmp_path)
    for figure in await draw(monitored, began - 20, time.time(), folder):
        assert figure.read_text().count("<path") > 50
