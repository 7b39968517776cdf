"""Every spec that the API server accepts gets a complete decision: no tenant's text makes a rule fail."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvpilot_operator.api.faults import faults
from kvpilot_operator.decide import decide
from kvpilot_operator.state.snapshot import NodeFacts
from support.services import manifest, pod, running, samples, snapshot

ODD = "0123456789²³٣½Ⅷ+-_.,:/=$(){}[]\"'\\ \n\tkKmMgGtTbBeExX∞é\u0000\u202e"
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", fullmatch=True) | st.sampled_from(
    ["4" * 400, "a-" + "9" * 300 + "b", "1e999b", "0x10b", "inf-b", "nan", "8x" * 100 + "b", "-".join(["7b"] * 100)]
)
SOURCES = st.builds(
    lambda scheme, name: f"{scheme}{name}"[:512],
    st.sampled_from(["hf://", "hf://org/", "pvc://claim/", "file:///", "oci://r.example.org/"]),
    NAMES,
)
OPTIONS = [
    "--max-num-batched-tokens",
    "--max_num_batched_tokens",
    "--max-num-b",
    "--scheduling-policy",
    "--recent-tokens",
]
ARGUMENTS = st.lists(
    st.builds("{}={}".format, st.sampled_from(OPTIONS), st.text(ODD, max_size=40) | st.just("9" * 900))
    | st.sampled_from(OPTIONS)
    | st.text(ODD, min_size=1, max_size=40),
    max_size=6,
)
QUANTITIES = st.from_regex(r"[0-9]{1,12}([.][0-9]{1,6})?(m|k|M|G|Ki|Mi|Gi|Ei)?", fullmatch=True) | st.integers(
    0, 10**12
)
SPECS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"source": SOURCES}, optional={"servedName": st.text(ODD, min_size=1, max_size=128)}
        ),
        "engine": st.fixed_dictionaries(
            {"image": st.just("example.org/runtime:1"), "extraArgs": ARGUMENTS},
            optional={
                "env": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["A", "KVPILOT_CALIBRATION", "HF_HOME"]), "value": st.text(ODD)}
                    ),
                    max_size=2,
                    unique_by=lambda one: one["name"],
                ),
                "tensorParallelSize": st.integers(1, 64),
                "resources": st.fixed_dictionaries(
                    {"limits": st.dictionaries(st.sampled_from(["nvidia.com/gpu", "cpu", "memory"]), QUANTITIES)}
                ),
            },
        ),
        "kvCache": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["Auto", "Recommend"]),
                "skipLayers": st.lists(st.from_regex(r"sliding_window|0|[1-9][0-9]{0,3}", fullmatch=True), max_size=4),
            }
        ),
    }
)


@pytest.mark.slow
@given(SPECS, st.sampled_from(["cpu", "NVIDIA-H200", "unlabelled-gpu", ODD]))
@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_accepted_spec_can_be_rendered_and_decided(spec, gpu):
    obj = manifest(**spec)
    assume(not faults(obj))
    node = NodeFacts(gpu)
    starting = decide(replace(snapshot(obj), node=node))
    assert starting.unanswered == ()
    assert starting.objects is not None
    serving = running(obj, "auto", node=node)
    pressed = samples(usage=0.99, waiting=9)
    pressed = decide(replace(serving, samples={serving.traffic: pressed}, pods=(pod(serving.traffic),)))
    assert pressed.unanswered == ()
    assert pressed.status.condition("MemoryPressured").status == "True"
