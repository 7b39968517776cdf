"""Pauses between retries double up to a maximum, and retries never stop."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.backoff import Backoff

SECONDS = st.floats(0.01, 1000.0)


def test_pauses_between_retries_double_up_to_a_maximum_and_retries_never_end() -> None:
    assert list(islice(Backoff(0.2, 5.0), 7)) == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@given(SECONDS, SECONDS, st.integers(0, 10**6))
def test_pauses_between_retries_never_shrink_and_never_exceed_the_maximum(a: float, b: float, failures: int) -> None:
    backoff = Backoff(min(a, b), max(a, b))
    assert backoff.first <= backoff.pause(failures) <= backoff.pause(failures + 1) <= backoff.last
