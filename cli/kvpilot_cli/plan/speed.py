"""Estimated time of a decode step and of a prefill, from memory traffic and arithmetic.

    step = max(weights read / (bandwidth * WEIGHTS), flops of the new tokens / (peak * FLOPS)) + attention
    attention = cache read / (bandwidth * the dtype's `read_share`)
    prompt token = flops / (peak * FLOPS)

A token takes 2 flops for every parameter that it uses. In every layer it also takes 4 * heads * head_dim flops for
every token that it attends to. The efficiencies were measured on an H200. The model leaves out communication between
GPUs, sampling and the scheduler.
"""

from dataclasses import dataclass

from kvpilot_cli.plan.capacity import Cache
from kvpilot_cli.plan.facts import Model
from kvpilot_formats import formats
from kvpilot_operator.gpus import Gpu
from kvpilot_probes.generated import QUESTIONS, SHARES, most_resumes
from kvpilot_probes.loaded import MOST_PROMPTS
from kvpilot_probes.pressure import PRESSURE_SECONDS
from kvpilot_probes.reread import ANSWERS, long_answer
from kvpilot_probes.session import DEFAULT_TOKENS, MAX_RESUMES

WEIGHTS = 0.587
"""Share of peak bandwidth in a decode step with a nearly empty cache, including fixed costs.

A step of Llama-3-8B with 32 sequences of 16 tokens took 5.33 ms (docs/benchmarks/h200-engine.md).
"""

FLOPS = 0.66
"""Share of peak bfloat16 throughput in a prefill.

Llama-3-8B prefilled prompts of 16K tokens at 33,908 tokens/s (docs/benchmarks/h200-engine.md, `auto`).
"""

GATE_PREFILLS, GATE_STEPS, GATE_SEQUENCES = 3, 1000, 2
"""Work of the accuracy gate: prefills of the whole context, decode steps of all answers, and long prompts in flight."""

LOADED = 45e9
"""Bytes a second that a GPU loads from host memory.

An H100 loaded a token of 17,408 bytes in 0.38 us (docs/benchmarks/h200-offload.md, `k4v4`).
"""


def attention_efficiency(model: Model, dtype: str) -> float | None:
    """Return the share of peak bandwidth at which attention reads this dtype's cache; None if not measured.

    The shares were measured on an H200 with large batches. Smaller batches reach less.
    """
    if model.latent_dim or model.parameters is None or model.head_dim > 256:
        return None
    return formats.parse(dtype).read_share(model.head_dim)


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one engine: a model on `gpus` GPUs with one KV-cache dtype.

    Attributes:
        weights: bytes of all weights.
        efficiency, wide_efficiency: results of `attention_efficiency` for full-attention layers, and for layers with a
            window or chunks.
    """

    model: Model
    gpu: Gpu
    gpus: int
    cache: Cache
    weights: int
    efficiency: float
    wide_efficiency: float

    def step_seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of a decode step of `sequences`, each with `context` tokens on average."""
        bandwidth = self.gpu.bandwidth_gb_s * 1e9
        read = self._weights_read(sequences) / (bandwidth * WEIGHTS)
        compute = sequences * self._flops(context) / (self._peak() * FLOPS)
        full = self.cache.full_token_bytes * context / self.efficiency
        window = self.cache.window_token_bytes * min(context, self.cache.window) / self.wide_efficiency
        return max(read, compute) + sequences * (full + window) / bandwidth

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds of the prefill of `tokens` without a cached prefix."""
        return tokens * self._flops(tokens / 2) / (self._peak() * FLOPS)

    def gate_seconds(self, context: float, *, connector: bool = False) -> float:
        """Return the most seconds of the accuracy gate with the default packs, with this longest context in tokens.

        The 16-bit engine and the canary each prefill the context once, and the canary once more to fill its context.
        Both write long answers. With a `connector`, the gate also loads prompts through it.
        """
        long = long_answer(int(context))
        answers = GATE_STEPS * self.step_seconds(GATE_SEQUENCES, context) + 2 * long * self.step_seconds(ANSWERS, long)
        loads = self._connector_seconds(context) if connector else 0.0
        return GATE_PREFILLS * self.prompt_seconds(context) + answers + PRESSURE_SECONDS + loads

    def _connector_seconds(self, context: float) -> float:
        """Return the most seconds of the gate's stage that loads prompts from host memory through a KV connector.

        The engine prefills the context once more, because host memory may lack it. It then loads all long prompts: for
        the first request, for the answer, and each time the answer is resumed.
        """
        lengths = [int(context) // share for share in SHARES]
        tokens = QUESTIONS * sum(length * (2 + most_resumes(length, MAX_RESUMES)) for length in lengths)
        loads = tokens * (self.cache.full_token_bytes + self.cache.window_token_bytes) / LOADED
        steps = MOST_PROMPTS / GATE_SEQUENCES * (DEFAULT_TOKENS + MAX_RESUMES)
        return self.prompt_seconds(context) + loads + steps * self.step_seconds(GATE_SEQUENCES, context)

    def _weights_read(self, sequences: float) -> float:
        """Return the bytes of weights that one GPU reads in a step. Experts that no token uses are not read."""
        model = self.model
        total = model.parameters or 0
        looked_up = 0 if model.tied_embeddings else model.vocabulary * model.hidden
        used = total - looked_up
        if model.experts:
            hit = 1 - (1 - model.experts_per_token / model.experts) ** max(1.0, sequences)
            used -= int(model.expert_parameters * (1 - hit))
        return self.weights / self.gpus * used / max(1, total)

    def _flops(self, context: float) -> float:
        """Return the flops for one token that attends to `context` tokens."""
        model = self.model
        idle = model.expert_parameters * (1 - model.experts_per_token / model.experts) if model.experts else 0
        looked_up = 0 if model.tied_embeddings else model.vocabulary * model.hidden
        seen = model.full_layers * context + model.sliding_layers * min(context, model.window)
        return 2 * ((model.parameters or 0) - idle - looked_up) + 4 * model.heads * model.head_dim * seen

    def _peak(self) -> float:
        return self.gpu.bf16_tflops * 1e12 * self.gpus
