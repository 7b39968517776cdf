"""Tools come from the user's PATH, or are downloaded once into the cache, completely or not at all."""

import pytest

from kvpilot_localcluster.errors import BuildFailed
from kvpilot_localcluster.toolbox.fetch import link, tool


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPILOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))


def fetcher(text="fetched"):
    calls = []

    def fetch(folder):
        calls.append(folder)
        (folder / "spanner").write_text(text)
        link(folder / "spanner", folder)

    return fetch, calls


def test_a_tool_in_the_users_path_comes_first(tmp_path):
    own = tmp_path / "path" / "spanner"
    own.parent.mkdir()
    own.touch(mode=0o755)
    fetch, calls = fetcher()
    assert tool("spanner", "1.0", fetch) == own
    assert not calls


def test_a_tool_is_fetched_once_for_each_version():
    fetch, calls = fetcher()
    first = tool("spanner", "1.0", fetch)
    assert first.read_text() == "fetched"
    assert tool("spanner", "1.0", fetch) == first
    assert tool("spanner", "1.1", fetch) != first
    assert len(calls) == 2


def test_an_interrupted_download_starts_again():
    fetch, _ = fetcher("whole")

    def broken(folder):
        (folder / "spanner").write_text("half")
        raise OSError("the connection is lost")

    with pytest.raises(OSError, match="lost"):
        tool("spanner", "1.0", broken)
    assert tool("spanner", "1.0", fetch).read_text() == "whole"


def test_a_package_without_the_program_is_an_error_that_names_it():
    with pytest.raises(BuildFailed, match=r"spanner 1\.0 was fetched, and .*bin/spanner is not there"):
        tool("spanner", "1.0", lambda folder: None)
