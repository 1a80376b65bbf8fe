"""Formats log lines as plain text, or as one JSON object per line for log collectors.

A record is always one line without control characters, whatever names clients chose. In an engine's process, kvdepot's
records go to the engine's handlers, the only ones configured there, and an exception of kvdepot is a record, too.
"""

import copy
import functools
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from kvdepot.errors import printable

Call = TypeVar("Call", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

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


_OURS: Final = ("kvdepot", "kvdepot_vllm", "kvdepot_sglang", "kvdepot_cpu", "kvdepot_cuda", "kvdepot_hpu")


class _Named(logging.Handler):
    """Hands records to an engine's handlers with kvdepot's name before the text: engines show only a file's name."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("kvdepot"):
            record = copy.copy(record)
            record.msg = f"kvdepot: {record.msg}"
        logging.getLogger(self._engine).handle(record)


def log_like(engine: str) -> None:
    """Hand kvdepot's records to the handlers of the logger `engine`, unless the user has configured logging."""
    theirs = logging.getLogger(engine)
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers and not logging.getLogger().handlers:
            ours.addHandler(_Named(engine))
            ours.setLevel(theirs.level)
            ours.propagate = False


def never_raises(default: Callable[[], Any]) -> Callable[[Call], Call]:
    """Decorate a call of the engine to log exceptions and return `default()` instead."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception:
                logger.exception("%s failed; the engine continues without the depot here", call.__name__)
                return default()

        return guarded  # pyright: ignore[reportReturnType]

    return decorate
