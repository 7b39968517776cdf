"""Calibrate an engine that has no calibration file, before it captures CUDA graphs and takes requests.

One forward pass runs built-in text (`calibration.text`) through the model. The text is cut into sequences, whose
positions are spread over the served context. In this pass each sequence attends only to its own, unquantized keys and
values. `kvpilot_kernels.fit.Observed` fits the factors of our layers (means and scales per channel) to these keys,
values and queries.

Each tensor-parallel rank keeps the factors of its heads, and each pipeline stage the factors of its layers. The same
model, text and number of ranks give the same factors.
"""

import logging
import time
from typing import Any

import torch

from kvpilot_formats import formats
from kvpilot_kernels.fit import Observed
from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_runtime.calibration.attention import attending_to_itself
from kvpilot_runtime.calibration.of_engine import factors_hash
from kvpilot_runtime.calibration.text import LONGEST, SHORTEST, NoTokensError, passes, text_ids
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.ranks import of_all_ranks
from kvpilot_runtime.vllm_api import compat

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def calibrate(worker: Any, layers: dict[str, Any]) -> None:
    """Set the factors of a worker's layers, and report their source to log and metrics. The model must be loaded.

    Args:
        worker: vLLM's worker.
        layers: our layers, by name.

    Raises:
        UnsupportedModelError: calibration fails, or is not possible and the dtype needs it.
    """
    config = worker.vllm_config
    if not any(of_all_ranks(len(layers))):
        return
    # If one pipeline stage cannot calibrate, none may, because the other stages would wait for its output.
    reason = "" if factors_file.asked() else next(filter(None, of_all_ranks(obstacle(config, layers))), "")
    if factors_file.asked():
        source = "off" if factors_file.turned_off() else "file"
    elif reason:
        dtype = config.cache_config.cache_dtype
        if formats.parse(dtype).calibrated_only:
            raise UnsupportedModelError(
                f"kv-cache dtype {dtype!r} is not accurate without calibration, which this engine cannot do by itself "
                f"({reason}); give a file of `kvpilot calibrate` in {factors_file.VARIABLE}, or use another dtype"
            )
        source = "none"
        log.warning("Not calibrated (%s): kv-cache dtype %r is less accurate than with calibration; run `kvpilot "
                    "calibrate`, and set %s to the path of its file", reason, dtype, factors_file.VARIABLE)  # fmt: skip
    else:
        source = "self"
        began = time.perf_counter()
        tokens, reason = token_ids(config)
        problem = _fill(layers, _observed(worker, tokens, layers))
        # If one rank has a problem, refuse on every rank, because the others would wait for it forever.
        if told := next(filter(None, of_all_ranks(problem)), ""):
            raise UnsupportedModelError(told)
        log.info("Calibrated %d layers on %d tokens in %.1f s", len(layers), len(tokens), time.perf_counter() - began)
    calibration_info.report(source, factors_hash(layers, worker.device), reason)


def token_ids(config: Any) -> tuple[list[int], str]:
    """Return the token ids to calibrate on, at most one chunk of prefill, and a reason for metrics.

    The reason is empty for built-in text. Without a tokenizer, return random token ids from a fixed seed, and
    the reason `RandomTokens`.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    length = min(config.scheduler_config.max_num_batched_tokens, model.max_model_len, LONGEST)
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        log.warning("No tokenizer: calibrating on random tokens")
        drawn = torch.randint(model.get_vocab_size(), (length,), generator=torch.Generator().manual_seed(0))
        return [int(x) for x in drawn], "RandomTokens"
    try:
        return text_ids(tokenizer, length), ""
    except NoTokensError as error:
        raise UnsupportedModelError(f"{error}; {_REMEDY}") from error


_REMEDY = f"give a file of `kvpilot calibrate` in {factors_file.VARIABLE}, or set it to 'off' to serve without"


def obstacle(config: Any, layers: dict[str, Any]) -> str:
    """Return why this engine cannot calibrate itself, as one word for metrics. Return an empty string if it can."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    if config.lora_config is not None:
        return "LoRA"
    every = get_layers_from_vllm_config(config, AttentionLayerBase)
    if any(type(layer) is not Attention for layer in every.values()):
        return "OtherLayers"
    if any(layer.impl.kv_sharing_target_layer_name is not None for layer in layers.values()):
        return "SharedCache"
    if min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len) < SHORTEST:
        return "ShortContext"
    return ""


