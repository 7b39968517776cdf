"""Create hostile services for hostile.py, and act as their owners."""

import asyncio
import itertools
from collections import Counter
from typing import Any

from benchmarks.operator.fleet_kubelets import KINDS
from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import ClusterError

GOOD_REPLICAS, HOSTILE_REPLICAS = 2, 4
HOSTILE = KINDS[1:]
# The operator shares its reconciles among namespaces, so use as many good namespaces as hostile ones.
GOOD = tuple(f"team-good-{i}" for i in range(len(HOSTILE)))
MAPS = 16
BOMB = "prompts:\n- &a {k: v}\n" + "".join(f"- &a{i} {{<<: [{', '.join(['*a'] * 20)}]}}\n" for i in range(12))
CHARACTER = "\N{GRINNING FACE}"


def service(namespace: str, name: str, replicas: int, **spec: Any) -> Object:
    """Return a service in mode Fixed, whose engines answer probes."""
    base = {
        "replicas": replicas,
        "model": {"source": "file:///models/tiny", "servedName": "m", "maxModelLen": 4096},
        "engine": {"image": "ghcr.io/kvpilot/runtime:1"},
        "kvCache": {"mode": "Fixed", "dtype": "auto"},
        "scaling": {"mode": "External", "minReplicas": 0, "maxReplicas": 8},
        "accuracy": {"probeSets": ["builtin/general"]},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {**base, **spec},
    }


class HostileServices:
    """Hostile services of one cluster, each kind in its own namespace.

    Attributes:
        refused: number of objects and edits that the API server refused, by kind.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.refused: Counter[str] = Counter()
        self._cluster = cluster
        self._keys: list[tuple[str, str]] = []

    async def create(self, number: int) -> list[tuple[str, str]]:
        """Create services of each kind in turn. Return the keys of those that get replicas."""
        self._keys = [
            (f"team-{kind}", f"{kind}-{i:03d}") for i in range(number) for kind in [HOSTILE[i % len(HOSTILE)]]
        ]
        for key in self._keys:
            kind = key[0].removeprefix("team-")
            spec: dict[str, Any] = {}
            if kind in ("maps", "yaml"):
                names = [f"{key[1]}-{i}" for i in range(MAPS)]
                spec["accuracy"] = {"probeSets": [f"configmap/{name}" for name in names]}
                for name in names:
                    await self._try(self._config_map(key[0], name, kind))
            if kind == "route":
                spec["canary"] = {"routeRef": {"name": "../" * 6 + "api/v1/configmaps"}}
            if not await self._try(self._cluster.create(service(*key, HOSTILE_REPLICAS, **spec))):
                self.refused[kind] += 1
        # Leave out services with a path such as `..` in a name: the API server or the operator refuses them.
        return [key for key in self._keys if key[0] != "team-route"]

    async def _config_map(self, namespace: str, name: str, kind: str) -> None:
        data = {"prompts.yaml": BOMB} if kind == "yaml" else {"prompts.yaml": "prompts: []", "more": "x" * 1_000_000}
        about = {"namespace": namespace, "name": name}
        await self._cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data})

    async def _try(self, doing: Any) -> bool:
        try:
            await doing
        except ClusterError as error:
            if error.status not in (400, 413, 422, 500):
                raise
            return False
        return True

    async def provoke(self) -> None:
        """Act as the owners forever: write megabytes into specs, and start canaries of engines that hang or lie."""
        canaries = [key for key in self._keys if key[0] in ("team-objects", "team-probe-hang")]
        for key in canaries:
            await self._try(self._cluster.merge(Ref(API_VERSION, KIND, *key), {"spec": {"kvCache": {"dtype": "k8v4"}}}))
        specs = [key for key in self._keys if key[0] == "team-spec"]
        for number in itertools.count():
            # Do not edit faster. Otherwise the benchmark would measure the API server's own work with megabytes.
            await asyncio.sleep(1)
            if specs:
                env = [{"name": f"V{i}", "value": f"{number:04d}" + CHARACTER * 4000} for i in range(64)]
                key = specs[number % len(specs)]
                if not await self._try(
                    self._cluster.merge(Ref(API_VERSION, KIND, *key), {"spec": {"engine": {"env": env}}})
                ):
                    self.refused["spec"] += 1
