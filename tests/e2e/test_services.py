"""Services side by side: the operator serves, scales (by /scale) and deletes each of them independently.

The fault of one service appears in the API or a condition, and the others stay served.
"""

import asyncio
import copy
import json

import httpx
import pytest
import pytest_asyncio

from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
NAMESPACES = ("team-a", "team-b")
# Each wait takes at most a minute on quiet cores, in which two engines start side by side.
HANGS = 600


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(whole_world):
    """Return the cluster with one service `twin` in each of two namespaces. Both answer."""
    for name in NAMESPACES:
        await asyncio.to_thread(whole_world.rest.create, "/api/v1/namespaces", {"metadata": {"name": name}})
        await whole_world.cluster.create(service(whole_world, namespace=name))
    for name in NAMESPACES:
        await until(whole_world, name, "twin", lambda s: condition(s, "Ready")[0] == "True")
    return whole_world


def service(world, name="twin", namespace="team-a", **spec):
    made = copy.deepcopy(world.example)
    made["metadata"] = {"name": name, "namespace": namespace}
    made["spec"]["model"] = {"source": "file:///models/tiny-llama", "maxModelLen": 512}
    made["spec"]["kvCache"] = {"mode": "Fixed", "dtype": "auto"}
    made["spec"]["scaling"] = {"minReplicas": 1, "maxReplicas": 2}
    for section, value in spec.items():
        made["spec"][section] = value
    return made


def condition(status, kind):
    found = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return found.get("status"), found.get("reason"), found.get("message", "")


async def until(world, namespace, name, seen):
    status = {}
    async with asyncio.timeout(HANGS):
        while True:
            found = await world.cluster.find(Ref(API_VERSION, KIND, namespace, name))
            status = (found or {}).get("status") or {}
            if seen(status):
                return status
            await asyncio.sleep(0.5)


async def answers(world, namespace):
    found = await world.cluster.get(Ref("v1", "Service", namespace, "twin"))
    body = {"model": "twin", "prompt": "Hello", "max_tokens": 4}
    async with httpx.AsyncClient(timeout=HANGS) as client:
        answer = await client.post(f"http://{found['spec']['clusterIP']}/v1/completions", json=body)
    return answer.status_code == 200


async def refused(world, manifest):
    with pytest.raises(ClusterError) as caught:
        await world.cluster.create(manifest)
    return caught.value.message


async def test_two_services_of_one_name_in_two_namespaces_are_both_served(world):
    assert await answers(world, "team-a")
    assert await answers(world, "team-b")


async def test_the_api_error_for_an_unknown_dtype_names_the_known_dtypes(world):
    message = await refused(world, service(world, "bad", kvCache={"mode": "Fixed", "dtype": "int3"}))
    assert "spec.kvCache.dtype" in message
    assert "int3" in message
    assert "k4v4" in message


async def test_negative_replicas_are_refused_by_the_api(world):
    message = await refused(world, service(world, "bad", replicas=-1))
    assert "spec.replicas" in message


async def test_a_name_of_5000_characters_is_refused_by_the_api(world):
    message = await refused(world, service(world, "x" * 5000))
    assert "no more than 253" in message


async def test_an_argument_that_only_the_operator_can_judge_is_named_in_a_condition(world):
    made = service(world, "reserved")
    made["spec"]["engine"]["extraArgs"] = ["--kv-cache-dtype=fp8"]
    await world.cluster.create(made)
    status = await until(world, "team-a", "reserved", lambda s: condition(s, "Stalled")[0] == "True")
    _, reason, message = condition(status, "Stalled")
    assert reason == "SpecInvalid"
    assert "spec.engine.extraArgs[0]" in message
    assert condition(status, "Ready")[1] == "SpecInvalid"


async def test_a_model_path_that_does_not_exist_is_named_in_a_condition(world):
    await world.cluster.create(service(world, "nowhere", model={"source": "file:///models/nowhere"}))
    status = await until(world, "team-a", "nowhere", lambda s: condition(s, "Serving")[1] == "ModelNotFound")
    assert "nowhere" in condition(status, "Serving")[2]
    # The pod keeps its share of the node until it ends.
    await world.cluster.delete(Ref(API_VERSION, KIND, "team-a", "nowhere"))


async def test_a_model_that_vllm_does_not_know_is_named_in_a_condition(world, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["NobodyKnowsItForCausalLM"],
                "model_type": "nobody",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 100,
            }
        )
    )
    await world.cluster.create(service(world, "strange", model={"source": f"file://{tmp_path}"}))
    status = await until(world, "team-a", "strange", lambda s: condition(s, "Serving")[1] == "ModelUnsupported")
    assert "NobodyKnowsItForCausalLM" in condition(status, "Serving")[2]
    await world.cluster.delete(Ref(API_VERSION, KIND, "team-a", "strange"))


async def test_a_probe_set_without_prompts_is_a_condition_and_no_canary_starts(world):
    await world.cluster.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "empty", "namespace": "team-b"},
            "data": {"prompts.yaml": "prompts: []\n"},
        }
    )
    patch = {"spec": {"accuracy": {"probeSets": ["configmap/empty"]}, "kvCache": {"mode": "Fixed", "dtype": "k4v4"}}}
    await world.cluster.merge(Ref(API_VERSION, KIND, "team-b", "twin"), patch)
    status = await until(world, "team-b", "twin", lambda s: condition(s, "AccuracyVerified")[1] == "ProbeSetInvalid")
    assert "configmap/empty" in condition(status, "AccuracyVerified")[2]
    assert status["kvCache"]["activeDtype"] == "auto"
    assert "canary" not in status


async def test_a_bad_service_does_not_stop_the_others(world):
    assert await answers(world, "team-a")
    assert await answers(world, "team-b")


async def test_the_scale_subresource_changes_the_number_of_engines(world):
    path = f"/apis/{API_VERSION}/namespaces/team-a/quantizedllmservices/twin/scale"
    scale = await asyncio.to_thread(world.rest.get, path)
    assert scale["status"]["replicas"] == 1
    assert "kvpilot.io/service=twin" in scale["status"]["selector"]
    await world.cluster.merge(Ref(API_VERSION, KIND, "team-a", "twin"), {"spec": {"replicas": 2}})
    await until(world, "team-a", "twin", lambda s: s.get("readyReplicas") == 2)
    await world.cluster.merge(Ref(API_VERSION, KIND, "team-a", "twin"), {"spec": {"replicas": 1}})
    await until(world, "team-a", "twin", lambda s: s.get("replicas") == 1 and s.get("readyReplicas") == 1)
    assert await answers(world, "team-a")


async def test_deleting_a_service_deletes_what_it_owned_and_nothing_else(world):
    await world.cluster.delete(Ref(API_VERSION, KIND, "team-b", "twin"))
    async with asyncio.timeout(HANGS):
        while True:
            left = [await world.cluster.list("apps/v1", "Deployment", "team-b", "kvpilot.io/service=twin")]
            left.append(await world.cluster.list("v1", "Service", "team-b", "kvpilot.io/service=twin"))
            left.append(await world.cluster.list("v1", "Pod", "team-b", "kvpilot.io/service=twin"))
            if not any(left):
                break
            await asyncio.sleep(0.5)
    assert await answers(world, "team-a")
