"""A service whose newest spec was refused comes back in another cluster with the spec that served."""

import json
from typing import Any

import pytest

from kvpilot_kubectl.export import export
from kvpilot_operator.api.faults import MAX_SPEC_BYTES, faults
from kvpilot_operator.api.names import KIND, REVISION_LABEL, SPEC_ANNOTATION
from kvpilot_operator.api.spec import parse
from support.crd import apply_defaults
from support.model_cluster import ModelCluster
from support.services import KEY
from support.trials import OLD, edit, ended, service, stage


class Reader:
    """The part of `kubectl kvpilot`'s client that export uses, over a model cluster."""

    def __init__(self, cluster: ModelCluster) -> None:
        self._objects = cluster.api.objects

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(self._objects[KIND, name]))
        return found

    def workload(self, name: str) -> dict[str, Any]:
        return next(obj for (kind, known), obj in self._objects.items() if known == name and "selector" in obj["spec"])


def exported(cluster: ModelCluster) -> tuple[dict[str, Any], str]:
    manifest, about = export(Reader(cluster), KEY.name)  # type: ignore[arg-type]
    return apply_defaults(manifest), about


def notes(cluster: ModelCluster) -> dict[str, Any]:
    """Return the spec in each workload's annotation, by revision."""
    made = [one["metadata"] for one in cluster.api.of_kind("Deployment")]
    return {one["labels"][REVISION_LABEL]: json.loads(one["annotations"][SPEC_ANNOTATION]) for one in made}


def refused(cluster: ModelCluster) -> None:
    """Apply a spec that the operator refuses."""
    edit(cluster, replicas=2, engine={**cluster.obj["spec"]["engine"], "extraArgs": ["--port=1"]})
    assert faults(cluster.obj)


def another_image(cluster: ModelCluster) -> None:
    """Ask for an image that no canary has passed with yet."""
    edit(cluster, replicas=2, engine={**cluster.obj["spec"]["engine"], "image": "kvpilot/runtime:2"})
    cluster.until(stage("Probing"))


def failed_image(cluster: ModelCluster) -> None:
    """Ask for an image that never starts."""
    cluster.starts = False
    edit(cluster, replicas=2, engine={**cluster.obj["spec"]["engine"], "image": "kvpilot/runtime:2"})
    cluster.until(ended)


@pytest.mark.parametrize("change", [refused, another_image, failed_image])
def test_an_export_to_another_cluster_has_the_serving_spec(change: Any) -> None:
    lost = ModelCluster(service(OLD, 3), start_ticks=2)
    lost.settle()
    revision, served = lost.parsed().stable.revision, lost.snapshot().spec
    change(lost)
    for _ in range(3):
        lost.tick()
    manifest, about = exported(lost)
    assert faults(manifest) == ()
    there = ModelCluster({**manifest, "metadata": {**lost.obj["metadata"], "generation": 1}})
    assert there.settle().stable.revision == revision
    assert there.deployments[revision] == (OLD, there.snapshot().spec.replicas)
    if change is refused:
        assert parse(manifest) == served
        assert "is that of generation 1, which serves, not the newest (generation 2) (" in about
        assert "--port" in about


def test_the_largest_spec_leaves_room_for_the_annotations_of_others() -> None:
    long = "\x1b\u202e" * 2048
    env = [{"name": f"A{i}", "value": long} for i in range(100)]
    obj = service(OLD, 1)
    spec = {**obj["spec"], "engine": {**obj["spec"]["engine"], "env": []}}
    while not faults(more := apply_defaults({**obj, "spec": spec})):
        obj = more
        spec["engine"] = {**spec["engine"], "env": env[: len(spec["engine"]["env"]) + 1]}
    assert len(json.dumps(obj["spec"])) > MAX_SPEC_BYTES / 2
    cluster = ModelCluster(obj)
    cluster.settle()
    [made] = cluster.api.of_kind("Deployment")
    # Kubernetes allows 256 KiB of annotations on an object.
    assert len(made["metadata"]["annotations"][SPEC_ANNOTATION].encode()) <= MAX_SPEC_BYTES + 1024


def test_only_a_valid_spec_is_written_into_the_workloads_annotations() -> None:
    cluster = ModelCluster(service(OLD, 3))
    revision = cluster.settle().stable.revision
    edit(cluster, scaling={**cluster.obj["spec"]["scaling"], "maxReplicas": 12})
    cluster.tick()
    note = notes(cluster)[revision]
    assert (note["generation"], note["spec"]["scaling"]["maxReplicas"]) == (2, 12)
    assert parse({**cluster.obj, "spec": note["spec"]}) == cluster.snapshot().spec
    refused(cluster)
    cluster.tick()
    assert notes(cluster) == {revision: note}
    assert exported(cluster)[0]["spec"] != cluster.obj["spec"]
