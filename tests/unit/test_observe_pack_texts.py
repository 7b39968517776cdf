"""The operator reads only the texts of a service's own probe packs, up to a limit."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats.untrusted import OverBudget
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.budget import CONFIG_MAP_BYTES, PACKS_BYTES
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.probe_packs import PackTexts
from kvpilot_probes.errors import PackTooLarge
from support.crd import apply_defaults
from support.services import KEY, manifest


@dataclass
class FakeCluster:
    """API that serves ConfigMaps by name and counts parallel reads."""

    maps: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def find_json(self, ref: Ref, *, most: int) -> bytes | None:
        self.asked.append(ref.name)
        found = self.maps.get(ref.name)
        if found is not None and len(found) > most:
            raise OverBudget(f"{ref.name}: more than {most} bytes")
        return found


def naming(*names: str) -> Spec:
    return parse(apply_defaults(manifest(accuracy={"probeSets": [f"configmap/{name}" for name in names]})))


def config_map(**data: Any) -> bytes:
    return json.dumps({"metadata": {"name": "x", "labels": {"a": "b"}}, "data": data}).encode()


async def read(cluster: FakeCluster, *names: str) -> Any:
    return await PackTexts(cluster).of(KEY, naming(*names))  # type: ignore[arg-type]


async def test_only_the_pack_is_taken_out_of_a_config_map() -> None:
    cluster = FakeCluster({"a": config_map(**{"prompts.yaml": "prompts: []", "more": "x" * 9999})})
    assert await read(cluster, "a", "missing") == {"a": {"prompts.yaml": "prompts: []"}}
    assert cluster.asked == ["a", "missing"]


async def test_the_error_about_a_config_map_without_a_pack_names_some_keys() -> None:
    cluster = FakeCluster({"a": config_map(**{f"key-{i:04}": "x" * 50 for i in range(2000)}), "b": b'{"kind": "x"}'})
    assert await read(cluster, "a", "b") == {"a": {f"key-{i:04}": "" for i in range(8)}, "b": {}}


async def test_a_config_map_beyond_the_budget_is_refused_and_those_after_it_are_not_read() -> None:
    cluster = FakeCluster({"large": config_map(more="x" * CONFIG_MAP_BYTES), "b": config_map()})
    with pytest.raises(PackTooLarge, match=r"configmap/large: the ConfigMap has more than \d+ bytes; give the pack"):
        await read(cluster, "large", "b")
    assert cluster.asked == ["large"]


async def test_the_total_size_of_a_services_packs_is_limited() -> None:
    texts = {f"m{i}": config_map(**{"prompts.yaml": "x" * (PACKS_BYTES // 4)}) for i in range(6)}
    with pytest.raises(PackTooLarge, match=r"up to configmap/m4 have more than"):
        await read(FakeCluster(texts), *texts)


@given(
    st.binary(max_size=200)
    | st.text().map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["data", "prompts.yaml", "metadata"]) | st.text(), inner)
        ),
        max_leaves=20,
    ).map(lambda value: json.dumps(value).encode())
)
async def test_any_answer_is_either_read_or_a_typed_error(answer: bytes) -> None:
    try:
        found = await read(FakeCluster({"a": answer}), "a")
    except ClusterError as error:
        assert len(str(error)) < 1000
    else:
        assert all(isinstance(text, str) for text in found["a"].values())
        assert json.dumps(found).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 100_000,
        b'{"data":' * 30_000,
        b'{"data":{"prompts.yaml":"\\ud800"}}',
        b'{"data":{"prompts.yaml":"\xff"}}',
    ],
    ids=["lists", "mappings", "half a surrogate", "no UTF-8"],
)
async def test_nesting_and_broken_text_are_refused_by_a_typed_error(answer: bytes) -> None:
    with pytest.raises(ClusterError):
        await read(FakeCluster({"a": answer}), "a")
