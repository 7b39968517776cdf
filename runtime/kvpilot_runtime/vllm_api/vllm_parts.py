"""Parts of vLLM that kvpilot uses, each with its required shape and the feature that needs it.

A part is a function with the parameters that we pass or receive, a class with the fields that we read, or a test to
run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args


class Feature(Enum):
    """Feature of kvpilot that needs a part of vLLM. The value describes the effect if the part is missing."""

    NAMES = "no dtype of kvpilot can be chosen"
    LAYERS = "dtypes of kvpilot are refused"
    SKIPPED = "dtypes of kvpilot are refused beside layers that stay in 16 bits"
    WINDOW = "there is no recent window"
    LATENTS = "dtypes of multi-head latent attention are refused"
    BOUND = "--retention is refused"
    HEAVY = "--retention HeavyHitters is refused"
    HOST = "probes of an engine that offloads read from its GPU's pages alone"
    IMAGES = "images whose tokens attend to each other both ways are refused"
    DRAIN = "requests that wait for an engine's last step before SIGTERM are not answered"


@dataclass(frozen=True)
class Part:
    """Part of vLLM that kvpilot uses.

    Attributes:
        path: `module:name`, perhaps with dots. platform: `cpu`, `cuda` or, on both, `""`.
        takes: its first parameters, in this order. named: others that are given by name. The rest must have defaults.
        has: attributes, or fields of a class. tries: a test that returns the fault, or nothing.
    """

    path: str
    feature: Feature = Feature.LAYERS
    platform: str = ""
    takes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    tries: Callable[[Any], str] | None = None

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    def wrong(self) -> str:
        """Return the fault as the end of a sentence; empty without one."""
        module, _, name = self.path.partition(":")
        try:
            found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            return f"is not there ({error})"
        fields = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
        missing = [name for name in self.has if name not in fields]
        if missing:
            return f"has no {', '.join(missing)}"
        if self.takes or self.named:
            return unlike(found, self.takes, self.named)
        try:
            return self.tries(found) if self.tries else ""
        except Exception as error:  # a later vLLM may raise anything here
            return f"cannot be tried ({type(error).__name__}: {error})"


@dataclass(frozen=True)
class Broken:
    """Part that differs from what kvpilot needs, with the difference."""

    part: Part
    why: str

    def __str__(self) -> str:
        return f"{self.part} {self.why}"


def unlike(function: Any, takes: tuple[str, ...], named: tuple[str, ...]) -> str:
    """Say how a function's parameters differ from ours. Return nothing if they do not."""
    try:
        every = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled code has no signature, so its existence must suffice
        return ""
    every = [p for p in every if p.name not in ("self", "cls")]
    places = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in every) and tuple(places[: len(takes)]) != takes:
        return f"takes ({', '.join(places)}), and not ({', '.join(takes)})"
    if not any(p.kind is p.VAR_KEYWORD for p in every):
        unknown = [name for name in named if name not in {p.name for p in every}]
        if unknown:
            return f"does not take {', '.join(unknown)}"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asks = [p.name for p in every if p.default is p.empty and p.kind not in variadic and p.name not in (*takes, *named)]
    return f"asks for {', '.join(asks)}" if asks else ""


def _gives(output: Any) -> str:
    """Check that a GPU runner's output is constructed from the message that the worker will send."""
    known = "model_runner_output" in inspect.signature(output.__init__).parameters
    return "" if known else "is not made of a model_runner_output"


def _names(cache: Any) -> str:
    if hasattr(cache, "register_kv_cache_dtype"):
        return "" if hasattr(cache, "get_kv_cache_dtype_handler") else "has no get_kv_cache_dtype_handler"
    known = get_args(getattr(cache, "CacheDType", None))
    return "" if "auto" in known else "has neither register_kv_cache_dtype nor a Literal CacheDType"


def _validated(selector: Any) -> str:
    """Check that a backend accepts all fields of the selector. On a CPU we call its validation in vLLM's place."""
    from vllm.v1.attention.backend import AttentionBackend

    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    unknown = [name for name in (*selector._fields, "device_capability") if name not in known]
    return f"has fields that AttentionBackend.validate_configuration does not take: {', '.join(unknown)}" * bool(
        unknown
    )


def _sized(spec: Any) -> str:
    """Check that a page is as large as a backend says."""
    from dataclasses import replace

    import torch

    page = replace(spec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8), state_content_bytes=68)
    wanted = 16 * 2 * 68
    return "" if page.page_size_bytes == wanted else f"makes pages of {page.page_size_bytes} bytes, and not {wanted}"


def _carries(message: Any) -> str:
    """Check that we can attach an attribute to a message between scheduler and workers."""
    return "has slots, and takes no attribute" if hasattr(message, "__slots__") else ""


_BACKEND = "vllm.v1.attention.backend"

_LATENT = "vllm.model_executor.layers.attention.mla_attention"

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

