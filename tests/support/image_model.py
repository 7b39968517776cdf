"""A small PaliGemma with random weights: 16 tokens of an image, which attend to each other both ways, before a text."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
        # Make answers depend on attention: embeddings are large in Gemma, and are also the output's weights.
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
    """Rename weights as in published checkpoints, which vLLM knows; transformers 5 omits a part."""
    found = load_file(file)
    long = {name: name.replace("vision_tower.", "vision_tower.vision_model.", 1) for name in found}
    save_file({long[name]: weight for name, weight in found.items()}, file, {"format": "pt"})
