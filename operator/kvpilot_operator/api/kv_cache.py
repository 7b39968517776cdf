"""The KV cache in a service's spec: its dtype, its tiers below the GPU, and the tokens that it keeps."""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from kvpilot_formats import dtypes
from kvpilot_operator.api.record import SET, Name, Record, Rule, rules

SmallDtype = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "int8", "k8v4", "k4v4", "k4v2",
    "k2v2", "mla8", "mla4",
]  # fmt: skip
"""Dtypes of fewer than 16 bits."""
Dtype = Literal["auto", "bfloat16", "float16", SmallDtype]
SkippedLayer = Annotated[str, Meta(max_length=16, pattern=r"^(sliding_window|0|[1-9][0-9]{0,3})$")]

_MILLIBITS = {name: int(dtypes.parse(name).bits_per_element() * 1000) for name in get_args(SmallDtype)}
_DOWNWARDS = Rule(
    "",
    f"[{_MILLIBITS}].all(bits, [0, 1, 2, 3, 4, 5, 6].all(i, i + 1 >= size(self) || bits[self[i]] > bits[self[i + 1]]))",
    "kvCache.ladder [{self.join(', ')}] has a step that is not smaller than the one before: order the dtypes from more "
    "bits per element to fewer, and name none twice",
)

Ladder = Annotated[tuple[SmallDtype, ...], Meta(min_length=1, max_length=8, extra={"rules": (_DOWNWARDS,)})]


class Pressure(Record, frozen=True):
    """Signs of too little KV memory. One that holds for sustainedSeconds turns the condition MemoryPressured True.
    Takes effect at the next reconcile."""

    high_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    """KV cache use, in percent, from which memory is under pressure."""
    low_percent: Annotated[int, Meta(ge=0, le=99)] = 50
    """KV cache use, in percent, under which pressure has left. Below highPercent."""
    waiting_per_replica: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Requests that wait in a replica's queue from which memory is under pressure. One that is thrown out of the cache
    each minute is such a sign, too."""
    sustained_seconds: Annotated[int, Meta(ge=5, le=86_400)] = 300
    """Seconds for which a sign must hold before anything is done about it."""


@rules(
    Rule(
        ".storageClassName",
        "!(has(self.claimName) && has(self.storageClassName))",
        "kvCache.offload.disk has claimName, a claim that is there, and storageClassName, which is for volumes of the "
        "pods' own: remove one of the two",
    )
)
class OffloadDisk(Record, frozen=True):
    """A tier of disk below host memory: what host memory drops stays in one file of each engine's own, which goes with
    it. Without claimName each pod has a volume of its own (a generic ephemeral volume). Needs vLLM 0.32; an engine
    refuses to start where the volume is full or read-only, and serves on without it if its disk fails later."""

    size_gib: Annotated[int, Meta(ge=1, le=131_072)]
    """Size of each engine's file, at most, in GiB. A pod's own volume asks for a tenth more, for its file system; a
    claim needs it free for each pod."""
    storage_class_name: Name | None = None
    """StorageClass of the pods' own volumes; by default the cluster's. A node's local disks are the fastest."""
    claim_name: Name | None = None
    """PersistentVolumeClaim of this namespace that all pods keep their files on instead. Pods on several nodes need
    ReadWriteMany."""


class Offload(Record, frozen=True):
    """Host memory and disk for prefixes when the GPU needs their blocks; without it they are dropped. A later request
    that begins alike loads them instead of computing them. A smaller dtype holds more tokens; int8, k8v4, k4v4, k4v2
    and k2v2 not for a model with sliding-window layers, mla8 and mla4 not at all. A change starts a new revision."""

    cpu_memory_gib: Annotated[int, Meta(ge=1, le=16_384)]
    """Host memory of each replica for offloaded blocks, in GiB, shared by its GPUs. The pod asks for it beside
    engine.resources: requests.memory and limits.memory grow by it where set, else requests.memory is set to it. The
    engine takes all of it at its start, or refuses to start."""
    disk: OffloadDisk | None = None


