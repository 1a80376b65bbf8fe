"""Traces as a target: the lines that users give to `kvdepot replay`."""

import io
from pathlib import Path

from kvdepot_plan.trace import MAXIMUM_LINE_BYTES, TraceError, requests_of


def read(data: bytes) -> None:
    """A trace: requests, then perhaps one `TraceError`."""
    try:
        for found in requests_of(io.BytesIO(data), Path("trace")):
            assert found.timestamp_ms >= 0
    except TraceError as error:
        assert str(error).startswith("trace, line ")
        assert len(str(error)) < 1000


def seeds() -> list[bytes]:
    """Return a trace, and what is hard to read."""
    line = b'{"timestamp": 27, "input_length": 1100, "output_length": 30, "hash_ids": [4, 5, 9]}\n'
    return [
        line * 2,
        line.replace(b"27", b"1e400"),
        b"\n \n" + line,
        b'{"x": ' + b"[" * 5000,
        b" " * (MAXIMUM_LINE_BYTES + 1),
    ]
