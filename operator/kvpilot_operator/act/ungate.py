"""Removal of the readiness gate from a serving Deployment, so that its later pods need no operator.

A Deployment replaces its pods if its template differs from its ReplicaSet's. So it is paused while both change, and
goes on once its controller has seen that they agree. Each step follows from what is observed.
"""

from __future__ import annotations

from kvpilot_operator.act.ownership import is_owned
from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL, deployment_name
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.render.workloads import DEPLOYMENT
from kvpilot_operator.state.snapshot import Snapshot

_NO_GATE = {"template": {"spec": {"readinessGates": None}}}


async def ungate(cluster: Cluster, s: Snapshot, revision: str) -> None:
    """Take the next step for a revision's Deployment."""
    view, name = s.deployments[revision], deployment_name(s.key.name, revision)
    uid = s.objects[DEPLOYMENT.name, name].uid

    async def patch(kind: str, name: str, uid: str, spec: Object) -> None:
        ref = Ref(DEPLOYMENT.api_version, kind, s.key.namespace, name)
        await cluster.merge(ref, {"metadata": {"uid": uid}, "spec": spec})

    if view.has_gate:
        await patch(DEPLOYMENT.name, name, uid, {"paused": True, **_NO_GATE})
    elif view.in_step:
        await patch(DEPLOYMENT.name, name, uid, {"paused": False})
        return
    selector = f"{SERVICE_LABEL}={s.key.name},{REVISION_LABEL}={revision}"
    for one in await cluster.list(DEPLOYMENT.api_version, DEPLOYMENT.pods_owner, s.key.namespace, selector):
        if is_owned(one, uid) and one["spec"]["template"]["spec"].get("readinessGates"):
            await patch(DEPLOYMENT.pods_owner, one["metadata"]["name"], one["metadata"]["uid"], _NO_GATE)
