"""Engines that calibrate themselves find the same factors at every start, and report them."""

import random
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Observed
from kvpilot_runtime.calibration import at_start
from kvpilot_runtime.calibration import attention as calibration_attention
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_runtime.calibration.text import NoTokensError, lone, passes, text_ids
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import Reported
from kvpilot_runtime.vllm_api import compat
from kvpilot_smallmodels.models import smollm2_135m, tiny_gemma3, tiny_llama
from kvpilot_smallmodels.oracle import Oracle
from support.built_in_factors import factors_of
from support.engines_in_turn import refused
from support.stepped_engine import Asked, serve

pytestmark = pytest.mark.timeout(1800)

CHUNK, CONTEXT = 512, 2048
SLACK = 1e-3


def told(page: list[str]) -> dict[str, str]:
    """Return the labels of the only series that shows the source of the factors."""
    [line] = [line for line in page if line.startswith(calibration_info.NAME + "{")]
    labels = line.partition("{")[2].partition("}")[0]
    return dict(part.split("=", 1) for part in labels.replace('"', "").split(","))


def asked(model: Path, dtype: str, prompts: list[list[int]], calibration: str = "") -> Asked:
    """Send these prompts together, with 16 tokens each, to an engine without a window."""
    options = {"max_num_batched_tokens": CHUNK, "max_model_len": CONTEXT, "kv_cache_memory_bytes": 64 << 20}
    return Asked(str(model), dtype, [prompts], [[16] * len(prompts)], options, recent=0, calibration=calibration)


@pytest.mark.parametrize("model", [tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def test_answers_equal_those_with_factors_from_the_built_in_text(model: Callable[[], Path]) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 49152) for _ in range(rng.randint(8, 120))] for _ in range(20)]
    question = asked(model(), "k4v4", prompts)
    if model is tiny_gemma3:
        question.options["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    found = serve(question)
    labels = told(found.metrics)
    assert (labels["source"], labels["reason"]) == ("self", "")
    assert len(labels["hash"]) == 16
    both = list(zip(prompts, found.answers[0], strict=True))
    calibrated = Oracle(model(), "k4v4", factors_of(model(), CHUNK, CONTEXT))
    wrong = [i for i, (prompt, answer) in enumerate(both) if not calibrated.sound(prompt, answer)]
    assert not wrong
    # As a control: the same codec answers differently without factors.
    plain = Oracle(model(), "k4v4")
    assert sum(max(plain.shortfalls(prompt, answer)) > SLACK for prompt, answer in both) > 5


def test_every_start_finds_the_same_factors_and_a_start_without_calibration_reports_it() -> None:
    starts = (("k4v4", ""), ("k2v2", ""), ("k4v4", "off"))
    first, second, without = (told(serve(asked(tiny_llama(), dtype, [], how)).metrics) for dtype, how in starts)
    assert first == second
    assert without["source"] == "off"
    assert without["hash"] != first["hash"]


def test_keys_that_are_not_finite_prevent_the_start_and_name_the_layer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    log = refused(model, {"KVPILOT_CALIBRATION": ""}, load_format="auto", skip_tokenizer_init=False)
    assert "calibration of layer 'model.layers.1.self_attn.attn': keys are not finite in" in log
    assert "KVPILOT_CALIBRATION" in log


def test_the_text_repeats_to_the_requested_length_and_begins_like_a_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_135m())
    ids = text_ids(tokenizer, 10_000)
    assert len(ids) == 10_000
    assert ids[:90] == text_ids(tokenizer, 100)[:90]
    # The last tokens stand for first tokens of prompts. This tokenizer has no special first token, so any may be one.
    assert ids[-lone(10_000) :] == [ids[i * 10_000 // 64] for i in range(64)]
    assert len(set(ids[-64:])) > 30
    assert len(set(ids[:4000])) > 800

    class Opening:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * add_special_tokens + [5] * len(text)

    ids = text_ids(Opening(), 50_000)
    assert ids[:-64].count(1) == ids[0] == 1
    assert ids[-64:] == [1] * 64


def test_a_tokenizer_that_returns_no_tokens_is_an_error() -> None:
    with pytest.raises(NoTokensError, match="no tokens for text"):
        text_ids(SimpleNamespace(encode=lambda text, add_special_tokens: []), 10)


@given(st.integers(128, 20_000), st.integers(0, 2**21))
def test_the_texts_sequences_are_spread_over_the_context(tokens: int, more: int) -> None:
    context = tokens + more
    found = passes(tokens, context)
    tokens -= lone(tokens)
    assert sum(length for length, _ in found) == tokens
    assert all(length > 0 and first >= 0 and first + length <= context for length, first in found)
    assert found[0][1] == 0
    assert found[0][0] >= tokens // 2
    last = max(first + length for length, first in found)
    # Sequences are spread evenly over the doublings of the context, so the last one begins in the upper half of them.
    assert last >= min(context, 1024 * ((context / 1024 + 1) ** 0.75 - 1))


def test_without_a_tokenizer_the_same_random_tokens_are_used_and_reported() -> None:
    model = SimpleNamespace(max_model_len=200, skip_tokenizer_init=True, get_vocab_size=lambda: 50)
    config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=300))
    ids, reason = at_start.token_ids(config)
    assert reason == "RandomTokens"
    assert len(ids) == 200
    assert len(set(ids)) > 30
    assert max(ids) < 50
    assert at_start.token_ids(config) == (ids, reason)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 40), heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    window=st.one_of(st.none(), st.integers(1, 50)), softcap=st.sampled_from([0.0, 2.0]), rows=st.integers(1, 50),
    sinking=st.booleans(),
)  # fmt: skip
def test_attention_within_a_chunk_equals_the_formula(
    tokens: int, heads: tuple[int, int], window: int | None, softcap: float, rows: int, sinking: bool
) -> None:
    rng = torch.Generator().manual_seed(tokens)
    query, key, value = (torch.randn(tokens, n, 8, generator=rng) for n in (heads[0], heads[1], heads[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_attention, "_ROWS", rows)
        sinks = torch.randn(heads[0], generator=rng) if sinking else None
        found = calibration_attention.causal(query, key, value, 0.3, softcap, window, sinks)
    for t in range(tokens):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(heads[0]):
            kv = h // (heads[0] // heads[1])
            scores = key[first : t + 1, kv].double() @ query[t, h].double() * 0.3
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            more = 0.0 if sinks is None else sinks[h].double().exp()
            wanted = scores.exp() / (scores.exp().sum() + more) @ value[first : t + 1, kv].double()
            torch.testing.assert_close(found[t, h].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 3.0, 0.0])])
