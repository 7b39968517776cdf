"""All kernels compile to machine code with the installed Triton, without a GPU.

A program that spills registers is slow. A program that asks for too much shared memory fails at the first request.
`tuning` chooses neither on any of these GPUs.

Each program is compiled once on a machine, until its kernel changes: Triton's key of a program covers everything that
its kernel reads. The resources are read from the machine code each time.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_keys
import pytest

import kvpilot_formats
import kvpilot_kernels
from kvpilot_formats import formats
from kvpilot_localcluster.cache import cache_folder

UNUSED = 14 * 24 * 3600
"""Age in seconds at which a compiled program is removed."""


@pytest.fixture(scope="session")
def compiled() -> Iterator[Path]:
    """Triton's cache of all tests of this machine. Remove old programs from it while no other test run uses it."""
    cache = cache_folder() / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_old(cache)
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield cache


def remove_old(cache: Path) -> None:
    """Remove programs that were compiled long ago, because Triton itself never removes one."""
    for one in cache.iterdir():
        if one.is_dir() and one.stat().st_mtime < time.time() - UNUSED:
            shutil.rmtree(one)


ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvpilot_kernels.__file__).parent
RESOURCES = ("-m", "benchmarks.kernels.kernel_resources")
CAPABILITIES = (80, 86, 89, 90, 100, 120)
FULL = (86, 90)
"""Compute capabilities for which `--few` compiles all kernels. For others it skips store and gather, which are far
below any limit."""


def python(*arguments: str, cache: Path, timeout: int, package: Path = PACKAGE) -> subprocess.CompletedProcess[str]:
    """Run a process that compiles the package's kernels. This process can only interpret them."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1", "PYTHONPATH": str(package.parent)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def served(compiled: Path) -> subprocess.CompletedProcess[str]:
    """Compile some programs of each kernel, and for every GPU those that a limit may stop."""
    return python(*RESOURCES, "--few", "--processes", "1", cache=compiled, timeout=1800)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_absent_gpus_and_spill_no_more_than_recorded(
    capability: int, served: subprocess.CompletedProcess[str]
) -> None:
    lines = [line.split() for line in served.stdout.splitlines() if line.startswith(f"{capability} ")]
    wanted = {("decode_kernel", dtype) for dtype in formats.own_names()}
    if capability in FULL:
        wanted |= {("store_kernel", dtype) for dtype in ("int8", "k4v4", "k2v2")}
        wanted |= {("gather_kernel", dtype) for dtype in ("int8", "k4v4")}
    wanted |= {(f"latent_{name}_kernel", "mla4") for name in ("store", "decode", "gather")}
    plain = ("plan", "reduce", "prefill", "latent_prepare", "latent_reduce")
    wanted |= {(f"{name}_kernel", "any") for name in plain}
    assert {(line[1], line[2]) for line in lines} == wanted, served.stderr[-3000:]
    assert all(line[-1] in ("fits", "(known)") for line in lines), served.stdout


@pytest.mark.long
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_variant_of_decode_fits_and_spills_no_more_than_recorded(capability: int, tmp_path: Path) -> None:
    done = python(*RESOURCES, "--capabilities", str(capability), cache=tmp_path, timeout=4500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"head_dim {max(formats.HEAD_DIMS)}" in done.stdout


def test_a_program_that_would_spill_is_reported_and_not_chosen(compiled: Path) -> None:
    code = """
from benchmarks.kernels.kernel_resources import compile_for
from dataclasses import replace
from benchmarks.kernels.kernel_variants import gather_variant
own = gather_variant("k4v4", 96)
for variant in (replace(own, registers=32), own):
    print(compile_for(variant, 80).misfit(80))
"""
    done = python("-c", code, cache=compiled, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    few, enough = done.stdout.splitlines()
    assert few.startswith("spills ")
    assert enough == ""


def test_variants_that_need_too_much_shared_memory_are_reported(tmp_path: Path) -> None:
    code = """
from benchmarks.kernels.kernel_resources import SHARED_KIB, Resources
for capability in SHARED_KIB:
    print(Resources(255, 100 * 1024, 0).misfit(capability))
"""
    done = python("-c", code, cache=tmp_path, timeout=300)
    told = dict(zip(CAPABILITIES, done.stdout.splitlines(), strict=True))
    assert {capability for capability, misfit in told.items() if "of 99 KiB" in misfit} == {86, 89, 120}
    assert not any(told[capability] for capability in (80, 90, 100))


def test_a_changed_constant_of_another_module_recompiles_the_kernel(tmp_path: Path) -> None:
    formats_package = Path(kvpilot_formats.__file__).parent
    changed = tmp_path / formats_package.name
    shutil.copytree(formats_package, changed)
    layouts = changed / "layouts.py"
    layouts.write_text(layouts.read_text() + "\nZERO_STEPS += 1\n")
    code = """
import hashlib
from benchmarks.kernels.kernel_resources import Path, compile_for, triton
from benchmarks.kernels.kernel_variants import decode_variant
def tell(cache_hit, metadata_group, **_):
    print(cache_hit, hashlib.sha256(Path(metadata_group["decode_kernel.cubin"]).read_bytes()).hexdigest())
triton.knobs.compilation.listener = tell
for _ in range(2):
    compile_for(decode_variant("int8", 64, 4, 0, 80), 80)
"""
    # Both versions use one cache, like pods of two kvpilot versions that share a volume claim.
    cache = tmp_path / "cache"
    found = [python("-c", code, cache=cache, timeout=900, package=package) for package in (formats_package, changed)]
    programs = [done.stdout.split() for done in found]
    assert [told[::2] for told in programs] == [["False", "True"]] * 2, [done.stderr[-3000:] for done in found]
    assert all(first == second for _, first, _, second in programs)
    assert programs[0][1] != programs[1][1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of kernel_keys.py on the package."""
    done = python(kernel_keys.__file__, cache=tmp_path_factory.mktemp("keys"), timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def test_the_cache_key_of_a_kernel_includes_every_value_that_it_reads(told: dict[str, Any]) -> None:
    assert told["functions"] > 90
    assert told["unseen"] == {}


@pytest.mark.parametrize(
    ("constant", "readers"),
    [
        ("ZERO_STEPS", {"layout.unpack.zero_unit", "decode.kernel.decode_kernel", "store.kernel.store_kernel",
                        "prefill.gather.gather_kernel", "mla.decode.latent_decode_kernel"}),
        ("ZERO_BITS", {"layout.unpack.scales", "decode.kernel.decode_kernel", "store.kernel.store_kernel",
                       "prefill.gather.gather_kernel"}),
        ("RANK", {"mla.operands.planes", "mla.decode.latent_decode_kernel"}),
    ],
)  # fmt: skip
def test_a_changed_constant_changes_the_cache_key_of_every_kernel_that_reads_the_constant(
    constant: str, readers: set[str], told: dict[str, Any]
) -> None:
    assert told["same"]
    assert readers <= set(told["changed"][constant])
    assert "decode.schedule.plan_kernel" not in told["changed"][constant]


def test_programs_compiled_long_ago_are_removed_from_the_cache(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_text("compiled")
    past = time.time() - UNUSED - 60
    os.utime(tmp_path / "old", (past, past))
    remove_old(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["new"]