@torch.inference_mode()
def _observed(worker: Any, tokens: list[int], layers: dict[str, Any]) -> dict[str, Observed]:
    """Run the tokens through the model, and return the statistics of each of our layers, by layer name."""
    from vllm.forward_context import set_forward_context

    config, model, device = worker.vllm_config, worker.model_runner.get_model(), worker.device
    # Read this before `attending_to_itself` replaces the layers' implementations.
    drafting = any(layer.impl.drafting for layer in layers.values())
    seen = {name: Observed(layer.impl.num_kv_heads, layer.impl.head_size, device) for name, layer in layers.items()}
    ids = torch.tensor(tokens, device=device)
    plan = passes(len(tokens), config.model_config.max_model_len)
    # Each of the remaining tokens is a sequence of its own, at position 0.
    positions = torch.zeros(len(tokens), dtype=torch.int64, device=device)
    in_sequences = torch.cat([torch.arange(first, first + length, device=device) for length, first in plan])
    positions[: len(in_sequences)] = in_sequences
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    try:
        with (
            attending_to_itself(config, seen, [length for length, _ in plan]),
            # Run eagerly, because the engine's compiled code must not depend on this pass.
            set_forward_context(None, config, num_tokens=len(tokens), slot_mapping={}, skip_compiled=True),
        ):
            found = _forward(model, ids, positions)
            if drafting:
                _draft(compat.drafter(worker.model_runner), ids, positions, found)
    except Exception as error:
        raise UnsupportedModelError(
            f"the model could not calibrate itself ({type(error).__name__}: {error}); {_REMEDY}"
        ) from error
    return seen


def _forward(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """Run this pipeline stage on the previous stage's output. Send the result to the next stage, and return it."""
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.sequence import IntermediateTensors

    stages, group = get_pp_group(), get_tp_group()
    before = None
    if not stages.is_first_rank:
        before = IntermediateTensors(stages.recv_tensor_dict(all_gather_group=group))
    after = model(
        input_ids=ids if before is None else None, positions=positions, intermediate_tensors=before, inputs_embeds=None
    )
    if not stages.is_last_rank:
        stages.send_tensor_dict(after.tensors, all_gather_group=group)
    return after


def _draft(drafter: compat.Drafter, ids: torch.Tensor, positions: torch.Tensor, found: Any) -> None:
    """Run the text through the draft model. `found` is the output of the target model for the same text.

    For each token, a draft head (EAGLE, MTP) reads the next token and the target model's hidden state. For the last
    token of a sequence, it reads the first token of the following sequence. This is wrong, but only for one token in
    hundreds.
    """
    if not drafter.reads_states:
        drafter.model(input_ids=ids, positions=positions, inputs_embeds=None)
        return
    if positions.dim() > 1 and not drafter.uses_mrope:
        positions = positions[0]
    states, several = found if isinstance(found, tuple) else (found, None)
    if several is not None and drafter.combines_states:
        states = drafter.model.combine_hidden_states(torch.cat(several, -1))
    drafter.model(input_ids=ids.roll(-1), positions=positions, hidden_states=states, inputs_embeds=None)


def _fill(layers: dict[str, Any], seen: dict[str, Observed]) -> str:
    """Fit and set the layers' factors for this rank's heads. Return an error message, or an empty string."""
    for name, layer in layers.items():
        if layer.impl.drafting and not seen[name].tokens:
            continue  # vLLM ran only the first of the model's MTP layers, so there is nothing to fit for the others
        try:
            found = seen[name].factors()
        except ValueError as error:
            return f"calibration of layer {name!r}: {error}; use --kv-cache-dtype auto, or {_REMEDY}"
        layer.impl.set_factors(layer, found)
    return ""
