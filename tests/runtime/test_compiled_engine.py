"""A pod with real vLLM runs the code that another pod has compiled."""

import hashlib
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpilot_localcluster.engines.real import HANGS, engine
from kvpilot_runtime import compiled
from kvpilot_smallmodels.models import tiny_llama

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
PROMPT = [7] * 8
Files = dict[str, tuple[str, int]]
"""Hash and modification time (ns) of each file in a folder."""


@dataclass(frozen=True)
class Start:
    """Record of one pod: its answer, its log, its compiled or unpacked files, and the seconds until it was ready."""

    tokens: list[int]
    log: str
    files: Files
    seconds: float


def pod(folder: Path, claim: Path, dtype: str) -> Start:
    """Run an engine with an empty home folder and compiled code on `claim`, until all its files exist."""
    home, logs = folder / "home", folder / f"logs-{time.monotonic_ns()}"
    home.mkdir()
    logs.mkdir()
    begun = time.monotonic()
    env = {"HOME": str(home), compiled.VARIABLE: str(claim)}
    made = home / ".cache" / "kvpilot" / "compiled"
    with engine(
        tiny_llama(), dtype, logs, "--no-enforce-eager", "--max-num-seqs=4", "--kv-cache-memory-bytes=16M", env=env
    ) as running:
        seconds = time.monotonic() - begun
        tokens = running.tokens(PROMPT, 8)
        while kept(claim) != files(made).keys():
            assert time.monotonic() - begun < HANGS
            time.sleep(0.5)
        log = running.log.read_text()
    found = files(made)
    home.rename(folder / f"home-{time.monotonic_ns()}")
    return Start(tokens, log, found, seconds)


def files(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def kept(claim: Path) -> set[str]:
    """Return the names of the files on the claim."""
    names: set[str] = set()
    for archive in claim.glob("compiled-*.tar"):
        with tarfile.open(archive) as tar:
            names.update(tar.getnames())
    return names


@pytest.mark.parametrize("dtype", ["k4v4", "auto"])
def test_a_second_pod_uses_the_firsts_compiled_code_and_compiles_nothing(tmp_path: Path, dtype: str) -> None:
    claim = tmp_path / "claim"
    first = pod(tmp_path, claim, dtype)
    second = pod(tmp_path, claim, dtype)
    print(f"{dtype}: ready after {first.seconds:.1f} s, then {second.seconds:.1f} s, {len(first.files)} files")
    programs = [name for name in first.files if name.endswith(".so")]
    assert len(programs) > 5
    # Times equal those of the first pod, so nothing was compiled again, and the archive is unchanged.
    (archive,) = claim.glob("compiled-*.tar")
    (tmp_path / "look").mkdir()
    assert compiled.unpack(archive, tmp_path / "look", pytest.fail)
    assert second.files == files(tmp_path / "look")
    assert {name: first.files[name][0] for name in first.files} == {name: one[0] for name, one in second.files.items()}
    assert compiled.REASON not in first.log + second.log
    assert second.tokens == first.tokens
