"""A real vLLM on a CPU for prompts with images: `python -m support.image_engine`, a `Question` on stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from support.image_model import PIXELS
from support.own_process import ask

_EXACT = {"KVPILOT_CALIBRATION": "off", "KVPILOT_RECENT_TOKENS": "0", "KVPILOT_PREFILL_FROM_PAGES": "1"}


@dataclass
class Question:
    """Request to one engine: prompts, each with the image of a seed before it; `options` go to vLLM's LLM."""

    model: str
    dtype: str
    prompts: list[list[int]]
    images: list[int]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answered:
    """Results: `prompts` with the tokens of the images; `cached` tokens of each from the prefix cache."""

    prompts: list[list[int]]
    answers: list[list[int]]
    cached: list[int]


def picture(seed: int) -> Any:
    """Return an image of random pixels."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8))


def serve(question: Question) -> Answered:
    """Ask an engine in its own process."""
    return Answered(**ask("support.image_engine", asdict(question), **_EXACT))


def answer(question: Question) -> Answered:
    """Run one engine, from its start to its end."""
    from vllm import LLM, SamplingParams

    llm = LLM(question.model, kv_cache_dtype=question.dtype, enforce_eager=True, **question.options)
    params = SamplingParams(temperature=0, max_tokens=question.tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt, "multi_modal_data": {"image": picture(seed)}}
             for prompt, seed in zip(question.prompts, question.images, strict=True)]  # fmt: skip
    found = llm.generate(asked, params, use_tqdm=False)
    return Answered([list(one.prompt_token_ids) for one in found], [list(one.outputs[0].token_ids) for one in found],
                    [one.num_cached_tokens or 0 for one in found])  # fmt: skip


def main() -> None:
    """Serve the request on stdin."""
    # vLLM imports Pixtral's module, which needs torchvision, to compare encoders; no model here is one.
    pixtral = ModuleType("vllm.model_executor.models.pixtral")
    pixtral.PixtralHFEncoderInfo = pixtral.PixtralVisionConfig = type("Nothing", (), {})  # type: ignore[attr-defined]
    sys.modules[pixtral.__name__] = pixtral
    print(json.dumps(asdict(answer(Question(**json.load(sys.stdin))))), flush=True)


if __name__ == "__main__":
    main()