_CHOOSES = ("selected_backend", "attn_selector_config")

_LAYER = ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
          "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name")  # fmt: skip

_ATTENDS = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")

_FLASH = ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k", "softmax_scale", "softcap", "fa_version",
          "causal", "out", "return_softmax_lse")  # fmt: skip

PARTS = (
    Part("vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE", Feature.NAMES, has=("update",)),
    Part("vllm.config:cache", Feature.NAMES, tries=_names),
    Part("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls", Feature.NAMES, "cpu", _CHOOSES, ("num_heads",)),
    Part("vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend", Feature.NAMES, "cpu", ("vllm_config",)),
    Part("vllm.platforms.cuda:CudaPlatformBase.get_attn_backend_cls", Feature.NAMES, "cuda", _CHOOSES, ("num_heads",)),
    Part("vllm.v1.attention.selector:AttentionSelectorConfig", Feature.NAMES, has=("kv_cache_dtype", "_asdict")),
    Part("vllm.v1.attention.selector:AttentionSelectorConfig", tries=_validated),
    Part("vllm.platforms.interface:Platform._align_heterogeneous_kv_block_size", Feature.SKIPPED,
         takes=("vllm_config", "backend_cls")),
    Part(f"{_BACKEND}:AttentionBackend.customize_spec", takes=("spec",)),
    Part("vllm.v1.kv_cache_interface:KVCacheLayout", has=("LBHNC",)),
    Part(f"{_BACKEND}:AttentionImpl.__init__", takes=_LAYER),
    Part(f"{_BACKEND}:AttentionImpl.forward", takes=_ATTENDS),
    Part(f"{_BACKEND}:AttentionImpl.process_weights_after_loading", takes=("act_dtype",)),
    Part(f"{_BACKEND}:AttentionMetadataBuilder.__init__",
         takes=("kv_cache_spec", "layer_names", "vllm_config", "device")),
    Part(f"{_BACKEND}:AttentionMetadataBuilder.build",
         takes=("common_prefix_len", "common_attn_metadata", "fast_build")),
    Part(f"{_BACKEND}:CommonAttentionMetadata",
         has=("num_reqs", "query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping",
              "causal")),
    Part(f"{_BACKEND}:AttentionType", has=("DECODER",)),
    Part(f"{_BACKEND}:MultipleOf", takes=("base",)),
    Part("vllm.v1.kv_cache_interface:FullAttentionSpec", has=("head_size_v", "state_content_bytes"), tries=_sized),
    Part("vllm.model_executor.layers.attention:Attention", has=("get_attn_backend", "get_kv_cache_spec")),
    Part("vllm.forward_context:set_forward_context", takes=("attn_metadata", "vllm_config"),
         named=("num_tokens", "slot_mapping", "skip_compiled")),
    Part("vllm.forward_context:get_forward_context"),
    Part("vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config", takes=("kv_cache_configs",)),
    Part("vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register", Feature.WINDOW,
         takes=("kvcache_spec_cls", "manager_class", "uniform_type_base_spec")),
    Part("vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered", Feature.WINDOW),
    Part("vllm.v1.kv_cache_interface:CircularBufferSpec", Feature.WINDOW,
         has=("state_content_bytes", "block_table_token_alignment", "max_memory_usage_bytes",
              "max_num_blocks_per_req")),
    Part("vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager", Feature.WINDOW,
         has=("get_num_blocks_to_allocate", "allocate_new_blocks", "allocate_external_computed_blocks")),
    Part("vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func", platform="cuda", takes=("q", "k", "v"),
         named=_FLASH),
    Part("vllm.v1.attention.backends.fa_utils:get_flash_attn_version", platform="cuda", named=("head_size",)),
    Part("vllm.v1.attention.ops.merge_attn_states:merge_attn_states", platform="cuda",
         takes=("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse")),
    Part("vllm.platforms.cpu:CpuPlatform.check_and_update_config", Feature.NAMES, "cpu", ("vllm_config",)),
    Part("vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl", Feature.LATENTS, "cpu"),
    Part(f"{_LATENT}:MLACommonBackend.is_mla", Feature.LATENTS),
    Part(f"{_LATENT}:MLACommonImpl._compute_prefill_context", Feature.LATENTS,
         takes=("q", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale")),
    Part(f"{_LATENT}:MLACommonImpl.forward_mha", Feature.LATENTS,
         takes=("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output")),
    Part(f"{_LATENT}:MLACommonImpl.forward_mqa", Feature.LATENTS,
         takes=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    Part(f"{_LATENT}:MLACommonPrefillMetadata.ContextChunk", Feature.LATENTS,
         has=("request_slice", "token_slice", "starts", "cu_seq_lens", "max_seq_len", "num_context_tokens")),
    Part(f"{_LATENT}:init_mla_context_partial", Feature.LATENTS,
         takes=("chunked_context", "attn_output", "attn_softmax_lse", "num_tokens")),
    Part(f"{_LATENT}:accumulate_mla_context_chunk", Feature.LATENTS,
         takes=("chunk", "attn_output", "attn_softmax_lse", "output", "output_lse")),
    Part(f"{_LATENT}:MLACommonMetadataBuilder._build_decode", Feature.LATENTS, "cuda",
         takes=("block_table_tensor", "seq_lens_device"),
         named=("max_seq_len", "query_start_loc_cpu", "query_start_loc_device", "num_decode_tokens", "max_query_len",
                "dcp_tot_seq_lens_device")),
    Part(f"{_BACKEND}:CommonAttentionMetadata", Feature.BOUND, has=("seq_lens_cpu_upper_bound", "is_prefilling")),
    Part("vllm.v1.kv_cache_interface:SlidingWindowSpec.max_admission_blocks_per_request", Feature.BOUND,
         takes=("max_in_flight_tokens", "max_model_len")),
    Part(f"{_MANAGER}.find_longest_cache_hit", Feature.BOUND,
         takes=("block_hashes", "max_length", "kv_cache_group_ids", "block_pool", "kv_cache_spec"),
         named=("drop_eagle_block", "alignment_tokens")),
    Part(f"{_MANAGER}.get_num_blocks_to_allocate", Feature.BOUND,
         takes=("request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens",
                "num_local_computed_tokens", "num_tokens_main_model"),
         named=("apply_admission_cap",)),
    Part(f"{_MANAGER}.remove_skipped_blocks", Feature.BOUND,
         takes=("request_id", "processed_computed_tokens", "num_prompt_tokens")),
    Part(f"{_MANAGER}._remove_blocks_in_range", Feature.BOUND, takes=("request_id", "first_block", "last_block")),
    Part("vllm.model_executor.layers.attention:Attention.get_kv_cache_spec", Feature.BOUND, takes=("vllm_config",)),
    Part(f"{_BACKEND}:AttentionMetadataBuilder.get_cudagraph_support", Feature.BOUND,
         takes=("vllm_config", "kv_cache_spec")),
    Part("vllm.v1.core.sched.scheduler:Scheduler.schedule", Feature.HEAVY),
    Part("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", Feature.HEAVY,
         takes=("scheduler_output", "model_runner_output")),
    Part("vllm.v1.core.sched.output:SchedulerOutput", Feature.HEAVY, has=("num_scheduled_tokens",), tries=_carries),
    Part("vllm.v1.outputs:ModelRunnerOutput", Feature.HEAVY, tries=_carries),
    Part(f"{_MANAGER}.pop_blocks_for_free", Feature.HEAVY, takes=("request_id",)),
    Part("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", Feature.HEAVY, takes=("scheduler_output",)),
    Part("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", Feature.HEAVY, takes=("grammar_output",)),
    Part("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model", Feature.HEAVY, "cuda",
         takes=("scheduler_output",)),
    Part("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens", Feature.HEAVY, "cuda",
         takes=("grammar_output",)),
    Part("vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state", Feature.HEAVY, "cuda",
         takes=("scheduler_output", "dummy_run")),
    Part("vllm.v1.worker.gpu.model_runner:BatchReqState", Feature.HEAVY, "cuda", has=("req_ids",)),
    Part("vllm.v1.worker.gpu_input_batch:InputBatch", Feature.HEAVY, has=("req_ids",)),
    Part("vllm.v1.worker.gpu.async_utils:AsyncOutput", Feature.HEAVY, "cuda", tries=_gives),
    Part("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", Feature.HOST, takes=("request",)),
    Part("vllm.v1.request:Request.get_skip_reading_prefix_cache", Feature.HOST),
    Part("vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.get_worker", Feature.HOST, "cpu", ("kv_caches",)),
    Part(f"{_BACKEND}:CommonAttentionMetadata", Feature.IMAGES, has=("mm_req_doc_ranges",)),
    Part("vllm.config.scheduler:SchedulerConfig", Feature.IMAGES, has=("disable_chunked_mm_input",)),
    Part("vllm.v1.engine.core:EngineShutdownState", Feature.DRAIN, has=("REQUESTED",)),
    Part("vllm.v1.engine.core:EngineCoreProc._handle_shutdown", Feature.DRAIN),
    Part("vllm.v1.engine.core:EngineCoreProc._reject_add_in_shutdown", Feature.DRAIN, takes=("request",)),
    Part("vllm.v1.engine.core:EngineCoreProc._handle_client_request", Feature.DRAIN,
         takes=("request_type", "request")),
    Part("vllm.v1.attention.backends.utils:split_decodes_and_prefills", platform="cuda",
         takes=("common_attn_metadata",), named=("decode_threshold",)),
)  # fmt: skip
"""All parts, except those that only some supported versions have. `compat` looks for these."""
