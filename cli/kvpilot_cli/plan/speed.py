"""Time of a decode step and of a prompt: a model of memory traffic and arithmetic, with efficiencies of an H200.

    step = max(weights read / (bandwidth * WEIGHTS), flops of the new tokens / (peak * FLOPS)) + attention
    attention = cache read / (bandwidth * the dtype's efficiency)
    prompt token = flops / (peak * FLOPS)

A token takes 2 flops for every parameter that it uses, and 4 * heads * head_dim for every token that it attends to, in
every layer. The model leaves out the exchange between GPUs under tensor parallelism, sampling, and the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_cli.plan.capacity import Cache
from kvpilot_cli.plan.facts import Model
from kvpilot_cli.plan.gpus import BF16_TFLOPS
from kvpilot_operator.decide.steps.latency import EFFICIENCY
from kvpilot_operator.gpus import Gpu

WEIGHTS = 0.587
"""Share of peak bandwidth in a step with a nearly empty cache, fixed costs included: 5.33 ms for 32 x 16 tokens with
Llama-3-8B (docs/benchmarks/h200-engine.md)."""

FLOPS = 0.66
"""Share of peak bfloat16: 33,908 tokens/s for 16K prompts with Llama-3-8B (docs/benchmarks/h200-engine.md, `auto`)."""

HEAD_DIM_256 = {"auto": 0.859, "fp8": 0.352, "int8": 0.750, "k8v4": 0.683, "k4v4": 0.617, "k4v2": 0.494, "k2v2": 0.370}
"""Share of peak bandwidth for attention at head_dim 256 (the operator's table has 128): one layer, 32 x 16,384 tokens,
with the store of the new token (docs/benchmarks/h200-decode.md, `layer`; for the 16-bit and fp8 caches FlashAttention
3's `merged`)."""


def attention_efficiency(model: Model, dtype: str) -> float | None:
    """Return the share of peak bandwidth at which this dtype's cache is read, or None without a measurement.

    Smaller batches reach less. Only the H200 was measured.
    """
    if model.latent_dim or model.parameters is None or model.head_dim > 256:
        return None
    same = {"bfloat16": "auto", "float16": "auto", "fp8_e4m3": "fp8"}
    return (HEAD_DIM_256 if model.head_dim > 128 else EFFICIENCY).get(same.get(dtype, dtype))


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine: a model on `gpus` GPUs with one KV dtype.

    Attributes:
        weights: bytes of all weights.
        efficiency: as `attention_efficiency` gives it; `wide_efficiency` applies to the layers with a window or chunks.
    """

    model: Model
    gpu: Gpu
    gpus: int
    cache: Cache
    weights: int
    efficiency: float
    wide_efficiency: float

    def step_seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of a step for `sequences` that hold `context` tokens each on average."""
        bandwidth = self.gpu.bandwidth_gb_s * 1e9
        read = self._weights_read(sequences) / (bandwidth * WEIGHTS)
        compute = sequences * self._flops(context) / (self._peak() * FLOPS)
        full = self.cache.full_token_bytes * context / self.efficiency
        window = self.cache.window_token_bytes * min(context, self.cache.window) / self.wide_efficiency
        return max(read, compute) + sequences * (full + window) / bandwidth

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds of a prompt of `tokens` without a cached prefix."""
        return tokens * self._flops(tokens / 2) / (self._peak() * FLOPS)

    def _weights_read(self, sequences: float) -> float:
        """Return the bytes of weights that one GPU reads in a step. It skips experts that no token was routed to."""
        model = self.model
        total = model.parameters or 0
        looked_up = 0 if model.tied_embeddings else model.vocabulary * model.hidden
        used = total - looked_up
        if model.experts:
            hit = 1 - (1 - model.experts_per_token / model.experts) ** max(1.0, sequences)
            used -= int(model.expert_parameters * (1 - hit))
        return self.weights / self.gpus * used / max(1, total)

    def _flops(self, context: float) -> float:
        """Return the operations for one token that attends to `context` tokens."""
        model = self.model
        idle = model.expert_parameters * (1 - model.experts_per_token / model.experts) if model.experts else 0
        looked_up = 0 if model.tied_embeddings else model.vocabulary * model.hidden
        seen = model.full_layers * context + model.sliding_layers * min(context, model.window)
        return 2 * ((model.parameters or 0) - idle - looked_up) + 4 * model.heads * model.head_dim * seen

    def _peak(self) -> float:
        return BF16_TFLOPS[self.gpu.name] * 1e12 * self.gpus
