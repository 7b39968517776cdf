"""A real API server and operator: the spec that served before a refused one is exported, and serves elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import Rest, until
from support.operated import Json, create, engine, exists, services, told

PROGRAM = Path(sys.executable).with_name("kubectl-kvpilot")


def serving(rest: Rest, namespace: str) -> str:
    """Wait until `chat` has a revision with a Deployment, and return the revision."""

    def stable() -> str:
        status: Json = rest.get(f"{services(namespace)}/chat").get("status") or {}
        return str((status.get("stable") or {}).get("revision", ""))

    until(lambda: bool(stable()), "chat has a revision")
    made = f"/apis/apps/v1/namespaces/{namespace}/deployments/chat-{stable()}"
    until(lambda: exists(rest, made), "the revision has a Deployment")
    return stable()


def test_export_of_a_service_with_a_refused_spec_restores_the_last_good_spec(
    cluster: LocalCluster, rest: Rest, namespace: str
) -> None:
    create(rest, namespace, replicas=2)
    revision = serving(rest, namespace)
    bad = {"replicas": 3, **engine(extraArgs=["--port=1"])}
    rest.merge(f"{services(namespace)}/chat", {"spec": bad})
    assert "--port" in told(rest, namespace, "Stalled", "SpecInvalid")["message"]
    done = subprocess.run(
        [PROGRAM, "export", "chat", "-n", namespace], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the spec is that of generation 1, which serves, not the newest (generation 2) (" in done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert manifest["spec"]["replicas"] == 2
    assert "extraArgs" not in manifest["spec"]["engine"]
    # Act as if the cluster and its objects were lost: apply the file in a namespace without any of them.
    other = f"{namespace}-restored"
    rest.create("/api/v1/namespaces", {"metadata": {"name": other}})
    rest.create(services(other), {**manifest, "metadata": {"name": "chat", "namespace": other}})
    assert serving(rest, other) == revision
    found = rest.get(f"/apis/apps/v1/namespaces/{other}/deployments/chat-{revision}")
    assert found["spec"]["replicas"] == 2
    rest.delete(f"/api/v1/namespaces/{other}")
