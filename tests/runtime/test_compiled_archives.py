"""The archive of compiled code survives concurrent writers, and unpacks no file outside its folder."""

import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_runtime import compiled
from support.trees import files, write

NAMES = st.text(st.sampled_from("ab.é "), min_size=1, max_size=8).filter(lambda name: name.strip(".") and name != " ")
TREES = st.dictionaries(st.tuples(NAMES, NAMES), st.binary(max_size=2000), max_size=6)


@settings(max_examples=25)
@given(tree=TREES)
def test_the_next_pod_finds_the_files_that_one_pod_compiled(tree: dict[tuple[str, str], bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        one, other, archive = Path(name, "one"), Path(name, "other"), Path(name, "claim", "compiled-1.tar")
        for folder in (one, other, archive.parent):
            folder.mkdir()
        wanted = {f"{folder}-/{file}": content for (folder, file), content in tree.items() if not file.endswith(".tmp")}
        write(one, wanted)
        write(one, {"aot/model.17.tmp": b"half", "k/tmp.pid_17_5/kernel.cubin": b"half"})
        write(one, {"vllm/gpu_p2p_access_cache_for_0,1.json": b"of this node"})
        assert compiled.pack(one, archive)
        assert compiled.unpack(archive, other, pytest.fail) is True
        assert files(other) == wanted
        assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_an_archive_keeps_file_modes_and_times(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write(one, {"launcher.so": b"x"})
    other.mkdir()
    (one / "launcher.so").chmod(0o755)
    os.utime(one / "launcher.so", (1000, 1000))
    compiled.pack(one, tmp_path / "a.tar")
    compiled.unpack(tmp_path / "a.tar", other, pytest.fail)
    assert (other / "launcher.so").stat().st_mode & 0o777 == 0o755
    assert (other / "launcher.so").stat().st_mtime == 1000


def test_a_folder_renamed_while_it_is_archived_is_archived_under_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, archive, scandir = tmp_path / "triton", tmp_path / "compiled-1.tar", os.scandir
    write(folder, {"tmp.pid_1_2/kernel": b"x", "other": b"y"})

    def late(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == folder / "tmp.pid_1_2":
            Path(path).rename(folder / "KEY")  # Triton renames the folder once all files of a kernel are written.
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert not compiled.pack(folder, archive)
    assert compiled.pack(folder, archive)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["KEY/kernel", "other"]


def contend(folder: Path, archive: Path, content: bytes, rounds: int) -> None:
    """Write the archive `rounds` times, as a pod would."""
    write(folder, {f"{i}.so": content * 1000 for i in range(20)})
    for _ in range(rounds):
        assert compiled.pack(folder, archive)


def test_with_several_writers_a_reader_finds_one_complete_archive(tmp_path: Path) -> None:
    claim, seen = tmp_path / "claim", set()
    claim.mkdir()
    archive, context = claim / "compiled-1.tar", get_context("fork")
    jobs = [(tmp_path / letter, archive, letter.encode(), 60) for letter in "abc"]
    writers = [context.Process(target=contend, args=job) for job in jobs]
    for one in writers:
        one.start()
    number = 0
    while any(one.is_alive() for one in writers):
        number += 1
        found = tmp_path / f"found{number}"
        found.mkdir()
        if compiled.unpack(archive, found, pytest.fail):
            contents = set(files(found).values())
            assert len(files(found)) == 20
            assert len(contents) == 1
            seen |= contents
    assert seen
    assert [one.exitcode for one in writers] == [0] * 3
    assert [path.name for path in claim.iterdir()] == [archive.name]


@pytest.mark.parametrize("kind", ["climbs", "leads away", "is a link", "is a pipe"])
def test_an_archive_writes_nothing_outside_its_folder(kind: str, tmp_path: Path) -> None:
    folder, archive, outside = tmp_path / "a" / "folder", tmp_path / "compiled-1.tar", tmp_path / "outside"
    folder.mkdir(parents=True)
    outside.mkdir()
    if kind == "is a pipe":
        os.mkfifo(archive)
    elif kind == "is a link":
        write(tmp_path / "whole", {"model": b"x"})
        compiled.pack(tmp_path / "whole", tmp_path / "other.tar")
        archive.symlink_to(tmp_path / "other.tar")
    else:
        with tarfile.open(archive, "w") as tar:
            link = tarfile.TarInfo("way")
            link.type, link.linkname = tarfile.SYMTYPE, str(outside)
            if kind == "leads away":
                tar.addfile(link)
            tar.addfile(tarfile.TarInfo("way/file" if kind == "leads away" else "../file"))
        with archive.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            assert file.write(compiled.digest(file, archive.name, end)) == 32
    said: list[str] = []
    assert compiled.unpack(archive, folder, said.append) is False
    assert len(said) == 1
    assert files(tmp_path / "a") == files(outside) == {}


def test_only_archives_that_no_engine_used_for_long_are_deleted(tmp_path: Path) -> None:
    now, day = time.time(), 24 * 3600
    ages = {"compiled-old.tar": 31, "compiled-used.tar": 29, ".compiled-1.tar.left": 2, ".compiled-1.tar.begun": 0.5,
            "hub": 400, "mine.tar": 400}  # fmt: skip
    for name, days in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - days * day,) * 2)
    compiled.tidy(tmp_path, now)
    assert {path.name for path in tmp_path.iterdir()} == set(ages) - {"compiled-old.tar", ".compiled-1.tar.left"}


def test_using_an_archive_at_start_marks_it_as_used(tmp_path: Path) -> None:
    write(tmp_path / "whole", {"model": b"x"})
    archive = tmp_path / "compiled-1.tar"
    compiled.pack(tmp_path / "whole", archive)
    os.utime(archive, (0, 0))
    (tmp_path / "folder").mkdir()
    compiled.unpack(archive, tmp_path / "folder", pytest.fail)
    compiled.tidy(tmp_path, time.time())
    assert archive.exists()
