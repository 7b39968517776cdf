"""Features of vLLM with `k4v4` on GPUs: `python -m benchmarks.accuracy.gpu_options --out DIR [--gpus 2]`.

On one GPU the program tests fp8 weights (quantized at start), sleep mode, a LoRA adapter, prompt logprobs, parallel
samples and structured output. On two GPUs it tests tensor, pipeline and data parallelism, and expert parallelism with a
small MoE model. It compares each run on two GPUs with a run of the same model on one GPU. Models and prompts are small
and random, as in gpu_families.py.

The program writes DIR/options-answers.json.gz, or options-2-answers.json.gz on two GPUs. gpu_families_page.py judges
the answers. The program needs `smallmodels`, `formats`, `kernels` and `runtime` on PYTHONPATH.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_equality import prompts_of
from benchmarks.accuracy.gpu_families import OWN_PROCESS, ROOM, RUNS, engine_options, serve, shared_arguments
from benchmarks.accuracy.gpu_families_ask import Asked
from benchmarks.accuracy.gpu_options_judge import adapter_row, details_rows, fp8_row, sleep_row, spread_row
from kvpilot_smallmodels import adapters
from kvpilot_smallmodels.families import VOCABULARY, make

MODEL, EXPERTS, DTYPE = "plain", "qwen3-moe", "float16"
WIDTH = 2
"""Number of GPUs of an engine that runs on several GPUs."""
SPREAD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor parallel": (MODEL, "answers", {"tensor_parallel_size": WIDTH}),
    "pipeline parallel": (MODEL, "answers", {"pipeline_parallel_size": WIDTH}),
    "data parallel": (MODEL, "data_parallel", {"data_parallel_size": WIDTH}),
    "expert parallel": (EXPERTS, "answers", {"tensor_parallel_size": WIDTH, "enable_expert_parallel": True}),
}
"""Features that are tested on several GPUs, by name: the model, the kind of requests, and the engine's options."""
ON_ONE = ("fp8", "sleep", "adapter", "details")
Rows = dict[str, dict[str, Any]]
ON_TWO = ("auto/crowded", "k4v4/crowded", "k4v4/codec")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, WIDTH))
    parser.add_argument("--what", help=f"features, comma-separated: {', '.join(ON_ONE)}; "
                        f"on two GPUs {', '.join(SPREAD)}")  # fmt: skip
    shared_arguments(parser, engines=4)
    return parser.parse_args()


def tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Add a tokenizer with one token per byte to the folder of a model with `vocabulary` token ids.

    Structured output needs each token's text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = {word: i for i, word in enumerate([*known, *(f"<{i}>" for i in range(len(known), vocabulary))])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


class Engines:
    """Jobs of engines to run, by name, each with its model."""

    def __init__(self, args: argparse.Namespace, scratch: Path, prompts: list[list[int]]) -> None:
        self.args, self.scratch, self.prompts, self.asked = args, scratch, prompts, dict[str, Asked]()

    def add(
        self, name: str, model: Path, run: str, how: str = "answers", more: dict[str, Any] | None = None, **engine: Any
    ) -> None:
        """Add a job like a run of gpu_families.py.

        Args:
            name: name of the job.
            run: kind of run, a key of `RUNS`.
            how: kind of requests, a key of `HOW`.
            more: arguments for that kind.
            engine: additional arguments of `vllm.LLM`.
        """
        dtype, crowded, env = RUNS[run]
        options = {**engine_options(model, dtype, crowded), "dtype": DTYPE, **engine, **self.args.engine_args}
        own = {} if how == "data_parallel" else OWN_PROCESS
        out = self.scratch / f"{name.replace(' ', '-').replace('/', '-')}.json"
        room = 0.0 if how in ("data_parallel", "details") else ROOM * crowded
        self.asked[name] = Asked(
            options, self.prompts, self.args.tokens, crowded, str(out), {**own, **env}, room, how, more or {}
        )


