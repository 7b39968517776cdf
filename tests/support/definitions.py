"""The service's definition under a group of its own, so that a test may change it on a server that others use, too."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import DEFINITIONS, define, served_paths, undefine
from kvpilot_localcluster.rest import Rest, until
from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.api.names import KIND, PLURAL
from support.crd import load_crd

Json = dict[str, Any]


@dataclass(frozen=True)
class Defined:
    """The definition on one server, and what a user does with services there."""

    plane: ControlPlane
    group: str

    @property
    def rest(self) -> Rest:
        """A client of the administrator's, where the definition is."""
        return self.plane.rest

    @property
    def path(self) -> str:
        """Where the definition is."""
        return f"{DEFINITIONS}/{PLURAL}.{self.group}"

    def services(self, version: str = "v1alpha1") -> str:
        """Where services of the namespace default are, in that version."""
        return f"/apis/{self.group}/{version}/namespaces/default/{PLURAL}"

    def definition(self, change: Callable[[Json], None] = lambda _: None) -> Json:
        """crds/ in this group, changed."""
        made = copy.deepcopy(dict(load_crd()))
        made["metadata"]["name"] = f"{PLURAL}.{self.group}"
        made["spec"]["group"] = self.group
        change(made)
        return made

    def create(self, definition: Json) -> None:
        """Bring the definition, and wait until it is served."""
        define(self.rest, [definition])

    def replace(self, definition: Json) -> None:
        """Change the definition; the server takes a moment to act on it."""
        now = self.rest.get(self.path)["metadata"]["resourceVersion"]
        metadata = {**definition["metadata"], "resourceVersion": now}
        self.rest.call("PUT", self.path, {**definition, "metadata": metadata})
        for path in served_paths(definition):
            until(partial(self.rest.get, path), f"{path} is served")

    def manifest(self, name: str, version: str = "v1alpha1", **spec: Any) -> Json:
        """A service as a user writes it."""
        whole = {"model": {"source": "hf://Qwen/Qwen3-8B"}, "engine": {"image": "kvpilot/runtime:1"}, **spec}
        return {"apiVersion": f"{self.group}/{version}", "kind": KIND, "metadata": {"name": name}, "spec": whole}

    def apply(self, manifest: Json, *flags: str) -> None:
        """kubectl apply."""
        done = subprocess.run(
            [kubectl(), "--kubeconfig", self.plane.kubeconfig, "apply", "--validate=false", "-f", "-", *flags],
            input=json.dumps(manifest), capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def get(self, name: str, version: str = "v1alpha1") -> Json:
        """The service as the server has it."""
        found: Json = self.rest.get(f"{self.services(version)}/{name}")
        return found

    def would_be(self, manifest: Json, version: str = "v1alpha1") -> Json:
        """What the server would make of a new service; nothing is kept."""
        made: Json = self.rest.create(f"{self.services(version)}?dryRun=All", manifest)
        return made

    def remove(self) -> None:
        """Take the definition and all its services away, and wait for it."""
        undefine(self.rest, self.definition())


def with_successor(definition: Json, *, stored: str) -> None:
    """Serve v1beta1 beside v1alpha1, of the same shape, without a webhook; objects are stored in one of them."""
    (alpha,) = definition["spec"]["versions"]
    beta = {**copy.deepcopy(alpha), "name": "v1beta1"}
    definition["spec"]["versions"] = [{**one, "storage": one["name"] == stored} for one in (alpha, beta)]
    definition["spec"]["conversion"] = {"strategy": "None"}
