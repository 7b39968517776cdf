"""What a model's folder says about it, read without torch: config.json and the headers of its weights."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpilot_runtime.errors import PreflightError

_MAX_HEADER = 100 * 2**20  # the safetensors format's own limit on a header


@dataclass(frozen=True)
class ModelConfig:
    """The facts that decide whether a model can be served.

    Attributes:
        architectures: class names, in the model's order of preference.
        layers, heads, kv_heads, head_dim: of the language model; sizes in elements.
        max_model_len: tokens, or None when the model does not say.
        element_bytes: bytes per element of the KV cache in the model's own dtype.
        sliding_layers: layers that attend to a window only.
        latent_attention, encoder_decoder, alibi, sinks: what our formats do not serve.
        custom_code: the folder brings its own model code (`auto_map`).
    """

    architectures: tuple[str, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int | None
    element_bytes: int
    sliding_layers: int
    latent_attention: bool
    encoder_decoder: bool
    alibi: bool
    sinks: bool
    custom_code: bool


def read_config(path: Path) -> ModelConfig:
    """Read `config.json` (the file itself, or the folder that holds it).

    Raises:
        PreflightError: ModelNotFound when there is no such file; ModelUnsupported when it cannot be understood.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        state = "the folder has no config.json" if path.is_dir() else "there is no such folder"
        raise PreflightError(
            "ModelNotFound",
            f"model {str(path)!r}: {state}; give a folder with config.json and weights, and check that its volume "
            "is mounted",
        ) from None
    except (OSError, ValueError) as error:
        raise PreflightError(
            "ModelUnsupported", f"model {str(path)!r}: config.json cannot be read ({error}); download the model again"
        ) from error
    if not isinstance(raw, dict):
        raise PreflightError("ModelUnsupported", f"model {str(path)!r}: config.json holds no object")
    nested = raw.get("text_config")
    text = nested if isinstance(nested, dict) else raw
    try:
        return _facts(raw, text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PreflightError(
            "ModelUnsupported",
            f"model {str(path)!r}: config.json lacks or garbles {error}; kvpilot-serve needs the layers, heads and "
            "sizes of a decoder",
        ) from error


def _facts(raw: dict[str, Any], text: dict[str, Any]) -> ModelConfig:
    def number(*names: str) -> int:
        for name in names:
            if text.get(name) is not None:
                return int(text[name])
        raise KeyError(names[0])

    heads = number("num_attention_heads", "n_head")
    head_dim = text.get("head_dim") or number("hidden_size", "n_embd") // heads
    layers = number("num_hidden_layers", "n_layer")
    kv_heads = text.get("num_key_value_heads") or heads
    limit = text.get("max_position_embeddings") or text.get("n_positions")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype"))
    kind = str(text.get("model_type", ""))
    return ModelConfig(
        architectures=tuple(str(a) for a in raw.get("architectures") or ()),
        layers=layers,
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        max_model_len=int(limit) if limit else None,
        # vLLM serves float32 checkpoints in 16 bits too.
        element_bytes=1 if "float8" in dtype else 2,
        sliding_layers=_sliding_layers(text, layers),
        latent_attention=bool(text.get("kv_lora_rank")),
        encoder_decoder=bool(raw.get("is_encoder_decoder")),
        alibi=kind in ("bloom", "mpt") or bool(text.get("alibi")),
        sinks=kind == "gpt_oss",
        custom_code="auto_map" in raw,
    )


def _sliding_layers(text: dict[str, Any], layers: int) -> int:
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0
    every = text.get("sliding_window_pattern")
    return layers - layers // int(every) if every else layers


def weight_bytes(folder: Path) -> int:
    """Bytes of the model's weights, summed over the tensors that the safetensors headers list.

    Raises:
        PreflightError: ModelNotFound, the folder has no weights, or a file is cut short.
    """
    total, files = 0, sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > _MAX_HEADER:
                    raise ValueError("its header is longer than the format allows")
                header = json.loads(stream.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise PreflightError("ModelNotFound", f"model file {str(file)!r} is damaged ({error}); download it again") from error  # fmt: skip  # noqa: E501
        data = max(ends, default=0)
        if 8 + length + data > size:
            raise PreflightError(
                "ModelNotFound",
                f"model file {str(file)!r} holds {size} bytes of {8 + length + data}; the download was cut short",
            )
        total += data
    if files:
        return total
    total = sum(f.stat().st_size for pattern in ("*.bin", "*.pt", "*.gguf") for f in folder.glob(pattern))
    if not total:
        raise PreflightError(
            "ModelNotFound", f"model {str(folder)!r} holds no weights (*.safetensors); download the model again"
        )
    return total
