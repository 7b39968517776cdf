"""Child process of engine_kl.py: run one engine on texts, and record the last norm's output for each token."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions


@dataclass(frozen=True)
class Job:
    """Engine, and the texts that it reads.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        texts: token IDs of each text.
        hit: number of each text's tokens that an earlier request leaves in the prefix cache; 0 for none.
        decoded: True to let the engine answer with each text, one token a step. False to prefill it at once.
        out: file for the answers. `states` of each text are [tokens after the hit, hidden], in the model's dtype.
            `logprobs` are reported by the engine, for each of these tokens but the first.
    """

    engine: dict[str, Any]
    texts: list[list[int]]
    hit: int
    decoded: bool
    out: str


class States:
    """Recorder of the last norm's output (the hidden state) for each token, by request."""

    def __init__(self, llm: Any, decoded: bool) -> None:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner, self.decoded = worker.model_runner, decoded
        self.steps: list[tuple[Any, Any, Any]] = []
        self.found: dict[str, list[tuple[Any, Any, Any]]] = {}
        self.runner.get_model().register_forward_hook(self._seen, with_kwargs=True)
        execute = worker.execute_model

        def stepped(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            out = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                self._sort(scheduled.num_scheduled_tokens)
            return out

        worker.execute_model = stepped

    def _seen(self, _model: Any, _args: Any, inputs: dict[str, Any], states: Any) -> None:
        self.steps.append((inputs["input_ids"].clone(), inputs["positions"].clone(), states.clone()))

    def _sort(self, tokens: dict[str, int]) -> None:
        """Divide the last step's output among the requests of the step."""
        ((ids, positions, states),) = self.steps
        self.steps.clear()
        # vLLM's first model runner keeps the batch of the last step, and its second model runner passes the batch to
        # sampling.
        runner = self.runner
        batch = runner.input_batch if hasattr(runner, "input_batch") else runner.execute_model_state.input_batch
        start = 0
        for request in batch.req_ids:
            end = start + tokens[request]
            self.found.setdefault(request, []).append((ids[start:end], positions[start:end], states[start:end]))
            start = end

    def of(self, request: str, text: list[int], hit: int) -> Any:
        """Return the states [tokens after the hit, hidden] of a request.

        Raises:
            RuntimeError: the engine computed another text, or computed the text in another way than requested.
        """
        import torch

        # In a single process, vLLM appends a suffix to a request's id.
        ((_, parts),) = [item for item in self.found.items() if item[0].split("-")[0] == request]
        ids, positions, states = (torch.cat(x).cpu() for x in zip(*parts, strict=True))
        steps = [len(part[0]) for part in parts][: len(text) - hit]
        ids, positions, states = (x[: len(text) - hit] for x in (ids, positions, states))
        if positions.tolist() != list(range(hit, len(text))) or ids.tolist() != text[hit:]:
            raise RuntimeError(f"request {request} computed {len(ids)} tokens from {int(positions[0])} on, or of "
                               f"another text; asked for were {hit} to {len(text)}")  # fmt: skip
        if self.decoded and max(steps) > 1:
            raise RuntimeError(f"request {request} had a step of {max(steps)} tokens, not of one")
        return states


def main() -> NoReturn:
    """Run the engine of the job file that the command line names, and write its answers."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    import torch
    from vllm import LLM, SamplingParams

    from benchmarks.accuracy.forced import ANSWER, Forced

    llm = LLM(**job.engine, logits_processors=[Forced], enforce_eager=True, enable_prefix_caching=job.hit > 0)
    one: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    if job.hit:
        # Send one prompt after another, because vLLM prefills a prompt in one step if it is alone in the batch.
        for text in job.texts:
            llm.generate({"prompt_token_ids": text[: job.hit]}, SamplingParams(**one), use_tqdm=False)
    states = States(llm, job.decoded)
    if job.decoded:
        prompts = [{"prompt_token_ids": text[: job.hit + 1]} for text in job.texts]
        # The token after the text is not forced. The engine samples it in the step that reads the text's last token.
        decode = [
            SamplingParams(**one | {"max_tokens": len(text) - job.hit}, ignore_eos=True, logprobs=0,
                           extra_args={ANSWER: text[job.hit + 1 :]})
            for text in job.texts
        ]  # fmt: skip
        found = llm.generate(prompts, decode, use_tqdm=False)
    else:
        prefill = SamplingParams(**one, prompt_logprobs=0)
        found = [llm.generate({"prompt_token_ids": text}, prefill, use_tqdm=False)[0] for text in job.texts]
    answers = []
    for request, text in zip(found, job.texts, strict=True):
        entries = request.outputs[0].logprobs[:-1] if job.decoded else request.prompt_logprobs[1:]
        own = [entry[token].logprob for entry, token in zip(entries, text[job.hit + 1 :], strict=True)]
        answers.append({"states": states.of(request.request_id, text, job.hit), "logprobs": torch.tensor(own)})
    facts = {name: str(value) for name, value in versions().items()}  # torch's version is a subclass of str
    torch.save({"answers": answers, "versions": facts}, job.out)
    say(f"{sum(len(x['states']) for x in answers):,} positions")
    # Exit at once, as gpu_engine_measure.py does. The parent kills the remaining processes of vLLM.
    os._exit(0)


if __name__ == "__main__":
    main()
