"""The operator's log: one JSON object a line, for log collectors and for people with `jq`."""

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType

from kvpilot_formats.untrusted import lines

# Only these extra fields of a record are logged, so that other values, such as secrets, stay out.
FIELDS = ("service", "pod", "action", "reason", "from_dtype", "to_dtype", "probe")
_CHATTY = ("asyncio", "aiohttp.access")

log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """A formatter of JSON lines without control characters or credentials. `service` is NAMESPACE/NAME."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a log record as one line of JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: str(value) for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: lines(text) for name, text in line.items()}, ensure_ascii=False)


def configure(level: str) -> None:
    """Write all records from `level` up to stderr, including Python's warnings and the error that ends the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _last_words


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
