"""Write the tables of metrics, dtypes and conditions in pages of docs/ (`make generate`)."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import crd
from prometheus_client.metrics import MetricWrapperBase

from kvpilot_formats.formats import FORMATS, Format
from kvpilot_formats.latent import LATENT_FORMATS, ROPE_BITS
from kvpilot_operator.api.words import ConditionType
from kvpilot_operator.control.service_metrics import FAMILIES
from kvpilot_operator.control.telemetry import Telemetry

DOCS = Path(__file__).parents[1] / "docs"
OURS = [one for one in FORMATS.values() if one.ours]


def metrics() -> Iterator[str]:
    """Yield the rows of the operator's own metrics, without those of the Python process."""
    labels = {f.name: ("namespace", "name", *f.labels) for f in FAMILIES}
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


def dtypes() -> Iterator[str]:
    """Yield the rows of our dtypes for keys and values."""
    for one in OURS:
        bits = one.bits_per_element()
        needs = "; needs [calibration](calibration.md), the engine's own or a file" if one.calibrated_only else ""
        yield f"| `{one.name}` | {one.key.bits} bits | {one.value.bits} bits | {bits:g} | {16 / bits:.2f}x{needs} |"


def latents() -> Iterator[str]:
    """Yield the rows of our dtypes for multi-head latent attention."""
    for one in LATENT_FORMATS.values():
        times = 16 / one.bits_per_element()
        yield f"| `{one.name}` | {one.bits} bits | {ROPE_BITS} bits | {one.row_bytes} | {times:.2f}x |"


def residuals() -> Iterator[str]:
    """Yield the rows of dtypes with a recent window, for head_dim 128 and blocks of 64 tokens."""
    for one in OURS:
        if one.has_residuals:
            pages, blocks = one.residual_pages(128, 64), one.recent_blocks(one.window, 64)
            yield f"| `{one.name}` | {_missing(one)} | {pages} | {one.window} tokens | {blocks} | {pages * blocks} |"


def _missing(one: Format) -> str:
    """Describe the bits that residuals add to a token's key and value."""
    key, value = 8 - one.key.bits, 8 - one.value.bits
    if key == value:
        return f"{key} more bits of each key and value"
    if key and value:
        return f"{key} more bits of each key, {value} of each value"
    return f"{key} more bits of each key" if key else f"{value} more bits of each value"


def conditions() -> Iterator[str]:
    """Yield the rows of the conditions with their reasons."""
    for one in ConditionType:
        yield f"| `{one}` | {crd.texts(ConditionType)[one.name]} |"


def write(page: str, name: str, rows: Iterable[str]) -> None:
    """Replace the rows of the table between the page's marks `NAME: begin` and `NAME: end`. Keep the table's head."""
    path, end = DOCS / page, f"<!-- {name}: end -->\n"
    before, begin, rest = re.split(rf"(<!-- {name}: begin -->\n(?:\|.*\n){{2}})", path.read_text())
    path.write_text("".join([before, begin, *(f"{row}\n" for row in rows), end, rest.partition(end)[2]]))


if __name__ == "__main__":
    write("metrics.md", "metrics", sorted(metrics()))
    write("conditions.md", "conditions", conditions())
    write("formats.md", "dtypes", dtypes())
    write("formats.md", "latents", latents())
    write("formats.md", "residuals", residuals())
