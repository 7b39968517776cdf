"""The engines of one page: data-parallel ranks (label `engine`), or processes that each write a series (`pid`)."""

from __future__ import annotations

from collections.abc import Mapping

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.numbers import whole
from kvpilot_operator.observe.pod_metrics import Rank

# An API server in front of every rank of a large deployment has a few hundred.
MOST_RANKS = 512
USAGE, RUNNING, WAITING, FOR_ROOM, DONE = "usage", "running", "waiting", "for_room", "done"
_LARGEST_LABEL = 10**10
_Key = tuple[int | None, int | None]


class Ranks:
    """Gathers what each engine of a page says; raises ScrapeError where there are more than one page can have."""

    def __init__(self) -> None:
        self._found: dict[_Key, dict[str, float]] = {}

    def add(self, figure: str, labels: Mapping[str, str], value: float) -> None:
        """Add a series. Of several of one engine the largest use counts; all else adds up."""
        key = whole(labels.get("engine", ""), _LARGEST_LABEL), whole(labels.get("pid", ""), _LARGEST_LABEL)
        rank = self._found.setdefault(key, {})
        if len(self._found) > MOST_RANKS:
            raise ScrapeError(f"more than {MOST_RANKS} engines are on the page, by the labels engine and pid")
        before = rank.get(figure, 0.0)
        rank[figure] = max(before, value) if figure == USAGE else before + value

    def close(self, done: float) -> tuple[Rank, ...]:
        """Return the engines that say their use; none where there is only one of them."""
        keys = sorted((key for key, rank in self._found.items() if USAGE in rank), key=str)
        if len(keys) < 2:
            return ()
        return tuple(self._rank(key, keys, done) for key in keys)

    def _rank(self, key: _Key, keys: list[_Key], done: float) -> Rank:
        rank = self._found[key]
        waiting = rank.get(FOR_ROOM, rank.get(WAITING, 0.0))
        return Rank(_name(key, keys), rank[USAGE], rank.get(RUNNING, 0.0), waiting, rank.get(DONE, done))


def _name(key: _Key, keys: list[_Key]) -> str:
    words = [
        f"{word} {'?' if key[i] is None else key[i]}"
        for i, word in enumerate(("engine", "process"))
        if len({other[i] for other in keys}) > 1
    ]
    return " ".join(words)
