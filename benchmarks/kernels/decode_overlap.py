"""Find batch sizes at which decode should overlap `store`: `python -m benchmarks.kernels.decode_overlap --out OUT`.

The program times a layer of Llama-3-8B's shape in k4v4 for 1 to 64 sequences, with and without a ring, and with and
without the overlap. Next to the times it prints the choice of `kvpilot_kernels.gpu.launch.tuning`. It writes
OUT/decode-overlap.json.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.kernels import decode

SHORT = ((1, 1024), (1, 8192), (2, 2048), (4, 2048), (8, 1024), (8, 4096), (16, 1024), (32, 2048), (64, 1024))
LONG = ((1, 32768), (1, 65536), (1, 131072), (2, 32768), (4, 16384), (8, 32768), (16, 8192), (32, 16384), (64, 4096))


def main() -> None:
    """Measure all batch sizes, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    out: Path = parser.parse_args().out
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for sequences, context in (*SHORT, *LONG):
        case = decode.Case("Llama-3-8B", *decode.SHAPES["Llama-3-8B"], sequences, context)
        for recent in (0, 64):
            for overlap in (True, False):
                times = decode.ours("k4v4", case, device, recent, overlap=overlap)
                rows.append({"sequences": sequences, "context": context, "overlap": overlap, **times})
                print(rows[-1], flush=True)
                torch.cuda.empty_cache()
    facts = {
        "command": "python -m benchmarks.kernels.decode_overlap",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode-overlap.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
