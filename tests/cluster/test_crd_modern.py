"""A modern API server refuses exactly what the operator's own check finds, in the same fields and words."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import ApiError
from kvpilot_operator.api.host_access import KINDS
from kvpilot_operator.api.schema import apply_defaults, faults
from support.bad_manifests import BAD, GOOD, GOOD_GPU_LIMITS, Bad, with_gpus
from support.derived_manifests import service_with, together
from support.pod_templates import TEMPLATES

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"


def create(cluster: LocalCluster, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """HTTP status and answer of asking for the object to be created, without keeping it."""
    try:
        return 201, cluster.rest.create(f"{SERVICES}?dryRun=All&fieldValidation=Strict", manifest)
    except ApiError as error:
        return error.status, json.loads(error.body)


def causes(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """(field, message) of each fault, without the notes on /scale and on rules that were not evaluated."""
    found = [(cause.get("field", ""), cause["message"]) for cause in answer["details"]["causes"]]
    return [(field, message) for field, message in found if field not in ("<nil>", "") and not field.startswith(".")]


def places(fields: list[str]) -> set[str]:
    """Fields without list indices, which the server leaves out of schema faults."""
    return {re.sub(r"\[\d+\]", "", field) for field in fields}


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge in ("schema", "rule")], ids=lambda bad: bad.name)
def test_a_wrong_manifest_is_refused_at_the_field_that_the_operator_finds(
    modern_cluster: LocalCluster, bad: Bad
) -> None:
    status, answer = create(modern_cluster, bad.manifest)
    assert status == 422, answer
    assert places([field for field, _ in causes(answer)]) == places([bad.field])
    if bad.judge == "rule":
        assert "PASSWORD" not in str(answer)
        (fault,) = faults(bad.manifest)
        ((field, message),) = causes(answer)
        assert field == fault.field
        assert message.endswith(re.sub(r"^is ('.*?'|-?\d+|true|false): ", "", fault.message))


def test_every_limit_of_the_schema_is_enforced_where_the_operator_finds_it(modern_cluster: LocalCluster) -> None:
    for group in together():
        status, answer = create(modern_cluster, service_with(group))
        assert status == 422, answer
        mine = places([fault.field for fault in faults(service_with(group))])
        assert mine == places([field for field, _ in causes(answer)]), group[0].keyword


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "operator"], ids=lambda bad: bad.name)
def test_what_only_an_administrator_may_allow_is_found_by_the_operator(modern_cluster: LocalCluster, bad: Bad) -> None:
    status, answer = create(modern_cluster, bad.manifest)
    assert status == 201, answer
    assert [fault.field for fault in faults(answer)] == [bad.field]
    assert faults(answer, KINDS) == ()


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "parser"], ids=lambda bad: bad.name)
def test_arguments_that_take_a_parser_are_found_by_the_operator(modern_cluster: LocalCluster, bad: Bad) -> None:
    status, answer = create(modern_cluster, bad.manifest)
    assert status == 201, answer
    assert [fault.field for fault in faults(answer)] == [bad.field]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted_and_defaulted_as_the_operator_does(modern_cluster: LocalCluster, path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "QuantizedLLMService":
            status, answer = create(modern_cluster, document)
            assert status == 201, answer
            assert answer["spec"] == apply_defaults(document)["spec"]


@pytest.mark.parametrize(("size", "limit"), GOOD_GPU_LIMITS)
def test_a_limit_that_is_enough_is_accepted_in_every_spelling(
    modern_cluster: LocalCluster, size: int, limit: int | str
) -> None:
    status, answer = create(modern_cluster, with_gpus(size, limit))
    assert status == 201, answer


def test_a_misspelt_field_is_refused_by_name(modern_cluster: LocalCluster) -> None:
    status, answer = create(modern_cluster, {**GOOD, "spec": {**GOOD["spec"], "kvcache": {"mode": "Auto"}}})
    assert status == 400
    assert 'unknown field "spec.kvcache"' in answer["message"]


def test_a_5000_character_name_is_refused_without_harm(modern_cluster: LocalCluster) -> None:
    status, answer = create(modern_cluster, {**GOOD, "metadata": {"name": "a" * 5000}})
    assert status == 422
    assert "metadata.name" in [field for field, _ in causes(answer)]


NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 50, 85, 100, 101, 1000, 1001, 2**31])
DTYPES = st.sampled_from(["auto", "bfloat16", "fp8", "fp8_e5m2", "int8", "k8v4", "k4v4", "k4v2", "nvfp4", "q4"])
SOURCES = st.sampled_from(
    ["hf://a/b", "hf://a/b/c", "pvc://models", "pvc://models/a/b", "pvc://M", "oci://r.io:5000/x/y:1", "oci://r",
     "oci://r/x@sha256:" + "a" * 64, "file:///m", "file:///m/", "file:///m/./x", "file://m", "s3://x", "hf://ä/b"]
)  # fmt: skip


def section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


REF = st.fixed_dictionaries({"name": st.sampled_from(["a", "A"]), "key": st.just("k")})
ENV = st.fixed_dictionaries(
    {"name": st.sampled_from(["A", "B", "HF_TOKEN", "HF_HOME", "VLLM_CACHE_ROOT", "VLLM_API_KEY"])},
    optional={
        "value": st.sampled_from(["", "x"]),
        "valueFrom": section(secretKeyRef=REF, configMapKeyRef=REF, fieldRef=st.just({"fieldPath": "status.podIP"})),
    },
)
SPECS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"source": SOURCES},
            optional={
                "revision": st.just("main"),
                "tokenSecretRef": st.just({"name": "hf"}),
                "maxModelLen": NUMBERS,
                "servedName": st.sampled_from(["good", "sql"]),
                "adapters": st.lists(
                    st.fixed_dictionaries({"name": st.sampled_from(["good", "sql", "a=b"]), "source": SOURCES}),
                    max_size=2,
                ),
            },
        ),
        "engine": st.fixed_dictionaries(
            {"image": st.sampled_from(["a/b:1", "a b", ""])},
            optional={
                "tensorParallelSize": st.sampled_from([1, 2, 8]),
                "env": st.lists(ENV, max_size=3),
                "extraArgs": st.lists(
                    st.sampled_from(
                        [
                            "--x",
                            "--model",
                            "--models",
                            "--host=1",
                            "-tp",
                            "-tpx",
                            "--ssl_keyfile=x",
                            "",
                            "--seed 1",
                        ]
                    ),
                    max_size=3,
                ),
                "resources": section(
                    limits=st.dictionaries(
                        st.sampled_from(["nvidia.com/gpu", "cpu"]),
                        st.sampled_from(
                            [1, "1", "4", "1.5", "1Gi", "x", True, 2.5, -1, "8000m", "1500m", "0k", "2.0", "0m"]
                        ),
                    )
                ),
                "podTemplate": TEMPLATES,
                "tolerations": st.lists(
                    section(
                        key=st.sampled_from(["", "a"]),
                        operator=st.sampled_from(["Equal", "Exists"]),
                        value=st.sampled_from(["", "a"]),
                        effect=st.sampled_from(["NoSchedule", "NoExecute"]),
                        tolerationSeconds=st.just(5),
                    ),
                    max_size=2,
                ),
            },
        ),
    },
    optional={
        "replicas": st.none() | NUMBERS,
        "cache": section(
            weightsClaimName=st.sampled_from(["a", "A"]),
            compileClaimName=st.just("a"),
            weights=section(
                size=st.sampled_from(["1Gi", "0Gi", "10", "2T"]), accessMode=st.sampled_from(["ReadWriteOnce", "x"])
            ),
        ),
        "kvCache": section(
            mode=st.sampled_from(["Auto", "Fixed"]),
            dtype=st.none() | DTYPES,
            ladder=st.lists(DTYPES, max_size=9),
            recentTokens=NUMBERS,
            offload=section(
                cpuMemoryGiB=NUMBERS,
                disk=section(
                    sizeGiB=NUMBERS, claimName=st.sampled_from(["a", "/"]), storageClassName=st.sampled_from(["a", ""])
                ),
            ),
            skipLayers=st.lists(st.sampled_from(["0", "00", "31", "sliding_window", "x"]), max_size=3),
            pressure=section(highPercent=NUMBERS, lowPercent=NUMBERS),
        ),
        "scaling": section(minReplicas=NUMBERS, maxReplicas=NUMBERS),
        "canary": section(steps=st.lists(st.fixed_dictionaries({"weightPercent": NUMBERS}), max_size=4)),
        "accuracy": section(
            probeSets=st.lists(st.sampled_from(["builtin/general", "configmap/a", "configmap/", "x"]), max_size=3)
        ),
        "disruption": section(minAvailable=NUMBERS),
    },
)


@given(SPECS)
@example(
    {
        **GOOD["spec"],
        "engine": {"image": "a/b:1", "tensorParallelSize": 1, "resources": {"limits": {"nvidia.com/gpu": "x"}}},
    }
)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_operator_and_the_server_agree_on_any_spec(modern_cluster: LocalCluster, spec: dict[str, Any]) -> None:
    manifest = {**copy.deepcopy(GOOD), "spec": spec}
    status, answer = create(modern_cluster, manifest)
    mine = faults(manifest, KINDS)
    if status == 201:
        assert mine == ()
    else:
        assert status == 422, answer
        assert places([fault.field for fault in mine]) == places([field for field, _ in causes(answer)])
