"""kvdepot's log lines in vLLM's processes: they go to vLLM's handlers, as nothing else configures logging there."""

import copy
import logging


class _Named(logging.Handler):
    """Hands records to vLLM's handlers with kvdepot's name before the text: vLLM shows only the name of a file."""

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("kvdepot"):
            record = copy.copy(record)
            record.msg = f"kvdepot: {record.msg}"
        logging.getLogger("vllm").handle(record)


def log_like_vllm() -> None:
    """Hand kvdepot's records to vLLM's handlers, unless the user has configured logging."""
    theirs = logging.getLogger("vllm")
    for name in ("kvdepot", "kvdepot_vllm", "kvdepot_cpu", "kvdepot_cuda", "kvdepot_hpu"):
        ours = logging.getLogger(name)
        if not ours.handlers and not logging.getLogger().handlers:
            ours.addHandler(_Named())
            ours.setLevel(theirs.level)
            ours.propagate = False
