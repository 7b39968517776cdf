"""Write the table of metrics in docs/metrics.md (`make generate`)."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from kvpilot_operator.control.service_metrics import FAMILIES
from kvpilot_operator.control.telemetry import Telemetry

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"


def table() -> str:
    """Return the table of the operator's own metrics, without those of the Python process."""
    labels = {f.name: ("namespace", "name", *f.labels) for f in FAMILIES}
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *sorted(_rows(labels)), ""])


def _rows(labels: dict[str, tuple[str, ...]]) -> Iterator[str]:
    registry = Telemetry().registry
    owners = registry._names_to_collectors
    for family in registry.collect():
        if not family.name.startswith("kvpilot_"):
            continue
        owner = owners.get(family.name)
        if isinstance(owner, MetricWrapperBase):
            labels[family.name] = owner._labelnames
        name = f"{family.name}_total" if family.type == "counter" else family.name
        words = ", ".join(f"`{label}`" for label in labels[family.name])
        yield f"| `{name}` | {family.type} | {words} | {family.documentation} |"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
