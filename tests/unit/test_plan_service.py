"""`kvpilot plan -f FILE` plans the engine that the operator renders for a service."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_cli.plan.command import main
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_cli.plan.make import Request, make
from kvpilot_cli.plan.models import find
from support.bad_manifests import GOOD

ROOT = Path(__file__).parents[2]


def written(folder: Path, *specs: dict[str, Any]) -> Path:
    file = folder / "service.yaml"
    base = GOOD["spec"]
    merged = [
        {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in spec.items()}
        for spec in specs
    ]
    file.write_text(yaml.safe_dump_all([{**GOOD, "spec": {**base, **one}} for one in merged]))
    return file


def planned(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([*map(str, argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def test_tensor_parallelism_memory_and_context_are_those_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"limits": {"nvidia.com/gpu": 4}}
    engine = {"tensorParallelSize": 4, "gpuMemoryUtilizationPercent": 80, "resources": limits}
    model = {"source": "hf://meta-llama/Llama-3.3-70B-Instruct", "maxModelLen": 16384}
    file = written(tmp_path, {"model": model, "engine": engine})
    by_file = planned(capsys, "-f", file, "--gpu", "H100-80GB")
    by_name = planned(
        capsys, "meta-llama/Llama-3.3-70B-Instruct", "--gpus", 4, "--utilization", 0.8,
        "--context", "2048,8192,16384",
    )  # fmt: skip
    assert by_file == by_name


@pytest.mark.parametrize(
    ("spec", "connector"),
    [
        ({"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 1}}}, True),
        ({"engine": {"extraArgs": ['--kv-transfer-config={"kv_connector": "LMCacheMPConnector"}']}}, True),
        ({"engine": {"extraArgs": ['--kv-transfer-config={"kv_connector": "NixlConnector"}']}}, False),
        ({}, False),
    ],
    ids=["host memory", "LMCache", "NIXL", "none"],
)
def test_the_gate_of_a_service_whose_engines_load_pages_takes_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: dict[str, Any], connector: bool
) -> None:
    model = {"source": "hf://meta-llama/Llama-3.1-8B", "maxModelLen": 32768}
    asked = ("-f", written(tmp_path, {**spec, "model": model}), "--gpu", "H200", "--dtype", "auto")
    alone, through = (planned(capsys, *asked, *more)["dtypes"][0]["gate_seconds"] for more in ((), ("--connector",)))
    plain = planned(capsys, "Llama-3.1-8B", "--gpu", "H200", "--context", "32768", "--dtype", "auto")
    assert alone == (through if connector else plain["dtypes"][0]["gate_seconds"]) and alone <= through
    assert through > plain["dtypes"][0]["gate_seconds"]


def test_options_of_the_command_line_replace_those_of_the_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"model": {"maxModelLen": 16384}})
    document = planned(capsys, "-f", file, "--gpu", "L40S", "--context", "4096", "--dtype", "fp8")
    (row,) = document["dtypes"]
    assert [one["context_tokens"] for one in row["capacities"]] == [4096]


def test_a_pipeline_over_two_nodes_is_planned_with_twice_the_tokens_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "-f", ROOT / "examples/multi-node.yaml", "--gpu", "H100-80GB")
    assert (document["nodes"], document["gpus_per_replica"]) == (2, 16)
    model, gpu = find("meta-llama/Llama-3.1-405B-Instruct"), find_gpu("H100-80GB")
    one = make(Request(model, gpu, gpus=8, contexts=(32768,), dtypes=("auto",), kv=8 * 10**10))
    two = make(Request(model, gpu, gpus=8, nodes=2, contexts=(32768,), dtypes=("auto",), kv=16 * 10**10))
    # Each node has half of the layers and as much cache, so it holds twice the tokens.
    assert two.rows[0].capacities[0].capacity_tokens == pytest.approx(
        2 * one.rows[0].capacities[0].capacity_tokens, rel=0.01
    )


def test_a_pipeline_of_uneven_parts_is_limited_by_its_largest_part() -> None:
    model, gpu = find("Qwen/Qwen3-8B"), find_gpu("H200")
    assert model.layers % 5
    plan = make(Request(model, gpu, nodes=5, contexts=(8192,), dtypes=("auto",), kv=5 * 10**10))
    assert plan.request.stage.layers == -(-model.layers // 5)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["Qwen/Qwen3-8B", "--nodes", "99"], "--nodes 99: Qwen/Qwen3-8B has 36 layers; use at most as many"),
        (
            ["Qwen/Qwen3-8B", "--nodes", "2", "--requests-per-second", "1", "--prompt-tokens", "9",
             "--generated-tokens", "9"],
            "--nodes 2: the speed of a pipeline was not measured; leave the load out",
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be_planned_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in refused(capsys, *argv)


def test_the_gpu_is_the_one_that_the_service_selects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L40S"}}}
    file = written(tmp_path, {"engine": {"podTemplate": pod}})
    assert planned(capsys, "-f", file)["gpu"] == "L40S"
    assert "selects no GPU by a node label; name one" in refused(capsys, "-f", written(tmp_path, {}))


@pytest.mark.parametrize(
    "labels",
    [
        {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        {"nvidia.com/gpu.product": "NVIDIA-L4"},
    ],
)
def test_a_selector_and_a_required_affinity_name_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: dict[str, str]
) -> None:
    expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in labels.items()]
    required = {"nodeSelectorTerms": [{"matchExpressions": expressions}, {"matchFields": []}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    for pod in ({"nodeSelector": labels}, {"affinity": affinity}):
        file = written(tmp_path, {"engine": {"podTemplate": {"spec": pod}}})
        assert planned(capsys, "-f", file)["gpu"] == "L4"


def test_a_service_of_a_cluster_is_planned_on_the_gpu_of_its_last_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    history = [{"gpu": "NVIDIA-H200"}, {"gpu": "NVIDIA-L4"}]
    file.write_text(yaml.safe_dump({**GOOD, "status": {"history": history}}))
    assert planned(capsys, "-f", file)["gpu"] == "H200"


def test_a_service_without_an_image_of_its_own_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The chart may give the image of all services.
    spec = {**GOOD["spec"], "engine": {key: value for key, value in GOOD["spec"]["engine"].items() if key != "image"}}
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "spec": spec}))
    assert planned(capsys, "-f", file, "--gpu", "H200")["gpu"] == "H200"


@pytest.mark.parametrize("limit", [4, "4"])
def test_without_a_size_of_tensor_parallelism_it_plans_for_all_gpus_of_a_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int | str
) -> None:
    file = written(tmp_path, {"engine": {"resources": {"limits": {"nvidia.com/gpu": limit}}}})
    assert planned(capsys, "-f", file, "--gpu", "L40S")["gpus_per_replica"] == 4


NUMBER = st.none() | st.integers() | st.text(max_size=3)


@given(NUMBER, NUMBER, NUMBER, NUMBER, st.sampled_from(["hf://Qwen/Qwen3-8B", "hf://", "hf://-h", "", "x"]))
def test_any_spec_is_handled_without_an_unexpected_error(
    gpus: Any, percent: Any, longest: Any, recent: Any, source: str
) -> None:
    spec = {
        "model": {"source": source, "maxModelLen": longest},
        "engine": {"tensorParallelSize": gpus, "gpuMemoryUtilizationPercent": percent},
        "kvCache": {"recentTokens": recent},
    }
    with TemporaryDirectory() as folder:
        file = Path(folder, "service.yaml")
        file.write_text(json.dumps({**GOOD, "spec": spec}))
        assert main(["-f", str(file), "--gpu", "H200"]) in (0, 2)


def test_a_model_without_a_name_is_planned_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, {"model": {"source": "pvc://models/own"}})
    assert "'pvc://models/own' does not name a published model" in refused(capsys, "-f", file, "--gpu", "H200")
    folder = tmp_path / "own"
    folder.mkdir()
    entry = next(
        one
        for one in json.loads((ROOT / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
        if one["model"] == "Qwen/Qwen3-8B"
    )
    (folder / "config.json").write_text(json.dumps(entry["config"]))
    assert planned(capsys, "-f", file, folder, "--gpu", "H200")["model"] == str(folder)


def test_a_service_never_gets_the_plan_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, {"model": {"source": "hf://someone/Qwen3-8B"}})
    assert "'someone/Qwen3-8B' is neither a folder nor in the table" in refused(capsys, "-f", file, "--gpu", "H200")


def test_a_file_without_a_plannable_service_is_an_error_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "give a file with one" in refused(capsys, "-f", written(tmp_path, {}, {}), "--gpu", "H200")
    bad = written(tmp_path, {"replicas": -1})
    assert "spec.replicas is -1" in refused(capsys, "-f", bad, "--gpu", "H200")
    assert "cannot be read" in refused(capsys, "-f", tmp_path / "none.yaml", "--gpu", "H200")
    shutil.copy(bad, tmp_path / "secret.yaml")
    assert "H100-80GB" in refused(capsys, "-f", written(tmp_path, {}), "--gpu", "H100")
