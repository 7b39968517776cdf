"""Tell how long something has been so. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

# A contradiction that lasts this long, over so many pages in a row at least, is no coincidence of the moment.
LASTING_SECONDS = 15.0
LASTING_PAGES = 4


@dataclass(frozen=True, slots=True)
class Streak:
    """Consecutive pages with the same contradiction."""

    since: datetime
    pages: int = 1

    def lasts(self, now: datetime, seconds: float = LASTING_SECONDS) -> bool:
        """Return True once it is no coincidence."""
        return self.pages >= LASTING_PAGES and (now - self.since).total_seconds() >= seconds
