"""kvdepot's log lines in an engine's processes: they go to the engine's handlers, the only ones configured there."""

import copy
import logging
from typing import Final

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
