"""Plan GPU capacity for each KV-cache dtype and context, and GPUs for a load: `kvpilot plan MODEL` or `-f FILE`.

MODEL is a folder with a config.json, or a name of the built-in table. FILE holds a service. See docs/planning.md.
"""

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from kvpilot_cli.plan import models, output, service
from kvpilot_cli.plan.facts import Model, PlanError
from kvpilot_cli.plan.facts_config import read_folder
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_cli.plan.load import Load
from kvpilot_cli.plan.make import CONTEXTS, Request, make, usual_dtypes
from kvpilot_cli.text_tables import render
from kvpilot_formats.dtypes import parse
from kvpilot_formats.formats import RECENT_CHOICES, FormatError, default_windows
from kvpilot_formats.installed import lacks
from kvpilot_operator.gpus import GPUS

WEIGHTS = ("bfloat16", "fp8", "int4")

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Return 0, or 2 if an argument is wrong."""
    try:
        options = _options(argv)
        if options.list:
            print(_list())
            return 0
        plan = make(_request(options))
    except (PlanError, FormatError) as error:
        print(f"kvpilot plan: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        lacks("kvpilot plan", "operator", error)
    print(output.as_json(plan) if options.json else output.text(plan))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. With -f, take those of the service, unless the command line has the option, too."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.file is None:
        options.gpu = options.gpu or "H100-80GB"
        return options
    planned = parser.parse_args(service.from_file(options.file, options.gpu, options.model))
    model = planned.model
    options = parser.parse_args(argv, namespace=planned)
    options.model = model
    return options


def _parser() -> _Parser:
    parser = _Parser(prog="kvpilot plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder with a config.json, or a name such as Llama-3.1-8B")
    add("-f", "--file", metavar="FILE", help="plan the engine of the QuantizedLLMService in FILE (- is stdin)")
    add("--list", action="store_true", help="list the built-in models and GPUs")
    add(
        "--gpu",
        metavar="NAME",
        help="a name that --list shows, or a value of nvidia.com/gpu.product (default H100-80GB, with -f the one that "
        "the service selects)",
    )
    add("--gpus", type=_whole, default=1, metavar="N", help="GPUs of one engine under tensor parallelism (default 1)")
    add(
        "--nodes", type=_whole, default=1, metavar="N", help="nodes of one engine, each with --gpus GPUs (engine.nodes)"
    )
    add("--context", type=_list_of(_whole), default=(), metavar="N,N", help=f"lengths of sequences to plan, in tokens (default {','.join(map(str, CONTEXTS))}, up to the model's limit)")  # fmt: skip  # noqa: E501
    add(
        "--dtype",
        type=_list_of(str),
        default=(),
        metavar="D,D",
        help=f"KV-cache dtypes (default {','.join(usual_dtypes(latent=False))}; with multi-head latent attention "
        f"{','.join(usual_dtypes(latent=True))})",
    )
    add(
        "--recent-tokens",
        type=_window,
        metavar="N",
        help="newest tokens of each sequence that our dtypes below 8 bits read at 8 bits: "
        f"{', '.join(map(str, RECENT_CHOICES))} (default {default_windows()})",
    )
    add(
        "--utilization",
        type=_share,
        default=0.9,
        metavar="X",
        help="share of the GPU's memory that vLLM may use (default 0.9)",
    )
    add("--weights-dtype", choices=WEIGHTS, help="format of the weights (default: as published)")
    add("--weights-gb", type=_positive, metavar="X", help="weights in GB (10^9 bytes), instead of the estimate")
    add("--kv-gb", type=_positive, metavar="X", help="KV cache of all GPUs in GB (10^9 bytes), instead of the estimate")
    connector = "the engine has a KV connector, so the accuracy gate also judges pages that it loads"
    add("--connector", action="store_true", help=connector)
    add("--json", action="store_true", help="print JSON instead of tables")
    load = parser.add_argument_group("cost of a load on all replicas; needs the first three options")
    load.add_argument("--requests-per-second", type=_positive, metavar="R")
    load.add_argument(
        "--prompt-tokens", type=_whole, metavar="P", help="prompt tokens of a request that are not in a cache"
    )
    load.add_argument("--generated-tokens", type=_whole, metavar="G")
    load.add_argument(
        "--max-ms-per-token",
        type=_positive,
        default=50.0,
        metavar="T",
        help="largest mean time between two tokens in ms (default 50)",
    )
    return parser


def _request(options: argparse.Namespace) -> Request:
    if options.model is None:
        raise PlanError("MODEL is missing; give a folder with a config.json, a name that --list shows, or -f FILE")
    for dtype in options.dtype:
        parse(dtype)
    load = _load(options)
    return Request(
        model=_model(options.model),
        gpu=find_gpu(options.gpu),
        gpus=options.gpus,
        nodes=options.nodes,
        contexts=tuple(dict.fromkeys(options.context)),
        dtypes=tuple(dict.fromkeys(options.dtype)),
        utilization=options.utilization,
        weights_dtype=options.weights_dtype,
        weights=None if options.weights_gb is None else int(options.weights_gb * 1e9),
        kv=None if options.kv_gb is None else int(options.kv_gb * 1e9),
        load=load,
        recent_tokens=options.recent_tokens,
        connector=options.connector,
    )


def _model(name: str) -> Model:
    path = Path(name)
    if path.is_dir():
        return read_folder(path)
    if path.is_absolute() or name.startswith("."):
        raise PlanError(f"MODEL {name!r}: the folder does not exist; give the folder of a Hugging Face model, or a name that --list shows")  # fmt: skip  # noqa: E501
    return models.find(name)


def _load(options: argparse.Namespace) -> Load | None:
    fields = ("requests_per_second", "prompt_tokens", "generated_tokens")
    missing = [f"--{field.replace('_', '-')}" for field in fields if getattr(options, field) is None]
    if len(missing) == len(fields):
        return None
    if missing:
        raise PlanError(f"{' and '.join(missing)}: missing; a load needs all of --requests-per-second, --prompt-tokens and --generated-tokens")  # fmt: skip  # noqa: E501
    return Load(
        options.requests_per_second, options.prompt_tokens, options.generated_tokens, options.max_ms_per_token / 1000
    )


def _list() -> str:
    named = textwrap.fill(", ".join(models.names()), 118, break_on_hyphens=False)
    gpus = [
        [g.name, f"{g.memory_mib:,}", f"{g.bandwidth_gb_s:,}", ".".join(map(str, g.compute_capability))] for g in GPUS
    ]
    return f"{named}\n\n{render(['GPU', 'MiB', 'GB/s', 'compute capability'], gpus)}"


def _list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse_all(text: str) -> tuple[T, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return parse_all


def _whole(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = 0
    if not 0 < value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; give one such as 8192")
    return value


def _window(text: str) -> int:
    if text not in map(str, RECENT_CHOICES):
        choices = ", ".join(map(str, RECENT_CHOICES))
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; give one of {choices}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; give one such as 2.5")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than the whole GPU; give a share such as 0.9")
    return value
