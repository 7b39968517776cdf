"""Convert a published trace to the CSV of `kvpilot backtest --recorded`: `python -m benchmarks.backtest.traces FILE`.

The program reads Azure's CSV format or Mooncake's JSON lines, and prints the converted CSV.
"""

import csv
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvpilot_cli.backtest.recorded import COLUMNS


def requests(file: Path) -> Iterator[tuple[float, int, int]]:
    """Yield (arrival in seconds, prompt tokens, answer tokens) of each request of a trace."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if file.suffix == ".jsonl":
            for one in map(json.loads, lines):
                yield one["timestamp"] / 1000, one["input_length"], one["output_length"]
            return
        for row in csv.DictReader(lines):
            time = datetime.fromisoformat(row["TIMESTAMP"])
            # The time zone does not matter, because only differences between times count.
            seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
            yield seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])


if __name__ == "__main__":
    csv.writer(sys.stdout).writerows([COLUMNS, *requests(Path(sys.argv[1]))])
