"""The objects that the operator renders for a service."""

import pytest

from kvpilot_formats import dtypes
from kvpilot_operator.api.faults import faults
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import service, workload
from support.services import KEY, manifest, spec_of


def engine(**spec):
    template = pod_template(KEY.name, spec_of(manifest(**spec)), "k4v4")
    return template["spec"], template["spec"]["containers"][0]


def test_the_revision_is_a_hash_of_the_pod_template():
    spec = spec_of(manifest())
    assert revision(pod_template("chat", spec, "auto")) == revision(pod_template("chat", spec, "auto"))
    assert revision(pod_template("chat", spec, "auto")) != revision(pod_template("chat", spec, "k4v4"))


@pytest.mark.parametrize("dtype", dtypes.names())
def test_a_recent_window_that_is_requested_reaches_the_engines_that_have_one_and_makes_a_new_revision(dtype):
    plain, asked = (spec_of(manifest(kvCache=kv_cache)) for kv_cache in ({}, {"recentTokens": 128}))
    before, after = (pod_template("chat", spec, dtype) for spec in (plain, asked))
    arguments = after["spec"]["containers"][0]["args"]
    if dtypes.parse(dtype).has_residuals:
        assert "--recent-tokens=128" in arguments
        assert revision(before) != revision(after)
    else:
        assert before == after


@pytest.mark.parametrize(
    ("skipped", "told"),
    [(["sliding_window"], None), (["sliding_window", "3"], "--kv-cache-dtype-skip-layers=3"), ([], None)],
)
def test_a_latent_model_gets_no_sliding_window_to_skip(skipped, told):
    template = pod_template("chat", spec_of(manifest(kvCache={"skipLayers": skipped})), "mla4")
    found = [a for a in template["spec"]["containers"][0]["args"] if "skip" in a]
    assert found == ([] if told is None else [told])


def test_without_recent_tokens_in_the_spec_the_engine_chooses_the_recent_window():
    _, container = engine()
    assert not [argument for argument in container["args"] if "recent" in argument]


def test_a_recent_window_of_0_is_passed_to_the_engine():
    _, container = engine(kvCache={"recentTokens": 0})
    assert "--recent-tokens=0" in container["args"]


@pytest.mark.parametrize("dtype", dtypes.names())
def test_offloading_reaches_engines_of_every_dtype_with_the_memory_for_it_and_makes_a_new_revision(dtype):
    before, after = (
        pod_template("chat", spec_of(manifest(kvCache=kv_cache)), dtype)
        for kv_cache in ({}, {"offload": {"cpuMemoryGiB": 64}})
    )
    container = after["spec"]["containers"][0]
    assert "--kv-offloading-size=64" in container["args"]
    assert not [argument for argument in before["spec"]["containers"][0]["args"] if "offload" in argument]
    (shm,) = (volume for volume in after["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "66Gi"}
    assert revision(before) != revision(after)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, {"requests": {"memory": "64Gi"}}),
        ({"requests": {"cpu": "4", "memory": "24Gi"}}, {"requests": {"cpu": "4", "memory": "88Gi"}}),
        ({"limits": {"memory": "24Gi"}}, {"limits": {"memory": "88Gi"}}),
        ({"requests": {"memory": "512Mi"}, "limits": {"memory": "25769803777"}},
         {"requests": {"memory": "66048Mi"}, "limits": {"memory": str(88 * 2**30 + 1)}}),
        ({"requests": {"memory": "1.5k"}}, {"requests": {"memory": str(64 * 2**30 + 1500)}}),
        ({"limits": {"nvidia.com/gpu": "1"}},
         {"requests": {"cpu": "3", "memory": "72Gi"}, "limits": {"nvidia.com/gpu": "1"}}),
    ],
)  # fmt: skip
def test_memory_for_offloaded_blocks_is_requested_beside_the_engines_own(asked, given):
    _, container = engine(engine={"image": "i", "resources": asked}, kvCache={"offload": {"cpuMemoryGiB": 64}})
    assert container["resources"] == given


