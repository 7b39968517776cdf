import shlex
from pathlib import Path

import pytest

from kvpilot_cli import command
from kvpilot_cli.plan import models
from kvpilot_cli.plan.command import main
from kvpilot_formats.formats import FORMATS
from support.plans import planned, sequences

DOCS = [Path(__file__).parents[2] / "docs" / page for page in ("planning.md", "planning-load.md")]


def test_the_worked_example_holds_67_sequences_of_llama_3_70b(capsys):
    document = planned(capsys, "Llama-3-70B", "--gpus", "4", "--kv-gb", "180", "--context", "8192")
    auto = document["dtypes"][0]
    assert auto["bytes_per_token"] == 327_680
    assert auto["bytes_per_token"] * 8192 == 2_684_354_560
    assert sequences(document, "auto", 8192) == 67


def test_the_documented_output_is_the_printed_one(capsys):
    blocks = [block for page in DOCS for block in page.read_text().split("```\n")]
    shown = [block for block in blocks if block.startswith("$ kvpilot plan ")]
    assert len(shown) == 2
    for block in shown:
        asked, _, answer = block.replace("\\\n", "").partition("\n")
        assert main(shlex.split(asked)[3:]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in answer.splitlines() if line != "..." and line not in printed] == []


def test_the_engines_own_memory_and_the_utilization_cost_ten_of_the_67_sequences(capsys):
    document = planned(capsys, "Llama-3-70B", "--gpu", "H100-80GB", "--gpus", "4", "--context", "8192")
    assert sequences(document, "auto", 8192) == 57
    memory = document["memory_per_gpu"]
    left = memory["usable_bytes"] - memory["weights_bytes"] - memory["engine_bytes"]
    assert document["kv_bytes_per_gpu"] == left


def test_the_recent_window_is_planned_for_and_can_be_chosen(capsys):
    plans = {n: planned(capsys, "Llama-3-70B", "--gpus", "4", *asked) for n, asked in
             {None: [], 64: ["--recent-tokens", "64"], 0: ["--recent-tokens", "0"]}.items()}  # fmt: skip
    of_each = {row["dtype"]: row["recent_tokens"] for row in plans[None]["dtypes"]}
    assert of_each == {name: FORMATS[name].window for name in of_each}
    assert (of_each["fp8"], of_each["k4v4"], of_each["k4v2"]) == (0, 64, 128)
    rows = {n: next(row for row in plan["dtypes"] if row["dtype"] == "k4v4") for n, plan in plans.items()}
    assert (rows[64]["recent_tokens"], rows[64]["recent_bytes_per_sequence"]) == (64, 2 * 64 * 87_040)
    assert (rows[0]["recent_tokens"], rows[0]["recent_bytes_per_sequence"]) == (0, 0)
    assert sequences(plans[64], "k4v4", 2048) < sequences(plans[0], "k4v4", 2048)
    assert sequences(plans[64], "fp8", 2048) == sequences(plans[0], "fp8", 2048)


@pytest.mark.parametrize("asked", ["100", "-64", "many", "1024"])
def test_the_error_for_an_unsupported_window_names_the_supported_windows(capsys, asked):
    assert main(["Llama-3-70B", f"--recent-tokens={asked}"]) == 2
    assert capsys.readouterr().err == (
        f"kvpilot plan: --recent-tokens: '{asked}' is not supported; give one of 0, 64, 128, 256, 512\n"
    )


def test_a_gpu_is_known_by_its_node_label_too(capsys):
    by_name = planned(capsys, "Llama-3-70B", "--gpu", "h100-80gb", "--gpus", "4")
    assert planned(capsys, "Llama-3-70B", "--gpu", "NVIDIA-H100-80GB-HBM3", "--gpus", "4") == by_name


