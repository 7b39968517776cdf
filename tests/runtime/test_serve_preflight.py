"""kvpilot-serve refuses invalid requests before it imports vLLM: a JSON line with field, value and remedy, exit code
78.
"""

import json
import subprocess
import sys

import pytest

from kvpilot_localcluster.engines.real import SERVE
from kvpilot_smallmodels.models import tiny_llama


def refused(*arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-X", "importtime", SERVE, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = ended.stderr.splitlines()
    imports = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "kvpilot_runtime.preflight" in imports
    assert not {"vllm", "torch"} & imports
    assert ended.returncode == 78, ended.stderr
    line = json.loads([line for line in lines if not line.startswith("import time:")][-1])
    assert line["kvpilot"] == "refused"
    return line["reason"], line["message"]


def weird(tmp_path, **changes):
    config = json.loads((tiny_llama() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return f"--model={tmp_path}"


def test_a_path_that_does_not_exist_is_refused():
    reason, message = refused("--model=/models/nowhere")
    assert reason == "ModelNotFound"
    assert "/models/nowhere" in message


def test_an_architecture_unknown_to_vllm_is_refused(tmp_path):
    reason, message = refused(weird(tmp_path, architectures=["NobodyKnowsItForCausalLM"]))
    assert reason == "ModelUnsupported"
    assert "NobodyKnowsItForCausalLM" in message


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    reason, message = refused(f"--model={tmp_path}")
    assert reason in ("ModelUnsupported", "ModelNotFound")
    assert "config.json" in message


def test_the_error_about_an_unknown_dtype_lists_the_known_ones():
    reason, message = refused(f"--model={tiny_llama()}", "--kv-cache-dtype=int3")
    assert reason == "DtypeUnsupported"
    assert "int3" in message
    assert "k4v4" in message


@pytest.mark.parametrize("head_dim", [40, 264])
def test_an_unsupported_head_dim_is_refused(tmp_path, head_dim):
    reason, message = refused(weird(tmp_path, head_dim=head_dim), "--kv-cache-dtype=k4v4")
    assert reason in ("DtypeUnsupported", "ModelUnsupported")
    assert str(head_dim) in message


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    reason, message = refused(f"--model={tiny_llama()}", "--kv-cache-memory-bytes=4000G")
    assert reason == "DoesNotFit"
    assert any(character.isdigit() for character in message)


def test_unknown_arguments_are_refused():
    reason, message = refused(f"--model={tiny_llama()}", "--max-model-len=minus")
    assert reason == "BadArguments"
    assert "max-model-len" in message
