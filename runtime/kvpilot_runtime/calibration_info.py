"""Where an engine's factors come from, on its own /metrics: ``kvpilot_calibration_info{hash,source,reason} 1``.

`source` is `self` (calibrated at start), `file`, `off` (turned off) or `none`, for the `reason` given. The workers know
it, the API server publishes it: a file carries it across, whose path the first of vLLM's processes puts into the
environment of the others.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "KVPILOT_CALIBRATION_REPORT"
"""Environment variable with the path of the file; set by the plugin."""

NAME = "kvpilot_calibration_info"
_HELP = "Where the static factors of the KV cache come from."
_LABELS = ("hash", "source", "reason")

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


@dataclass(frozen=True)
class Outcome:
    """What became of an engine's calibration. `hash` is over the factors of all layers and ranks, in hexadecimal."""

    source: str
    hash: str
    reason: str = ""


def report(outcome: Outcome) -> None:
    """Of a worker: write the outcome where `publish` finds it. A file that cannot be written costs the metric only."""
    from vllm.distributed import get_tp_group

    if get_tp_group().rank_in_group:
        return
    log.info("Calibration: source %s, hash %s %s", outcome.source, outcome.hash, outcome.reason)
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        scratch = Path(path + f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(outcome)))
        scratch.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): no %s on /metrics", path, error, NAME)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # several API servers serve what all processes wrote to a folder
        from prometheus_client import Gauge

        gauge = Gauge(NAME, _HELP, _LABELS, multiprocess_mode="mostrecent")
        gauge.labels(outcome.hash, outcome.source, outcome.reason).set(1)


def publish() -> None:
    """Of any process of vLLM: say where workers report, and serve what they reported from this process's registry."""
    from prometheus_client import REGISTRY

    if VARIABLE not in os.environ:
        try:
            os.environ[VARIABLE] = str(Path(tempfile.mkdtemp(prefix="kvpilot-"), "calibration.json"))
        except OSError as error:
            log.warning("no folder for temporary files (%s): no %s on /metrics", error, NAME)
            return
    if not any(isinstance(c, Reported) for c in list(REGISTRY._collector_to_names)):
        REGISTRY.register(Reported(Path(os.environ[VARIABLE])))


class Reported:
    """The series of the outcome that a worker wrote; none before it did."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def describe(self) -> list[Any]:
        """Nothing: what a registry asks at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """The gauge, once a worker has reported."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            outcome = Outcome(**json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            return
        family = GaugeMetricFamily(NAME, _HELP, labels=_LABELS)
        family.add_metric([outcome.hash, outcome.source, outcome.reason], 1)
        yield family
