"""The chart's metadata for Artifact Hub is valid and true."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.catalogs import chart_faults, repository_faults


@pytest.fixture
def about(chart: Path) -> Any:
    return yaml.safe_load((chart / "Chart.yaml").read_text())


def test_artifact_hub_finds_no_fault(about: Any) -> None:
    assert chart_faults(about) == []


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("category", "ai", "none of Artifact Hub's"),
        ("operatorCapabilities", "Perpetual Motion", "none of the five"),
        ("prerelease", "perhaps", "neither true nor false"),
        ("operator", True, "no text"),
        ("images", "image: kvpilot", "images is no list"),
        ("images", "- {name: a, image: 'Not An Image'}", "no reference"),
        ("crds", "- {kind: A}", "lacks a field"),
        ("links", "- {name: docs, url: docs/install.md}", "needs a name and a URL"),
    ],
)
def test_metadata_that_artifact_hub_refuses_is_a_fault(about: Any, name: str, value: Any, fault: str) -> None:
    about["annotations"][f"artifacthub.io/{name}"] = value
    assert fault in "\n".join(chart_faults(about))


def test_artifact_hubs_description_of_the_api_matches_the_crd(root: Path, about: Any) -> None:
    (known,) = yaml.safe_load(about["annotations"]["artifacthub.io/crds"])
    definition = yaml.safe_load((root / f"crds/kvpilot.io_{known['name'].partition('.')[0]}.yaml").read_text())
    assert known["name"] == definition["metadata"]["name"]
    assert known["kind"] == definition["spec"]["names"]["kind"]
    assert known["version"] in [version["name"] for version in definition["spec"]["versions"]]


def test_every_page_and_picture_that_the_metadata_name_exists(root: Path, about: Any) -> None:
    links = yaml.safe_load(about["annotations"]["artifacthub.io/links"])
    for url in (about["icon"], *(link["url"] for link in links)):
        assert (root / url.partition("/main/")[2]).is_file(), url


def test_artifact_hub_accepts_the_repositorys_own_file(root: Path) -> None:
    assert repository_faults(yaml.safe_load((root / "charts/artifacthub-repo.yml").read_text())) == []
    assert repository_faults(None)
    assert repository_faults({"repositoryID": "kvpilot"})
    assert repository_faults({"ignore": [{"version": "1"}]})
    assert repository_faults({"owners": [{"name": "somebody"}]})
