"""A plain HTTP client for an API server, for tests that look at its answers as they come."""

from __future__ import annotations

import base64
import ssl
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml


def kube_client(kubeconfig: Path) -> httpx.Client:
    """A client of the current context's server, with the client certificate of its user."""
    config = yaml.safe_load(Path(kubeconfig).read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    with tempfile.TemporaryDirectory() as folder:
        tls = ssl.create_default_context(cafile=_file(cluster, "certificate-authority", Path(folder)))
        certificate = _file(user, "client-certificate", Path(folder))
        tls.load_cert_chain(certificate, _file(user, "client-key", Path(folder)))
    return httpx.Client(base_url=cluster["server"], verify=tls, timeout=30)


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def _file(holder: dict[str, str], key: str, folder: Path) -> str:
    """A path that holds what a kubeconfig gives as a path or as base64 data."""
    if key in holder:
        return holder[key]
    path = folder / key
    path.write_bytes(base64.b64decode(holder[f"{key}-data"]))
    return str(path)
