"""`kvdepot`, as the release after this one may be: it speaks protocol 3, and every reply has a field more."""

import sys
from typing import Any

import msgspec

from kvdepot.ops.cli import main
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

_MORE = "a field of a later release"


def _longer(message: Any) -> bytes:
    if isinstance(message, o.StatusReply):
        return msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(message)), _MORE])


def _encode_frame(sequence: int, message: Any) -> bytes:
    return sequence.to_bytes(8, "little") + _longer(message)


def _encode_session(message: Any) -> bytes:
    body = _longer(message)
    return len(body).to_bytes(4, "little") + body


if __name__ == "__main__":
    m.PROTOCOL_VERSION = 3  # type: ignore[misc]
    frames.encode_frame = _encode_frame  # type: ignore[assignment]
    frames.encode_session = _encode_session
    sys.exit(main())