@pytest.mark.parametrize(
    ("asked", "requests"),
    [
        ({}, None),
        ({"limits": {"nvidia.com/gpu": 1}}, {"cpu": "3", "memory": "8Gi"}),
        ({"limits": {"amd.com/gpu": "8"}}, {"cpu": "10", "memory": "36Gi"}),
        ({"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "500m"}}, {"cpu": "500m", "memory": "8Gi"}),
        # Without a request, Kubernetes uses the limit as the request. It would refuse a larger request of ours.
        ({"limits": {"nvidia.com/gpu": 1, "cpu": "2", "memory": "6Gi"}}, None),
    ],
)
def test_an_engine_on_gpus_reserves_cpu_and_memory_unless_the_user_says_how_much(asked, requests):
    _, container = engine(engine={"image": "i", "resources": asked})
    assert container["resources"].get("requests") == requests


@pytest.mark.parametrize(
    ("limits", "nodes", "arguments", "size"),
    [
        ({}, 1, [], 1),
        ({"nvidia.com/gpu": 4}, 1, [], 4),
        ({"nvidia.com/gpu": "4.0"}, 1, [], 4),
        ({"nvidia.com/gpu": "4000m"}, 1, [], 4),
        ({"amd.com/gpu": 8}, 1, [], 8),
        ({"nvidia.com/gpu": 8}, 2, [], 8),
        ({"nvidia.com/gpu": 8}, 1, ["--pipeline-parallel-size=2"], 4),
        ({"nvidia.com/gpu": 8}, 1, ["-dp", "4"], 2),
    ],
)
def test_tensor_parallelism_takes_all_gpus_of_a_pod_unless_the_user_says_otherwise(limits, nodes, arguments, size):
    given = {"image": "i", "nodes": nodes, "extraArgs": arguments, "resources": {"limits": limits}}
    assert faults(manifest(engine=given)) == ()
    _, container = engine(engine=given)
    assert f"--tensor-parallel-size={size}" in container["args"]
    assert ("--pipeline-parallel-size=2" in container["args"]) == (nodes == 2 or len(arguments) == 1)


def test_scaling_and_pressure_do_not_change_the_revision():
    one = spec_of(manifest())
    other = spec_of(manifest(replicas=3, scaling={"maxReplicas": 5}, kvCache={"pressure": {"highPercent": 70}}))
    assert revision(pod_template("chat", one, "auto")) == revision(pod_template("chat", other, "auto"))


def test_the_grace_period_covers_leaving_the_service_and_finishing_requests():
    pod, container = engine()
    # AWS ends a spot node 120 s after a notice, and some seconds pass between the notice and the node's drain.
    assert pod["terminationGracePeriodSeconds"] == 115
    assert "--shutdown-timeout=90" in container["args"]
    pod, container = engine(drain={"preStopSeconds": 20, "timeoutSeconds": 80})
    assert pod["terminationGracePeriodSeconds"] == 110
    assert "--shutdown-timeout=80" in container["args"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]


@pytest.mark.parametrize("seconds", [60, 601, 7200])
def test_liveness_waits_for_the_startup_probe_as_long_as_the_spec_says(seconds):
    _, container = engine(engine={"image": "i", "startupTimeoutSeconds": seconds})
    probe = container["startupProbe"]
    assert seconds <= probe["failureThreshold"] * probe["periodSeconds"] < seconds + 5


def test_the_pod_refers_to_a_secret_and_the_operator_never_reads_it():
    _, container = engine(model={"tokenSecretRef": {"name": "hf", "key": "token"}})
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}} in container["env"]


def test_a_model_on_a_claim_is_mounted_and_named_by_its_path():
    pod, container = engine(model={"source": "pvc://weights/llama/8b"})
    assert "--model=/models/llama/8b" in container["args"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}} in pod["volumes"]


def test_a_users_extra_args_come_last_and_unchanged():
    _, container = engine(engine={"extraArgs": ["--max-num-seqs=8", "--chat-template=a b"]})
    assert container["args"][-2:] == ["--max-num-seqs=8", "--chat-template=a b"]


def test_every_object_names_the_service_as_owner_so_that_it_is_deleted_with_it():
    template = pod_template(KEY.name, spec_of(manifest()), "auto")
    for made in (workload(KEY, "u-1", template, 1, 600), service(KEY, "u-1", "chat", "abc")):
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("QuantizedLLMService", "u-1", True)


def test_a_pending_pod_has_the_fields_that_schedulers_and_node_autoscalers_read():
    spread = {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    expressions = [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100", "NVIDIA-H200"]}]
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    where = {
        "nodeSelector": {"karpenter.sh/capacity-type": "on-demand"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "topologySpreadConstraints": [spread],
    }
    pod, container = engine(
        engine={
            "image": "i",
            "resources": {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"nvidia.com/gpu": 2}},
            "podTemplate": {"spec": where},
        },
        model={"source": "pvc://weights/llama"},
    )
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "48Gi"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    counted = {**spread, "labelSelector": {"matchLabels": {"kvpilot.io/service": KEY.name}}}
    assert where | {"topologySpreadConstraints": [counted]} == {name: pod[name] for name in where}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["weights"]


def test_no_volume_of_a_pod_prevents_a_node_autoscaler_from_removing_a_node():
    for source in ("hf://Qwen/Qwen3-8B", "pvc://weights/llama", "oci://example.org/m:1", "file:///m"):
        pod, _ = engine(model={"source": source}, cache={"weightsClaimName": "w", "compileClaimName": "c"})
        for volume in pod["volumes"]:
            assert "hostPath" not in volume
            # Cluster Autoscaler keeps a node if its pods would lose data in an emptyDir on disk.
            assert volume.get("emptyDir", {}).get("medium", "Memory") == "Memory"


def test_optional_parts_are_in_the_pod_only_if_requested():
    pod, _ = engine()
    assert not {"affinity", "topologySpreadConstraints", "nodeSelector", "tolerations"} & set(pod)
