"""The captured baselines of a service that the cluster keeps: read one, find the one of an identity."""

from __future__ import annotations

import base64
import binascii
import logging

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.probes import codec
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.errors import MalformedBaseline
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)


async def read(cluster: Cluster, key: ServiceKey, config_map: str) -> Baseline:
    """The baseline in a ConfigMap; raises `MalformedBaseline` where there is none that can be read."""
    kept = await cluster.find("v1", "ConfigMap", key.namespace, config_map)
    try:
        content = base64.b64decode((kept or {})["binaryData"]["baseline"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise MalformedBaseline(f"ConfigMap {config_map} holds no baseline: {type(error).__name__}: {error}") from error
    return codec.decode(content)


async def find(cluster: Cluster, key: ServiceKey, config_map: str, identity: str) -> Baseline | None:
    """The kept baseline of this identity, or None where it is missing, damaged, another's or without its control."""
    try:
        kept = await read(cluster, key, config_map)
    except MalformedBaseline as error:
        log.debug("no baseline to adopt: %s", error, extra={"service": str(key)})
        return None
    return kept if kept.identity == identity and kept.control is not None else None
