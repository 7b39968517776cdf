"""Load the probe packs of a service: built-in packs, and its own packs from ConfigMaps."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from kvpilot_formats.untrusted import OverBudget, lines
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.budget import CONFIG_MAP_BYTES, CONFIG_MAPS, PACKS_BYTES
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.snapshot import ProbePlan, ServiceKey
from kvpilot_probes import codec, packs
from kvpilot_probes.errors import PackError, PackTooLarge
from kvpilot_probes.packs import CONFIG_MAP_KEY, ProbePrompt
from kvpilot_probes.session import DEFAULT_TOKENS, TOP_K

# Reuse a service's packs for this long, because each of up to 16 ConfigMaps takes a request.
PACKS_SECONDS = 15.0
# If a ConfigMap lacks the key of its pack, the message names at most this many of its other keys.
_OTHER_KEYS = 8


class _ConfigMap(msgspec.Struct):
    # Keep the values as undecoded JSON until one is needed.
    data: dict[str, msgspec.Raw] | None = None


class PlanRead(NamedTuple):
    """Probe plan of a service, and the time and inputs of its last read."""

    read: datetime
    spec: Spec
    about: object
    """Everything that the plan depends on. None if the packs could not be used."""
    plan: ProbePlan


class PackTexts:
    """A reader of packs in ConfigMaps. It reads only a few ConfigMaps at a time for the whole fleet."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turns = asyncio.Semaphore(CONFIG_MAPS)

    async def of(self, key: ServiceKey, spec: Spec) -> dict[str, Mapping[str, str]]:
        """Return the data of the ConfigMaps in `spec.accuracy.probeSets`, by name. Leave out missing ConfigMaps.

        If a ConfigMap lacks `prompts.yaml`, return some of its other keys with empty texts, so that the error can name
        them. Raise PackTooLarge if the packs exceed PACKS_BYTES.
        """
        found: dict[str, Mapping[str, str]] = {}
        left = PACKS_BYTES
        for name in (one.partition("/")[2] for one in spec.accuracy.probe_sets if one.startswith("configmap/")):
            async with self._turns:
                data = await self._data(key, name)
            if data is None:
                continue
            found[name] = data
            left -= sum(len(text.encode()) for text in data.values())
            if left < 0:
                raise PackTooLarge(
                    f"spec.accuracy.probeSets: the packs up to configmap/{name} have more than {PACKS_BYTES} bytes in "
                    "all: shorten their texts or name fewer"
                )
        return found

    async def plan(self, key: ServiceKey, spec: Spec, known: PlanRead | None, now: datetime) -> PlanRead:
        """Return the service's probe plan. Reuse the known plan while it is recent enough."""
        if known is not None and known.spec is spec and 0 <= (now - known.read).total_seconds() < PACKS_SECONDS:
            return known
        try:
            texts = await self.of(key, spec)
        except PackError as error:
            return PlanRead(now, spec, None, ProbePlan(fault=str(error)))
        # Reuse a plan whose inputs are the same, because making one takes about 60 ms.
        digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()
        about = (spec.model, spec.kv_cache.baseline, spec.accuracy.probe_sets, digest)
        plan = known.plan if known is not None and known.about == about else probe_plan(spec, texts)
        return PlanRead(now, spec, about, plan)

    async def _data(self, key: ServiceKey, name: str) -> Mapping[str, str] | None:
        try:
            most = CONFIG_MAP_BYTES
            answer = await self._cluster.find_json(Ref("v1", "ConfigMap", key.namespace, name), most=most)
        except OverBudget as error:
            raise PackTooLarge(
                f"configmap/{name}: the ConfigMap has more than {most} bytes; give the pack a separate one"
            ) from error
        return None if answer is None else texts_of(answer)


def texts_of(answer: bytes) -> dict[str, str]:
    """Return the pack in a ConfigMap's JSON, by its key.

    If the key is missing, return some of the ConfigMap's other keys with empty texts. Raise ClusterError if the JSON is
    not a ConfigMap.
    """
    try:
        data = msgspec.json.decode(answer, type=_ConfigMap).data or {}
        text = data.get(CONFIG_MAP_KEY)
        if text is None:
            return dict.fromkeys(sorted(data)[:_OTHER_KEYS], "")
        return {CONFIG_MAP_KEY: msgspec.json.decode(text, type=str)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClusterError("GET", "a ConfigMap", 200, f"another form: {lines(str(error))[:300]}") from error


def probe_prompts(spec: Spec, config_maps: Mapping[str, Mapping[str, str]]) -> tuple[ProbePrompt, ...]:
    """Return the prompts of `spec.accuracy.probeSets`. Raise PackError if they cannot be used."""
    context = spec.model.max_model_len or 0
    return packs.load(spec.accuracy.probe_sets, config_maps, context)


def probe_plan(spec: Spec, config_maps: Mapping[str, Mapping[str, str]]) -> ProbePlan:
    """Return the packs' identity, a hash of their content, or the fault that makes them unusable."""
    try:
        prompts = probe_prompts(spec, config_maps)
    except PackError as error:
        return ProbePlan(fault=str(error))
    about = (spec.model.source, spec.model.revision or "", spec.kv_cache.baseline)
    return ProbePlan(identity=codec.identity(*about, prompts, DEFAULT_TOKENS, TOP_K))
