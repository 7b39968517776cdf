"""The operator's process uses a mesh's certificates to read an engine that accepts no other client."""

import asyncio
import sys
from functools import partial
from pathlib import Path

from kvpilot_localcluster import procs
from kvpilot_localcluster.addresses import Addresses, free_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.engines import faulty
from kvpilot_localcluster.rest import Rest, until
from kvpilot_operator.api.names import ENGINE_PORT
from support.meshed import Mesh, sidecar
from support.operated import create, engine, told
from support.operator_pair import Operator

OPERATOR = "spiffe://cluster.local/ns/kvpilot-system/sa/kvpilot-operator"
# No node has this name, so the pod keeps the status that the test sets.
NOWHERE = {"kubernetes.io/hostname": "nowhere"}
IN_THE_MESH = {"metadata": {"labels": {"security.istio.io/tlsMode": "istio"}}}


def answers(rest: Rest, namespace: str, address: str) -> None:
    """Set the status of the service's pod, as a kubelet would for an engine that answers at this address."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    until(lambda: rest.get(pods)["items"], "the engine has a pod")
    pod = rest.get(pods)["items"][0]["metadata"]["name"]
    conditions = [{"type": kind, "status": "True"} for kind in ("ContainersReady", "Initialized", "PodScheduled")]
    status = {"phase": "Running", "podIP": address, "conditions": conditions}
    rest.merge(f"{pods}/{pod}/status", {"status": status})


async def test_the_operator_reads_an_engine_that_requires_the_meshs_mutual_tls(
    cluster: LocalCluster, namespace: str, tmp_path: Path
) -> None:
    mesh, own, address = Mesh(tmp_path / "mesh"), tmp_path / "own", Addresses(tmp_path).take()
    certificates = mesh.issue(namespace, "default", tmp_path / "engine")
    own.mkdir()
    port = free_port()
    command = [sys.executable, "-I", "-S", faulty.__file__, f"--port={port}", "--kv-cache-dtype=auto"]
    procs.spawn(
        tmp_path / "engine.pid", [*command, "--served-model-name=chat"], log=tmp_path / "engine.log",
        env={"KVPILOT_SERVE_HOST": "127.0.0.1"},
    )  # fmt: skip
    flags = (f"--namespace={namespace}", f"--mesh-certificates={own}")
    operator = Operator("meshed", tmp_path, cluster.kubeconfig, *flags)
    try:
        async with sidecar(f"http://127.0.0.1:{port}", certificates, host=address, port=ENGINE_PORT) as seen:
            create(cluster.rest, namespace, **engine(podTemplate={**IN_THE_MESH, "spec": {"nodeSelector": NOWHERE}}))
            await asyncio.to_thread(answers, cluster.rest, namespace, address)
            missing = "cert-chain.pem, key.pem and root-cert.pem come from the mesh's agent"
            await asyncio.to_thread(
                until, lambda: missing in operator.log.read_text(), "the operator lacks an identity"
            )
            assert seen.let_through == []
            mesh.issue("kvpilot-system", "kvpilot-operator", own)
            wait = partial(told, cluster.rest, namespace)
            await asyncio.to_thread(wait, "MetricsAvailable", "Scraped")
            assert set(seen.let_through) == {OPERATOR}
            assert set(seen.spoken) == {"http/1.1"}
    finally:
        procs.end(tmp_path / "operator-meshed.pid", grace=10)
        procs.end(tmp_path / "engine.pid")
