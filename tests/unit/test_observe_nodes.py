"""The accelerator of a node, read from labels and resources as clouds and vendors set them."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpilot_operator.decide.load.workload import step_tokens
from kvpilot_operator.decide.steps.ladder import hardware_fault
from kvpilot_operator.gpus import by_product
from kvpilot_operator.observe.nodes import node_facts
from kvpilot_operator.state.snapshot import NodeFacts
from support.services import manifest, spec_of

TYPE = "node.kubernetes.io/instance-type"
GKE = "cloud.google.com/gke-accelerator"
A100 = "NVIDIA-A100-SXM4-80GB"
SPEC = spec_of(manifest())
NODES: dict[str, tuple[dict[str, str], dict[str, str], NodeFacts]] = {
    "no accelerator": ({TYPE: "m7i.4xlarge", "kubernetes.io/arch": "amd64"}, {"cpu": "15890m"}, NodeFacts()),
    "GPU operator": (
        {
            "feature.node.kubernetes.io/pci-10de.present": "true",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "nvidia.com/gpu.family": "hopper",
            "nvidia.com/gpu.memory": "81559",
            "nvidia.com/gpu.compute.major": "9",
            "nvidia.com/gpu.compute.minor": "0",
            "nvidia.com/gpu.count": "8",
            "nvidia.com/mig.capable": "true",
            TYPE: "p5.48xlarge",
        },
        {"cpu": "191450m", "nvidia.com/gpu": "8"},
        NodeFacts("NVIDIA-H100-80GB-HBM3", (9, 0), 81_559),
    ),
    "by hand": ({"nvidia.com/gpu.product": "NVIDIA-L4"}, {}, NodeFacts("NVIDIA-L4", (8, 9))),
    "GPU operator, time slicing": (
        {
            "nvidia.com/gpu.product": "NVIDIA-A10G-SHARED",
            "nvidia.com/gpu.memory": "23028",
            "nvidia.com/gpu.replicas": "4",
            "nvidia.com/gpu.compute.major": "8",
            "nvidia.com/gpu.compute.minor": "6",
        },
        {"nvidia.com/gpu": "4"},
        NodeFacts("NVIDIA-A10G-SHARED", (8, 6), 23_028),
    ),
    "GPU operator, time slicing under a resource of its own": (
        {"nvidia.com/gpu.product": "NVIDIA-A10G", "nvidia.com/gpu.memory": "23028"},
        {"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "4"},
        NodeFacts("NVIDIA-A10G-SHARED", (8, 6), 23_028),
    ),
    "MIG single": (
        {
            "nvidia.com/mig.strategy": "single",
            "nvidia.com/gpu.product": f"{A100}-MIG-3g.40gb",
            "nvidia.com/gpu.memory": "40192",
            "nvidia.com/gpu.slices.gi": "3",
            "nvidia.com/gpu.compute.major": "8",
            "nvidia.com/gpu.compute.minor": "0",
        },
        {"nvidia.com/gpu": "16"},
        NodeFacts(f"{A100}-MIG-3g.40gb", (8, 0), 40_192),
    ),
    "MIG mixed, one profile": (
        {
            "nvidia.com/mig.strategy": "mixed",
            "nvidia.com/gpu.product": A100,
            "nvidia.com/gpu.memory": "81920",
            "nvidia.com/mig-3g.40gb.count": "16",
            "nvidia.com/mig-3g.40gb.memory": "40192",
            "nvidia.com/mig-3g.40gb.product": f"{A100}-MIG-3g.40gb",
        },
        {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "16"},
        NodeFacts(f"{A100}-MIG-3g.40gb", (8, 0), 40_192),
    ),
    "MIG mixed, two profiles": (
        {"nvidia.com/gpu.product": A100, "nvidia.com/gpu.memory": "81920"},
        {"nvidia.com/mig-3g.40gb": "8", "nvidia.com/mig-1g.10gb": "24"},
        NodeFacts(f"{A100}-MIG", (8, 0), None),
    ),
    "MIG mixed, beside whole GPUs": (
        {"nvidia.com/gpu.product": A100, "nvidia.com/gpu.memory": "81920"},
        {"nvidia.com/gpu": "4", "nvidia.com/mig-3g.40gb": "8"},
        NodeFacts(f"{A100}-MIG", (8, 0), None),
    ),
    "MIG without labels": (
        {},
        {"nvidia.com/mig-1g.10gb.me": "1"},
        NodeFacts("unlabelled-gpu-MIG-1g.10gb.me"),
    ),
    "GKE": (
        {GKE: "nvidia-h100-80gb", "cloud.google.com/gke-gpu": "true", TYPE: "a3-highgpu-8g"},
        {"nvidia.com/gpu": "8"},
        NodeFacts("NVIDIA-H100-80GB-HBM3", (9, 0)),
    ),
    "GKE, MIG": (
        {GKE: "nvidia-tesla-a100", "cloud.google.com/gke-gpu-partition-size": "1g.5gb", TYPE: "a2-highgpu-1g"},
        {"nvidia.com/gpu": "7"},
        NodeFacts("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", (8, 0)),
    ),
    "GKE, time-sharing": (
        {GKE: "nvidia-l4", "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing", TYPE: "g2-standard-8"},
        {"nvidia.com/gpu": "2"},
        NodeFacts("NVIDIA-L4-SHARED", (8, 9), None),
    ),
    "GKE, a GPU that is not in the table": (
        {GKE: "nvidia-tesla-v100", TYPE: "n1-standard-8"},
        {"nvidia.com/gpu": "1"},
        NodeFacts("nvidia-tesla-v100"),
    ),
    "GKE, TPU": ({TYPE: "ct5lp-hightpu-4t"}, {"google.com/tpu": "4"}, NodeFacts("google.com/tpu", cuda=False)),
    "EKS, Neuron": ({TYPE: "inf2.xlarge"}, {"aws.amazon.com/neuron": "1"}, NodeFacts()),
    "device plugin alone": ({TYPE: "bare-metal"}, {"nvidia.com/gpu": "4"}, NodeFacts("unlabelled-gpu")),
    "no GPU is left": ({}, {"nvidia.com/gpu": "0"}, NodeFacts()),
    "AMD": ({"amd.com/gpu.vram": "192G"}, {"amd.com/gpu": "8"}, NodeFacts("amd.com/gpu", cuda=False)),
    "Intel": ({}, {"gpu.intel.com/xe": "1"}, NodeFacts("gpu.intel.com/xe", cuda=False)),
    "an integrated GPU beside NVIDIA's": (
        {"nvidia.com/gpu.product": "NVIDIA-L40S"},
        {"gpu.intel.com/i915": "1", "nvidia.com/gpu": "2"},
        NodeFacts("NVIDIA-L40S", (8, 9)),
    ),
}


def node(labels: Any, allocatable: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": allocatable}}


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_known_by_its_labels_and_resources(name: str) -> None:
    labels, allocatable, facts = NODES[name]
    assert node_facts(node(labels, allocatable)) == facts


@pytest.mark.parametrize(
    ("accelerator", "name"),
    [
        ("nvidia-b200", "B200"),
        ("nvidia-h200-141gb", "H200"),
        ("nvidia-h100-80gb", "H100-80GB"),
        ("nvidia-h100-mega-80gb", "H100-80GB"),
        ("nvidia-a100-80gb", "A100-80GB"),
        ("nvidia-tesla-a100", "A100-40GB"),
        ("nvidia-rtx-pro-6000", "RTX-PRO-6000"),
        ("nvidia-l4", "L4"),
        ("nvidia-tesla-t4", "T4"),
    ],
)
def test_an_accelerator_of_gke_is_one_of_the_table_of_gpus(accelerator: str, name: str) -> None:
    facts = node_facts(node({GKE: accelerator}, {"nvidia.com/gpu": "1"}))
    gpu = by_product(facts.gpu)
    assert gpu is not None
    assert gpu.name == name
    assert facts.compute_capability == gpu.compute_capability


def test_a_node_keeps_its_gpus_name_when_the_gpu_operator_is_installed() -> None:
    labels = {GKE: "nvidia-a100-80gb"}
    before = node_facts(node(labels, {"nvidia.com/gpu": "8"}))
    assert before == node_facts(node({**labels, "nvidia.com/gpu.product": A100}, {"nvidia.com/gpu": "8"}))


# CPU nodes are left out, because hardware_fault refuses int4_per_token_head there.
@pytest.mark.parametrize("name", ["AMD", "Intel", "GKE, TPU"])
def test_an_accelerator_without_cuda_rules_only_our_dtypes_out(name: str) -> None:
    labels, allocatable, _ = NODES[name]
    facts = node_facts(node(labels, allocatable))
    for dtype in ("int8", "k8v4", "k4v4", "k4v2", "k2v2"):
        assert hardware_fault(dtype, facts) == f"{dtype} needs an NVIDIA GPU; the node has {facts.gpu}"
    for dtype in ("auto", "bfloat16", "fp8", "int4_per_token_head"):
        assert hardware_fault(dtype, facts) is None


@pytest.mark.parametrize("name", ["GKE, a GPU that is not in the table", "device plugin alone"])
def test_an_unknown_gpu_rules_no_dtype_out(name: str) -> None:
    labels, allocatable, _ = NODES[name]
    facts = node_facts(node(labels, allocatable))
    assert [dtype for dtype in ("fp8", "k4v4", "int4_per_token_head") if hardware_fault(dtype, facts)] == []


def test_a_mig_slice_has_the_step_budget_of_its_memory() -> None:
    whole_gpu = node({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, {"nvidia.com/gpu": "8"})
    a_slice = node({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, {"nvidia.com/mig-3g.40gb": "16"})
    assert (step_tokens(SPEC, node_facts(whole_gpu)), step_tokens(SPEC, node_facts(a_slice))) == (8192, 2048)


LABELS = st.sampled_from(
    [
        "nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.compute.major",
        "nvidia.com/gpu.compute.minor", "nvidia.com/mig-1g.10gb.product", "nvidia.com/mig-1g.10gb.memory",
        GKE, "cloud.google.com/gke-gpu-partition-size", "cloud.google.com/gke-gpu-sharing-strategy",
    ]
)  # fmt: skip
RESOURCES = st.sampled_from(
    ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-9g.99999999999999gb",
     "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "google.com/tpu"]
)  # fmt: skip
TEXTS = st.text(max_size=200) | st.sampled_from(
    ["0", "8", "9" * 5000, "-MIG-", "-MIG-1g.²gb", "-SHARED", A100, f"{A100}-MIG-1g.10gb", "nvidia-", "nvidia-l4"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LABELS | RESOURCES | st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_a_mig_slice_has_the_capability_of_its_gpu() -> None:
    named = node({"nvidia.com/mig-1g.10gb.product": A100}, {"nvidia.com/mig-1g.10gb": "2"})
    assert node_facts(named) == NodeFacts(A100, (8, 0))
    longer = node({"nvidia.com/mig-1g.10gb.product": f"{A100}-MIG-1g.10gb"}, {"nvidia.com/mig-1g.10gb": "2"})
    assert node_facts(longer) == NodeFacts(f"{A100}-MIG-1g.10gb", (8, 0))


@given(st.dictionaries(LABELS | st.text(), TEXTS), st.dictionaries(RESOURCES | st.text(), TEXTS))
@example({"nvidia.com/mig-1g.10gb.product": A100}, {"nvidia.com/mig-1g.10gb": "00"})
def test_any_text_in_labels_and_resources_is_read_without_an_error(
    labels: dict[str, str], allocatable: dict[str, str]
) -> None:
    facts = node_facts(node(labels, allocatable))
    assert 0 < len(facts.gpu) <= 128  # limit of the API's field status.history[].gpu
    assert facts.memory_mib is None or 0 < facts.memory_mib <= 2**30
    assert facts.cuda or facts.compute_capability is None
    assert by_product(facts.gpu) is None or facts.compute_capability is not None
    assert step_tokens(SPEC, facts) > 0
    for dtype in ("fp8", "k4v4"):
        hardware_fault(dtype, facts)


@given(JSON, JSON)
def test_a_node_of_any_json_is_read_without_an_error(labels: Any, allocatable: Any) -> None:
    node_facts(node(labels, allocatable))
    for odd in ({"metadata": labels, "status": allocatable}, {"metadata": None}, {}):
        node_facts(odd)
