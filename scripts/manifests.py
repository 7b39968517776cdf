"""Write all files that are made from the API's structs and charts/kvpilot (`make generate`).

- The structs give crds/ and the schema of `kvpilot validate`.
- crds/ and LICENSE are copied into the chart.
- values.yaml gives the table in the chart's README.md.
- The chart gives config/ (kustomize) and bundle/ (OLM).
"""

import json
from pathlib import Path

import chart_readme
import crd
import kustomize
import olm_bundle

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "kvpilot"
CONFIG = ROOT / "config"
BUNDLE = ROOT / "bundle"
SCHEMA = ROOT / "cli" / "kvpilot_cli" / "validate" / "schema.json"
COPIES = CHART / "files" / "crds"
_COPIED = "# A copy of crds/, by `make generate`: a chart holds only files of its own folder.\n"


def _crds() -> dict[Path, str]:
    return {COPIES / file.name: _COPIED + file.read_text() for file in sorted((ROOT / "crds").glob("*.yaml"))}


def _readme() -> dict[Path, str]:
    readme = CHART / "README.md"
    table = chart_readme.with_values(readme.read_text(), (CHART / "values.yaml").read_text())
    return {readme: table, CHART / "LICENSE": (ROOT / "LICENSE").read_text()}


def _config() -> dict[Path, str]:
    return {CONFIG / name: text for name, text in kustomize.folders(CHART).items()}


def _bundle() -> dict[Path, str]:
    return {BUNDLE / name: text for name, text in olm_bundle.files(ROOT).items()}


def main() -> None:
    """Write all files. The chart's copies come first, because the rest is made from the chart."""
    (ROOT / "crds" / crd.FILE).write_text(crd.text())
    SCHEMA.write_text(json.dumps(crd.judged(), indent=1, sort_keys=True) + "\n")
    _write(_crds(), COPIES)
    _write(_readme(), None)
    _write(_config(), CONFIG)
    _write(_bundle(), BUNDLE)


def _write(wanted: dict[Path, str], folder: Path | None) -> None:
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in folder.rglob("*.yaml") if folder is not None else []:
        if path not in wanted:
            path.unlink()


if __name__ == "__main__":
    main()
