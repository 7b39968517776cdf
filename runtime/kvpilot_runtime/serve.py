"""`kvpilot-serve`: the entry point of the runtime image. It checks its arguments, then becomes `vllm serve`.

If it refuses the arguments, the last line on stderr is JSON, and the exit code is 78 (EX_CONFIG: a restart will not
help)::

    {"kvpilot": "refused", "reason": "DoesNotFit", "message": "weights 14,904 MiB + ..."}

A warning is such a line with ``"kvpilot": "warning"``. The engine still starts.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from kvpilot_formats import arguments as vllm
from kvpilot_formats import formats
from kvpilot_formats.installed import add_version
from kvpilot_runtime import compiled, listening
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import PreflightError, tell
from kvpilot_runtime.metrics import model_info
from kvpilot_runtime.preflight import machine, memory
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.elsewhere import asks_a_hub
from kvpilot_runtime.preflight.request import Request, model_folder

REFUSED = 78
CALIBRATION = "KVPILOT_CALIBRATION"
"""Environment variable that gives the engine's processes the path of the calibration file, or `off`."""
RECENT = "KVPILOT_RECENT_TOKENS"
"""Environment variable that gives the engine's processes the size of the recent window in tokens."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PreflightError("BadArguments", f"{message}; kvpilot-serve --help lists its options")


def _count(text: str) -> int:
    """Parse a count of at least 1, written as for vLLM: 1024, 64M (times 2^20), 64m (times 10^6)."""
    try:
        value = vllm.whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write it in digits, or as 64M") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def _length(text: str) -> int | None:
    """Parse a number of tokens. Return None for `auto` and -1, with which vLLM finds the largest number that fits."""
    return None if text.strip().lower() in ("-1", "auto") else _count(text)


def _window(text: str) -> int | str:
    if text == formats.ALL:
        return text
    if not text.isdecimal() or int(text) not in formats.RECENT_CHOICES:
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; use {formats.recent_choices()}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvpilot-serve", allow_abbrev=False, description="Check, then serve with vLLM. Any further "
                     "argument goes unchanged to `vllm serve`.")  # fmt: skip
    add_version(parser)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype-skip-layers", help="layers that stay in 16 bits, comma-separated: "
                        "sliding_window, or layer numbers (default with our dtypes: sliding_window)")  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="dtype of the weights")
    parser.add_argument("--recent-tokens", type=_window, metavar="N", default=os.environ.get(RECENT) or None,
                        help="number of last tokens of a sequence that are read with 8 bits, with the rest of their "
                        f"blocks: {formats.recent_choices()}. With {formats.ALL}, the number is the dtype's default, "
                        "and older tokens are read with 8 bits while memory is free "
                        f"(default: {RECENT}, and without it {formats.default_windows()}, but at most the context's "
                        "length)")  # fmt: skip
    parser.add_argument("--max-model-len", type=_length, help="tokens, or auto")
    parser.add_argument("--tensor-parallel-size", type=_count, default=1)
    parser.add_argument("--gpu-memory-utilization", type=_fraction, default=0.9)
    parser.add_argument("--kv-cache-memory-bytes", type=_count, help="size of the KV cache: bytes, or 64M")
    return parser


def parse(argv: Sequence[str]) -> tuple[Request, list[str]]:
    """Return the request, and the arguments for `vllm serve`. `main` adds more arguments.

    Raises:
        PreflightError: an argument is invalid.
    """
    found, parser = vllm.read(argv), _parser()
    if found.faults:
        raise PreflightError("BadArguments", f"argument {found.faults[0].place + 1}: {found.faults[0].message}")
    if found.on("--config"):
        raise PreflightError("BadArguments", "--config is not supported: kvpilot-serve passes options such as --dtype to vLLM, which would override the file; remove --config, and write the file's options as arguments")  # fmt: skip  # noqa: E501
    checked = [action.option_strings[-1] for action in parser._actions]
    written = ((one.name, one.values) for one in found.given if one.name in checked)
    known = parser.parse_args([f"{name}={','.join(values)}" if values else name for name, values in written])
    others = found.without(*checked)
    skip = known.kv_cache_dtype_skip_layers
    if skip is not None:
        skip = tuple(part for part in skip.split(",") if part)
    kv_bytes = known.kv_cache_memory_bytes
    if kv_bytes is None and machine.platform() == "cpu":
        kv_bytes = memory.cpu_kv_bytes()
    request = Request(
        known.model, known.kv_cache_dtype, known.dtype, known.max_model_len, known.tensor_parallel_size,
        known.gpu_memory_utilization, kv_bytes, skip, os.environ.get(CALIBRATION) or None, known.revision,
        tuple(others), known.recent_tokens,
        found.on("--max-model-len") and known.max_model_len is None,
    )  # fmt: skip
    arguments = [
        known.model,
        f"--kv-cache-dtype={known.kv_cache_dtype}",
        f"--dtype={known.dtype}",
        f"--tensor-parallel-size={known.tensor_parallel_size}",
        f"--gpu-memory-utilization={known.gpu_memory_utilization}",
        f"--host={listening.host()}",
    ]
    if known.revision:
        arguments.append(f"--revision={known.revision}")
    if (length := found.value("--max-model-len")) is not None:
        arguments.append(f"--max-model-len={known.max_model_len or length}")
    if known.kv_cache_memory_bytes:
        arguments.append(f"--kv-cache-memory-bytes={known.kv_cache_memory_bytes}")
    return request, [*arguments, *others]


def main(argv: Sequence[str] | None = None) -> int:
    """Check the request, then replace this process by `vllm serve`. Return the exit status after a refusal."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given == ["--version"]:
        _parser().parse_args(given)
    try:
        request, arguments = parse(given)
        findings = check(request)
    except PreflightError as error:
        tell("refused", error.reason, error.message)
        return REFUSED
    for reason, message in findings.warnings:
        tell("warning", reason, message)
    if request.dtype == "auto" and findings.config is not None and findings.config.auto != "auto":
        # Name the dtype, so that vLLM reports it: vLLM 0.32 stores fp8 for some checkpoints, but reports `auto`.
        arguments.append(f"--kv-cache-dtype={findings.config.auto}")
    if findings.skip_layers:
        arguments += ["--kv-cache-dtype-skip-layers", *findings.skip_layers]
    if findings.disable_window:
        arguments.append("--disable-sliding-window")
    environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ, options.SERVE: "1"}
    if request.recent is not None:
        environment[RECENT] = str(request.recent)
    if findings.config is not None:
        environment[model_info.VARIABLE] = model_info.encode(findings.config)
    if model_folder(request.model) is not None and not asks_a_hub(request):
        # The model's folder is complete, so the engine never needs the hub at start.
        environment.setdefault("HF_HUB_OFFLINE", "1")
    variables, beside = compiled.prepare(arguments, environment, partial(tell, "warning"))
    if beside is not None:
        subprocess.Popen(beside, stdin=subprocess.DEVNULL)
    return _become_vllm(arguments, environment | variables)


def _become_vllm(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    # -P prevents files in the working directory from shadowing Python's modules.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    os.execve(sys.executable, [*command, *arguments], environment)  # noqa: S606


if __name__ == "__main__":
    raise SystemExit(main())
