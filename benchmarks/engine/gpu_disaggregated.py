"""Measure prefill on one GPU and decode on another in real vLLM: `python -m benchmarks.engine.gpu_disaggregated`.

Each dtype has two engines (dummy weights) with vLLM's NixlConnector. `DTYPE/window` is one of our dtypes with its
recent window, and `DTYPE` has no window. A suffix `@LAYOUT` sets vLLM's layout of both KV caches, which otherwise
the connector chooses. GPU 0 prefills prompts one by one, and GPU 1 answers them. The results are:

- the bytes transferred, and NIXL's copies (adjacent blocks on both sides count as one),
- the transfer time, and the time to the first token,
- a comparison of every block's bytes on both sides,
- the number of answer tokens that equal those of the first engine, which reads the same blocks. With a window, the
  first engine may read the newest blocks of the prompt at 8 bits. The second engine has no residuals of them.

The program writes OUT/disaggregated-SHAPE.json and prints a table.
"""

import argparse
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_disaggregated_run import Job
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from benchmarks.engine.gpu_engine_shapes import SHAPES, write

BLOCK = 64


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="auto,auto@BHLNC,fp8,k4v4@LBHNC,k4v4,k4v4/window",
                        help="comma-separated (default: %(default)s)")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the shape has")
    parser.add_argument("--prompts", default="4096,16384", help="tokens, comma-separated (default: %(default)s)")
    parser.add_argument("--each", type=int, default=5, help="number of prompts of each length (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="number of tokens of an answer (default: %(default)s)")
    parser.add_argument(
        "--gpus", default="0,1", help="GPUs of prefill and decode, which may be the same (default: 0,1)"
    )
    parser.add_argument("--engine-args", type=json.loads, default={"enforce_eager": True},
                        help="further arguments of vllm.LLM, as JSON (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=150, help="seconds that one dtype may take")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


class Child:
    """Connection to a child process, which answers questions. Each question and each answer is one line of JSON."""

    def __init__(self, listener: socket.socket) -> None:
        self.line = listener.accept()[0]
        self.lines = self.line.makefile("r")

    def tell(self, what: str, **more: Any) -> None:
        """Send a question, and do not wait for the answer."""
        self.line.sendall(json.dumps([what, more]).encode() + b"\n")

    def hear(self) -> Any:
        """Wait for the answer to the oldest open question, and return it."""
        if not (said := self.lines.readline()):
            raise ChildFailedError("an engine has ended; see its log")
        return json.loads(said)

    def ask(self, what: str, **more: Any) -> Any:
        """Send a question, wait for the answer, and return it."""
        self.tell(what, **more)
        return self.hear()


def measured(prefill: Child, decode: Child, length: int, number: int, answer: int) -> dict[str, Any]:
    """Let the prefill engine compute a prompt and the decode engine answer it. Return the figures."""
    left = prefill.ask("serve", prompt=[length, number], tokens=1, params={"do_remote_decode": True})
    sums = prefill.ask("sums", blocks=left["params"]["remote_block_ids"])
    came = decode.ask("serve", prompt=[length, number], tokens=answer, params=left["params"])
    prefill.ask("hear")
    again = prefill.ask("serve", prompt=[length, number], tokens=answer, params=None)
    say(f"{length} tokens: {came['reads']} reads, {came['bytes'] / 2**20:.1f} MiB in {came['copies']} copies, "
        f"{came['transfer_s']:.4f} s")  # fmt: skip
    alike = sum(a == b for a, b in zip(came["answer"], again["answer"], strict=True))
    return {
        "tokens": length, "prefill_s": left["first_s"], "decode_first_s": came["first_s"], "bytes": came["bytes"],
        "copies": came["copies"], "transfer_s": came["transfer_s"], "reads": came["reads"],
        "blocks": sum(map(len, sums)), "blocks_alike": bool(sums) and came["sums"] == sums, "alike": alike,
        "answer": answer,
    }  # fmt: skip


def run(args: argparse.Namespace, name: str, model: Path, scratch: Path) -> dict[str, Any]:
    """Run the two engines of a dtype, and return their figures."""
    kind, _, layout = name.partition("@")
    dtype, _, window = kind.partition("/")
    file_name = name.replace("/", "-").replace("@", "-")
    lengths = [int(x) for x in args.prompts.split(",")]
    blocks = (max(lengths) // BLOCK + 2) * 3
    failed: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where := str(scratch / f"{file_name}.socket"))
        listener.listen()
        listener.settimeout(args.limit)
        threads, children = [], []
        for i, (role, gpu) in enumerate(zip(("kv_producer", "kv_consumer"), args.gpus.split(","), strict=True)):
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute"}
            options = {
                "model": str(model), "kv_cache_dtype": dtype, "load_format": "dummy", "skip_tokenizer_init": True,
                "block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_num_seqs": 4, "max_model_len":
                max(lengths) + 2 * BLOCK, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.8,
                "kv_transfer_config": transfer, **args.engine_args,
            }  # fmt: skip
            if args.gpus == "0,0":
                options["gpu_memory_utilization"] = 0.4
            file = scratch / f"{file_name}-{role}.json"
            file.write_text(json.dumps(asdict(Job(options, SHAPES[args.shape].vocab, where))))
            # Let each process also see the other's GPU, after its own, because UCX must find a path between the two.
            others = dict.fromkeys(other for other in args.gpus.split(",") if other != gpu)
            extra = {
                "CUDA_VISIBLE_DEVICES": ",".join([gpu, *others]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "KVPILOT_RECENT_TOKENS": "" if window else "0", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + i),
                **({"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}),
            }  # fmt: skip

            def start(file: Path = file, extra: dict[str, str] = extra) -> None:
                log = args.out / f"{file.stem}.log"
                try:
                    with environment(extra) as env:
                        run_child("benchmarks.engine.gpu_disaggregated_run", file, log, args.limit, env)
                except ChildFailedError as error:
                    failed.append(str(error))

            threads.append(threading.Thread(target=start))
            threads[-1].start()
            try:
                children.append(Child(listener))  # a short wait: the child connects before it creates its engine
            except TimeoutError:
                failed.append("an engine never came")
        try:
            for child in children:
                child.tell("start")
            starts = [child.hear() for child in children]
            prefill, decode = children
            # Do not count the first prompt, which also opens connections.
            measured(prefill, decode, min(lengths), -1, args.answer)
            found = [measured(prefill, decode, n, i, args.answer) for n in lengths for i in range(args.each)]
        except (ChildFailedError, OSError, ValueError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            for child in children:
                with contextlib.suppress(OSError):
                    child.line.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    return {"dtype": name, "failed": failed} if failed else {"dtype": name, "starts": starts, "prompts": found}


def line(row: dict[str, Any], length: int) -> str:
    """Return one row of the table: the figures of a dtype for prompts of one length."""
    of = [one for one in row["prompts"] if one["tokens"] == length]

    def middle(key: str) -> float:
        return statistics.median(one[key] for one in of)

    return (
        f"| {row['dtype']} | {row['starts'][0]['layout']} | {length} | {middle('bytes') / 2**20:.1f} | "
        f"{' '.join(str(one['copies']) for one in of)} | {spread(of)} | "
        f"{1e3 * middle('prefill_s'):.1f} | {1e3 * middle('decode_first_s'):.1f} | "
        f"{sum(one['blocks_alike'] for one in of)}/{len(of)} | {sum(one['alike'] for one in of)}/"
        f"{sum(one['answer'] for one in of)} |"
    )


def spread(of: list[dict[str, Any]]) -> str:
    """Return the smallest, the median and the largest time of the transfers as text, in milliseconds."""
    times = sorted(1e3 * one["transfer_s"] for one in of)
    return f"{times[0]:.1f}, {statistics.median(times):.1f}, {times[-1]:.1f}"


def main() -> int:
    """Run all dtypes, print and write the results. Return 1 if a run failed or if the bytes of a block differ."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    shape, rows = SHAPES[args.shape], []
    with tempfile.TemporaryDirectory(prefix="kvpilot-apart-") as folder:
        scratch = Path(folder)
        longest = max(int(x) for x in args.prompts.split(",")) + 2 * BLOCK
        model = write(scratch / "model", shape, args.layers or shape.layers, longest)
        for name in args.dtypes.split(","):
            say(name)
            rows.append(run(args, name, model, scratch))
            (args.out / f"disaggregated-{args.shape}.json").write_text(json.dumps(rows, indent=1))
    print(
        "| KV cache | layout | prompt | MiB | copies of each | transfer, ms: least, median, most | prefill, ms | "
        "then first token, ms | equal blocks | equal tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"{row['dtype']}: {row['failed']}")
            continue
        for length in map(int, args.prompts.split(",")):
            print(line(row, length))
        print([start["said"] for start in row["starts"]])
    return int(any("failed" in row or not all(one["blocks_alike"] for one in row["prompts"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
