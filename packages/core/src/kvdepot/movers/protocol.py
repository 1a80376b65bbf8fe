"""Messages between the depot and its movers, the processes that open workers' device memory for the depot.

A backend whose memory another process can open names a module in the entry point group `kvdepot.movers`. The module
calls `kvdepot.movers.child.run_mover`. The depot starts one such process per worker that offers its memory
(`kvdepot.movers.table`), sends `Setup` and waits for `Ready`. Then it sends one `Copy` per ticket or lease, at most one
per direction at a time, and gets one answer to each. Messages are frames on a stream socket: u32 length, then msgpack.
A copy has extents chosen by the depot and block ids chosen by a worker. The mover checks both before it copies.
"""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from kvdepot.errors import KVDepotError
from kvdepot.wire.messages import RegisterKVCache

MAXIMUM_FRAME_BYTES: Final = 8 << 20  # the extents of a batch, and 1 MiB of block ids per layer group
MAXIMUM_ANSWER_BYTES: Final = 1 << 16  # a mover opens foreign memory, so its answers are not trusted; they are short


class MoverError(KVDepotError):
    """A mover cannot work here. If `is_final`, another mover could not either."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class CopyRefused(KVDepotError):
    """A copy would exceed the worker's memory or the pool. Nothing was copied."""


class Setup(Struct, frozen=True, array_like=True, tag="setup"):
    """Tells a mover which memory to open. It answers `Ready` or `Failed`. The registration has an offer."""

    pool_size_bytes: int
    registration: RegisterKVCache


class Copy(Struct, frozen=True, array_like=True, tag="copy"):
    """Requests a copy between extents and blocks.

    Fields are as in `backends.CopyBatch`, with block ids packed as i32.
    """

    number: int
    is_store: bool
    extents: bytes
    block_ids: tuple[bytes, ...]
    first_covered: tuple[int, ...]
    skip_blocks: tuple[int, ...]


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The worker's memory is open."""


class Copied(Struct, frozen=True, array_like=True, tag="copied"):
    """The bytes are in place."""

    number: int
    is_warm: bool = False  # as in `Moved`


class NotCopied(Struct, frozen=True, array_like=True, tag="refused"):
    """A copy does not fit the cache and was not started. The mover continues."""

    number: int
    text: str


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The mover's last message: it cannot continue, and exits."""

    text: str
    is_final: bool = False


ToMover: TypeAlias = Setup | Copy
FromMover: TypeAlias = Ready | Copied | NotCopied | Failed

_encoder = msgspec.msgpack.Encoder()
_to_mover: msgspec.msgpack.Decoder[ToMover] = msgspec.msgpack.Decoder(ToMover)
_from_mover: msgspec.msgpack.Decoder[FromMover] = msgspec.msgpack.Decoder(FromMover)


def encode(message: ToMover | FromMover) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def decode_request(body: bytes) -> ToMover:
    """Return the request in a frame's body. Raise `msgspec.DecodeError` if it is malformed."""
    return _to_mover.decode(body)


def take_answers(received: bytearray) -> list[FromMover]:
    """Remove the complete answers from the bytes received from a mover. Return them.

    Raises:
        MoverError: the bytes are not valid answers.
    """
    answers: list[FromMover] = []
    try:
        while len(received) >= 4:
            length = int.from_bytes(received[:4], "little")
            if length > MAXIMUM_ANSWER_BYTES:
                raise MoverError(f"an answer of {length} bytes")
            if len(received) < 4 + length:
                break
            answers.append(_from_mover.decode(bytes(received[4 : 4 + length])))
            del received[: 4 + length]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MoverError(f"a malformed answer: {error}") from error
    return answers
