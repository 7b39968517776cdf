"""Run all tests of faults, long ones included, and write their measurements into docs/reliability.md.

python tests/faults/table.py                  # measures all
python tests/faults/table.py --record FILE    # only the table, from a run with KVPILOT_FAULTS_RECORD=FILE
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.faulty_record import VARIABLE

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: tests/faults/table.py writes this -->", "<!-- end of what is measured -->"


def table(lines: list[dict[str, Any]]) -> str:
    """Return the machine and the newest measurement of each fault, in Markdown."""
    machine = [line for line in lines if "versions" in line][-1]
    rows = {line["fault"]: line for line in lines if "fault" in line}
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    text = [f"Measured on {machine['date']} on {machine['cores']} cores: {versions}.", ""]
    text += [
        "| fault | event that ends the measurement | seconds until the event | requests answered | requests failed |"
    ]
    text += ["|---|---|---|---|---|"]
    for row in rows.values():
        users = "no load | -" if row["answered"] is None else f"{row['answered']} | {row['failed']}"
        text.append(f"| {row['fault']} | {row['what']} | {row['seconds']:.1f} | {users} |")
    return "\n".join(text)


def write(lines: list[dict[str, Any]]) -> None:
    """Replace the table in the page of measurements."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{after}")


def main() -> int:
    """Write the table if all tests pass, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="file with the measurements of an earlier run")
    file = parser.parse_args().record
    with tempfile.TemporaryDirectory() as scratch:
        if file is None:
            file = Path(scratch) / "record.jsonl"
            files = sorted(map(str, Path(__file__).parent.glob("test_*.py")))
            command = [sys.executable, "-m", "pytest", "-m", "long or not long", *files]
            status = subprocess.run(command, env={**os.environ, VARIABLE: str(file)}, check=False).returncode
            if status:
                return status
        write([json.loads(line) for line in file.read_text().splitlines()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
