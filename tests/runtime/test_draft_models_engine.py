"""Speculation with draft models in a real engine: greedy answers equal those without drafts.

The layers of a draft model have the served model's dtype, blocks and residual pages.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_smallmodels import draft_models, families
from kvpilot_smallmodels.oracle import Oracle
from support.judge import Judge, newest_blocks
from support.stepped_engine import Asked, Told, serve

pytestmark = pytest.mark.timeout(3600)

DRAFTS, WINDOW = 3, 64
DTYPES = ("k8v4", "k4v4", "k4v2", "k2v2")


@dataclass(frozen=True)
class Case:
    """Recipe for a draft model. A `skilled` one drafts well even without factors."""

    method: str
    make: Callable[[Path, Path], Path]
    skilled: bool = False


def _like(**fields: Any) -> Callable[[Path, Path], Path]:
    """Return a function that makes a Llama of other sizes."""
    return lambda _model, folder: families.make("plain", folder, fields=fields)


CASES = {
    "draft model": Case("draft_model", draft_models.shaken, skilled=True),
    "EAGLE": Case("eagle", draft_models.eagle),
    "EAGLE-3": Case("eagle3", draft_models.eagle3),
    "MTP": Case("mtp", draft_models.with_mtp),
    "draft model with half a page": Case("draft_model", _like(num_key_value_heads=1)),
    "draft model with a page that does not divide": Case("draft_model", _like(num_key_value_heads=1, head_dim=128)),
}
ALL = [
    (name, dtype, recent, calibrated)
    for name in CASES
    for dtype in DTYPES
    for recent, calibrated in ((WINDOW, False), (0, False), (WINDOW, True))
    if (dtype == "k4v4" or not calibrated) and not ("page" in name and (calibrated or dtype != "k4v4"))
]
SHORT = ("draft model", "k4v4", WINDOW, True)
"""Case that `make test` runs. The served model's layers are the same for all kinds of drafts."""

SERVED = 2
"""Layers of the served model."""


@dataclass
class Models:
    """Served and draft models, made once."""

    root: Path

    def __post_init__(self) -> None:
        self.pair = cache(self._pair)
        self.plain = cache(self._plain)

    def _pair(self, name: str) -> tuple[Path, str]:
        """Return the paths of the served model and of its draft model. MTP has no separate draft model."""
        case, folder = CASES[name], self.root / name.replace(" ", "-")
        if case.method == "mtp":
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            qwen = families.make("plain", self.root / "qwen", kind="Qwen2Config", fields=heads)
            return case.make(qwen, folder), ""
        if not (model := self.root / "plain").exists():
            families.make("plain", model)
        return model, str(case.make(model, folder))

    def _plain(self, model: Path, dtype: str, recent: int, calibrated: bool, roomy: bool = False) -> Told:
        """Return the answers of an engine without drafts."""
        return serve(requests(model, dtype, recent, calibrated, roomy))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return the models of this module's tests."""
    return Models(tmp_path_factory.mktemp("drafts"))