@rules(
    Rule(
        "",
        "self.policy == 'All' ? !(has(self.sinkTokens) || has(self.windowTokens) || has(self.budgetTokens)) : "
        "self.policy == 'SinksAndWindow' ? has(self.sinkTokens) && has(self.windowTokens) && !has(self.budgetTokens) : "
        "has(self.budgetTokens)",
        "kvCache.retention: the numbers do not fit the policy: SinksAndWindow needs sinkTokens and windowTokens and "
        "takes no budgetTokens, HeavyHitters needs budgetTokens, All takes none: set policy or the numbers accordingly",
    ),
    Rule(
        ".budgetTokens",
        "!has(self.budgetTokens) || (has(self.sinkTokens) ? self.sinkTokens : 4) + "
        "(has(self.windowTokens) ? self.windowTokens : self.budgetTokens / 2) < self.budgetTokens",
        "kvCache.retention.budgetTokens is not above sinkTokens and windowTokens together, which are 4 and half of the "
        "budget unless they are set: raise it, or lower these",
    ),
)
class Retention(Record, frozen=True):
    """Tokens of a sequence that the KV cache keeps; all of them without it. SinksAndWindow (StreamingLLM) keeps the
    first and the last and frees the pages between, and what was in them is forgotten. HeavyHitters (H2O) also keeps
    those between with the most attention so far, up to a budget. kvpilot never chooses either. Engines refuse it for
    sliding-window layers, beside offload, recentTokens above 0 and speculative decoding, and HeavyHitters for dtype
    auto on a GPU. A change starts a new revision."""

    policy: Literal["All", "SinksAndWindow", "HeavyHitters"]
    """All keeps every token; SinksAndWindow needs sinkTokens and windowTokens, HeavyHitters budgetTokens."""
    sink_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    """The first tokens of a sequence that are kept, in whole pages."""
    window_tokens: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    """The last tokens of a sequence that are kept, in whole pages."""
    budget_tokens: Annotated[int, Meta(ge=16, le=16_777_216)] | None = None
    """For HeavyHitters, all kept tokens of a sequence, in whole pages: sinkTokens (4 if left out), windowTokens (half
    of the budget if left out) and the heaviest pages between. Engines refuse one without room for such a page (512
    tokens with pages of 128, which CPUs have unless --block-size says otherwise)."""


class KVCache(Record, frozen=True):
    """Choice of the KV cache's dtype, and what the cache keeps."""

    mode: Literal["Fixed", "Recommend", "Auto"] = "Recommend"
    """The party that chooses the dtype. Fixed: you, with dtype. Recommend: kvpilot writes its choice to
    status.kvCache.recommendedDtype and status.scaling.recommendedReplicas and changes nothing, except that it leaves a
    dtype whose answers fail their probes, and takes startDtype. Auto: kvpilot moves along the ladder, one canary at a
    time. Takes effect at the next reconcile, within seconds."""
    baseline: Literal["auto", "bfloat16", "float16"] = "auto"
    """The 16-bit dtype that the accuracy of every other one is measured against, and where Auto starts. auto is the
    model's own. Where the checkpoint chooses fewer bits for auto, name bfloat16 or float16, with --dtype of the same
    name in engine.extraArgs. A change captures the baseline anew."""
    ladder: Ladder = ("fp8", "k8v4", "k4v4")
    """The dtypes that Auto may choose and Recommend may name, from the safest to the smallest, after the baseline. A
    step that the GPU or the model does not support is passed over."""
    start_dtype: SmallDtype | None = None
    """A step of the ladder that the service takes as soon as it answers, without waiting for pressure: the dtype that
    it earned elsewhere (kubectl kvpilot export writes it). It is a canary like any other: until its probes have passed,
    the baseline serves, and if they fail, the service goes on as without it. Without effect once the dtype has changed.
    """
    skip_layers: Annotated[tuple[SkippedLayer, ...], Meta(max_length=128, extra=SET)] = ("sliding_window",)
    """Layers whose cache stays in the model's dtype: layer numbers from 0, or sliding_window for all layers with a
    sliding window (they hold little). A change starts a new revision."""
    pressure: Pressure = Pressure()
    min_dwell_seconds: Annotated[int, Meta(ge=0, le=2_592_000)] = 21_600
    """Seconds that a dtype serves before Auto may choose another. A change restarts every replica, so hours are right
    in production. Does not delay a rollback."""
    dtype: Dtype | None = None
    """The dtype of the KV cache; required with mode Fixed, refused otherwise. auto is the model's own 16-bit dtype, or
    what its checkpoint chooses; bfloat16 and float16 need --dtype with the same name in engine.extraArgs; mla8 and mla4
    are for models with multi-head latent attention, int8, k8v4, k4v4, k4v2 and k2v2 for all others. It goes through a
    canary, and one that fails its probes is denied."""
    recent_tokens: Literal[0, 64, 128, 256, 512] | None = None
    """Number of newest tokens of each sequence that are read at 8 bits, with k8v4, k4v4, k4v2 and k2v2; of no effect on
    other dtypes. More is more accurate and takes more memory for each sequence; 0 turns it off. Without it each dtype's
    default: 64 for k8v4, 64 for k4v4, 128 for k4v2, 512 for k2v2. A shorter context cuts a default down to the largest
    value that is not longer. A change starts a new revision of these dtypes, and denied ones may be tried again."""
    offload: Offload | None = None
    retention: Retention | None = None

    @property
    def bounded(self) -> bool:
        """Return True if engines forget a part of long sequences."""
        return self.retention is not None and self.retention.policy != "All"

    def recent_tokens_of(self, dtype: str) -> int | None:
        """Return the recent window for an engine with this dtype; None if none is set, or the dtype has no window."""
        return self.recent_tokens if dtypes.parse(dtype).has_ring else None
