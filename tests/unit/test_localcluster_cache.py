"""Folders in which the local cluster keeps its downloads and builds."""

from pathlib import Path

import pytest

from kvpilot_localcluster.cache import cache_folder


@pytest.mark.parametrize(
    ("said", "folder"),
    [("/srv/cache", Path("/srv/cache")), ("~/other", Path.home() / "other"), ("", Path.home() / ".cache/kvpilot")],
)
def test_the_environment_sets_the_cache_folder_unless_it_is_empty(
    said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPILOT_CACHE", said)
    assert cache_folder() == folder
