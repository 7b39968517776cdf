"""A broken model ends kvpilot-serve with one JSON line and exit code 78, never with a traceback."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot_runtime import serve
from kvpilot_runtime.preflight import machine

CORPUS = json.loads((Path(__file__).parents[2] / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
DTYPES = ["auto", "fp8", "k4v4", "k8v4"]

values = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 1, 3, 2**31, 10**30]) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=3),
)


class BecameError(Exception):
    """Signal that kvpilot-serve has reached the point at which it would become vLLM."""


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Pretend that this machine has eight H200. Start no engine."""

    def become(*_: Any) -> None:
        raise BecameError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "platform", lambda: "cuda")
        patch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))] * 8)
        patch.setattr(serve.os, "execve", become)
        yield


@st.composite
def broken(draw: st.DrawFn) -> str:
    """Draw the text of a published config.json with missing or arbitrary fields, or a truncated one."""
    config = copy.deepcopy(draw(st.sampled_from(CORPUS))["config"])
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    for _ in range(draw(st.integers(0, 3))):
        part = draw(st.sampled_from(parts))
        field = draw(st.sampled_from(sorted({*part, "head_dim", "sliding_window", "layer_types", "auto_map"})))
        if draw(st.booleans()):
            part.pop(field, None)
        else:
            part[field] = draw(values)
    text = json.dumps(config)
    return text if draw(st.integers(0, 9)) else text[: draw(st.integers(0, len(text)))]


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(broken(), st.sampled_from(DTYPES), st.sampled_from([1, 8]))
def test_a_broken_model_is_either_served_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], text: str, dtype: str, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(text)
    (folder / "model.bin").write_bytes(b"0")
    try:
        code = serve.main([f"--model={folder}", f"--kv-cache-dtype={dtype}", f"--tensor-parallel-size={ranks}"])
    except BecameError:
        return
    assert code == 78
    told = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert told["kvpilot"] == "refused"
    assert "\n" not in told["message"]
    assert ";" in told["message"], "a refusal says what to do"
