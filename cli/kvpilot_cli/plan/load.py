"""Compute the number of GPUs for a load, by Little's law and the estimated step durations of `speed`.

Requests arrive at a rate r on each replica, with P prompt and G generated tokens. Prompts take the share rho = r *
prompt_seconds(P) of the time, so a token takes step / (1 - rho) on average. By Little's law, N = r * G * step / (1 -
rho) sequences decode at once. A step gets longer with N, so iteration from 0 finds the least fixed point. A sequence
takes P + G/2 tokens of the cache on average while it decodes, and P during its prefill.

The plan takes the fewest replicas that meet three limits: the requested time per token, a KV cache usage of at most
FILL, and vLLM's limit of running sequences. All of these are averages, so FILL leaves room for bursts.
"""

from dataclasses import dataclass

from kvpilot_cli.plan.speed import Speed
from kvpilot_operator.gpus import Gpu

FILL = 0.85
"""Largest mean usage of the KV cache. The pilot acts above the same value (`kvCache.pressure.highPercent`)."""

MOST_REPLICAS = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """Load of all replicas together. `token_seconds` is the largest allowed mean time per token."""

    requests_per_second: float
    prompt_tokens: int
    generated_tokens: int
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Operating:
    """State of one replica under its share of a load.

    Attributes:
        sequences: mean number of running sequences.
        token_seconds: mean seconds between two tokens of a sequence.
        fill: usage of the KV cache, from 0 to 1.
        prompt_share: share of the time that prefill takes.
        binds: limit that is exceeded, or None: "prompts" (prefill alone takes all the time), "time per token",
            "sequences", or "KV memory".
    """

    sequences: float
    token_seconds: float
    fill: float
    prompt_share: float
    binds: str | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Number of replicas for a load, and the state of each.

    Attributes:
        replicas: number of replicas, or None if no number is enough.
        limit: limit that one replica fewer would exceed; None for one replica. Without `replicas`, the limit that no
            number can meet.
        gpus: number of GPUs of all replicas, or None without `replicas`.
    """

    replicas: int | None
    operating: Operating
    limit: str | None
    gpus: int | None = None


def most_sequences(gpu: Gpu) -> int:
    """Return vLLM's default of max_num_seqs on this GPU (vLLM 0.32, engine/arg_utils.py)."""
    return 1024 if gpu.memory_mib >= 70 * 1024 and "A100" not in gpu.name else 256


def operate(speed: Speed, kv_bytes: int, load: Load, rate: float) -> Operating:
    """Return the state of a replica that gets `rate` requests a second."""
    blocks = max(1, speed.cache.blocks(kv_bytes))
    context = load.prompt_tokens + load.generated_tokens / 2
    share = rate * speed.prompt_seconds(load.prompt_tokens)
    if share >= 1:
        return Operating(0.0, float("inf"), 1.0, share, "prompts")
    most = most_sequences(speed.gpu)
    decoding, token = 0.0, 0.0
    while True:
        token = speed.step_seconds(max(1.0, decoding), context) / (1 - share)
        wanted = rate * load.generated_tokens * token
        if wanted - decoding < 1e-6 * max(1.0, wanted) or token > load.token_seconds or wanted > 2 * most:
            decoding = max(decoding, wanted)
            break
        decoding = wanted
    held = decoding * speed.cache.held(round(context)) + share * speed.cache.held(load.prompt_tokens)
    fill = held / blocks
    binds = None
    if token > load.token_seconds:
        binds = "time per token"
    elif decoding + share > most:
        binds = "sequences"
    elif fill > FILL:
        binds = "KV memory"
    return Operating(decoding + share, token, fill, share, binds)


def cost(speed: Speed, kv_bytes: int, load: Load) -> Cost:
    """Return the smallest number of replicas that meets all limits."""
    longest = load.prompt_tokens + load.generated_tokens
    alone = operate(speed, kv_bytes, load, load.requests_per_second / MOST_REPLICAS)
    if alone.binds is not None or speed.cache.sequences(kv_bytes, longest) < 1:
        return Cost(None, alone, alone.binds or "KV memory")
    low, high = 0, 1
    while operate(speed, kv_bytes, load, load.requests_per_second / high).binds is not None:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if operate(speed, kv_bytes, load, load.requests_per_second / middle).binds is None:
            high = middle
        else:
            low = middle
    limit = operate(speed, kv_bytes, load, load.requests_per_second / low).binds if low else None
    return Cost(high, operate(speed, kv_bytes, load, load.requests_per_second / high), limit)
