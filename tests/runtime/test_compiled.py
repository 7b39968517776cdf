"""An engine unpacks compiled code of its own kind from a claim completely or not at all, and starts in any case."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpilot_runtime import compiled
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.vllm_api import compat
from support.trees import files, write

SECONDS = 900
ARGUMENTS = ["/models/m", "--kv-cache-dtype=k4v4", "--host=0.0.0.0", "--port=8000"]


def prepared(home: Path, store: object, **more: str) -> tuple[dict[str, str], list[str] | None, list[str]]:
    """Return the result of `prepare` for a pod with this home folder, and its warnings."""
    said: list[str] = []
    environment = {"HOME": str(home), compiled.VARIABLE: str(store), **more}
    variables, command = compiled.prepare(ARGUMENTS, environment, lambda reason, text: said.append(f"{reason} {text}"))
    return variables, command, said


@pytest.fixture
def new_pod(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that empties the pod's home folder. Its path is the same in every pod."""

    def made() -> Path:
        home = tmp_path / "home"
        if home.exists():
            home.rename(tmp_path / f"old-{time.monotonic_ns()}")
        home.mkdir()
        return home

    return made


def test_an_engine_compiles_into_its_pods_own_folder(tmp_path: Path, new_pod: Callable[[], Path]) -> None:
    home = new_pod()
    variables, command, said = prepared(home, tmp_path / "claim")
    assert compat.kept_graphs("cpu").items() <= variables.items()
    folder = home / ".cache" / "kvpilot" / "compiled"
    assert variables == {"VLLM_CACHE_ROOT": f"{folder}/vllm", "TRITON_CACHE_DIR": f"{folder}/triton",
                         "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "VLLM_USE_AOT_COMPILE": "0"}  # fmt: skip
    assert command is not None
    assert said == []
    assert not (tmp_path / "claim").exists()


def test_a_users_own_cache_folder_is_respected(tmp_path: Path) -> None:
    assert prepared(tmp_path, tmp_path, VLLM_CACHE_ROOT="/mine") == ({}, None, [])
    assert prepared(tmp_path, "") == ({}, None, [])
    variables, _, _ = prepared(tmp_path, tmp_path / "claim", TRITON_CACHE_DIR="/mine", VLLM_USE_AOT_COMPILE="1")
    assert variables.keys() == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"}


def test_a_gpus_engine_loads_graphs_that_were_compiled_ahead_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    variables, _, _ = prepared(tmp_path, tmp_path / "claim")
    assert "VLLM_USE_AOT_COMPILE" not in variables


def start(command: list[str], pause: float = 0.05) -> subprocess.Popen[str]:
    return subprocess.Popen([*command, str(pause)], stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_compiled_code_is_archived_soon_and_again_after_changes(tmp_path: Path, new_pod: Callable[[], Path]) -> None:
    claim, home = tmp_path / "claim", new_pod()
    variables, command, _ = prepared(home, claim)
    assert command is not None
    beside = start(command)
    try:
        write(Path(variables["VLLM_CACHE_ROOT"]), {"model": b"first"})
        until(lambda: len(list(claim.glob("compiled-*.tar"))) == 1)
        write(Path(variables["TRITON_CACHE_DIR"]), {"KEY/kernel.cubin": b"second"})
        (archive,) = claim.glob("compiled-*.tar")

        def both() -> bool:
            with tarfile.open(archive) as tar:
                return len(tar.getnames()) == 2

        until(both)
    finally:
        beside.kill()
        beside.communicate(timeout=SECONDS)
    variables, command, said = prepared(new_pod(), claim)
    assert said == []
    assert files(Path(variables["VLLM_CACHE_ROOT"]).parent) == {
        "vllm/model": b"first",
        "triton/KEY/kernel.cubin": b"second",
    }
    assert command is not None
    assert command[-1] == compiled.state(Path(variables["VLLM_CACHE_ROOT"]).parent) != ""


def test_an_unchanged_archive_is_not_written_again(tmp_path: Path) -> None:
    folder, archive = tmp_path / "folder", tmp_path / "compiled-1.tar"
    write(folder, {"model": b"first"})
    looks = iter([True] * 4 + [False])
    compiled.keep(folder, archive, compiled.state(folder), 0, lambda: next(looks))
    assert not archive.exists()
    looks = iter([True] * 4 + [False])
    compiled.keep(folder, archive, "", 0, lambda: next(looks))
    assert archive.exists()


def test_the_archiving_process_ends_with_its_engine(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
arguments = [str(os.getpid()), {str(tmp_path)!r}, {str(tmp_path / "compiled-1.tar")!r}, "", "60"]
beside = subprocess.Popen([sys.executable, "-m", "kvpilot_runtime.compiled", *arguments], stdin=subprocess.DEVNULL)
os.kill(os.getpid(), 9)
"""
    # A leftover process would hold the pipe open.
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=SECONDS)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "damage", ["cut in a file", "cut between files", "a wrong byte", "nothing in it", "endless", "another's"]
)
def test_a_damaged_or_foreign_archive_causes_one_warning_and_is_replaced(
    damage: str, tmp_path: Path, new_pod: Callable[[], Path]
) -> None:
    claim, compiles = tmp_path / "claim", {"model": b"x" * 100_000, "other": b"y" * 100_000}
    _, command, _ = prepared(new_pod(), claim)
    assert command is not None
    archive = Path(command[-2])
    write(tmp_path / "whole", compiles)
    compiled.pack(tmp_path / "whole", archive)
    whole = archive.read_bytes()
    with tarfile.open(archive) as tar:
        second = tar.getmembers()[1].offset
    damaged = {"cut in a file": whole[:50_000], "cut between files": whole[:second], "nothing in it": b"",
               "a wrong byte": whole[:50_000] + b"z" + whole[50_001:]}  # fmt: skip
    if damage == "another's":
        other = tmp_path / "compiled-2.tar"
        compiled.pack(tmp_path / "whole", other)
        other.replace(archive)
    elif damage == "endless":
        os.truncate(archive, 1 << 40)  # a sparse file takes no space
    else:
        archive.write_bytes(damaged[damage])
    variables, command, said = prepared(new_pod(), claim)
    folder = Path(variables["VLLM_CACHE_ROOT"]).parent
    assert len(said) == 1
    assert str(archive) in said[0]
    assert files(folder) == {}
    assert command is not None
    assert command[-1] == ""
    write(folder, compiles)
    looks = iter([True] * 3 + [False])
    compiled.keep(folder, archive, command[-1], 0, lambda: next(looks))
    variables, _, said = prepared(new_pod(), claim)
    assert said == []
    assert files(folder) == compiles


def identity(arguments: list[str] | None = None, folder: str = "/home") -> str:
    return compiled.identity(arguments or ARGUMENTS, Path(folder))


def test_engines_of_different_kinds_use_different_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [identity(), identity([*ARGUMENTS, "--node-rank=1"]), identity(["/models/m", "--kv-cache-dtype=fp8"]),
             identity(folder="/other")]  # fmt: skip
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(machine, "gpus", lambda name=name: [machine.Gpu(name, 1, 0, (9, 0))])
        found.append(identity())
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 1, 0, (9, 0))] * 2)
    found.append(identity())
    monkeypatch.syspath_prepend(str(tmp_path))
    for record in ("vllm/a.py,sha256=1,5", "vllm/a.py,sha256=2,5"):
        write(
            tmp_path / "vllm-0.32.0.dist-info",
            {"METADATA": b"Name: vllm\nVersion: 0.32.0\n", "RECORD": record.encode()},
        )
        found.append(identity())
    assert len(set(found)) == len(found)


def test_pods_of_a_service_share_an_archive_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 10, 0, (9, 0))])
    here = identity()
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 10, 7, (9, 0))])
    away = ["/models/m", "--kv-cache-dtype=k4v4", "--host=::", "--port=9000", "--master-addr=10.0.0.1"]
    assert identity(away) == here == identity()


def test_a_file_in_place_of_the_folder_causes_one_warning_and_the_engine_compiles(
    tmp_path: Path, new_pod: Callable[[], Path]
) -> None:
    (tmp_path / "claim").write_text("mine")
    variables, command, said = prepared(new_pod(), tmp_path / "claim")
    assert command is not None
    assert said == []
    write(Path(variables["VLLM_CACHE_ROOT"]), {"model": b"x"})
    _, told = start(command).communicate(timeout=SECONDS)
    (line,) = told.splitlines()
    assert "is lost with its pod" in line
    assert (tmp_path / "claim").read_text() == "mine"


def test_a_home_that_cannot_be_written_turns_archives_off(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    variables, command, said = prepared(tmp_path / "home", tmp_path / "claim")
    assert (variables, command) == ({}, None)
    assert len(said) == 1


@pytest.fixture(scope="module")
def mounts() -> Iterator[list[str]]:
    """Yield a command prefix that allows mounts in a separate namespace."""
    begin = ["unshare", "--user", "--map-root-user", "--mount"]
    tried = subprocess.run([*begin, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=SECONDS)
    if tried.returncode:
        pytest.skip(f"no file system may be mounted here: {tried.stderr!r}")
    yield begin


PREPARE = """
import json, sys
from pathlib import Path
from kvpilot_runtime import compiled
said = []
home, claim = sys.argv[1:]
variables, _ = compiled.prepare(
    ["m"], {"HOME": home, compiled.VARIABLE: claim}, lambda reason, text: said.append(text))
print(json.dumps({"said": said, "found": [path.name for path in Path(variables["VLLM_CACHE_ROOT"]).parent.rglob("*")]}))
"""


def test_an_archive_on_a_read_only_claim_is_used(
    tmp_path: Path, new_pod: Callable[[], Path], mounts: list[str]
) -> None:
    home, claim = new_pod(), tmp_path / "claim"
    claim.mkdir()
    _, command = compiled.prepare(["m"], {"HOME": str(home), compiled.VARIABLE: str(claim)}, pytest.fail)
    assert command is not None
    write(tmp_path / "whole", {"model": b"x"})
    compiled.pack(tmp_path / "whole", Path(command[-2]))
    new_pod()
    shell = f'mount --bind "{claim}" "{claim}" && mount -o remount,bind,ro "{claim}" && exec "$@"'
    run = [sys.executable, "-c", PREPARE, str(home), str(claim)]
    done = subprocess.run([*mounts, "sh", "-c", shell, "-", *run], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {"said": [], "found": ["model"]}


def test_a_full_claim_causes_one_warning_and_keeps_no_partial_archive(tmp_path: Path, mounts: list[str]) -> None:
    folder, claim = tmp_path / "folder", tmp_path / "claim"
    claim.mkdir()
    write(folder, {"model": b"x" * 1_000_000})
    run = [str(folder), str(claim / "compiled-1.tar"), "", "0.05"]
    beside = f'"{sys.executable}" -m kvpilot_runtime.compiled $$ "$@"'
    shell = f'mount -t tmpfs -o size=64k none "{claim}" && {beside}; echo "$?"; ls -A "{claim}"'
    done = subprocess.run([*mounts, "sh", "-c", shell, "-", *run], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.split() == ["0"]
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["reason"] == compiled.REASON
    assert "No space left on device" in line
