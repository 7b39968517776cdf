"""Objects written by the operator's own rules, and what `kubectl kvpilot` prints for them."""

import copy
import functools
import io
import json
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from kvpilot_kubectl import show
from support.model_cluster import ModelCluster
from support.services import manifest

BAD = "int4_per_token_head"
AUTO = {
    "kvCache": {"mode": "Auto", "ladder": ["k8v4", "k4v4"], "pressure": {"sustainedSeconds": 30}},
    "canary": {"steps": []},
}
PLAIN = Console(file=io.StringIO())
COLOURED = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, markup=False)


def fixed(dtype: str) -> dict[str, Any]:
    """Return a service with this dtype."""
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype}, canary={"steps": []})


@functools.cache
def story() -> dict[str, dict[str, Any]]:
    """Return the object at each stage: serving, on trial, promoted after memory pressure, with a denied dtype."""
    seen = {}
    cluster = ModelCluster(manifest(**AUTO), bad=frozenset({BAD}))
    cluster.settle()
    seen["serving"] = here(cluster)
    cluster.demand = 9000
    cluster.until(lambda status: status.canary is not None)
    seen["trial"] = here(cluster)
    cluster.settle()
    seen["promoted"] = here(cluster)
    cluster.demand = 0
    cluster.edit(fixed(BAD))
    cluster.settle()
    seen["denied"] = here(cluster)
    return seen


def here(cluster: ModelCluster) -> dict[str, Any]:
    """Return the object after a round trip through JSON, as from the API server."""
    obj = {**cluster.obj, "status": json.loads(json.dumps(cluster.status, default=str))}
    return copy.deepcopy(obj)


def now() -> datetime:
    """Return the time at which the commands show the object."""
    return datetime(2026, 11, 22, tzinfo=UTC)


def detailed(obj: Any) -> str:
    """Return the output of `status NAME`."""
    return show.rendered(show.detailed(obj, now()), PLAIN)


def why(obj: Any) -> str:
    """Return the output of `why NAME`."""
    return show.rendered(show.timeline(obj, now()), PLAIN)
