"""How long an engine may take to start goes by the size in its model's name, and is generous where that tells none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.render.startup import startup_budget_seconds
from support.services import manifest, spec_of

UNKNOWN = 150
BOUNDS = (600, 40_600)


def budget(source: str, gpus: int = 1) -> int:
    return startup_budget_seconds(spec_of(manifest(model={"source": source}, engine={"tensorParallelSize": gpus})))


@pytest.mark.parametrize(
    ("source", "billions"),
    [
        ("hf://Qwen/Qwen3-0.6B", 0.6),
        ("hf://Qwen/Qwen3-8B", 8),
        ("hf://Qwen/Qwen2.5-1.5B-Instruct", 1.5),
        ("hf://Qwen/Qwen2.5-14B-Instruct-1M", 14),
        ("hf://Qwen/Qwen3-235B-A22B-Instruct-2507", 235),
        ("hf://Qwen/Qwen3-Next-80B-A3B-Thinking-FP8", 80),
        ("hf://Qwen/Qwen1.5-MoE-A2.7B", UNKNOWN),
        ("hf://tencent/Hunyuan-A13B-Instruct", UNKNOWN),
        ("hf://google/gemma-3n-E4B-it", UNKNOWN),
        ("hf://google/gemma-3-27b-it", 27),
        ("hf://meta-llama/Llama-3.2-1B", 1),
        ("hf://meta-llama/Llama-3.1-405B-Instruct-FP8", 405),
        ("hf://meta-llama/Llama-4-Scout-17B-16E-Instruct", 17 * 16),
        ("hf://nvidia/Llama-3_1-Nemotron-Ultra-253B-v1", 253),
        ("hf://mistralai/Mixtral-8x7B-Instruct-v0.1", 56),
        ("hf://mistralai/Mixtral-8x22B-Instruct-v0.1", 176),
        ("hf://cognitivecomputations/dolphin-2.7-mixtral-8x7b", 56),
        ("hf://mistralai/Mistral-Large-Instruct-2407", UNKNOWN),
        ("hf://CohereForAI/c4ai-command-r-plus-08-2024", UNKNOWN),
        ("hf://deepseek-ai/DeepSeek-V3", UNKNOWN),
        ("hf://deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.5),
        ("hf://microsoft/Phi-3-mini-128k-instruct", UNKNOWN),
        ("hf://gradientai/Llama-3-8B-Instruct-262k", 8),
        ("hf://gradientai/Llama-3-8B-Instruct-Gradient-1048k", 8),
        ("hf://01-ai/Yi-34B-200K", 34),
        ("hf://internlm/internlm2_5-7b-chat-1m", 7),
        ("hf://somebody/phi-3-128k-1M", UNKNOWN),
        ("hf://HuggingFaceTB/SmolLM2-135M-Instruct", 0.135),
        ("hf://facebook/opt-125m", 0.125),
        ("hf://ibm-granite/granite-3.1-3b-a800m-instruct", 3),
        ("hf://allenai/OLMoE-1B-7B-0924", 7),
        ("hf://TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", 1.1),
        ("hf://inclusionAI/Ling-1T", 1000),
        ("hf://Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", 7),
        ("hf://h2oai/h2o-danube3-4b-base", 4),
        ("hf://openai/gpt-oss-120b", 120),
        ("pvc://weights/llama3.1-405b", 405),
        ("pvc://weights/llama-405b/fp8", 405),
        ("pvc://disk-1b/llama-405b", 405),
        ("pvc://disk-1m/llama-405b", 405),
        ("pvc://llama-70b", 70),
        ("pvc://weights/models--Qwen--Qwen3-8B/snapshots/9c925d64d72725edaf899c6cb9c377fd0709d9c5", 8),
        ("oci://registry.example.com:5000/models/mixtral8x7b:v2", 56),
        ("file:///models/vicuna13b-v1.5", 13),
        ("file:///models/current", UNKNOWN),
        ("file:///models/llama-" + "4" * 400 + "b", UNKNOWN),
        ("file:///models/llama-9999b", 2000),
    ],
    ids=lambda value: str(value)[:70],
)
def test_the_weights_are_as_large_as_the_name_says(source, billions):
    assert budget(source) == 600 + int(20 * billions)


def test_weights_of_a_size_that_no_name_tells_may_fill_every_gpu():
    assert [budget("hf://deepseek-ai/DeepSeek-V3", gpus) for gpus in (1, 8, 64)] == [3600, 24_600, 40_600]


SIZES = st.decimals(min_value="0.1", max_value=999, places=1).map(lambda d: (f"{d.normalize():f}", float(d)))
WORDS = st.lists(
    st.sampled_from(["llama", "3.1", "instruct", "v0.1", "fp8", "2407", "128k", "1m", "a22b", "chat", "8bit"]),
    max_size=3,
)


@given(SIZES, st.sampled_from("bB"), WORDS, WORDS, st.sampled_from("-_"))
def test_a_clear_size_is_never_given_less_time_wherever_it_stands_in_the_name(size, unit, before, after, separator):
    text, billions = size
    name = separator.join(["m", *before, f"{text}{unit}", *after])
    assert budget(f"hf://org/{name}") >= 600 + int(20 * billions)


@given(
    st.from_regex(r"[A-Za-z0-9._@+=-]{1,200}", fullmatch=True),
    st.sampled_from(["hf://", "pvc://a/", "file:///", "oci://r/"]),
)
def test_any_name_gives_a_time_within_bounds(name, scheme):
    least, most = BOUNDS
    assert least <= budget(scheme + name) <= most


@given(st.text(max_size=300))
def test_any_text_at_all_gives_a_time_within_bounds(text):
    assert BOUNDS[0] <= budget(text) <= BOUNDS[1]
