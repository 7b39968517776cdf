"""The PersistentVolumeClaim of a service: its content, the pods that use it, and when the operator writes it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import KIND
from kvpilot_operator.api.pods import Claim
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import Conflict, Rejected
from kvpilot_operator.observe.views import pod_view
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.render.objects import claim
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.times import utc
from kvpilot_runtime import compiled
from support import services
from support.memory_api import MemoryApi, Operator
from support.services import KEY, manifest, revision_of, running, spec_of

CLAIM = ("PersistentVolumeClaim", "chat-weights")
FIXED = {"mode": "Fixed", "dtype": "auto"}


def template(**cache: Any) -> dict[str, Any]:
    return pod_template("chat", spec_of(manifest(cache=cache)), "k4v4")


def test_without_cache_weights_pods_do_not_change() -> None:
    assert "kvpilot.io/claim" not in template()["metadata"]["labels"]
    assert "affinity" not in template(weightsClaimName="models")["spec"]


SHARED = "as ReadWriteMany of StorageClass gp3: there is no such class, or its volumes cannot be shared"
DISK = "as ReadWriteOnce of the cluster's default StorageClass: there is no such class, or it cannot provision"


@pytest.mark.parametrize(
    "scheduler",
    [
        "0/1 nodes are available: 1 pod has unbound immediate PersistentVolumeClaims.",
        'persistentvolumeclaim "models" not found',
        'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded',
        "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.",
        "0/1 nodes are available: 1 node(s) did not have enough free storage.",
    ],
)
@pytest.mark.parametrize(
    ("cache", "words", "not_said"),
    [
        ({"weights": {"size": "200Gi", "storageClassName": "gp3"}}, f"chat-weights asks for 200Gi {SHARED}", "Mend"),
        ({"weights": {"size": "1Gi"}}, "or with accessMode ReadWriteOnce, which keeps all pods on one node", "gp3"),
        ({"weights": {"size": "1Gi", "accessMode": "ReadWriteOnce"}}, DISK, "or with accessMode"),
        ({"weightsClaimName": "models"}, "Repair that claim, or name one that is Bound", "spec.cache.weights"),
    ],
)
def test_a_claim_without_a_volume_is_reported_with_what_was_asked_for_and_the_remedy(
    cache: dict[str, Any], words: str, not_said: str, scheduler: str
) -> None:
    obj = manifest(cache=cache, kvCache=FIXED)
    waits = services.pod(revision_of(obj, "auto"), ready=False, node=None, ip=None, unschedulable=scheduler)
    status = decide(running(obj, "auto", pods=(waits,), rejections=())).status
    for kind in ("Ready", "Serving"):
        found = status.condition(kind)
        assert found is not None
        assert (found.status, found.reason) == ("False", "ClaimNotBound")
        assert words in found.message
        assert not_said not in found.message
        assert found.message.endswith(f"The scheduler says: {scheduler}")


def without_a_word(seconds: int, claims: bool) -> PodView:
    volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": "chat-weights"}}] if claims else []
    obj = {
        "metadata": {"name": "chat-1", "uid": "u", "creationTimestamp": utc(services.NOW - timedelta(seconds=seconds))},
        "spec": {"volumes": volumes, "containers": [{"name": "engine"}]},
        "status": {"phase": "Pending"},
    }
    return pod_view(obj)


@pytest.mark.parametrize(
    ("claims", "seconds", "reason", "words"),
    [
        (True, 59, "EnginesStarting", "0 of 1"),
        (True, 60, "ClaimNotBound", "asks for 1Gi as ReadWriteMany of StorageClass efs"),
        (True, 3600, "ClaimNotBound", "chat-1, which was created at"),
        (False, 59, "EnginesStarting", "0 of 1"),
        (False, 60, "Unschedulable", "check that the pod's scheduler runs"),
    ],
)
def test_a_pod_without_a_scheduler_message_waits_for_a_volume_if_it_has_a_claim(
    claims: bool, seconds: int, reason: str, words: str
) -> None:
    obj = manifest(cache={"weights": {"size": "1Gi", "storageClassName": "efs"}}, kvCache=FIXED)
    waits = replace(without_a_word(seconds, claims), revision=revision_of(obj, "auto"))
    found = decide(running(obj, "auto", pods=(waits,), rejections=())).status.condition("Serving")
    assert found is not None
    assert (found.status, found.reason) == ("False", reason)
    assert words in found.message


def test_if_some_nodes_lack_a_gpu_and_others_a_volume_the_reason_is_unschedulable() -> None:
    obj = manifest(cache={"weights": {"size": "1Gi"}}, kvCache=FIXED)
    words = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't find available persistent volumes"
    waits = services.pod(revision_of(obj, "auto"), ready=False, node=None, ip=None, unschedulable=f"{words} to bind.")
    found = decide(running(obj, "auto", pods=(waits,), rejections=())).status.condition("Serving")
    assert found is not None
    assert found.reason == "Unschedulable"


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}


def test_engines_download_to_a_created_claim_as_to_an_existing_one() -> None:
    made, named = template(weights={"size": "100Gi"}), template(weightsClaimName="chat-weights")
    assert made["spec"]["volumes"] == named["spec"]["volumes"]
    (volume,) = (one for one in made["spec"]["volumes"] if one["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "chat-weights"}
    assert variables(named) == {"HF_HOME": "/models"}
    assert variables(made) == {"HF_HOME": "/models", compiled.VARIABLE: "/models/kvpilot-compiled"}


def test_compiled_code_is_kept_on_kvpilots_claim_or_on_the_named_one() -> None:
    own = {"weights": {"size": "100Gi"}}
    assert compiled.VARIABLE not in variables(template())
    assert compiled.VARIABLE not in variables(template(weightsClaimName="models"))
    for cache in ({}, own, {"weightsClaimName": "models"}):
        pod = template(**cache, compileClaimName="code")
        assert variables(pod)[compiled.VARIABLE] == "/compile-cache"
        (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "compile")
        assert volume["persistentVolumeClaim"] == {"claimName": "code"}
    local = spec_of(manifest(cache={"compileClaimName": "code"}, model={"source": "pvc://models/m", "servedName": "m"}))
    assert variables(pod_template("chat", local, "auto"))[compiled.VARIABLE] == "/compile-cache"


def test_users_may_turn_the_archive_of_compiled_code_off() -> None:
    spec = spec_of(manifest(cache={"weights": {"size": "100Gi"}}, engine={"env": [{"name": compiled.VARIABLE}]}))
    env = pod_template("chat", spec, "auto")["spec"]["containers"][0]["env"]
    assert [one for one in env if one["name"] == compiled.VARIABLE] == [{"name": compiled.VARIABLE, "value": ""}]


def test_a_claims_access_mode_changes_the_revision_but_its_size_and_class_do_not() -> None:
    plain = template(weights={"size": "100Gi"})
    assert plain == template(weights={"size": "200Gi", "storageClassName": "nfs"})
    assert plain != template(weights={"size": "100Gi", "accessMode": "ReadWriteOnce"})


def test_pods_that_share_a_disk_run_on_one_node_and_keep_their_other_node_rules() -> None:
    asked = {"weights": {"size": "100Gi", "accessMode": "ReadWriteOnce"}}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    where = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
    spec = spec_of(manifest(cache=asked, engine={"podTemplate": {"spec": where}}))
    pods = [pod_template("chat", spec, dtype) for dtype in ("auto", "k4v4")]
    for pod in pods:
        affinity = pod["spec"]["affinity"]
        (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # If an affinity term matches its own pod, it does not block the first pod. Pods of all revisions match each
        # other.
        selected = term["labelSelector"]["matchLabels"].items()
        assert all(selected <= other["metadata"]["labels"].items() for other in pods)
        assert affinity["nodeAffinity"]


@given(
    number=st.integers(1, 999_999),
    unit=st.sampled_from(["M", "G", "T", "Mi", "Gi", "Ti"]),
    mode=st.sampled_from(["ReadWriteMany", "ReadWriteOnce"]),
    storage_class=st.none() | st.just("fast"),
)
def test_an_accepted_size_is_requested_unchanged(number: int, unit: str, mode: str, storage_class: str | None) -> None:
    size = f"{number}{unit}"
    asked = {"size": size, "accessMode": mode, **({"storageClassName": storage_class} if storage_class else {})}
    obj = manifest(cache={"weights": asked})
    assert faults(obj) == ()
    wanted = spec_of(obj).cache.weights
    assert isinstance(wanted, Claim)
    made = claim(KEY, "u-1", wanted)["spec"]
    assert 0 < parse_quantity(made["resources"]["requests"]["storage"]) < 2**63
    assert made.get("storageClassName") == storage_class
    assert made["accessModes"] == [mode]


@given(st.text(alphabet="0123456789.eEimkMGTPKn- ", max_size=10))
def test_a_size_without_a_whole_number_and_a_unit_is_refused_at_its_field(size: str) -> None:
    found = faults(manifest(cache={"weights": {"size": size}}))
    if not found:
        assert size[0] in "123456789"
        assert size[-1] in "MGTi"
        assert parse_quantity(size) >= 1_000_000
    else:
        assert {one.field for one in found} == {"spec.cache.weights.size"}


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    one = Operator(MemoryApi(), manifest(kvCache=FIXED, cache={"weights": {"size": "100Gi"}}))
    yield one
    await one.close()


async def served(operator: Operator) -> None:
    for _ in range(3):
        await operator.reconcile()
        operator.api.run_engines()
    await operator.reconcile()
    assert operator.condition("Ready").status == "True"


async def test_the_service_owns_the_claim_which_is_created_before_the_engines(operator: Operator) -> None:
    await operator.reconcile()
    (owner,) = operator.api.objects[CLAIM]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == (KIND, "u-1")
    kinds = [kind for _, kind, _ in operator.api.writes()]
    assert kinds.index("PersistentVolumeClaim") < kinds.index("Deployment")


async def test_a_reconcile_without_changes_sends_no_request_for_the_claim(operator: Operator) -> None:
    await served(operator)
    operator.api.asked.clear()
    for _ in range(20):
        await operator.reconcile()
    assert operator.api.asked == []


async def test_a_larger_size_is_requested_and_restarts_no_engine(operator: Operator) -> None:
    await served(operator)
    before = {what for what in operator.api.objects if what[0] == "Deployment"}
    operator.edit(manifest(kvCache=FIXED, cache={"weights": {"size": "200Gi"}}))
    await operator.reconcile()
    assert operator.api.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] == "200Gi"
    assert {what for what in operator.api.objects if what[0] == "Deployment"} == before
    assert operator.condition("Reconciling").status == "False"


async def test_a_claim_removed_from_the_spec_is_not_deleted(operator: Operator) -> None:
    await served(operator)
    operator.edit(manifest(kvCache=FIXED))
    for _ in range(5):
        await operator.reconcile()
        operator.api.run_engines()
    assert CLAIM in operator.api.objects
    assert not [one for one in operator.api.asked if one[0] == "delete" and one[1] == CLAIM[0]]


async def test_another_owners_claim_is_not_changed_and_is_reported(operator: Operator) -> None:
    theirs = {"kind": CLAIM[0], "metadata": {"name": CLAIM[1]}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}
    before = operator.api.put(theirs)
    for _ in range(3):
        await operator.reconcile()
    assert operator.api.objects[CLAIM] == before
    assert not [what for what in operator.api.objects if what[0] == "Deployment"]
    for condition in map(operator.condition, ("Stalled", "Ready")):
        assert condition.reason == "NameTaken"
        assert "PersistentVolumeClaim chat-weights" in condition.message
        assert "spec.cache.weightsClaimName" in condition.message


async def test_engines_start_once_another_owners_claim_is_gone(operator: Operator) -> None:
    operator.api.put({"kind": CLAIM[0], "metadata": {"name": CLAIM[1]}, "spec": {}})
    for _ in range(3):
        await operator.reconcile()
    operator.api.drop(*CLAIM)
    await operator.reconcile(90)
    await served(operator)
    assert operator.condition("Stalled").status == "False"


async def test_no_engine_is_added_once_the_claim_has_another_owner(operator: Operator) -> None:
    """Replace the claim with another owner's between two reconciles. The operator may still remove running replicas."""
    await served(operator)
    operator.api.drop(*CLAIM)
    theirs = operator.api.put({"kind": CLAIM[0], "metadata": {"name": CLAIM[1]}, "spec": {}})
    operator.edit(manifest(kvCache=FIXED, cache={"weights": {"size": "100Gi"}}, replicas=3))
    for _ in range(3):
        await operator.reconcile()
    (deployment,) = (obj for what, obj in operator.api.objects.items() if what[0] == "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert operator.condition("Stalled").reason == "NameTaken"
    none = {"replicas": 0, "scaling": {"minReplicas": 0}}
    operator.edit(manifest(kvCache=FIXED, cache={"weights": {"size": "100Gi"}}, **none))
    for _ in range(3):
        await operator.reconcile()
    (deployment,) = (obj for what, obj in operator.api.objects.items() if what[0] == "Deployment")
    assert deployment["spec"]["replicas"] == 0
    assert operator.api.objects[CLAIM] == theirs


async def test_no_engine_starts_while_its_claim_is_refused(operator: Operator) -> None:
    def refuse(written: Any) -> Rejected | None:
        words = "exceeded quota: disks, requested: requests.storage=100Gi, used: requests.storage=0, limited: 1Gi"
        return Rejected("POST", "x", 403, words, "Forbidden") if written.get("kind") == CLAIM[0] else None

    operator.api.refuses = refuse
    for _ in range(3):
        await operator.reconcile()
    assert not [what for what in operator.api.objects if what[0] == "Deployment"]
    told = operator.condition("Stalled")
    assert (told.status, told.reason) == ("True", "Forbidden")
    assert "exceeded quota: disks" in told.message


async def test_a_claim_named_by_the_user_is_never_kvpilots(operator: Operator) -> None:
    operator.api.put({"kind": CLAIM[0], "metadata": {"name": CLAIM[1]}, "spec": {}})
    operator.edit(manifest(kvCache=FIXED, cache={"weightsClaimName": CLAIM[1]}))
    await served(operator)


async def test_a_refused_claim_does_not_prevent_repairs_of_engines(operator: Operator) -> None:
    await served(operator)

    def refuse(written: Any) -> Rejected | None:
        words = "spec.resources.requests.storage: Forbidden: field can not be less than previous value"
        return Rejected("PATCH", "x", 422, words, "Invalid") if written.get("kind") == CLAIM[0] else None

    operator.api.refuses = refuse
    operator.edit(manifest(kvCache=FIXED, cache={"weights": {"size": "50Gi"}}, replicas=2))
    await operator.reconcile()
    await operator.reconcile()
    (deployment,) = (obj for what, obj in operator.api.objects.items() if what[0] == "Deployment")
    assert deployment["spec"]["replicas"] == 2
    told = operator.condition("Stalled")
    assert (told.reason, told.status) == ("Invalid", "True")
    assert "spec.cache.weights: a claim keeps its class" in told.message
    assert operator.condition("Stalled").status == "True"


@pytest.mark.parametrize("last", ["create", "apply"])
async def test_an_operator_killed_at_any_write_of_the_claim_continues(operator: Operator, last: str) -> None:
    def dies(method: str, what: tuple[str, str]) -> None:
        if method == last and what == CLAIM:
            raise Conflict("PATCH", what[1], 409, "the process has ended")

    operator.api.before_write = dies
    with pytest.raises(Conflict):
        await operator.reconcile()
    operator.api.before_write = lambda *_: None
    operator.restart()
    await served(operator)
    assert operator.api.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteMany"]
