"""The rows of the accuracy table: which codec each row name means, and which names are valid."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.accuracy_rows import AGAINST_EXACT, SERVED, bits, engine, every_name, reading
from kvpilot_kernels.factors import Factors


def test_residual_pages_are_counted_in_whole_blocks_over_4096_tokens():
    assert bits("k4v4", 128) == 4.25
    assert bits("k4v4+self+w64", 128) == pytest.approx(4.25 * (1 + 2 * 64 / 4096))
    assert bits("k4v4+self+w65", 128) == pytest.approx(4.25 * (1 + 3 * 64 / 4096))
    assert bits("k2v2+self+w512", 128) == pytest.approx(2.25 * (1 + 9 * 3 * 64 / 4096))
    assert bits("k4v4+self+wall", 128) == pytest.approx(2 * 4.25)
    assert bits("int8+self", 128) == 8.25


def test_tokens_kept_in_16_bits_count_in_the_size_of_our_rows_and_of_kvarns():
    assert bits("k4v4+self+w128+first128", 128) - bits("k4v4+self+w128", 128) == pytest.approx(128 * 11.75 / 4096)
    assert bits("kvarn_k4v4+exact", 128) - bits("kvarn_k4v4", 128) == pytest.approx(256 * 11.625 / 4096)


def test_every_row_name_of_the_accuracy_table_can_be_parsed():
    factors = {0: Factors.identity(2, 64)}
    for name in every_name():
        found = reading(name, factors)
        assert found.pages(0).key(torch.ones(3, 2, 64)).shape == (3, 2, 64)
        assert (found.fine is None) == (found.newest == 0)
        assert bits(name, 64) > 2
    assert {*SERVED, *AGAINST_EXACT} <= set(every_name())


@pytest.mark.parametrize("name", ["k4v4+", "k4v4+w64+self", "k9v9", "k4v4+other"])
def test_an_unknown_row_of_the_accuracy_table_is_refused(name):
    with pytest.raises(ValueError, match=r"row 'k4v4|not known"):
        reading(name, {0: Factors.identity(2, 64)})


@pytest.mark.parametrize(("name", "dtype", "variables"), [
    ("k4v4+self+w64", "k4v4", {"KVPILOT_RECENT_TOKENS": "64"}),
    ("k4v4+self+wall", "k4v4", {"KVPILOT_RECENT_TOKENS": "all"}),
    ("k4v4+self", "k4v4", {"KVPILOT_RECENT_TOKENS": "0"}),
    ("k4v4", "k4v4", {"KVPILOT_RECENT_TOKENS": "0", "KVPILOT_CALIBRATION": "off"}),
    ("int8+self", "int8", {}),
    ("fp8_e4m3", "fp8_e4m3", {}),
])  # fmt: skip
def test_a_row_of_the_accuracy_table_becomes_dtype_and_variables_of_an_engine(name, dtype, variables):
    assert engine(name) == (dtype, variables)


@pytest.mark.parametrize("name", ["k4v4+self+w128+first128", "kvarn_k4v4"])
def test_a_row_that_no_engine_serves_is_refused(name):
    with pytest.raises(ValueError, match=r"row '|not known"):
        engine(name)
