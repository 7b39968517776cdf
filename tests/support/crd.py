"""The CRD of the checkout, and the API server's defaults and checks without a server."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvpilot_cli.validate.rules import rule_faults, schema_faults
from kvpilot_cli.validate.schema import apply_defaults as apply_defaults
from kvpilot_operator.state.status import Status

Json = Any

CRD = Path(__file__).parents[2] / "crds" / "kvpilot.io_quantizedllmservices.yaml"


@cache
def load_crd() -> dict[str, Json]:
    """Return the CustomResourceDefinition of the checkout."""
    crd: dict[str, Json] = yaml.load(CRD.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return crd


def root_schema() -> Mapping[str, Json]:
    """Return the OpenAPI schema of the CRD's only served version."""
    schema: Mapping[str, Json] = load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def status_faults(status: Json) -> tuple[str, ...]:
    """Return the first fault of a status by the CRD's schema; () if it is valid."""
    try:
        msgspec.convert(status, Status)
    except msgspec.ValidationError as error:
        return (str(error),)
    return ()


def refused(obj: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (field, message) of every error. CEL rules run only on values that the schema accepts."""
    return schema_faults(obj) or rule_faults(obj)
