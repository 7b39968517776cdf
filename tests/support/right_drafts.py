"""Replacement for the predictions of a draft model, because random weights predict badly."""

import random
from typing import Any

import torch

from kvpilot_smallmodels.families import VOCABULARY


def right_drafts(expected: list[list[int]]) -> None:
    """Replace the drafts in this process with tokens from `expected`, which are prompts followed by their answers.

    30% of the drafts contain a wrong token. vLLM's own proposer still runs first, and stores its keys and values.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock, before, choose = SpecDecodeBaseProposer.propose, GPUModelRunner.propose_draft_token_ids, random.Random(1)
    runners: list[Any] = []

    def of_runner(self: Any, *args: Any, **kwargs: Any) -> Any:
        runners[:] = [self]
        return before(self, *args, **kwargs)

    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        common, taken_back = kwargs["common_attn_metadata"], kwargs["num_rejected_tokens_gpu"]
        stored = common.seq_lens[: common.num_reqs].clone()
        if taken_back is not None:
            stored -= taken_back
        drafts: torch.Tensor = stock(self, *args, **kwargs)
        for row, request in enumerate(runners[0].input_batch.req_ids):
            prompt = runners[0].requests[request].prompt_token_ids
            whole = next(each for each in expected if each[: len(prompt)] == prompt)
            right = whole[int(stored[row]) + 1 :][: drafts.shape[1]]
            if right and choose.random() < 0.3:
                right[choose.randrange(len(right))] = choose.randrange(3, VOCABULARY)
            drafts[row, : len(right)] = torch.tensor(right, dtype=drafts.dtype)
        return drafts

    SpecDecodeBaseProposer.propose, GPUModelRunner.propose_draft_token_ids = propose, of_runner
