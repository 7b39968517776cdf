"""Step durations and cache capacity of an engine, from constants fitted to measurements of each dtype.

A step takes

    base + per_sequence * n + per_kv_token * K + per_prefill_token * p + per_prefill_pair * c      seconds.

- n: number of sequences that the step decodes, and K: number of their cached tokens in total.
- p: number of tokens that the step prefills, and c: the sum of the numbers of context tokens before each of them.
- base, per_sequence, ...: the fitted constants (`Costs`).

Decode reads every cached token once, so its time is linear in K. Prefill computes each token once, and its attention to
each token before it.
"""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvpilot_operator.decide.steps.capacity import gain
from kvpilot_operator.state.snapshot import ModelFacts


class BacktestError(ValueError):
    """Error for unusable input. The message names the field, the value and the remedy."""


Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one dtype on one GPU with one model. The module's docstring has the formula."""

    base: Seconds
    per_sequence: Seconds
    per_kv_token: Seconds
    per_prefill_token: Seconds
    per_prefill_pair: Seconds
    kv_tokens: Count
    """Number of tokens that fit in the KV cache of one replica."""
    block_size: Count

    def decode_step(self, sequences: int, kv_tokens: float) -> float:
        """Return the seconds of a step that only decodes."""
        return self.base + self.per_sequence * sequences + self.per_kv_token * kv_tokens

    def prefill(self, tokens: float, context: float) -> float:
        """Return the seconds that a prefill of `tokens` after `context` cached tokens adds to a step."""
        return self.per_prefill_token * tokens + self.per_prefill_pair * tokens * (context + tokens / 2)


class Profile(Struct, frozen=True):
    """Costs of every dtype of one model on one GPU, and the number of GPUs in a replica."""

    name: str
    gpu: str
    """GPU, as the node label nvidia.com/gpu.product names it."""
    model: ModelFacts
    """Facts that the engines report about the model."""
    gpus_per_replica: int
    costs: dict[str, Costs]
    max_num_seqs: int = 1024
    """vLLM's default for a server on an H100 or H200."""
    max_num_batched_tokens: int = 8192
    """vLLM's default for a server on an H100 or H200."""

    def of(self, dtype: str) -> Costs:
        """Return the costs of a dtype.

        An unmeasured dtype gets the costs of the measured dtype with the next fewer bits. Its capacity is scaled by the
        ratio of bits.
        """
        if dtype in self.costs:
            return self.costs[dtype]
        if not self.costs:
            raise BacktestError(f"profile {self.name}: no dtype was measured; give at least `auto`")
        source = max(
            (d for d in self.costs if gain(dtype, d) >= 1),
            key=lambda d: -gain(dtype, d),
            default=None,
        )
        if source is None:
            known = ", ".join(self.costs)
            raise BacktestError(
                f"dtype: {dtype} is missing from the costs of profile {self.name}; use one of {known}, or measure it"
            )
        costs = self.costs[source]
        return replace(costs, kv_tokens=int(costs.kv_tokens * gain(source, dtype)))


def load_profile(path: Path | None = None) -> Profile:
    """Read the built-in profile (Llama-3-8B on one H200), or a JSON file of the same form."""
    source = path if path is not None else files(__package__).joinpath("h200-llama3-8b.json")
    try:
        return parse_profile(source.read_bytes())
    except OSError as error:
        raise BacktestError(f"profile: {source} cannot be read ({error}); give a file like the built-in one") from error


def parse_profile(text: bytes) -> Profile:
    """Return a profile from its JSON text."""
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise BacktestError(f"profile: {error}; give name, gpu, model, gpus_per_replica and costs") from error