def requests(model: Path, dtype: str, recent: int, calibrated: bool, roomy: bool = False) -> Asked:
    """Return 16 random requests in two rounds. Most share a prefix, and the pool is too small for all.

    With `roomy` the pool is large, prefixes are not cached, and each prompt is one chunk. Then the window holds the
    same tokens with and without drafts.
    """
    rng = random.Random(20261123)
    shared = [rng.randrange(3, families.VOCABULARY) for _ in range(64)]

    def prompt() -> list[int]:
        prefix = [] if rng.random() < 0.3 else shared
        return prefix + [rng.randrange(3, families.VOCABULARY) for _ in range(rng.randint(4, 50))]

    rounds = [[prompt() for _ in range(8)] for _ in range(2)]
    tokens = [[rng.randint(24, 48) for _ in prompts] for prompts in rounds]
    options: dict[str, Any] = {
        "block_size": 16, "num_gpu_blocks_override": 44 if recent else 30, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 192, "max_num_batched_tokens": 128, "max_num_seqs": 8, "skip_tokenizer_init": True,
    }  # fmt: skip
    if roomy:
        options |= {"num_gpu_blocks_override": 400, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    return Asked(str(model), dtype, rounds, tokens, options, recent, calibration="" if calibrated else "off")


@pytest.mark.parametrize(
    ("name", "dtype", "recent", "calibrated"),
    [pytest.param(*one, marks=[] if one == SHORT else pytest.mark.long, id="-".join(map(str, one))) for one in ALL],
)
def test_greedy_answers_are_those_without_speculation(
    name: str, dtype: str, recent: int, calibrated: bool, models: Models,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    case, (model, drafter) = CASES[name], models.pair(name)
    asked = replace(requests(model, dtype, recent, calibrated), method=case.method, drafter=drafter, drafts=DRAFTS)
    plain = None
    if not (case.skilled and recent):
        plain = models.plain(model, dtype, recent, calibrated)
        assert plain.drafted == 0
        asked.right = [] if case.skilled else plain.answers
    told = serve(asked)
    factors = [Factors(*map(torch.tensor, layer)) for layer in told.factors[0]]
    served = factors[:SERVED] if calibrated else None
    found = Judge(asked, told, Oracle(model, dtype, served))
    begun = sum(step["anew"] for step in told.steps)
    seen = {
        "drafted": told.drafted, "accepted": told.accepted, "refused": told.drafted - told.accepted,
        "cached": sum(map(sum, told.cached)), "judged": found.judged,
    }  # fmt: skip
    if recent:
        seen |= {"windowed": found.windowed, "poisoned": told.poisoned}
    else:  # With a window, running requests take the residual pages of others first.
        seen["preempted"] = begun - sum(map(len, asked.rounds))
    for key, value in {**seen, "groups": told.groups, "wrong": len(found.wrong)}.items():
        record_property(key, value)
        print(f"{key}: {value}")
    assert not found.wrong
    assert min(seen.values()) > 0
    assert [kind for kind, _ in told.groups] == ["FullAttentionSpec"]
    if plain is not None:
        pairs = zip(chain(*told.answers), chain(*plain.answers), strict=True)
        other = sum(one != another for one, another in pairs)
        record_property("not_equal", other)
        print(f"not_equal: {other}")
        # With a window, the division into steps decides which tokens are read at 8 bits. Without one, only rounding
        # differs.
        assert recent or other < 6
    if recent:
        # Control: a window with one block less gives other answers.
        fewer = newest_blocks(asked, told) - 1
        assert Judge(asked, told, Oracle(model, dtype, served), rounds=0, newest=fewer).wrong
    if served is not None:
        # The draft model's layers have factors, too. Factors and hash of the served model stay the same.
        assert all(not torch.equal(one.key_mean, torch.zeros_like(one.key_mean)) for one in factors)
        [line] = [x for x in told.metrics if x.startswith(calibration_info.NAME + "{")]
        assert f'hash="{factors_file.digest(served)}"' in line
        assert 'source="self"' in line
        assert plain is None or told.factors[0][:SERVED] == plain.factors[0]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["draft model", "EAGLE", "EAGLE-3", "MTP"])
def test_without_preemption_and_prefix_hits_answers_with_a_window_equal_those_without_drafts(
    name: str, dtype: str, models: Models, record_property: Callable[[str, object], None]
) -> None:
    case, (model, drafter) = CASES[name], models.pair(name)
    plain = models.plain(model, dtype, WINDOW, False, True)
    asked = requests(model, dtype, WINDOW, False, True)
    told = serve(
        replace(asked, method=case.method, drafter=drafter, drafts=DRAFTS, right=[] if case.skilled else plain.answers)
    )
    seen = {"drafted": told.drafted, "accepted": told.accepted, "refused": told.drafted - told.accepted}
    other = sum(one != another for one, another in zip(chain(*told.answers), chain(*plain.answers), strict=True))
    for key, value in {**seen, "not_equal": other}.items():
        record_property(key, value)
        print(f"{key}: {value}")
    assert min(seen.values()) > 0
    assert len(told.steps) < len(plain.steps)
    assert other < 6  # Rounding changes these few answers.