def on_one(engines: Engines, models: dict[str, Path], what: str) -> None:
    """Add the engines that test the feature `what` on one GPU."""
    plain, alone = models[MODEL], ("auto/alone", "k4v4/alone")
    if what == "fp8":
        for run in (*alone, "auto/crowded", "k4v4/crowded"):
            engines.add(f"fp8 {run}", plain, run, quantization="fp8")
        for run in alone:
            engines.add(f"16 bits {run}", plain, run)
    elif what == "sleep":
        for run in alone:
            engines.add(f"sleep {run}", plain, run, "slept", enable_sleep_mode=True, enable_prefix_caching=True)
    elif what == "adapter":
        engines.add("adapter k4v4/codec", plain, "k4v4/codec", "adapted", {"adapter": str(models["adapter"])},
                    enable_lora=True, max_lora_rank=8)  # fmt: skip
    else:
        engines.add("details k4v4/codec", plain, "k4v4/codec", "details", skip_tokenizer_init=False,
                    enable_prefix_caching=False,
                    structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True})  # fmt: skip


def on_two(engines: Engines, models: dict[str, Path], what: str) -> None:
    """Add the engines that test the feature `what` on two GPUs, and engines with the same model on one GPU."""
    name, how, engine = SPREAD[what]
    for run in ON_TWO:
        if f"one {name} {run}" not in engines.asked:
            engines.add(f"one {name} {run}", models[name], run)
        engines.add(f"{what} {run}", models[name], run, how, **engine)


def rows_of_one(told: dict[str, Any], models: dict[str, Path], what: str) -> Rows:
    """Judge the answers with one feature on one GPU, and return its rows."""

    def of(name: str) -> dict[str, Any]:
        return {run: told[f"{name} {run}"] for run in RUNS if f"{name} {run}" in told}

    if what == "fp8":
        return {"weights in fp8": fp8_row(of("fp8"), of("16 bits"))}
    if what == "sleep":
        return {"sleep mode": sleep_row(of("sleep"))}
    if what == "adapter":
        return {"LoRA adapter": adapter_row(models[MODEL], models["merged"], of("adapter"))}
    return details_rows(models[MODEL], of("details"))


def rows_of_two(told: dict[str, Any], models: dict[str, Path], what: str) -> Rows:
    """Judge the answers with one feature on two GPUs, and return its row."""
    one = {run: told[f"one {SPREAD[what][0]} {run}"] for run in ON_TWO}
    return {what: spread_row(one, {run: told[f"{what} {run}"] for run in ON_TWO})}


def made(scratch: Path) -> dict[str, Path]:
    """Create the models, and for MODEL also a tokenizer, an adapter, and a copy with the adapter merged into it."""
    models = {name: make(name, scratch / name) for name in (MODEL, EXPERTS)}
    tokenizer(models[MODEL])
    models |= {name: scratch / name for name in ("adapter", "merged")}
    adapters.make(models[MODEL], models["adapter"], models["merged"])
    return models


def main() -> int:
    """Run all engines and write their answers. Return 1 if an engine failed."""
    args = arguments()
    args.name, known, asking = (
        ("options", ON_ONE, on_one) if args.gpus == 1 else (f"options-{args.gpus}", tuple(SPREAD), on_two)
    )
    chosen = args.what.split(",") if args.what else known
    if unknown := set(chosen) - set(known):
        raise SystemExit(f"--what has {', '.join(sorted(unknown))}; on {args.gpus} GPUs there is {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="kvpilot-options-") as folder:
        models = made(Path(folder))
        # Take the model without a tokenizer, so that prompts are random tokens as in gpu_families.py. With a tokenizer
        # they would depend on a text of this machine.
        engines = Engines(args, Path(folder), prompts_of(models[EXPERTS], args.prompts))
        for what in chosen:
            asking(engines, models, what)
        return serve(args, engines.asked, {name: models[name] for name in (MODEL, EXPERTS, "merged")})


if __name__ == "__main__":
    sys.exit(main())
