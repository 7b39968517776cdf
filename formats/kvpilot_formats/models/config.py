"""Reader of config.json. A missing field gets its default from the config class in transformers."""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

LARGEST_FILE = 16 * 2**20
"""Largest size of a file in bytes. The largest published config.json has about 0.4 MB."""

LARGEST_SIZE = 2**40
MOST_LAYERS = 10_000

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# Other names of fields, which are tried after the names that the config class lists.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "seq_length"),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "num_attention_groups"),
    "vocab_size": ("padded_vocab_size",),
}


class ConfigError(ValueError):
    """Error for a config.json that is unreadable or does not exist (`missing`). It names field, value and remedy."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def load(file: Path) -> dict[str, Any]:
    """Return the object in a config.json.

    If it has no quantization_config, take the content of hf_quant_config.json in the same folder instead.
    """
    raw, beside = _object(file), file.with_name("hf_quant_config.json")
    if raw.get("quantization_config") is None and beside.is_file():
        raw["quantization_config"] = _object(beside)
    return raw


def _object(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        if size > LARGEST_FILE:
            raise ConfigError(f"{file.name} has {size:,} bytes, and no model's has more than {LARGEST_FILE:,}; download it again")  # fmt: skip  # noqa: E501
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"the folder has no {file.name}", missing=True) from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file.name} cannot be read ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file.name} does not contain a JSON object; download it again")
    return raw


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return data of transformers' config classes by model_type: defaults, field names, text part, kinds of layers."""
    text = (resources.files("kvpilot_formats.models") / "defaults.json").read_text()
    table: dict[str, Any] = json.loads(text)["models"]
    return table


def known(model_type: str) -> bool:
    """Return True if transformers has a config class for this model_type."""
    return model_type in defaults()


_TYPES = {
    "IQuestLoopCoderForCausalLM": "iquestloopcoder",
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
}
"""Right model_type by architecture, for published configs whose model_type is missing or wrong."""


class Fields:
    """Fields of a config's text part. A missing field has the default of its config class. A null field is None."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.text: Mapping[str, Any] = raw
        self.model_type = text_of(raw.get("model_type")) or _type_of(raw)
        for _ in range(3):
            row = defaults().get(self.model_type, {})
            part, kind = row.get("text", (None, ""))
            names = (part, *_TEXT_PARTS) if part else _TEXT_PARTS
            inner = next((self.text[n] for n in names if isinstance(self.text.get(n), Mapping)), None)
            if inner is None:
                # Older configs of multimodal models have the text part's fields at the top level.
                self.model_type = kind or self.model_type
                break
            self.text, self.model_type = inner, text_of(inner.get("model_type")) or kind or self.model_type
        row = defaults().get(self.model_type, {})
        self.built_as = _type_of(raw) or self.model_type
        self.known = bool(row)
        self.kinds: Mapping[str, Any] = row.get("kinds", {})
        self._defaults: Mapping[str, Any] = row.get("defaults", {})
        self._names: Mapping[str, str] = row.get("names", {})

    def get(self, field: str) -> Any:
        """Return the field's value, its class's default, or None."""
        for name in (field, self._names.get(field), *_SPELLINGS.get(field, ())):
            if name is not None and name in self.text:
                return self.text[name]
        return self._defaults.get(field)

    def anywhere(self, field: str) -> Any:
        """Return a field of the text part, else of the whole model, else the default of its config class."""
        value = self.text.get(field)
        return value if value is not None else self.raw.get(field, self._defaults.get(field))

    def size(self, *fields: str, most: int = LARGEST_SIZE) -> int:
        """Return the first of these fields that is present and not null. Return 0 if there is none."""
        for field in fields:
            value = self.get(field)
            if value is not None:
                return self.checked(field, value, most)
        return 0

    def needed(self, field: str, most: int = LARGEST_SIZE) -> int:
        """Return the field as a size; raise ConfigError if it is missing or 0."""
        value = self.size(field, most=most)
        if not value:
            raise ConfigError(f"config.json has no {field}; download it again, or give the config.json of a decoder")
        return value

    @staticmethod
    def checked(field: str, value: Any, most: int = LARGEST_SIZE) -> int:
        """Return a size, or the largest of a list of sizes. Raise ConfigError for other values, or above `most`."""
        values = value if isinstance(value, list) and value else [value]
        for one in values:
            if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one <= most:
                raise ConfigError(f"{field} in config.json is {shown(value)}, which is not a size; correct it or download the file again")  # fmt: skip  # noqa: E501
        return int(max(values))

    def listed(self, field: str) -> list[Any] | None:
        """Return the field's list, or None if it is missing, null or empty."""
        value = self.get(field)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{field} in config.json is {shown(value)}, but must be a list; correct it or download the file again")  # fmt: skip  # noqa: E501
        return value or None


def shown(value: Any) -> str:
    """Return a value's `repr` for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _type_of(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return _TYPES.get(text_of(named[0]), "") if isinstance(named, list) and named else ""


def text_of(value: Any) -> str:
    """Return the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""
