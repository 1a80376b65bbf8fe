"""Formats log lines as plain text, or as one JSON object per line for log collectors.

A record is always one line without control characters, whatever names clients chose.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from kvdepot.errors import printable

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """One escaped line per record. Lines of an exception are indented, so that they do not look like records."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name that logging calls)
        """Return the line of a record."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return the lines of an exception."""
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One object per line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str, log_format: str = "text", text: str = _TEXT) -> None:
    """Log to standard error from this level on. `text` is the format of plain lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
