"""Write all generated files of the repository, or check that they are up to date.

    make generate                                    # write
    .venv/bin/python scripts/generate.py --check     # write nothing; exit 1 and name the files that would change

It generates copies in the chart, config/, the API's reference, tables of metrics, dtypes, conditions and decisions,
defaults of transformers' config classes, costs of `kvpilot backtest`, pages of models, README's badges, the picture of
a recording, and pages and plots of docs/benchmarks. It does not generate measured or resolved files: figures,
`tests/faults/table.py`, recordings, pictures of dashboards, locks.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("operator", "runtime", "kernels", "formats", "probes", "cli", "localcluster")
FIGURES = "docs/benchmarks"
COMMANDS = (
    ("scripts/manifests.py",),
    ("scripts/page_tables.py",),
    ("scripts/models_page.py", "cli/kvpilot_cli/plan/published.json", "docs/models.md"),
    ("scripts/model_defaults.py", "formats/kvpilot_formats/models/defaults.json"),
    ("scripts/api_reference.py", "docs/reference"),
    ("scripts/decisions_page.py", "docs/decisions"),
    ("scripts/badges.py", "docs/images/badges"),
    ("scripts/picture.py", "draw", "docs/images/rollback.ansi", "--from", "Problem "),
    (
        "-m",
        "benchmarks.backtest.backtest_profile",
    ),
    ("-m", "benchmarks.operator.parsers", "--page", f"{FIGURES}/operator-parsers.json"),
    ("-m", "benchmarks.operator.fleet_page", f"{FIGURES}/fleet.json"),
    ("-m", "benchmarks.operator.hostile_page", f"{FIGURES}/operator-hostile.json"),
    ("-m", "benchmarks.accuracy.accuracy_report", f"{FIGURES}/accuracy.json", f"{FIGURES}/accuracy-gemma3.json"),
    ("-m", "benchmarks.accuracy.engine_kl_report", f"{FIGURES}/engine-kl.json"),
    ("-m", "benchmarks.accuracy.speculation_acceptance_report", f"{FIGURES}/speculation-acceptance.json"),
    ("-m", "benchmarks.engine.cpu_backend", "--page"),
    ("-m", "benchmarks.accuracy.gpu_equality_page", f"{FIGURES}/h200-equality.json"),
    ("-m", "benchmarks.engine.plots", f"{FIGURES}/h200-engine.json"),
    (
        "-m",
        "benchmarks.kernels.decode_page",
    ),
)
"""Scripts and their arguments. They run at the root of a checkout, in any order."""


def generate(root: Path) -> None:
    """Write the generated files below `root` with the code in `root`.

    Raises:
        CalledProcessError: a command failed; its message is on stderr.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / name) for name in PACKAGES)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(
            lambda command: subprocess.run(
                [sys.executable, *command], cwd=root, env=environment, stdout=subprocess.DEVNULL, check=True
            ),
            COMMANDS,
        )
        list(done)


def stale() -> list[str]:
    """Return the files that `generate` would change, add or remove. Run it in a copy of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        generate(copy)
        made = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        return sorted(
            name
            for name in files | made
            if name not in files or name not in made or (ROOT / name).read_bytes() != (copy / name).read_bytes()
        )


def main() -> int:
    """Run the command line and return the exit status."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    found = stale()
    for name in found:
        print(f"{name} is not up to date: run make generate")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
