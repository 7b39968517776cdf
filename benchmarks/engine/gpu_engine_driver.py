"""Drive vLLM's engine step by step, and measure the seconds of a prefill and of each decode step.

As behind an API server, the engine core runs in its own process and schedules ahead of the GPU. Each call of
`engine.step()` returns the output of one engine step, so the time of a step is the time between two returns.
"""

import itertools
import random
import time
from dataclasses import dataclass
from typing import Any

WARM_STEPS = 8
"""Number of decode steps before the timing.

The first two are already in flight when the last prefill ends. During the others, the GPU's clock rates settle.
"""

FIRST_TOKEN = 100
"""Lowest token ID in a prompt. Special tokens have lower IDs."""


class DriveError(RuntimeError):
    """Error for an engine that breaks an assumption of the measurement. The message says what the engine did."""


def prompt(family: str, tokens: int, vocab: int) -> list[int]:
    """Return `tokens` random token IDs. In the same family, a shorter prompt is a prefix of a longer one."""
    chosen = random.Random(family)  # noqa: S311
    return chosen.choices(range(FIRST_TOKEN, vocab), k=tokens)


@dataclass(frozen=True)
class Filled:
    """Result of a prefill of several prompts: tokens, tokens found in the prefix cache, and duration in seconds."""

    tokens: int
    cached: int
    seconds: float


class Driver:
    """Driver of an `LLMEngine` that sends greedy requests with token IDs."""

    def __init__(self, engine: Any, max_model_len: int) -> None:
        self.engine = engine
        self.max_model_len = max_model_len
        self._ids = itertools.count()

    def prefill(self, prompts: list[list[int]]) -> Filled:
        """Prefill the prompts. Return the time until the last request has its first token."""
        began, cached = time.perf_counter(), 0
        self.submit(prompts, 1)
        while self.engine.has_unfinished_requests():
            cached += sum(output.num_cached_tokens or 0 for output in self.engine.step() if output.finished)
        return Filled(sum(map(len, prompts)), cached, time.perf_counter() - began)

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Return the seconds of each of `steps` consecutive steps in which every sequence got exactly one token.

        The requests are aborted afterwards. Prompts should be in the prefix cache; otherwise they are prefilled first.

        Raises:
            DriveError: the sequences never decoded together for `steps` steps, because the cache cannot hold all of
                them.
        """
        names = self.submit(prompts, self.max_model_len - max(map(len, prompts)))
        marks: list[float] = []
        while len(marks) <= WARM_STEPS + steps:
            if not self.engine.has_unfinished_requests():
                raise DriveError(f"sequences ended before {len(prompts)} of them decoded together for {steps} steps")
            outputs = self.engine.step()
            now = time.perf_counter()
            if len(outputs) == len(prompts) and all(len(o.outputs[0].token_ids) == 1 for o in outputs):
                marks.append(now)
            elif outputs:
                marks.clear()
        self.engine.abort_request(names)
        # Wait for the steps in flight, which must not extend into the next measurement.
        time.sleep(0.2)
        timed = marks[WARM_STEPS:]
        return [later - earlier for earlier, later in itertools.pairwise(timed)]

    def submit(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        """Add a greedy request for each prompt, and return the names of the requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"r{next(self._ids)}" for _ in prompts]
        for name, tokens in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return names
