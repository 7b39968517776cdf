"""KV-cache dtype that vLLM makes of `auto` for a checkpoint's quantization_config, asked by `support.own_process`.

The question is a list of such objects (null for none), and the answer a list of dtypes; null if vLLM refuses it.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Read objects from stdin and write vLLM's dtypes to stdout."""
    print(json.dumps([resolved(scheme) for scheme in json.load(sys.stdin)]))


def resolved(scheme: dict[str, Any] | None) -> str | None:
    """Return the dtype of one checkpoint, as engine arguments resolve it."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    config = PreTrainedConfig()
    if scheme is not None:
        config.quantization_config = scheme
    try:
        ModelArchConfigConvertorBase(config, config).get_quantization_config()
    except ValueError:
        return None
    return str(resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=config)))


if __name__ == "__main__":
    main()
