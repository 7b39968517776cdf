"""Real vLLM with image prompts whose image tokens attend in both directions: answers match the oracle.

PaliGemma represents such models. vLLM imports some of the others only if torchvision is installed. Gemma 3 has layers
with a window, for which vLLM's own CPU backend does not support such images.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpilot_smallmodels.oracle import Oracle, Picture
from support.own_process import ask

_EXACT = {"KVPILOT_CALIBRATION": "off", "KVPILOT_RECENT_TOKENS": "0", "KVPILOT_PREFILL_FROM_PAGES": "1"}


@dataclass
class Question:
    """Request to one engine. Each prompt follows an image, which is made from a seed. `options` are for vLLM's LLM."""

    model: str
    dtype: str
    prompts: list[list[int]]
    images: list[int]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answered:
    """Answers of an engine. `prompts` include the image tokens. `cached` is how many tokens of each were cached."""

    prompts: list[list[int]]
    answers: list[list[int]]
    cached: list[int]


def picture(seed: int) -> Any:
    """Return an image of random pixels."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8))


def serve(question: Question) -> Answered:
    """Send the request to an engine in its own process."""
    return Answered(**ask("test_images_engine", asdict(question), **_EXACT))


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
    # vLLM imports Pixtral's module to compare encoders. The module needs torchvision, but no model here uses it.
    pixtral = ModuleType("vllm.model_executor.models.pixtral")
    pixtral.PixtralHFEncoderInfo = pixtral.PixtralVisionConfig = type("Nothing", (), {})  # type: ignore[attr-defined]
    sys.modules[pixtral.__name__] = pixtral
    print(json.dumps(asdict(answer(Question(**json.load(sys.stdin))))), flush=True)


VOCABULARY = 2048
IMAGE_TOKENS, PIXELS = 16, 56
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<image>", "\n")


def make(folder: Path) -> Path:
    """Make the model and its processor in a folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_words())}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    images = transformers.SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    images.image_seq_length = IMAGE_TOKENS
    text = {"model_type": "gemma", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
            "vocab_size": 2 * VOCABULARY}  # fmt: skip  # the processor adds more than a thousand words
    vision = {"model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": PIXELS, "patch_size": 14, "projection_dim": 256,
              "vision_use_head": False}  # fmt: skip
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=256, hidden_size=256, image_token_index=3,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(20261125)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        # Make answers depend on attention: Gemma's embeddings are large, and serve as output weights, too.
        if "vision" not in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data.mul_(3)
        if "vision" not in name and name.endswith(("o_proj.weight", "down_proj.weight", "projector.linear.weight")):
            weight.data.mul_(300)
    model.to(torch.bfloat16).save_pretrained(folder)
    _rename(folder / "model.safetensors")
    transformers.PaliGemmaProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def _words() -> list[str]:
    return [*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), VOCABULARY))]


def _rename(file: Path) -> None:
    """Rename weights as in published checkpoints, which vLLM knows. transformers 5 omits a part of the names."""
    found = load_file(file)
    long = {name: name.replace("vision_tower.", "vision_tower.vision_model.", 1) for name in found}
    save_file({long[name]: weight for name, weight in found.items()}, file, {"format": "pt"})


pytestmark = pytest.mark.timeout(1800)

IMAGES = 3
SPAN = ((0, IMAGE_TOKENS),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("paligemma"))


@pytest.fixture(scope="module")
def pixels(model: Path) -> list[torch.Tensor]:
    from transformers import AutoProcessor

    process = AutoProcessor.from_pretrained(model).image_processor
    return [process(picture(seed), return_tensors="pt")["pixel_values"] for seed in range(IMAGES)]


@pytest.fixture(scope="module", params=["int8", "k4v4"])
def answered(request: pytest.FixtureRequest, model: Path) -> tuple[str, list[int], Answered]:
    """Return a dtype, the image of each prompt, and answers after chunks, preemptions and prefix hits."""
    rng, images = random.Random(5), [i % IMAGES for i in range(16)]
    prompts = [[2, *(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(4, 90)))] for _ in images]
    options = {"dtype": "float32", "max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 4,
               "kv_cache_memory_bytes": 16 << 20, "num_gpu_blocks_override": 20, "block_size": 16}  # fmt: skip
    return request.param, images, serve(Question(str(model), request.param, prompts, images, 12, options))


def test_answers_equal_the_codecs_with_images_that_attend_both_ways(
    answered: tuple[str, list[int], Answered], model: Path, pixels: list[torch.Tensor]
) -> None:
    dtype, images, found = answered
    assert any(found.cached), "no prompt had its image in the prefix cache"
    assert all(prompt[:IMAGE_TOKENS] == [3] * IMAGE_TOKENS for prompt in found.prompts)
    oracle = Oracle(model, dtype)
    for i, (prompt, answer) in enumerate(zip(found.prompts, found.answers, strict=True)):
        assert oracle.sound(prompt, answer, picture=Picture(pixels[images[i]], SPAN)), i
    # Control: with a causal mask many answers differ.
    others = [
        max(oracle.shortfalls(prompt, answer, picture=Picture(pixels[images[i]], ())))
        for i, (prompt, answer) in enumerate(zip(found.prompts, found.answers, strict=True))
    ]
    assert sum(below > 0.01 for below in others) > len(others) / 4, others
