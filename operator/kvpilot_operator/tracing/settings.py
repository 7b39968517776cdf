"""What the environment says of traces, by OpenTelemetry's names.

The SDK reads these variables itself, and takes its defaults, with a warning, for what it cannot read. Here that is an
error before anything begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpilot_operator.errors import KvpilotError

_SAMPLERS = ("always_on", "always_off", "traceidratio")
_PAIR = re.compile(r"[^=,;\s\"\\]+[ \t]*=[^,;\"\\]*")


class TracingError(KvpilotError):
    """A variable that cannot be used; names it, its value (unless that may hold a secret) and the remedy."""


class _Check(NamedTuple):
    names: tuple[str, ...]
    """The first of these that is set counts."""
    sound: Callable[[str], bool]
    remedy: str
    secret: bool = False


def endpoint(environment: Mapping[str, str]) -> str | None:
    """The URL that spans go to, None where they go nowhere.

    Raises:
        TracingError: where they go somewhere, and a variable says what cannot be.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter not in ("otlp", "none"):
        raise TracingError(f"OTEL_TRACES_EXPORTER: {exporter!r} cannot be used; give otlp or none")
    off = exporter == "none" or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    where = next((environment[name] for name in _ENDPOINT.names if environment.get(name)), None)
    if where is None or off:
        return None
    for check in (_ENDPOINT, *_CHECKS):
        name = next((name for name in check.names if environment.get(name)), None)
        if name is not None and not check.sound(environment[name]):
            shown = "is malformed" if check.secret else f"{environment[name]!r} cannot be used"
            raise TracingError(f"{name}: {shown}; {check.remedy}")
    return where


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return False
    whole = url.scheme in ("http", "https") and bool(url.hostname) and port != 0
    return whole and "@" not in url.netloc and not url.query and re.search(r"\s", text) is None


def _are_pairs(text: str) -> bool:
    return all(_PAIR.fullmatch(pair.strip()) for pair in text.split(",") if pair.strip())


def _is_number(text: str, low: float, high: float) -> bool:
    try:
        return low <= float(text) <= high
    except ValueError:
        return False


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _is_readable(path: str) -> bool:
    try:
        return Path(path).is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):
        return False


def _of_exporter(name: str) -> tuple[str, str]:
    return f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"


_ENDPOINT = _Check(
    _of_exporter("ENDPOINT"),
    _is_url,
    "give the URL of a collector's OTLP over HTTP, such as http://collector:4318, and credentials as "
    "OTEL_EXPORTER_OTLP_HEADERS",
    secret=True,
)
_CHECKS = (
    _Check(
        _of_exporter("PROTOCOL"),
        lambda text: text == "http/protobuf",
        "give http/protobuf, or leave it out; collectors take it at port 4318",
    ),
    _Check(
        _of_exporter("HEADERS"), _are_pairs, "give NAME=VALUE,NAME=VALUE, with %2C for a comma in a value", secret=True
    ),
    _Check(_of_exporter("TIMEOUT"), lambda text: _is_number(text, 0.001, 3600), "give seconds, such as 10"),
    _Check(_of_exporter("COMPRESSION"), lambda text: text in ("none", "gzip", "deflate"), "give none, gzip or deflate"),
    *(
        _Check(_of_exporter(name), _is_readable, "give the path of a file that can be read")
        for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    ),
    _Check(
        ("OTEL_TRACES_SAMPLER",),
        lambda text: text.removeprefix("parentbased_") in _SAMPLERS,
        "give parentbased_always_on, parentbased_traceidratio or another of its samplers",
    ),
    _Check(("OTEL_TRACES_SAMPLER_ARG",), lambda text: _is_number(text, 0, 1), "give a share from 0 to 1, such as 0.1"),
    _Check(("OTEL_RESOURCE_ATTRIBUTES",), _are_pairs, "give NAME=VALUE,NAME=VALUE"),
    *(
        _Check((f"OTEL_BSP_{name}",), _is_count, "give a whole number above 0")
        for name in ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE")
    ),
)
