"""The operator's process sends its traces, the last ones at its end, while it uses a real API server."""

from pathlib import Path

import pytest

from kvpilot_localcluster import procs
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import until
from support.collector import Collector, collecting
from support.operated import condition, create
from support.operator_pair import Operator


def reconciles(collector: Collector, namespace: str) -> list[dict[str, str]]:
    """Return the string attributes of each reconcile of a service in this namespace."""
    found = [
        {one.key: one.value.string_value for one in span.attributes}
        for span in collector.spans()
        if span.name == "reconcile"
    ]
    return [one for one in found if one["kvpilot.namespace"] == namespace]


def test_the_operators_process_sends_its_traces_the_last_of_them_at_its_end(
    cluster: LocalCluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        # Nothing is sent before the end: batches are an hour apart, and there are too few spans to fill one.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        operator = Operator("traced", tmp_path, cluster.kubeconfig, f"--namespace={namespace}")
        try:
            create(cluster.rest, namespace)
            until(lambda: condition(cluster.rest, namespace, "Ready"), "a status")
            assert collector.spans() == []
            operator.process.terminate()
            assert operator.process.wait(300) == 0, operator.log.read_text()[-2000:]
        finally:
            procs.end(tmp_path / "operator-traced.pid")
        first, *_ = reconciles(collector, namespace)
        assert first["kvpilot.name"] == "chat"
        assert {sender["k8s.pod.name"] for sender in collector.resources()} == {"operator-traced"}
