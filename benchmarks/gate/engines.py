"""Start real vLLM engines on the CPU for the gate's detection matrix, and switch their failure modes."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from benchmarks.gate.damage import MODE_FILE
from kvpilot_localcluster.engines.real import Engine, engine
from kvpilot_smallmodels.models import smollm2_135m

Run = Callable[..., AbstractContextManager[Engine]]

# Largest context in tokens. A prompt may be longer than one chunk, and has room for an answer.
CONTEXT = 2304
CHUNK = 2048
# KV cache in tokens, small enough that the pressure stage fills it on a CPU.
POOL_TOKENS = 7168
BLOCK = 64
_ENTRY = "[vllm.general_plugins]\ngate_matrix = benchmarks.gate.damage:register\n"


@contextmanager
def baseline(folder: Path) -> Iterator[Engine]:
    """Run the 16-bit engine without the plugin that damages engines."""
    with engine(smollm2_135m(), "auto", folder, *_common()) as running:
        yield running


@contextmanager
def canary(dtype: str, folder: Path, *arguments: str, model: Path | None = None, run: Run = engine) -> Iterator[Engine]:
    """Run an engine by `run`. It reads its failure mode from a file in `folder`. Without the file it is healthy."""
    plugin = folder / "plugin" / "gate_matrix-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: gate_matrix\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(_ENTRY)
    paths = [str(plugin.parent), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), MODE_FILE: str(folder / "mode"), "VLLM_SERVER_DEV_MODE": "1"}
    with run(model or smollm2_135m(), dtype, folder, *_common(), *arguments, env=env) as running:
        yield running


def switch(running: Engine, folder: Path, mode: str) -> None:
    """Let the engine fail by `mode` from now on; an empty `mode` makes it healthy. Empty the engine's prefix cache."""
    (folder / "mode").write_text(mode)
    httpx.post(f"{running.url}/reset_prefix_cache", timeout=60).raise_for_status()


def with_other_tokenizer(folder: Path) -> Path:
    """Make a copy of the model whose tokenizer puts a space before each text, and return its folder."""
    copy = folder / "other-tokenizer"
    copy.mkdir(exist_ok=True)
    for one in smollm2_135m().iterdir():
        if one.name != "tokenizer.json" and not (copy / one.name).exists():
            (copy / one.name).symlink_to(one.resolve())
    found = json.loads((smollm2_135m() / "tokenizer.json").read_text())
    for one in found["pre_tokenizer"]["pretokenizers"]:
        if one["type"] == "ByteLevel":
            one["add_prefix_space"] = True
    (copy / "tokenizer.json").write_text(json.dumps(found))
    return copy


def _common() -> tuple[str, ...]:
    lengths = f"--max-model-len={CONTEXT}", f"--max-num-batched-tokens={CHUNK}", f"--block-size={BLOCK}"
    return (*lengths, f"--num-gpu-blocks-override={POOL_TOKENS // BLOCK}", "--kv-cache-memory-bytes=512M")
