"""Which dtypes the hardware rules out, and what the nodes say of it."""

from __future__ import annotations

import pytest

from kvpilot_operator.decide.ladder import veto
from kvpilot_operator.observe.views import node_facts
from kvpilot_operator.state.snapshot import NodeFacts

AMPERE = NodeFacts("NVIDIA-A100-SXM4-80GB", (8, 0))
HOPPER = NodeFacts("NVIDIA-H200", (9, 0))
VOLTA = NodeFacts("Tesla-V100", (7, 0))


def node(labels=None, allocatable=None):
    return {"metadata": {"name": "n", "labels": labels or {}}, "status": {"allocatable": allocatable or {"cpu": "2"}}}


def test_fp8_needs_compute_capability_8_9():
    assert "8.0" in (veto("fp8", AMPERE) or "")
    assert veto("fp8", HOPPER) is None


@pytest.mark.parametrize("dtype", ["int4_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc"])
def test_what_vllms_cpu_backend_only_pretends_to_do_is_ruled_out_there(dtype):
    assert "garbage" in (veto(dtype, NodeFacts()) or "")
    assert veto(dtype, HOPPER) is None


@pytest.mark.parametrize("node", [NodeFacts(), HOPPER, AMPERE])
def test_our_formats_are_for_cpus_and_for_gpus_from_ampere_on(node):
    assert veto("k4v4", node) is None


def test_our_formats_are_not_tried_on_a_gpu_without_their_instructions():
    assert "needs compute capability 8.0 or newer; Tesla-V100 has 7.0" in (veto("k4v4", VOLTA) or "")


def test_a_node_without_a_gpu_is_a_cpu_node():
    assert node_facts([node()]) == NodeFacts()


def test_a_gpu_without_labels_is_not_taken_for_a_cpu():
    assert node_facts([node(allocatable={"nvidia.com/gpu": "8"})]).gpu == "unlabelled-gpu"


def test_product_and_compute_capability_come_from_the_labels():
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
    }
    assert node_facts([node(), node(labels, {"nvidia.com/gpu": "8"})]) == HOPPER
