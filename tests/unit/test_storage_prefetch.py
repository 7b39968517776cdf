"""The Job that fills a volume claim before engines start: its content, and when it runs."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from prefetched import FILLED, JOB, made, obj, pod_of

from kvpilot_operator.errors import ClusterError, Conflict
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.prefetch import identity
from support.kinds import unknown
from support.memory_api import MemoryApi, Operator
from support.services import KEY, spec_of

# Content of the Job.


def test_the_job_is_what_kubernetes_takes_and_asks_for_no_gpu() -> None:
    one = made(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}})
    assert unknown("V1Job", one, "job") == []
    _, container = pod_of(one)
    assert not [name for kind in container["resources"].values() for name in kind if "gpu" in name]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    assert one["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_no_service_sends_it_a_request_and_no_watch_of_engines_sees_it() -> None:
    labels = made()["spec"]["template"]["metadata"]["labels"]
    assert "kvpilot.io/service" not in labels
    assert "kvpilot.io/revision" not in labels
    assert labels["kvpilot.io/prefetch"] == "chat"


def test_it_runs_where_engines_may_with_what_leads_them_to_the_hub() -> None:
    engine = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar.istio.io/inject": "false"}},
            "spec": {
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
                "topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
                "serviceAccountName": "models",
                "imagePullSecrets": [{"name": "pull"}],
                "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
                "containers": [
                    {"name": "engine", "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]},
                    {"name": "beside", "image": "a/b:1"},
                ],
                "initContainers": [{"name": "before", "image": "a/b:1"}],
            },
        },
    }
    one = made(engine=engine, model={"tokenSecretRef": {"name": "hf", "key": "token"}})
    pod, container = pod_of(one)
    template = pod_template("chat", spec_of(obj(engine=engine)), "auto")["spec"]
    for same in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "serviceAccountName",
        "imagePullSecrets",
        "securityContext",
    ):
        assert pod[same] == template[same]
    assert not pod.keys() & {"initContainers", "topologySpreadConstraints"}
    assert [one["name"] for one in pod["volumes"]] == ["model", "ca"]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/models", "/ca"]
    names = {one["name"] for one in container["env"]}
    assert {"HF_TOKEN", "HF_HOME", "HTTPS_PROXY"} <= names
    about = one["spec"]["template"]["metadata"]
    assert about["labels"]["team"] == "a"
    assert about["annotations"] == {"sidecar.istio.io/inject": "false"}


def test_it_is_told_nothing_of_compiled_code_which_is_the_engines() -> None:
    env = [{"name": "KVPILOT_COMPILED", "value": "/elsewhere"}]
    for changes in ({}, {"cache": {**FILLED, "compileClaimName": "code"}}, {"engine": {"env": env}}):
        _, container = pod_of(made(**changes))
        assert "KVPILOT_COMPILED" not in {one["name"] for one in container["env"]}


def test_it_fetches_the_models_revision_and_the_hubs_adapters() -> None:
    adapters = [{"name": "sql", "source": "hf://team/sql"}, {"name": "own", "source": "pvc://adapters/own"}]
    _, container = pod_of(made(model={"revision": "v1", "adapters": adapters}))
    assert container["command"] == ["kvpilot-prefetch"]
    assert container["args"] == ["--model=Qwen/Qwen3-8B", "--revision=v1", "--adapter=team/sql", "--port=8000"]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/models"]


def test_on_a_disk_it_is_on_the_node_of_the_engines() -> None:
    cache = {"weights": {"size": "1Gi", "accessMode": "ReadWriteOnce"}, "prefetch": True}
    template = made(cache=cache)["spec"]["template"]
    engines = pod_template("chat", spec_of(obj(cache=cache)), "auto")
    assert template["spec"]["affinity"] == engines["spec"]["affinity"]
    assert template["metadata"]["labels"]["kvpilot.io/claim"] == engines["metadata"]["labels"]["kvpilot.io/claim"]


def test_a_prefetch_changes_no_engine() -> None:
    plain, filled = spec_of(obj(cache={"weights": {"size": "1Gi"}})), spec_of(obj())
    assert revision(pod_template("chat", plain, "auto")) == revision(pod_template("chat", filled, "auto"))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"engine": {"image": "kvpilot/runtime:2"}}, True),
        ({"cache": {"weights": {"size": "200Gi"}, "prefetch": True}}, True),
        ({"kvCache": {"mode": "Fixed", "dtype": "k4v4"}}, True),
        ({"model": {"revision": "v2"}}, False),
        ({"model": {"source": "hf://Qwen/Qwen3-4B"}}, False),
        ({"cache": {"weightsClaimName": "models", "prefetch": True}}, False),
    ],
)
def test_what_has_to_be_on_the_claim_is_known_by_model_revision_and_claim(change: dict[str, Any], same: bool) -> None:
    assert (identity("chat", spec_of(obj(**change))) == identity("chat", spec_of(obj()))) == same


# Times when it runs.


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    one = Operator(MemoryApi(), obj())
    yield one
    await one.close()


def finish(operator: Operator) -> None:
    found = operator.api.objects[JOB]
    operator.api.put({**found, "status": {"conditions": [{"type": "Complete", "status": "True"}]}})


def kinds(operator: Operator) -> set[str]:
    return {kind for kind, _ in operator.api.objects}


async def served(operator: Operator) -> None:
    await operator.reconcile()
    finish(operator)
    for _ in range(3):
        await operator.reconcile()
        operator.api.run_engines()
    await operator.reconcile()
    assert operator.condition("Ready").status == "True"


async def test_no_engine_is_there_before_the_claim_is_filled(operator: Operator) -> None:
    for _ in range(3):
        await operator.reconcile()
        assert kinds(operator) == {"QuantizedLLMService", "PersistentVolumeClaim", "Job"}
    assert operator.condition("Reconciling").status == "True"
    assert operator.condition("Ready").reason == "Prefetching"
    finish(operator)
    await operator.reconcile()
    assert "Deployment" in kinds(operator)


async def test_a_filled_claim_is_asked_about_no_more(operator: Operator) -> None:
    await served(operator)
    operator.api.asked.clear()
    for _ in range(10):
        await operator.reconcile()
    assert operator.api.asked == []
    del operator.api.objects[JOB]  # its time to live is over, or a user deleted it
    await operator.reconcile()
    assert JOB not in operator.api.objects


async def test_another_model_is_fetched_while_the_old_one_serves(operator: Operator) -> None:
    await served(operator)
    before = {what for what in operator.api.objects if what[0] == "Deployment"}
    operator.edit(obj(model={"source": "hf://Qwen/Qwen3-4B"}))
    await operator.reconcile()
    assert JOB not in operator.api.objects
    await operator.reconcile()
    assert "--model=Qwen/Qwen3-4B" in pod_of(operator.api.objects[JOB])[1]["args"]
    for _ in range(3):
        await operator.reconcile()
    assert {what for what in operator.api.objects if what[0] == "Deployment"} == before
    assert operator.condition("Serving").status == "True"
    assert operator.condition("Reconciling").reason == operator.condition("Ready").reason == "Prefetching"
    finish(operator)
    await operator.reconcile()
    await operator.reconcile()
    assert {what for what in operator.api.objects if what[0] == "Deployment"} > before


async def test_a_job_of_an_older_spec_goes_and_a_corrected_one_comes(operator: Operator) -> None:
    await operator.reconcile()
    operator.edit(obj(engine={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}]}))
    await operator.reconcile()
    assert JOB not in operator.api.objects
    await operator.reconcile()
    assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in pod_of(operator.api.objects[JOB])[1]["env"]


async def test_a_job_that_somebody_deletes_is_recreated_soon(operator: Operator) -> None:
    await operator.reconcile()
    operator.api.drop(*JOB)
    # Another object may have taken the name. Then the server answers the first attempt with a conflict.
    with pytest.raises(Conflict):
        await operator.reconcile()
    await operator.reconcile()
    assert JOB in operator.api.objects


async def test_a_prefetch_that_is_wanted_no_more_leaves_no_job_and_engines_start(operator: Operator) -> None:
    await operator.reconcile()
    operator.edit(obj(cache={"weights": {"size": "100Gi"}}))
    await operator.reconcile()
    assert JOB not in operator.api.objects
    assert "Deployment" in kinds(operator)
    await operator.reconcile()
    await operator.reconcile()
    assert "cache" not in operator.api.objects["QuantizedLLMService", KEY.name]["status"]


async def test_nothing_is_fetched_to_another_owners_claim(operator: Operator) -> None:
    claim = operator.api.put({"kind": "PersistentVolumeClaim", "metadata": {"name": "chat-weights"}, "spec": {}})
    for _ in range(3):
        await operator.reconcile()
    assert JOB not in operator.api.objects
    assert "Deployment" not in kinds(operator)
    assert operator.api.objects["PersistentVolumeClaim", "chat-weights"] == claim
    for condition in map(operator.condition, ("Stalled", "Ready")):
        assert condition.reason == "NameTaken"
        assert "spec.cache.weightsClaimName" in condition.message


async def test_another_owners_job_of_that_name_is_not_changed_and_reported(operator: Operator) -> None:
    theirs = operator.api.put({"kind": "Job", "metadata": {"name": JOB[1]}, "spec": {}})
    for _ in range(3):
        await operator.reconcile()
    assert operator.api.objects[JOB] == theirs
    assert operator.condition("Stalled").reason == "NameTaken"
    assert "Deployment" not in kinds(operator)


WRITES = [
    ("create", "PersistentVolumeClaim"), ("apply", "PersistentVolumeClaim"), ("create", "Job"), ("apply", "Job"),
    ("apply status", "QuantizedLLMService"), ("delete", "Job"), ("apply", "Deployment"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "kind"), WRITES)
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_whatever_write_the_operator_ends_at_the_same_comes_of_it(
    operator: Operator, method: str, kind: str, after: int
) -> None:
    """Kill the operator at the n-th write of each kind. The spec changes meanwhile, so a Job is deleted, too."""
    left = [after]

    def dies(done: str, what: tuple[str, str]) -> None:
        if (done, what[0]) == (method, kind):
            left[0] -= 1
            if left[0] == -1:
                raise Conflict("PATCH", what[1], 409, "the process has ended")

    operator.api.before_write = dies

    async def goes_on(times: int) -> None:
        for _ in range(times):
            try:
                await operator.reconcile()
            except Conflict:
                operator.restart()
            # Engines never start before their weights are there.
            wanted = operator.api.objects.get(JOB, {}).get("status")
            assert wanted or "Deployment" not in kinds(operator)

    await goes_on(3)
    operator.edit(obj(model={"revision": "v2"}))
    await goes_on(5)
    assert "--revision=v2" in pod_of(operator.api.objects[JOB])[1]["args"]
    finish(operator)
    await goes_on(3)
    assert len([what for what in operator.api.objects if what[0] in ("Job", "PersistentVolumeClaim")]) == 2
    assert "Deployment" in kinds(operator)


async def test_a_job_that_cannot_be_read_starts_nothing_and_ends_nothing(operator: Operator) -> None:
    await operator.reconcile()
    found = operator.api.find

    async def forbidden(api_version: str, kind: str, namespace: str, name: str) -> Any:
        if kind == "Job":
            raise ClusterError("GET", "jobs", 403, "forbidden")
        return await found(api_version, kind, namespace, name)

    operator.api.find = forbidden  # type: ignore[method-assign]
    operator.edit(obj(model={"revision": "v2"}))
    before = dict(operator.api.objects)
    await operator.reconcile()
    assert operator.api.objects[JOB] == before[JOB]
    assert "Deployment" not in kinds(operator)
    assert operator.condition("Reconciling").reason == "ReconcileIncomplete"
