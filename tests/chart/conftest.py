"""Fixtures of the chart tests: the chart's folder, its output for each file in tests/chart/values, and a cluster."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.images import DEFAULT_TABLE
from kvpilot_localcluster.toolbox.helm import render
from support.faulty_world import cheap_image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def chart() -> Path:
    """Return the chart's folder."""
    return ROOT / "charts" / "kvpilot"


@pytest.fixture(scope="session")
def installable(chart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the chart without its minimum Kubernetes version: the local API server reports 1.20."""
    made = tmp_path_factory.mktemp("charts") / "kvpilot"
    shutil.copytree(chart, made)
    about = made / "Chart.yaml"
    text, replaced = re.subn(r"(?m)^kubeVersion: .*\n", "", about.read_text())
    assert replaced == 1
    about.write_text(text)
    return made


@pytest.fixture(scope="session")
def rendered(chart: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Render the chart with a named value file. Each file is rendered only once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in known:
            values = yaml.safe_load((HERE / "values" / f"{name}.yaml").read_text())
            known[name] = render(chart, values)
        return known[name]

    return of


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Yield a local cluster with one node, four simulated GPUs and no kvpilot objects.

    The operator's image runs as the ServiceAccount of its pod. A cheap engine replaces the runtime image of
    docs/install.md, because tests cannot download that image's model.
    """
    folder = tmp_path_factory.mktemp("chart")
    operator = {
        "match": ["*/kvpilot/operator:*"],
        "entrypoint": [sys.executable, str(HERE / "operator_image.py")],
        "path": [str(Path(sys.executable).parent)],
        "env": {"POD_IP": "$(POD_IP)", "CLUSTER_KUBECONFIG": str(folder / "controlplane" / "admin.kubeconfig")},
    }
    engine = cheap_image(folder.parent / "engine", "registry.example.com/kvpilot/runtime:*")
    table = yaml.safe_load(DEFAULT_TABLE.read_text())
    table["images"][:0] = [operator, engine]
    (folder.parent / "images.yaml").write_text(yaml.safe_dump(table))
    # Cover the resource requests of the pods of every docs page. The cheap engines use far less.
    room = {"nvidia.com/gpu": "4", "cpu": "32", "memory": "128Gi"}
    with LocalCluster(folder, backoff=1.0, table=folder.parent / "images.yaml", resources=room) as running:
        yield running
        running.check()
