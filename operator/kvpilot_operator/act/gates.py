"""Remove the readiness gate from a serving Deployment."""

from kvpilot_operator.act.ownership import is_owned
from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL, deployment_name
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.render.workloads import DEPLOYMENT
from kvpilot_operator.state.decision import Ungating
from kvpilot_operator.state.snapshot import Snapshot

_NO_GATE = {"template": {"spec": {"readinessGates": None}}}


async def ungate(cluster: Cluster, s: Snapshot, step: Ungating) -> None:
    """Take one step that removes the readiness gate from a serving Deployment. Its new pods then need no operator.

    A step pauses the Deployment and removes the gate from its template and its ReplicaSets, or it resumes the
    Deployment.
    """
    name = deployment_name(s.key.name, step.revision)
    uid = s.objects[DEPLOYMENT.name, name].uid

    async def patch(kind: str, name: str, uid: str, spec: Object) -> None:
        ref = Ref(DEPLOYMENT.api_version, kind, s.key.namespace, name)
        await cluster.merge(ref, {"metadata": {"uid": uid}, "spec": spec})

    if step.paused is not None:
        await patch(DEPLOYMENT.name, name, uid, {"paused": step.paused} | (_NO_GATE if step.paused else {}))
    if step.paused is False:
        return
    selector = f"{SERVICE_LABEL}={s.key.name},{REVISION_LABEL}={step.revision}"
    for one in await cluster.list(DEPLOYMENT.api_version, DEPLOYMENT.pods_owner, s.key.namespace, selector):
        if is_owned(one, uid) and one["spec"]["template"]["spec"].get("readinessGates"):
            await patch(DEPLOYMENT.pods_owner, one["metadata"]["name"], one["metadata"]["uid"], _NO_GATE)
