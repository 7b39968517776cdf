"""The administrator's defaults for engines: what services leave out (`--engine-defaults`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpilot_operator.api.record import Json, camel


class EngineDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=camel, omit_defaults=True):
    """Parts of spec.engine for services that leave them out. A service's own value replaces the whole default."""

    image: Annotated[str, Meta(max_length=512)] = ""
    image_pull_secrets: list[dict[str, str]] = []
    tolerations: list[dict[str, str | int]] = []

    def fill(self, obj: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return a QuantizedLLMService with these defaults."""
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