def test_a_model_is_known_by_its_name_without_publisher_in_any_case(capsys):
    assert planned(capsys, "llama-3.1-8b-instruct")["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert planned(capsys, "meta-llama/Llama-3.1-8B-Instruct")["model"] == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["Llama-3.1-9B"], "did you mean meta-llama/Llama-3.1-8B"),
        (["zzzzzzzzzz"], "`kvpilot plan --list` shows them all"),
        (["/nonexistent/model"], "the folder does not exist"),
        ([], "MODEL is missing"),
        (["Llama-3.1-8B", "--gpu", "H300"], "--gpu 'H300' is not in the table; use one of H200"),
        (["Llama-3.1-8B", "--gpus", "3"], "--gpus 3: 32 heads with 8 KV heads cannot be divided among 3 GPUs"),
        (["Llama-3.1-8B", "--gpus", "0"], "--gpus: '0' is not a positive whole number"),
        (["Llama-3.1-8B", "--context", "8K"], "--context: '8K' is not a positive whole number"),
        (["Llama-3.1-8B", "--utilization", "1.5"], "--utilization: '1.5' is more than the whole GPU"),
        (["Llama-3.1-8B", "--utilization", "nan"], "--utilization: 'nan' is not a positive number"),
        (["Llama-3.1-8B", "--dtype", "auto,k5v5"], "kv-cache dtype 'k5v5' is not known"),
        (["Llama-3.1-8B", "--kv-gb", "-1"], "--kv-gb: '-1' is not a positive number"),
        (["Llama-3.1-8B", "--weights-dtype", "int3"], "--weights-dtype: invalid choice: 'int3'"),
        (["Llama-3.1-8B", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["Llama-3.1-70B"], "--gpus 1: 141.1 GB of weights and 3.2 GB for the engine do not leave room"),
        (["Llama-3.1-70B"], "use --gpus 2"),
        (["Llama-3.1-405B", "--gpu", "T4"], "however many are used; use a larger GPU"),
        (["Llama-3.1-8B", "--requests-per-second", "2"], "--prompt-tokens and --generated-tokens: missing"),
    ],
)
def test_an_error_is_one_line_with_exit_code_2(capsys, argv, said):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("model", [model.name for model in models.table()])
def test_every_model_of_the_table_prints_within_120_columns(capsys, model):
    load = ["--requests-per-second", "10", "--prompt-tokens", "100000", "--generated-tokens", "1000"]
    assert main([model, "--gpu", "B200", "--gpus", "1", "--kv-gb", "100", *load]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("auto") for line in lines)


def test_a_load_is_planned_for_every_dtype_that_can_serve(capsys):
    load = ["--requests-per-second", "8", "--prompt-tokens", "3000", "--generated-tokens", "1000"]
    document = planned(capsys, "Llama-3.1-8B", "--gpu", "A100-80GB", *load, "--max-ms-per-token", "40")
    cost = {row["dtype"]: row["cost"] for row in document["dtypes"]}
    assert document["load"]["token_seconds"] == 0.04
    assert all(c["gpus"] == c["replicas"] >= 1 and c["operating"]["token_seconds"] <= 0.04 for c in cost.values())
    assert cost["k4v4"]["replicas"] < cost["auto"]["replicas"]


def test_the_time_of_a_gate_grows_with_the_context_and_is_unknown_without_weights(capsys):
    def seconds(*options):
        rows = planned(capsys, "Llama-3.1-8B", "--gpu", "H200", *options)["dtypes"]
        return [row["gate_seconds"] for row in rows]

    short, long = seconds("--context", "2048"), seconds("--context", "32768,131072")
    assert all(90 < a < b < 600 for a, b in zip(short, long, strict=True))
    assert set(seconds("--kv-gb", "100")) == {None}
    assert command.main(["plan", "Llama-3.1-8B", "--gpu", "H200", "--context", "32768"]) == 0
    assert "accuracy gate of a canary at 32,768 tokens: at most about 2" in capsys.readouterr().out


