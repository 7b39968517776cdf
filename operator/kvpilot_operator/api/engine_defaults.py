"""The administrator's defaults for engine fields that services do not set (`--engine-defaults`)."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpilot_operator.api.record import Json, camel


class EngineDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=camel, omit_defaults=True):
    """Default values for fields of spec.engine. If a service sets a field, that field's default has no effect."""

    image: Annotated[str, Meta(max_length=512)] = ""
    image_pull_secrets: list[dict[str, str]] = []
    tolerations: list[dict[str, str | int]] = []

    def fill(self, obj: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return a QuantizedLLMService in which these defaults fill the fields that it does not set."""
        pod: dict[str, Any] = msgspec.to_builtins(self)
        image = {"image": pod.pop("image")} if self.image else {}
        if not image and not pod:
            return obj
        engine = {**image, **obj["spec"]["engine"]}
        if pod:
            template = engine.get("podTemplate") or {}
            engine["podTemplate"] = {**template, "spec": {**pod, **(template.get("spec") or {})}}
        return {**obj, "spec": {**obj["spec"], "engine": engine}}


NO_DEFAULTS = EngineDefaults()
