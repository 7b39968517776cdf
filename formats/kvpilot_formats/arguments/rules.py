"""Options and variables of vLLM that kvpilot reserves, or that do not work with its features.

`first_on` applies the rules to arguments. `first_set` applies the same rules to the configuration of an engine, which
kvpilot-serve may not have started.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from kvpilot_formats.arguments.drafts import DRAFT_MODELS, speculation, unsupported_drafts
from kvpilot_formats.arguments.parser import Arguments

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
SIMPLE_OFFLOAD = "VLLM_USE_SIMPLE_KV_OFFLOAD"
OFFLOAD = "--kv-offloading-size"
TRANSFER = "--kv-transfer-config"
SKIP_LAYERS = "--kv-cache-dtype-skip-layers"
DATA_PARALLEL = "--data-parallel-size"
PIPELINE_PARALLEL = "--pipeline-parallel-size"
SPECULATION = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")

CONNECTORS = ("NixlConnector", "LMCacheMPConnector")
"""KV connectors of vLLM that may send pages of our dtypes from one engine to another."""


class Switch(NamedTuple):
    """Feature that options of vLLM turn on."""

    what: str
    """Name of the feature in messages."""
    options: tuple[str, ...]
    """Main names of the options that turn the feature on."""
    off: tuple[str, ...] = ()
    """Values of these options that leave the feature off."""
    setting: str = ""
    """Path of the feature's attribute in vLLM's VllmConfig, such as `parallel_config.enable_dbo`; empty if it has none.
    """


_PIPELINE = Switch(
    "pipeline parallelism", (PIPELINE_PARALLEL,), ("1",), "parallel_config.pipeline_parallel_size"
)  # fmt: skip
_DATA = Switch("data parallelism", (DATA_PARALLEL,), ("1",), "parallel_config.data_parallel_size")
_TENSOR = Switch("tensor parallelism", ("--tensor-parallel-size",), ("1",), "parallel_config.tensor_parallel_size")
_ADAPTERS = Switch("adapters", ("--enable-lora",), (), "lora_config")
_OFFLOADING = Switch("offloading", (OFFLOAD,), (), "kv_transfer_config")
_SPECULATIVE = Switch("speculative decoding", SPECULATION, (), "speculative_config")

BESIDE_ANY = (
    Switch("decode context parallelism", ("--decode-context-parallel-size",), ("1",),
           "parallel_config.decode_context_parallel_size"),
    Switch("prefill context parallelism", ("--prefill-context-parallel-size",), ("1",),
           "parallel_config.prefill_context_parallel_size"),
    Switch("fast prefill of layers that share a cache", ("--kv-sharing-fast-prefill",), (),
           "cache_config.kv_sharing_fast_prefill"),
    Switch("dual batch overlap", ("--enable-dbo",), (), "parallel_config.enable_dbo"),
    Switch("dual batch overlap", ("--ubatch-size",), ("0", "1"), "parallel_config.ubatch_size"),
)  # fmt: skip
"""Features that no dtype of ours supports, for keys and values or for latents."""

BESIDE_OURS = (
    Switch("offloading by another backend than vLLM's own", ("--kv-offloading-backend",), ("native",)),
    *BESIDE_ANY,
    Switch("pooling", ("--runner",), ("auto", "generate", "draft")),
    Switch("pooling", ("--convert",), ("auto", "none")),
    Switch("pooling", ("--pooler-config",)),
)
"""Features that our dtypes for keys and values do not support. `BESIDE_LATENT` has those for latents."""

BESIDE_LATENT = (
    _SPECULATIVE,
    Switch("offloading to host memory", (OFFLOAD,)),
    Switch("KV transfer or offloading", (TRANSFER,), (), "kv_transfer_config"),
    Switch("layers that stay in 16 bits", (SKIP_LAYERS,), (), "cache_config.kv_cache_dtype_skip_layers"),
)
"""Features that our latent dtypes do not support."""

BESIDE_DRAFT_MODELS = (_TENSOR, _PIPELINE, _ADAPTERS, _OFFLOADING)
"""Features that are not tested together with a draft model."""

BESIDE_CONNECTORS = (_PIPELINE, _DATA, _SPECULATIVE, _ADAPTERS, _OFFLOADING._replace(setting=""))
"""Features of vLLM that are not tested together with a KV connector of `CONNECTORS`."""

SEVERAL_ENGINES = (
    DATA_PARALLEL, "--data-parallel-size-local", "--data-parallel-address", "--data-parallel-rpc-port",
    "--data-parallel-backend", "--data-parallel-supervisor-port",
)  # fmt: skip
"""Options that start several engines in a pod."""

GROUPS_OF_GPUS = (PIPELINE_PARALLEL, DATA_PARALLEL, "--prefill-context-parallel-size")
"""Options whose values multiply the number of GPUs of an engine, besides tensor parallelism."""

VARIABLES_BESIDE_OURS = {BATCH_INVARIANT: "batch invariance", SIMPLE_OFFLOAD: "vLLM's simple offloading"}


def first_on(arguments: Arguments, switches: Iterable[Switch]) -> tuple[str, str] | None:
    """Return the first option that turns one of these features on, and the feature's name; None if all are off."""
    for switch in switches:
        for option in switch.options:
            if arguments.on(option) and arguments.value(option) not in switch.off:
                return option, switch.what
    return None


