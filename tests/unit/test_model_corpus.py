"""Our code reads published configs (published.json of `kvpilot plan`) as transformers does, and refuses broken ones."""

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot_cli.plan import models
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.facts_config import from_config
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_cli.plan.make import Request, make
from kvpilot_formats import formats
from kvpilot_formats.models import ConfigError, Kind, read
from kvpilot_formats.models.layers import HYBRID, WORDS

ROOT = Path(__file__).parents[2]
CORPUS = json.loads((ROOT / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
CONFIGS = {entry["model"]: entry["config"] for entry in CORPUS}
FAMILIES = {
    "Llama 2", "Llama 3", "Llama 4", "Qwen2", "Qwen2.5", "Qwen3", "Qwen3-Next", "Qwen3.5", "gpt-oss", "Gemma 2",
    "Gemma 3", "Gemma 3n", "Gemma 4", "Mistral", "DeepSeek", "Kimi", "GLM", "MiniMax", "Phi", "Nemotron", "Granite",
    "OLMo", "Hunyuan", "Falcon", "SmolLM", "Whisper", "Jamba", "Mamba",
}  # fmt: skip

COMPRESSED = {name for name in CONFIGS if "DeepSeek-V4" in name}
SPARSE = {name for name in CONFIGS if "MiniMax-M3" in name}
"""Models whose KV cache kvpilot does not compute, because it is compressed or has an additional index."""
# Models whose kinds of layers transformers reads differently from vLLM. We follow vLLM.
OTHER_KINDS = {
    *COMPRESSED,
    "stepfun-ai/Step-3.7-Flash-FP8",
    "stepfun-ai/Step-3.7-Flash",  # the class in transformers ignores layer_types of the published file
}
# Configs for which transformers needs fields that published.json leaves out.
INCOMPLETE = {"mistralai/Ministral-3-3B-Instruct-2512"}


@pytest.fixture(scope="module")
def classes():
    script = ROOT / "tests" / "support" / "config_classes.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(CONFIGS),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_corpus_has_every_family_and_a_source_for_each_model():
    assert len(CORPUS) >= 150
    assert len(CONFIGS) == len(CORPUS)
    assert not FAMILIES - {entry["family"] for entry in CORPUS}
    assert all(entry["source"] for entry in CORPUS)


def test_our_reading_equals_transformers_classes(classes):
    assert len(classes) >= 90
    for name, said in classes.items():
        found, differs = read(CONFIGS[name]), []
        if said["kinds"] and name not in OTHER_KINDS:
            kinds = Counter(kind_of(word, said["window"], found) for word in said["kinds"])
            ours = Counter({group.kind: 0 for group in found.groups})
            for group in found.groups:
                ours[group.kind] += group.layers
            shared = found.shared_layers
            differs += [(kind, kinds[kind], ours[kind]) for kind in (Kind.FULL, Kind.WINDOW, Kind.CHUNKED)
                        if not ours[kind] <= kinds[kind] <= ours[kind] + shared]  # fmt: skip
            states = sum(word == HYBRID or WORDS.get(word) is Kind.STATE for word in said["kinds"])
            differs += [("state", states, found.state_layers)] if states != found.state_layers else []
        if found.layers and name not in INCOMPLETE and "heads" in said:
            differs += [("heads", said["heads"], found.heads)] if said["heads"] != found.heads else []
            # Falcon's class leaves the number of KV heads to the model.
            kv_heads = said["kv_heads"] or (1 if name == "tiiuae/falcon-7b" else found.heads)
            differs += [("kv_heads", kv_heads, found.kv_heads)] if kv_heads != found.kv_heads else []
            # If a model compresses its keys, some classes define head_dim as the part with positions.
            if said["head_dim"] and not CONFIGS[name].get("kv_lora_rank") and not found.latent:
                differs += (
                    [("head_dim", said["head_dim"], found.head_dim)] if said["head_dim"] != found.head_dim else []
                )
        assert differs == [], name


def kind_of(word, window, found):
    kind = Kind.FULL if word == HYBRID else WORDS.get(word, Kind.OTHER)
    beyond = not window or (found.max_positions is not None and window >= found.max_positions)
    return Kind.FULL if kind is Kind.WINDOW and beyond else kind


def test_no_dtype_of_vllm_is_refused_for_a_model_that_only_our_formats_cannot_hold():
    for name, config in CONFIGS.items():
        found = read(config)
        for dtype in tuple(formats.FORMATS):
            if not formats.parse(dtype).ours:
                assert (found.token_bytes(dtype) > 0) == bool(found.full_layers), (name, dtype)


def test_only_the_listed_models_are_doubtful():
    doubtful = {name for name, config in CONFIGS.items() if read(config).other_layers}
    assert doubtful == COMPRESSED | SPARSE


def test_every_model_with_a_known_kv_cache_can_be_planned():
    refused = {}
    for name, config in CONFIGS.items():
        try:
            model = from_config(config, name, weight_bytes=10**9)
            plan = make(Request(model, find_gpu("B200"), kv=10**11, weights=10**9))
            assert all(row.bytes_per_token > 0 for row in plan.rows if not row.veto), name
            assert any(not row.veto for row in plan.rows), name
        except PlanError as error:
            refused[name] = str(error)
    assert set(refused) == {*COMPRESSED, *SPARSE, "mistralai/Mamba-Codestral-7B-v0.1", "openai/whisper-tiny"}, refused


def test_the_table_of_kvpilot_plan_equals_our_reading():
    short = {name.rpartition("/")[2].removeprefix("Meta-").lower(): read(config) for name, config in CONFIGS.items()}
    compared = 0
    for model in models.table():
        names = (name.rpartition("/")[2].removeprefix("Meta-").lower() for name in (model.name, *model.also))
        for found in (short[name] for name in names if name in short):
            compared += 1
            assert model.layers == found.layers, model.name
            assert (model.heads, model.sliding_layers) == (found.heads, found.window_layers), model.name
            assert model.latent_dim == found.latent, model.name
            if not found.latent:
                assert (model.kv_heads, model.head_dim) == (found.kv_heads, found.head_dim), model.name
            assert {model.window} == {group.window for group in found.groups if group.window} or not model.window
    assert compared >= 20


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 7, 10**4, 2**31, 2**63, 10**30])
    | st.floats()
    | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=3),
)


@st.composite
def mutated(draw):
    """Draw a published config in which a few fields, at any depth, are missing, arbitrary or from another model."""
    names = sorted(CONFIGS)
    config = copy.deepcopy(CONFIGS[draw(st.sampled_from(names))])
    other = CONFIGS[draw(st.sampled_from(names))]
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    for _ in range(draw(st.integers(1, 4))):
        part = draw(st.sampled_from(parts))
        field = draw(st.sampled_from(sorted({*part, *other, "head_dim", "num_key_value_heads", "sliding_window"})))
        what = draw(st.sampled_from(["gone", "other", "anything"]))
        if what == "gone":
            part.pop(field, None)
        else:
            part[field] = copy.deepcopy(other.get(field)) if what == "other" else draw(anything)
    return config


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(mutated())
def test_a_broken_config_is_either_read_or_refused_in_one_line(config):
    config = json.loads(json.dumps(config))
    try:
        found = read(config)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 400
    else:
        for dtype in ("auto", "fp8"):
            assert found.token_bytes(dtype) >= 0
    try:
        plan = make(Request(from_config(config, "broken"), find_gpu("B200"), kv=10**11, weights=10**9))
    except (PlanError, formats.FormatError) as error:
        assert "\n" not in str(error)
    else:
        assert all(row.bytes_per_token > 0 for row in plan.rows if not row.veto)
