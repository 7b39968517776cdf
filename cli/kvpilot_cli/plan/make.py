"""Make a plan: how many sequences fit for every KV-cache dtype and context, and how many replicas a load needs."""

from dataclasses import dataclass, replace

from kvpilot_cli.plan.capacity import Cache, Memory, cache, kv_heads_per_gpu, memory, weight_bytes
from kvpilot_cli.plan.facts import Model, PlanError
from kvpilot_cli.plan.load import Cost, Load, cost
from kvpilot_cli.plan.speed import Speed, attention_efficiency
from kvpilot_formats import dtypes, hardware, models
from kvpilot_operator.gpus import Gpu


def usual_dtypes(latent: bool) -> tuple[str, ...]:
    """Return the default dtypes: `auto`, vLLM's fp8, and those of our dtypes that suit the model's attention."""
    return ("auto", "fp8", *dtypes.own_names(latent))


CONTEXTS = (2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a plan.

    Attributes:
        contexts: context lengths in tokens; empty for the usual ones.
        dtypes: KV-cache dtypes; empty for the usual ones of the model.
        weights, kv: bytes of all GPUs together that replace the estimates.
        recent_tokens: length of the recent window; None for each dtype's default.
        connector: True if the accuracy gate also judges pages that the engine loads through a KV connector.
    """

    model: Model
    gpu: Gpu
    gpus: int = 1
    nodes: int = 1
    contexts: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    utilization: float = 0.9
    weights_dtype: str | None = None
    weights: int | None = None
    kv: int | None = None
    load: Load | None = None
    recent_tokens: int | None = None
    connector: bool = False

    @property
    def all_gpus(self) -> int:
        """Return the GPUs of an engine: `gpus` of each of its nodes."""
        return self.gpus * self.nodes

    @property
    def stage(self) -> Model:
        """Return the model with the layers of one pipeline stage: the largest number that a node may get."""
        sliding = -(-self.model.sliding_layers // self.nodes)
        layers = -(-self.model.full_layers // self.nodes) + sliding
        return self.model if self.nodes == 1 else replace(self.model, layers=layers, sliding_layers=sliding)


@dataclass(frozen=True, slots=True)
class Fit:
    """Number of tokens and of sequences that fit if every sequence has `context_tokens`."""

    context_tokens: int
    capacity_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Row:
    """Result for one dtype. If `veto` has a reason, all other fields are empty.

    Attributes:
      bits_per_element: bits of a cache element, including its metadata.
      bytes_per_token: bytes of one token in the full-attention layers of all GPUs, including copies of KV heads. If all
        layers have a sliding window, the bytes of one token in these.
      window_bytes_per_sequence: bytes of one sequence in layers with a sliding window, once the window is full, on all
        GPUs.
      recent_tokens, recent_bytes_per_sequence: size of one sequence's recent window on all GPUs; 0 without one.
      cost: replicas for the load; None without a load or if the speed is unknown.
      gate_seconds: estimate of the most seconds of a canary's accuracy gate, at the longest context; None if the speed
        is unknown.
    """

    dtype: str
    veto: str | None = None
    bits_per_element: float = 0.0
    bytes_per_token: int = 0
    window_bytes_per_sequence: int = 0
    recent_tokens: int = 0
    recent_bytes_per_sequence: int = 0
    capacities: tuple[Fit, ...] = ()
    notes: tuple[str, ...] = ()
    cost: Cost | None = None
    gate_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for a request. `memory` is None if the request gave the cache's size. There is a row for each dtype."""

    request: Request
    weights_dtype: str
    memory: Memory | None
    kv_bytes: int
    contexts: tuple[int, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def make(request: Request) -> Plan:
    """Return the plan. Raise PlanError if the request cannot be planned."""
    model = request.model
    kv_heads_per_gpu(model, request.gpus)
    if request.nodes > model.layers:
        raise PlanError(f"--nodes {request.nodes}: {model.name} has {model.layers} layers; use at most as many nodes")
    if request.nodes > 1 and request.load is not None:
        raise PlanError(f"--nodes {request.nodes}: the speed of a pipeline was not measured; leave the load out")
    dtype = request.weights_dtype or model.published
    weights = request.weights
    if weights is None and (request.kv is None or request.load is not None):
        weights = weight_bytes(model, dtype)
    split = None
    if request.kv is not None:
        kv = request.kv // request.all_gpus
    else:
        split = memory(request.gpu, request.all_gpus, request.utilization, weights or 0)
        kv = split.kv_bytes
        if not kv:
            raise PlanError(_too_large(request, weights or 0, split))
    contexts = request.contexts or _contexts(model)
    named = request.dtypes or _usual(model)
    rows = tuple(_row(request, dtype, kv, weights or 0, contexts) for dtype in named)
    return Plan(request, dtype, split, kv, contexts, rows, _notes(request, contexts))


def _usual(model: Model) -> tuple[str, ...]:
    """Return the dtypes to plan by default. If the checkpoint defines `auto` as another dtype, add `bfloat16`."""
    auto, *others = usual_dtypes(bool(model.latent_dim))
    return (auto, *(() if model.auto == "auto" else ("bfloat16",)), *others)


def _contexts(model: Model) -> tuple[int, ...]:
    """Return the lengths of CONTEXTS below the model's longest context, followed by the longest context itself.

    No length exceeds the last of CONTEXTS.
    """
    longest = model.max_positions or CONTEXTS[-1]
    return (*(c for c in CONTEXTS[:-1] if c < longest), min(longest, CONTEXTS[-1]))


def _too_large(request: Request, weights: int, split: Memory) -> str:
    need = f"{split.weights_bytes / 1e9:,.1f} GB of weights and {split.engine_bytes / 1e9:,.1f} GB for the engine do not leave room for a KV cache in {split.usable_bytes / 1e9:,.1f} GB"  # noqa: E501
    for gpus in (2, 4, 8, 16, 32):
        try:
            kv_heads_per_gpu(request.model, gpus)
        except PlanError:
            continue
        if gpus > request.gpus and memory(request.gpu, gpus * request.nodes, request.utilization, weights).kv_bytes:
            return f"--gpus {request.gpus}: {need} of each {request.gpu.name}; use --gpus {gpus}, or a smaller --weights-dtype"  # noqa: E501
    return f"--gpu {request.gpu.name}: {need}, however many are used; use a larger GPU, or a smaller --weights-dtype"


def _row(request: Request, dtype: str, kv: int, weights: int, contexts: tuple[int, ...]) -> Row:
    model, gpus, served = request.model, request.gpus, request.model.served(dtype)
    refusal = infeasible(model, served, request.gpu)
    if refusal is not None:
        return Row(dtype, veto=refusal)
    layout = cache(request.stage, dtype, gpus, request.recent_tokens)
    recent = dtypes.parse(served).recent_tokens(request.recent_tokens, model.max_positions)
    speed = _speed(request, dtype, layout, weights)
    return Row(
        dtype,
        bits_per_element=dtypes.parse(served).bits_per_element(model.head_dim),
        bytes_per_token=(layout.full_token_bytes or layout.window_token_bytes) * request.all_gpus,
        window_bytes_per_sequence=layout.window_token_bytes * layout.window * request.all_gpus,
        recent_tokens=recent if layout.recent_blocks else 0,
        recent_bytes_per_sequence=layout.recent_bytes * request.all_gpus,
        capacities=tuple(Fit(c, layout.tokens(kv, c), layout.sequences(kv, c)) for c in contexts),
        notes=dtype_notes(model, served),
        cost=_with_gpus(request, cost(speed, kv, request.load)) if speed and request.load else None,
        gate_seconds=round(speed.gate_seconds(contexts[-1], connector=request.connector)) if speed else None,
    )


def _speed(request: Request, dtype: str, layout: Cache, weights: int) -> Speed | None:
    """Return the speed of an engine on one node, or None if it is not known."""
    served = request.model.served(dtype)
    efficiency, wide = (
        attention_efficiency(request.model, found)
        for found in (served, served if request.model.chunked or dtype == "auto" else "auto")
    )
    if efficiency is None or wide is None or not weights or request.nodes > 1:
        return None
    return Speed(request.model, request.gpu, request.gpus, layout, weights, efficiency, wide)


def _with_gpus(request: Request, found: Cost) -> Cost:
    return found if found.replicas is None else replace(found, gpus=found.replicas * request.all_gpus)


def _notes(request: Request, contexts: tuple[int, ...]) -> tuple[str, ...]:
    model, found = request.model, [request.model.doubt] if request.model.doubt else []
    if model.auto != "auto":
        found.append(
            f"auto is {model.auto} for this checkpoint, as its quantization_config says; bfloat16 is 16 bits by name"
        )
    if model.max_positions is not None and (beyond := [c for c in contexts if c > model.max_positions]):
        found.append(f"contexts of {', '.join(f'{c:,}' for c in beyond)} are longer than the model's {model.max_positions:,}")  # fmt: skip  # noqa: E501
    if request.gpus > model.kv_heads and not model.latent_dim:
        found.append(f"{request.gpus} GPUs share {model.kv_heads} KV heads: each head is kept {request.gpus // model.kv_heads} times")  # fmt: skip  # noqa: E501
    if request.nodes > 1:
        found.append(f"{request.nodes} nodes are a pipeline: each holds {request.stage.layers} of {model.layers} layers at most, and its share of the weights; the most loaded node decides")  # fmt: skip  # noqa: E501
    if model.latent_dim:
        found.append("multi-head latent attention: every GPU keeps the whole cache, and no speed was measured")
    if model.sliding_layers:
        bits = "" if model.chunked else ", in 16 bits"
        found.append(f"{model.sliding_layers} of {model.layers} layers keep at most {model.window:,} tokens of a sequence{bits}")  # fmt: skip  # noqa: E501
    if model.state_layers:
        found.append(f"{model.state_layers} layers keep a state of fixed size for each sequence, which is not counted")
    if model.shared_layers:
        found.append(f"{model.shared_layers} layers read another layer's cache and keep none")
    if model.source == "config.json" and model.weight_bytes is None and request.weights is None and request.kv is None:
        found.append("no weights next to config.json: their size is counted from the shapes of the text model")
    return tuple(found)


def infeasible(model: Model, dtype: str, gpu: Gpu) -> str | None:
    """Return the reason why this dtype cannot serve the model on this GPU, or None."""
    stored, latent = dtypes.parse(dtype), bool(model.latent_dim)
    fault = hardware.gpu_fault(dtype, gpu.compute_capability, model.head_dim, latent)
    if fault is not None:
        return f"{dtype} {fault}; {gpu.name} has {hardware.shown(gpu.compute_capability)}"
    if not stored.ours:
        unserved = hardware.latent_fault(dtype) if latent else None
        return None if unserved is None else f"{dtype} {unserved}"
    refusal = (models.unsupported_latent if stored.latent else models.unsupported)(model.architecture)
    return None if refusal is None else f"{dtype} does not support {refusal}"


def dtype_notes(model: Model, dtype: str) -> tuple[str, ...]:
    """Return notes about a dtype that can serve the model."""
    found = []
    if dtype.startswith("fp8") and model.head_dim >= 256:
        found.append(
            f"{dtype} at head_dim {model.head_dim} decodes slower than 16 bits (docs/benchmarks/h200-decode.md)"
        )
    return tuple(found)