def test_each_sequence_of_the_chunk_attends_only_to_itself(sinks: torch.Tensor | None) -> None:
    rng = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(65, n, 64, generator=rng) for n in (4, 2, 2))
    seen, apart, output = Observed(2, 64), Observed(2, 64), torch.empty(65, 4 * 64)
    impl, how = SimpleNamespace(scale=0.1, softcap=3.0, sinks=sinks), (0.1, 3.0, None, sinks)
    chunk = calibration_attention.Chunk(impl, None, seen, [40, 20])
    assert chunk.forward(None, query, key, value, key, None, output) is output
    for rows in (slice(0, 40), slice(40, 60)):
        wanted = calibration_attention.causal(query[rows], key[rows], value[rows], *how)
        torch.testing.assert_close(output.view(65, 4, 64)[rows], wanted)
        apart.add(query[rows], key[rows], value[rows], *how)
    for row in range(60, 65):  # Each of these tokens is computed alone.
        wanted = calibration_attention.causal(*(x[row : row + 1] for x in (query, key, value)), *how)
        torch.testing.assert_close(output.view(65, 4, 64)[row : row + 1], wanted)
        apart.add_first(key[row : row + 1])
    torch.testing.assert_close(seen.factors().key_first, key[60:].mean(0))
    for field in fields(Factors):
        torch.testing.assert_close(getattr(seen.factors(), field.name), getattr(apart.factors(), field.name))


def test_engines_that_cannot_calibrate_themselves_report_the_reason() -> None:
    assert at_start.obstacle(SimpleNamespace(lora_config=SimpleNamespace()), {}) == "LoRA"


def test_k2v2_is_refused_if_the_engine_cannot_calibrate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(at_start, "of_all_ranks", lambda mine: [mine])
    config = SimpleNamespace(lora_config=SimpleNamespace(), cache_config=SimpleNamespace(cache_dtype="k2v2"))
    with pytest.raises(
        UnsupportedModelError, match=r"'k2v2' is not accurate.*\(LoRA\); give a file of `kvpilot calibrate`"
    ):
        at_start.calibrate(SimpleNamespace(vllm_config=config, device="cpu"), {"layer": None})


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("new", [False, True])
def test_a_draft_model_gets_the_text_and_the_target_models_states_in_either_runner(method: str, new: bool) -> None:
    heads, several = method != "draft_model", method == "eagle3"
    got: dict[str, torch.Tensor] = {}

    class Model:
        def __call__(self, **inputs: torch.Tensor) -> None:
            got.update(inputs)

        def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
            return states + 1

    drafter = SimpleNamespace(
        model=Model(), method=method, pass_hidden_states_to_model=heads, eagle3_use_aux_hidden_state=several,
        uses_mrope=False,
    )  # fmt: skip
    runner = SimpleNamespace(**{"speculator" if new else "drafter": drafter}, use_aux_hidden_state_outputs=several)
    ids, positions, states = torch.tensor([5, 6, 7]), torch.arange(3), torch.zeros(3, 2)
    found = (states, [states, states]) if several else states
    at_start._draft(compat.drafter(runner), ids, positions, found)
    assert got["input_ids"].tolist() == ([6, 7, 5] if heads else [5, 6, 7])
    assert got["positions"].tolist() == [0, 1, 2]
    assert ("hidden_states" in got) == heads
    if heads:
        assert torch.equal(got["hidden_states"], torch.ones(3, 4) if several else states)


def test_a_draft_layer_without_tokens_keeps_its_factors_but_a_served_layer_is_an_error() -> None:
    told: list[object] = []
    impl = SimpleNamespace(drafting=True, set_factors=lambda layer, found: told.append(found))
    layers, seen = {"model.layers.3.attn": SimpleNamespace(impl=impl)}, {"model.layers.3.attn": Observed(2, 64)}
    assert not at_start._fill(layers, seen)
    assert not told
    impl.drafting = False
    assert "calibration of layer 'model.layers.3.attn': no token was counted" in at_start._fill(layers, seen)


def test_the_metric_appears_after_a_workers_report_and_never_from_a_partial_file(tmp_path: Path) -> None:
    registry, file = CollectorRegistry(), tmp_path / "calibration.json"
    registry.register(Reported(calibration_info.INFO, file))  # type: ignore[arg-type]  # it has what a collector needs
    assert calibration_info.NAME not in generate_latest(registry).decode()
    file.write_text('{"source": "se')
    assert calibration_info.NAME not in generate_latest(registry).decode()
    file.write_text('{"labels": {"source": "none", "hash": "0f", "reason": "LoRA"}, "value": 1}')
    assert told(generate_latest(registry).decode().splitlines()) == {"source": "none", "hash": "0f", "reason": "LoRA"}
