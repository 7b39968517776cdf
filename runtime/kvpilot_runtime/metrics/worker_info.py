"""Report facts of a worker or scheduler process on the engine's /metrics, as gauges.

The process writes a gauge's labels and value to a file, and the API server reads the file. vLLM's first process sets an
environment variable with the path of the file for the others.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@dataclass(frozen=True)
class WorkerInfo:
    """Gauge on /metrics whose labels and value another process sets.

    Attributes:
        name, help, labels: name, help text and label names of the gauge.
        variable: environment variable with the path of the file.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    variable: str

    def report(self, values: Mapping[str, str]) -> None:
        """Set the labels of a gauge whose value is 1. Do nothing in workers other than the first rank."""
        from vllm.distributed import get_tp_group

        if not get_tp_group().rank_in_group:
            self.write(values, 1)

    def write(self, labels: Mapping[str, str], value: float) -> None:
        """Write labels and value to the file.

        If the file cannot be written, only log the error, because the engine works without the metric.
        """
        path = os.environ.get(self.variable)
        if path is None:
            return
        try:
            scratch = Path(path + f".{os.getpid()}")
            scratch.write_text(json.dumps({"labels": dict(labels), "value": value}))
            scratch.replace(path)
        except OSError as error:
            log.warning("%s cannot be written (%s): no %s on /metrics", path, error, self.name)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            # With several API servers, each one serves metrics from a common folder, so this process must write its
            # gauge there.
            gauge = _shared(self)
            (gauge.labels(*(labels[label] for label in self.labels)) if self.labels else gauge).set(value)

    def publish(self) -> None:
        """Add the gauge to this process's registry. If no path of the file is set yet, choose one."""
        from prometheus_client import REGISTRY

        if self.variable not in os.environ:
            try:
                os.environ[self.variable] = str(Path(tempfile.mkdtemp(prefix="kvpilot-"), f"{self.name}.json"))
            except OSError as error:
                log.warning("no folder for temporary files (%s): no %s on /metrics", error, self.name)
                return
        known = (c for c in list(REGISTRY._collector_to_names) if isinstance(c, Reported))
        if not any(c.info == self for c in known):
            REGISTRY.register(Reported(self, Path(os.environ[self.variable])))


@cache
def _shared(info: WorkerInfo) -> Any:
    from prometheus_client import Gauge

    return Gauge(info.name, info.help, info.labels, multiprocess_mode="mostrecent")


class Reported:
    """Collector for the Prometheus registry, which reads the gauge that another process reported."""

    def __init__(self, info: WorkerInfo, path: Path) -> None:
        self.info, self._path = info, path

    def describe(self) -> list[Any]:
        """Return no metrics. The registry calls this at registration, when nothing has been reported yet."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the gauge with the reported labels and value. Yield nothing before the first report."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            found = json.loads(self._path.read_text())
            labels, value = [str(found["labels"][label]) for label in self.info.labels], float(found["value"])
        except (OSError, ValueError, TypeError, KeyError):
            return
        family = GaugeMetricFamily(self.info.name, self.info.help, labels=self.info.labels)
        family.add_metric(labels, value)
        yield family


RECENT_WINDOW = WorkerInfo(
    "kvpilot_recent_window_info", "Tokens of the recent window, which are read with more bits than the KV-cache dtype "
    "has.", ("dtype", "tokens", "reason"), "KVPILOT_RECENT_REPORT",
)  # fmt: skip
"""Gauge of the recent window that the engine uses, in tokens; 0 for no window.

If the window is smaller than the requested or the default window, the label `reason` says why.
"""

TOKENS_AT_8_BITS = WorkerInfo(
    "kvpilot_tokens_at_8_bits_ratio", "Share of the running requests' KV-cache blocks that decode reads at 8 bits.", (),
    "KVPILOT_8_BITS_REPORT",
)  # fmt: skip
"""Gauge of the share that `residual_scheduler` reports with `--recent-tokens=all`, from 0 to 1."""
