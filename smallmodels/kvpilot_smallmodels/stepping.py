"""Run requests through vLLM's engine step by step, for tests and benchmarks that inspect each step."""

from collections.abc import Callable, Sequence
from typing import Any


def in_steps(
    engine: Any, prompts: Sequence[list[int]], counts: Sequence[int], first: int,
    after: Callable[[int, Sequence[Any]], None] = lambda _steps, _outputs: None,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Answer prompts together with greedy decoding. Return the token ids and the number of cached tokens of each.

    Args:
        engine: vLLM's `LLMEngine`.
        counts: number of tokens of each answer.
        first: id of the first request. Further ids count up from it.
        after: function that is called after each step, with the number of steps so far and the step's outputs. It may
            abort requests.
    """
    from vllm import SamplingParams

    answers: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True), first):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        answers[number], cached[number] = [], 0
    steps = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps += 1
        for output in outputs:
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
            cached[int(output.request_id)] = output.num_cached_tokens or 0
        after(steps, outputs)
    return list(answers.values()), list(cached.values())
