"""Client of the demo's service in any cluster. It sends the same requests as kubectl would."""

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import yaml

from kvpilot_demo.observation import Observation
from kvpilot_operator.api.names import API_VERSION, KIND, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2.yaml"


class DemoError(Exception):
    """Error that stops the demo. The message has the remedy."""


class DemoService(ABC):
    """The demo's service, made from an example's manifest, in one namespace of a cluster.

    Attributes:
        folder: folder for the files of this run.
        example: the service's manifest; by default that of examples/smollm2.yaml.
    """

    def __init__(self, folder: Path, cluster: Cluster, namespace: str, example: Object | None = None) -> None:
        self.folder, self.cluster, self.namespace = folder, cluster, namespace
        self.example: dict[str, Any] = example or yaml.safe_load(EXAMPLE.read_text())
        self.name: str = self.example["metadata"]["name"]
        self.model: str = self.example["spec"]["model"].get("servedName", self.name)

    def manifest(self) -> Object:
        """Return the service's manifest."""
        made = copy.deepcopy(self.example)
        made["metadata"]["namespace"] = self.namespace
        return made

    async def apply_example(self) -> None:
        """Create the service."""
        await self.cluster.create(self.manifest())

    async def patch(self, patch: Object) -> None:
        """Apply a JSON merge patch to the service."""
        await self.cluster.merge(self._ref(API_VERSION, KIND), patch)

    async def service(self) -> Object | None:
        """Return the service, or None if it does not exist."""
        return await self.cluster.find(self._ref(API_VERSION, KIND))

    async def observe(self) -> Observation:
        """Return the service's status, its pods, and the work of its engines."""
        service = await self.service()
        return Observation((service or {}).get("status") or {}, await self.pods(), self.work())

    def work(self) -> int:
        """Return a number that grows while engines start or answer requests; 0 if it cannot be measured."""
        return 0

    async def events(self) -> list[Object]:
        """Return the Events about the service."""
        found = await self.cluster.list("v1", "Event", self.namespace, "")
        return [e for e in found if e["involvedObject"].get("kind") == KIND]

    async def pods(self) -> list[Object]:
        """Return the service's engine pods."""
        return await self.cluster.list("v1", "Pod", self.namespace, f"{SERVICE_LABEL}={self.name}")

    @property
    @abstractmethod
    def logs(self) -> str:
        """Return a text that names the logs to read after a failure."""

    @abstractmethod
    async def url(self) -> str:
        """Return an address at which this machine can reach the Service."""

    async def canary_has_traffic(self) -> bool:
        """Return True if the Service selects the canary's revision, alone or with the stable one."""
        found = await self.cluster.get(self._ref("v1", "Service"))
        revision = (await self.observe()).at("canary", "revision")
        return found["spec"]["selector"].get(REVISION_LABEL) in (None, revision)

    async def cluster_ip(self) -> str:
        """Return the cluster IP of the Service."""
        address: str = (await self.cluster.get(self._ref("v1", "Service")))["spec"]["clusterIP"]
        return address

    def _ref(self, version: str, kind: str) -> Ref:
        return Ref(version, kind, self.namespace, self.name)
