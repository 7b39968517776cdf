"""The local cluster's node finds GPUs, labels itself, and gives each GPU one owner."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_localcluster import gpus, images
from kvpilot_localcluster.errors import InvalidPod, LocalClusterError
from kvpilot_operator.observe.nodes import node_facts

LISTING = (
    "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 0, 9.0, Disabled, 580.159.04\n"
    "1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 4100, 9.0, Enabled, 580.159.04\n"
)
SMI = f"""#!/bin/sh
case "$*" in
  *query-gpu*) printf '%s' '{LISTING}' ;;
  *query-compute-apps*) echo 'GPU-bb, 4711' ;;
  *) echo '| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0     |' ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program nvidia-smi on PATH, and return its path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


@pytest.mark.usefixtures("smi")
def test_the_gpus_of_the_machine_are_found_with_their_processes() -> None:
    found = gpus.find()
    assert [(gpu.index, gpu.uuid, gpu.memory, gpu.used, gpu.mig) for gpu in found] == [
        (0, "GPU-aa", 81559, 0, False),
        (1, "GPU-bb", 81559, 4100, True),
    ]
    assert [gpu.processes for gpu in found] == [(), (4711,)]
    assert gpus.cuda_version() == "13.0"


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.find() == []


def test_a_failing_driver_is_an_error_with_its_message(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    with pytest.raises(LocalClusterError, match="ended with 18: Failed to initialize NVML"):
        gpus.find()
    with pytest.raises(LocalClusterError, match="update the driver"):
        gpus.parse("0, GPU-aa, [N/A]\n")


def test_the_operator_reads_the_nodes_labels_as_those_of_gpu_feature_discovery() -> None:
    labels = gpus.labels(gpus.parse(LISTING), "13.0", 2)
    assert labels["nvidia.com/gpu.count"] == "2"
    assert labels["nvidia.com/cuda.driver-version.full"] == "580.159.04"
    assert labels["nvidia.com/cuda.runtime-version.major"] == "13"
    facts = node_facts({"metadata": {"labels": labels}, "status": {"allocatable": {gpus.RESOURCE: "2"}}})
    assert (facts.gpu, facts.compute_capability, facts.memory_mib) == ("NVIDIA-H100-80GB-HBM3", (9, 0), 81559)
    assert gpus.labels([], "", 3) == {}


@pytest.mark.parametrize(("devices", "shared_by"), [(1, "1"), (2, "1"), (3, "2"), (4, "2"), (5, "3")])
def test_a_node_with_fewer_gpus_than_devices_says_how_many_pods_share_one(devices: int, shared_by: str) -> None:
    labels = gpus.labels(gpus.parse(LISTING), "13.0", devices)
    assert labels["nvidia.com/gpu.replicas"] == shared_by
    assert labels["nvidia.com/gpu.product"].endswith("-SHARED") == (devices > 2)
    assert node_facts({"metadata": {"labels": labels}, "status": {}}).compute_capability == (9, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4), st.booleans()), max_size=40))
def test_a_gpu_never_has_two_owners(events: list[tuple[str, int, bool]]) -> None:
    devices, owners = ("0", "1", "2", "3"), dict[gpus.Owner, tuple[str, ...]]()
    for pod, count, ends in events:
        owner = (pod, "engine")
        if ends:
            owners.pop(owner, None)
            continue
        free = len(devices) - sum(map(len, owners.values()))
        if owner not in owners and count > free:
            with pytest.raises(InvalidPod, match=f"{count} requested, but {free} of 4 free"):
                gpus.assign(devices, owners, owner, count)
            continue
        before = owners.get(owner)
        owners[owner] = gpus.assign(devices, owners, owner, count)
        assert owners[owner] == before if before is not None else len(owners[owner]) == count
        held = [device for given in owners.values() for device in given]
        assert len(held) == len(set(held))
        assert set(held) <= set(devices)


def container(name: str, count: int) -> dict[str, object]:
    return {"name": name, "resources": {"limits": {gpus.RESOURCE: str(count)}}}


def test_an_owner_keeps_its_gpus_until_its_processes_have_ended(tmp_path: Path) -> None:
    for pod in ("a", "b"):
        (tmp_path / pod).mkdir()
    node = gpus.Devices(3, 3, tmp_path)
    assert node.variables("a", container("engine", 2))["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert node.variables("a", container("helper", 1))["CUDA_VISIBLE_DEVICES"] == "2"
    assert node.variables("a", {"name": "logs"})["CUDA_VISIBLE_DEVICES"] == ""
    restarted = gpus.Devices(3, 3, tmp_path)
    assert restarted.variables("a", container("engine", 2))["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(InvalidPod, match="1 requested, but 0 of 3 free"):
        restarted.variables("b", container("engine", 1))
    restarted.release("a")
    assert restarted.variables("b", container("engine", 1))["CUDA_VISIBLE_DEVICES"] == "0"
    assert json.loads((tmp_path / "b" / "gpus.json").read_text()) == {"engine": ["0"]}


@pytest.mark.parametrize(
    ("real", "shown"), [(0, ["0", "1", "2", "3"]), (2, ["0", "1", "0", "1"]), (4, ["0", "1", "2", "3"])]
)
def test_pods_take_turns_on_the_gpus_if_there_are_fewer_than_devices(
    tmp_path: Path, real: int, shown: list[str]
) -> None:
    node = gpus.Devices(4, real, tmp_path)
    for pod, gpu in zip("abcd", shown, strict=True):
        (tmp_path / pod).mkdir()
        assert node.variables(pod, container("engine", 1))["CUDA_VISIBLE_DEVICES"] == gpu
    (tmp_path / "e").mkdir()
    with pytest.raises(InvalidPod, match="1 requested, but 0 of 4 free"):
        node.variables("e", container("engine", 1))


def test_a_container_never_gets_one_gpu_twice(tmp_path: Path) -> None:
    for pod in ("a", "b"):
        (tmp_path / pod).mkdir()
    node = gpus.Devices(3, 2, tmp_path)
    assert node.variables("a", container("engine", 2))["CUDA_VISIBLE_DEVICES"] == "0,1"
    node.release("a")
    with pytest.raises(InvalidPod, match="3 requested, but 2 GPUs are shared: request 1 in each pod"):
        node.variables("b", container("engine", 3))
    assert node.variables("b", container("engine", 1))["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_node_without_gpus_sets_no_variable(tmp_path: Path) -> None:
    assert gpus.Devices(0, 0, tmp_path).variables("a", {"name": "engine"}) == {}


def test_a_cuda_engine_finds_the_machines_cuda_but_not_its_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"PATH": "/opt/cuda/bin", "PYTHONPATH": "/opt/vllm", "LD_LIBRARY_PATH": "/opt/lib", "SECRET": "x"}
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    image = images.find(images.load(), "kvpilot/runtime-cuda:dev")
    assert image is not None
    found = image.environment({"POD_IP": "127.0.1.1"})
    assert found["PATH"].endswith(":/opt/cuda/bin")
    assert (found["PYTHONPATH"], found["LD_LIBRARY_PATH"]) == ("/opt/vllm", "/opt/lib")
    assert found["KVPILOT_SERVE_HOST"] == "127.0.1.1"
    assert "SECRET" not in found
    plain = images.find(images.load(), "kvpilot/runtime:dev")
    assert plain is not None
    assert "PYTHONPATH" not in plain.environment({"POD_IP": "127.0.1.1"})