def test_the_time_of_a_gate_includes_loads_through_a_kv_connector(capsys):
    asked = ["Llama-3.1-8B", "--gpu", "H200", "--context", "131072", "--dtype", "auto,k4v4"]
    without, through = (planned(capsys, *asked, *more)["dtypes"] for more in ([], ["--connector"]))
    auto, packed = (b["gate_seconds"] - a["gate_seconds"] for a, b in zip(without, through, strict=True))
    # A prefill of 131,072 tokens takes about 9 s. Each of 15 long prompts is loaded up to 14 times.
    assert 9 < packed < auto < 60
    assert main([*asked, "--connector"]) == 0
    said = f"at 131,072 tokens, with loads through its KV connector: at most about {through[0]['gate_seconds']:,} s"
    assert said in capsys.readouterr().out


def test_a_dtype_that_cannot_serve_gives_the_reason(capsys):
    infeasible = {
        row["dtype"]: row["veto"]
        for row in planned(capsys, "DeepSeek-V3", "--gpu", "H200", "--gpus", "8", "--dtype", "auto,fp8,k4v4")["dtypes"]
    }
    assert infeasible["auto"] is None
    assert infeasible["fp8"] is None  # vLLM's own dtype, which supports this model
    assert "multi-head latent attention" in infeasible["k4v4"]
    assert main(["Llama-3.1-8B", "--dtype", "mla4"]) == 0
    assert "mla4 does not support a model without multi-head latent attention" in capsys.readouterr().out


def test_a_model_with_latents_is_planned_in_dtypes_of_latents(capsys):
    rows = planned(capsys, "DeepSeek-V3", "--gpu", "H200", "--gpus", "8")["dtypes"]
    assert [row["dtype"] for row in rows] == ["auto", "fp8", "mla8", "mla4"]
    assert [row["veto"] for row in rows] == [None] * 4
    assert [row["bytes_per_token"] for row in rows] == [8 * 61 * size for size in (1152, 576, 580, 324)]


def test_the_plans_json_keeps_its_keys(capsys):
    load = ["--requests-per-second", "1", "--prompt-tokens", "1000", "--generated-tokens", "100"]
    document = planned(capsys, "Llama-3.1-8B", *load)
    assert set(document) == {
        "model", "gpu", "nodes", "gpus_per_replica", "weights_dtype", "memory_per_gpu", "kv_bytes_per_gpu", "load",
        "dtypes", "notes",
    }  # fmt: skip
    assert set(document["memory_per_gpu"]) == {"usable_bytes", "weights_bytes", "engine_bytes", "kv_bytes"}
    assert set(document["load"]) == {"requests_per_second", "prompt_tokens", "generated_tokens", "token_seconds"}
    row = document["dtypes"][0]
    assert set(row) == {
        "dtype", "veto", "bits_per_element", "bytes_per_token", "window_bytes_per_sequence", "recent_tokens",
        "recent_bytes_per_sequence", "capacities", "notes", "cost", "gate_seconds",
    }  # fmt: skip
    assert set(row["capacities"][0]) == {"context_tokens", "capacity_tokens", "sequences"}
    assert set(row["cost"]) == {"replicas", "operating", "limit", "gpus"}
    assert set(row["cost"]["operating"]) == {"sequences", "token_seconds", "fill", "prompt_share", "binds"}


def test_an_infinite_number_of_the_plan_is_null_in_json(capsys):
    load = ["--requests-per-second", "100000000", "--prompt-tokens", "100000", "--generated-tokens", "1"]
    (row,) = planned(capsys, "Llama-3.1-8B", "--dtype", "auto", *load)["dtypes"]
    assert (row["cost"]["replicas"], row["cost"]["operating"]["token_seconds"]) == (None, None)


def test_the_option_list_shows_models_and_gpus(capsys):
    assert command.main(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    assert "meta-llama/Llama-3.1-405B" in out
    assert "H100-80GB" in out