def first_set(config: Any, switches: Iterable[Switch]) -> tuple[str, str] | None:
    """Return the first of these features that is on in vLLM's `VllmConfig`, in the form of `first_on`."""
    for switch in switches:
        value = config if switch.setting else None
        for part in switch.setting.split("."):
            value = getattr(value, part, None)
        if value and str(value) not in switch.off:
            return switch.options[0], switch.what
    return None


def beside_ours(arguments: Arguments, variables: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first option or variable that our dtypes do not support, and the feature's name, or None."""
    asked = speculation(arguments)
    if (what := unsupported_drafts(asked.get("method"), asked)) is not None:
        return next(option for option in SPECULATION if arguments.on(option)), what
    if (found := first_on(arguments, BESIDE_OURS)) is not None:
        return found
    if asked.get("method") in DRAFT_MODELS and (found := first_on(arguments, BESIDE_DRAFT_MODELS)) is not None:
        return found[0], f"a model that drafts, beside {found[1]},"
    if arguments.on(TRANSFER):
        connector = arguments.mapping(TRANSFER).get("kv_connector")
        if connector not in CONNECTORS:
            return TRANSFER, f"KV transfer other than by {', '.join((OFFLOAD, *CONNECTORS))}"
        if (found := first_on(arguments, BESIDE_CONNECTORS)) is not None:
            return found[0], f"{connector} beside {found[1]}"
    on = (name for name in VARIABLES_BESIDE_OURS if variables.get(name, "0").strip() not in ("", "0"))
    return next(((name, VARIABLES_BESIDE_OURS[name]) for name in on), None)


class Reserved(NamedTuple):
    """Options that spec.engine.extraArgs must not contain, and a message with the reason and a remedy."""

    options: Collection[str]
    message: str


RESERVED = (
    Reserved(
        ("--model", "--revision", "--served-model-name", "--host", "--port", "--uds", "--kv-cache-dtype",
         SKIP_LAYERS, "--max-model-len", "--tensor-parallel-size", "--gpu-memory-utilization",
         "--shutdown-timeout", "--recent-tokens"),
        "kvpilot sets it itself: remove it and use the field of spec.model, spec.engine, spec.kvCache or spec.drain "
        "that stands for it",
    ),
    Reserved(
        ("--api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers",
         "--root-path", "--middleware", "--grpc", "--grpc-port", "--headless", "--disable-log-stats"),
        "it would hide the engine from kvpilot, which reads /metrics and asks probe questions over plain HTTP, without "
        "a key: remove it, and put keys and TLS into the gateway in front",
    ),
    Reserved(
        ("--nnodes", "--node-rank", "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-external-lb",
         "--data-parallel-hybrid-lb", "--data-parallel-multi-port-external-lb"),
        "it makes a pod only a part of an engine, but kvpilot expects a whole engine in every pod: remove it",
    ),
    Reserved(
        ("--logprobs-mode",),
        "it may change the logprobs, and kvpilot measures accuracy on the model's own logprobs: remove it",
    ),
    Reserved(
        ("--hf-token",),
        "anyone who may read the service can read a secret in its arguments: remove it and use model.tokenSecretRef",
    ),
    Reserved(
        ("--config",),
        "its file may set anything, and kvpilot cannot read it: remove it and list its options one by one",
    ),
)  # fmt: skip
"""Options that users must not set. The operator refuses them in every spelling."""


def reserved(arguments: Arguments) -> list[tuple[int, str]]:
    """Return, for each reserved option in the arguments, its index and a message with the remedy."""
    found = []
    for given in arguments.given:
        message = next((one.message for one in RESERVED if given.name in one.options and not given.off), None)
        if given.name == "--api-server-count" and not (given.values[0].isdecimal() and int(given.values[0])):
            message = "without an API server the engine answers no requests: use at least 1, or remove it"
        if message is not None:
            found.append((given.places[0], f"{given.name}: {message}"))
    return found
