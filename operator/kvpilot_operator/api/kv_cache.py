"""The KV cache in a service's spec: its dtype, its recent window, memory pressure, and offloading to host memory."""

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from kvpilot_formats import dtypes, formats
from kvpilot_operator.api.record import SET, Record, Rule

_MILLIBITS = {name: int(bits * 1000) for name, one in dtypes.DTYPES.items() if (bits := one.bits_per_element()) < 16}
if TYPE_CHECKING:  # mypy accepts no Literal of computed values
    Dtype = str
    SmallDtype = str
    RecentTokens = int
else:
    Dtype, SmallDtype = Literal[dtypes.names()], Literal[tuple(_MILLIBITS)]
    RecentTokens = Literal[formats.RECENT_CHOICES]
SkippedLayer = Annotated[str, Meta(max_length=16, pattern=r"^(sliding_window|0|[1-9][0-9]{0,3})$")]

_DOWNWARDS = Rule(
    "",
    f"[{_MILLIBITS}].all(bits, [0, 1, 2, 3, 4, 5, 6].all(i, i + 1 >= size(self) || bits[self[i]] > bits[self[i + 1]]))",
    "kvCache.ladder [{self.join(', ')}] has a step that is not smaller than the one before: order the dtypes from more "
    "bits per element to fewer, and name none twice",
)

Ladder = Annotated[tuple[SmallDtype, ...], Meta(min_length=1, max_length=8, extra={"rules": (_DOWNWARDS,)})]


class Pressure(Record, frozen=True):
    """Signs of too little KV memory. The condition MemoryPressured becomes True if, for sustainedSeconds, KV use is
    high, requests wait or are preempted, and prompts are not the limit. A change takes effect at the next
    reconcile."""

    high_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    """KV cache use, in percent, at or above which the cache counts as full."""
    low_percent: Annotated[int, Meta(ge=0, le=99)] = 50
    """KV cache use, in percent, below which the pressure has ended. It must be below highPercent."""
    waiting_per_replica: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Number of waiting requests per replica that count as a queue. So does one preemption a minute per replica."""
    sustained_seconds: Annotated[int, Meta(ge=5, le=86_400)] = 300
    """Seconds for which the signs must hold before kvpilot acts on them."""


class Offload(Record, frozen=True):
    """Host memory that keeps prompts' KV blocks after they leave the GPU. A later request with the same prefix loads
    these blocks instead of computing them again. Without this field, they are lost. With a smaller dtype, the same
    memory holds more tokens. Offloading does not work with mla8 and mla4. With kvpilot's other dtypes
    (docs/formats.md), it does not work for a model with sliding-window layers. A change starts a new revision."""

    cpu_memory_gib: Annotated[int, Meta(ge=1, le=16_384)]
    """Host memory of each replica for offloaded blocks, in GiB, shared by its GPUs. The pod requests it in addition to
    engine.resources: requests.memory and limits.memory grow by it if they are set. If neither is set, requests.memory
    is set to it. The engine takes all of it when it starts, or refuses to start."""


_RECENT_TOKENS = Meta(
    description="Number of newest tokens of each sequence that are read at 8 bits, with the rest of their blocks. A "
    "larger number is more accurate and takes more memory for each sequence. 0 turns this off. If not set, each "
    f"dtype's default: {formats.default_windows()}; other dtypes ignore this field. If the model's longest context is "
    "shorter than the default, the largest allowed value within that context applies. A change starts a new revision "
    "of these dtypes, and denied ones may be tried again."
)


class KVCache(Record, frozen=True):
    """Choice of the KV cache's dtype, and host memory for its blocks."""

    mode: Literal["Fixed", "Recommend", "Auto"] = "Recommend"
    """The party that chooses the dtype. Fixed: you choose it, in dtype. Recommend: kvpilot only writes its choice to
    status.kvCache.recommendedDtype and status.scaling.recommendedReplicas. It changes the dtype only to take startDtype
    and to leave a dtype that fails its probes. Auto: kvpilot moves along the ladder, one canary at a time. A change
    takes effect at the next reconcile, within seconds."""
    baseline: Literal["auto", "bfloat16", "float16"] = "auto"
    """The 16-bit dtype with which Auto starts, and with which every other dtype is compared. auto is the model's own
    dtype. If the checkpoint sets fewer than 16 bits for auto, use bfloat16 or float16, and add --dtype with the same
    name to engine.extraArgs. After a change, kvpilot captures the baseline anew."""
    ladder: Ladder = ("fp8", "k8v4", "k4v4")
    """Dtypes below the baseline that Auto may choose and Recommend may name, from the safest to the smallest. kvpilot
    skips a dtype that the GPU or the model does not support."""
    start_dtype: SmallDtype | None = None
    """Dtype of the ladder that kvpilot tries as soon as the service answers, without waiting for memory pressure. Use
    this field for a dtype that passed its probes in another cluster; kubectl kvpilot export writes the field. The dtype
    goes through a canary: the baseline serves until the probes have passed, and continues if they fail. The field has
    no effect once the dtype has changed. If not set, kvpilot waits for memory pressure."""
    skip_layers: Annotated[tuple[SkippedLayer, ...], Meta(max_length=128, extra=SET)] = ("sliding_window",)
    """Layers whose cache stays in the model's dtype: layer numbers, counted from 0, or sliding_window for all layers
    with a sliding window, whose caches are small. A change starts a new revision."""
    pressure: Pressure = Pressure()
    min_dwell_seconds: Annotated[int, Meta(ge=0, le=2_592_000)] = 21_600
    """Seconds for which a dtype serves before Auto may choose another. Use hours in production, because a change of
    dtype restarts every replica. A rollback does not wait for this."""
    dtype: Dtype | None = None
    """The dtype of the KV cache; required with mode Fixed, refused otherwise. auto is the model's own 16-bit dtype, or
    the one that its checkpoint sets. bfloat16 and float16 need --dtype with the same name in engine.extraArgs. mla8 and
    mla4 are for models with multi-head latent attention; kvpilot's other dtypes (docs/formats.md) are for all other
    models. A new dtype goes through a canary. If it fails its probes, it is denied."""
    recent_tokens: Annotated[RecentTokens | None, _RECENT_TOKENS] = None
    offload: Offload | None = None

    def recent_tokens_of(self, dtype: str) -> int | None:
        """Return the recent window for an engine with this dtype; None if none is set, or the dtype has no window."""
        return self.recent_tokens if dtypes.parse(dtype).has_residuals else None
