"""`kubectl kvpilot plan SERVICE` runs `kvpilot plan` with values from the service's spec and the nodes."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_api import LoopbackApi

from kvpilot_cli.plan import command as plan
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.service import arguments
from kvpilot_kubectl.main import main
from support.services import manifest

DOCS = Path(__file__).parents[2] / "docs" / "kubectl.md"
PODS = "/api/v1/namespaces/models/pods"
PRODUCT = "nvidia.com/gpu.product"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with LoopbackApi(tmp_path) as api:
        api.services["chat"] = manifest(
            model={"source": "hf://Qwen/Qwen3-8B", "maxModelLen": 16384},
            engine={"tensorParallelSize": 2, "gpuMemoryUtilizationPercent": 85},
        )
        yield api


def on_nodes(api: LoopbackApi, **products: str) -> None:
    pods = [{"spec": {"nodeName": name}} for name in products]
    api.answers[PODS] = (200, json.dumps({"items": [*pods, {"spec": {}}]}).encode())
    for name, product in products.items():
        node = {"metadata": {"labels": {PRODUCT: product} if product else {}}}
        api.answers[f"/api/v1/nodes/{name}"] = (200, json.dumps(node).encode())


def planned(api: LoopbackApi, *argv: str) -> int:
    return main(["plan", "chat", "--kubeconfig", str(api.kubeconfig), *argv])


@pytest.mark.parametrize("limit", [4, "4"])
def test_without_a_size_of_tensor_parallelism_it_plans_for_all_gpus_of_a_pod(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str], limit: int | str
) -> None:
    api.services["chat"]["spec"]["engine"] = {"image": "i", "resources": {"limits": {"nvidia.com/gpu": limit}}}
    assert planned(api, "--gpu=L40S") == 0
    assert "Qwen/Qwen3-8B on 4 x L40S" in capsys.readouterr().out


def test_it_says_what_kvpilot_plan_says_and_with_which_arguments(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str]
) -> None:
    on_nodes(api, a="NVIDIA-L40S", b="NVIDIA-L40S")
    assert planned(api) == 0
    first, _, text = capsys.readouterr().out.partition("\n")
    command = shlex.split(first)
    assert command[:3] == ["$", "kvpilot", "plan"]
    assert plan.main(command[3:]) == 0
    assert capsys.readouterr().out == text
    assert "Qwen/Qwen3-8B on 2 x L40S" in text
    assert "x 0.85 =" in text
    assert "at 2,048  at 8,192  at 16,384" in text


def near(labels: dict[str, str]) -> dict[str, Any]:
    """Return a podTemplate that requires nodes with these labels."""
    expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in labels.items()]
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}}


def test_where_nodes_may_not_be_read_the_gpu_is_what_the_spec_selects(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str]
) -> None:
    on_nodes(api, a="NVIDIA-L40S")
    api.answers["/api/v1/nodes/a"] = (403, b"{}")
    engine = api.services["chat"]["spec"]["engine"]
    engine["podTemplate"] = near({PRODUCT: "NVIDIA-H200"})
    assert planned(api) == 0
    assert "--gpu=NVIDIA-H200 " in capsys.readouterr().out
    engine["podTemplate"] = {"spec": {"nodeSelector": {PRODUCT: "NVIDIA-L4"}}}
    assert planned(api) == 0
    assert "--gpu=NVIDIA-L4 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "labels",
    [
        {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    ],
    ids=str,
)
def test_a_cloud_that_names_the_gpu_is_believed_of_nodes_and_of_what_the_spec_selects(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str], labels: dict[str, str]
) -> None:
    on_nodes(api, a="")
    api.answers["/api/v1/nodes/a"] = (200, json.dumps({"metadata": {"labels": labels}}).encode())
    assert planned(api) == 0
    assert "--gpu=NVIDIA-L4 " in capsys.readouterr().out
    api.answers["/api/v1/nodes/a"] = (403, b"{}")
    engine = api.services["chat"]["spec"]["engine"]
    engine["podTemplate"] = {"spec": {"nodeSelector": labels}}
    assert planned(api) == 0
    assert "--gpu=NVIDIA-L4 " in capsys.readouterr().out
    engine["podTemplate"] = near(labels)
    assert planned(api) == 0
    assert "--gpu=NVIDIA-L4 " in capsys.readouterr().out


def test_where_nothing_else_says_it_the_gpu_is_the_last_trials(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.services["chat"]["status"] = {"history": [{"gpu": "NVIDIA-H200"}, {"gpu": "NVIDIA-L4"}]}
    assert planned(api) == 0
    assert "--gpu=NVIDIA-H200 " in capsys.readouterr().out


def test_a_gpu_that_is_named_needs_no_right_but_the_services(api: LoopbackApi) -> None:
    assert planned(api, "--gpu", "H100-80GB") == 0
    assert [path for _, path in api.asked] == ["/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices/chat"]


@pytest.mark.parametrize(
    ("products", "said"),
    [
        ({}, "name it, for example --gpu H100-80GB"),
        ({"a": ""}, "name it, for example --gpu H100-80GB"),
        ({"a": "NVIDIA-L4", "b": "NVIDIA-L40S"}, "NVIDIA-L4 and NVIDIA-L40S): name one with --gpu"),
        ({"a": "Abacus"}, "--gpu 'Abacus' is not in the table"),
        ({"a": "NVIDIA-L4-MIG-1g.6gb"}, "--gpu 'NVIDIA-L4-MIG-1g.6gb' is not in the table"),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_be_told_is_said_with_the_remedy(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str], products: dict[str, str], said: str
) -> None:
    on_nodes(api, **products)
    assert planned(api) == 1
    assert said in capsys.readouterr().err


def test_a_model_without_a_name_is_asked_for_and_may_be_named(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.services["chat"]["spec"]["model"]["source"] = "pvc://models/qwen"
    assert planned(api, "--gpu", "H200") == 1
    assert "'pvc://models/qwen' does not name a published model" in capsys.readouterr().err
    assert planned(api, "--gpu", "H200", "--model", "Qwen3-8B") == 0


def test_a_model_that_is_not_in_the_table_is_said_with_those_that_are_close(
    api: LoopbackApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.services["chat"]["spec"]["model"]["source"] = "hf://Qwen/Qwen3-8C"
    assert planned(api, "--gpu", "H200") == 1
    assert "did you mean" in capsys.readouterr().err


def test_the_plan_in_the_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    block = DOCS.read_text().partition("$ kubectl kvpilot plan chat")[2].partition("```")[0]
    command, _, shown = block.partition("\n")[2].partition("\n")
    assert plan.main(shlex.split(command)[3:]) == 0
    assert capsys.readouterr().out == shown


NUMBER = st.none() | st.integers() | st.text(max_size=3)


@given(NUMBER, NUMBER, NUMBER, NUMBER, st.sampled_from(["hf://Qwen/Qwen3-8B", "hf://", "hf://-h", "", "x"]))
def test_no_spec_of_whatever_shape_ends_in_an_error(
    gpus: Any, percent: Any, longest: Any, recent: Any, source: str
) -> None:
    spec = {
        "model": {"source": source, "maxModelLen": longest},
        "engine": {"tensorParallelSize": gpus, "gpuMemoryUtilizationPercent": percent},
        "kvCache": {"recentTokens": recent},
    }
    try:
        argv = arguments({"spec": spec}, "H200")
    except PlanError as error:
        assert "spec." in str(error)
    else:
        assert plan.main(argv) in (0, 2)
