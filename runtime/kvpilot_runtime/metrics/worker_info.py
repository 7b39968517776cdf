"""Report facts of a worker process on the engine's /metrics, as labels of gauges whose value is 1.

The worker process writes the labels to a file, and the API server reads the file. vLLM's first process sets an
environment variable with the path of the file for the others.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@dataclass(frozen=True)
class WorkerInfo:
    """Gauge whose labels a worker sets.

    Attributes:
        name, help, labels: name, help text and label names of the gauge.
        variable: environment variable with the path of the file.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    variable: str

    def report(self, values: Mapping[str, str]) -> None:
        """Write the labels' values to the file. Do nothing in workers other than the first rank.

        If the file cannot be written, only log the error, because the engine works without the metric.
        """
        from vllm.distributed import get_tp_group

        if get_tp_group().rank_in_group:
            return
        path = os.environ.get(self.variable)
        if path is None:
            return
        try:
            scratch = Path(path + f".{os.getpid()}")
            scratch.write_text(json.dumps(dict(values)))
            scratch.replace(path)
        except OSError as error:
            log.warning("%s cannot be written (%s): no %s on /metrics", path, error, self.name)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            # With several API servers, each one serves metrics from a common folder, so the worker must write its gauge
            # there.
            from prometheus_client import Gauge

            gauge = Gauge(self.name, self.help, self.labels, multiprocess_mode="mostrecent")
            gauge.labels(*(values[label] for label in self.labels)).set(1)

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


class Reported:
    """Collector for the Prometheus registry, which reads the gauge that a worker reported."""

    def __init__(self, info: WorkerInfo, path: Path) -> None:
        self.info, self._path = info, path

    def describe(self) -> list[Any]:
        """Return no metrics. The registry calls this at registration, when no worker has reported yet."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the gauge with the labels that a worker reported. Yield nothing before that."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            found = json.loads(self._path.read_text())
            values = [str(found[label]) for label in self.info.labels]
        except (OSError, ValueError, TypeError, KeyError):
            return
        family = GaugeMetricFamily(self.info.name, self.info.help, labels=self.info.labels)
        family.add_metric(values, 1)
        yield family


RECENT_WINDOW = WorkerInfo(
    "kvpilot_recent_window_info", "Tokens of the recent window, which are read with more bits than the KV-cache dtype "
    "has.", ("dtype", "tokens", "reason"), "KVPILOT_RECENT_REPORT",
)  # fmt: skip
"""Gauge of the recent window that the engine uses, in tokens; 0 for no window.

If the window is smaller than the requested or the default window, the label `reason` says why.
"""
