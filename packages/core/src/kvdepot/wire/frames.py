"""Frames of messages, the tables of all messages, and greetings.

A frame is 8 bytes of sequence number (little-endian, chosen by the client and repeated in the reply) and one msgpack
array whose first item is the message's tag. Its length precedes each frame, and a greeting begins each connection.
"""

import struct
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union

import msgspec
from msgspec import Meta, Struct

from kvdepot.errors import ErrorCode
from kvdepot.wire import messages as m
from kvdepot.wire import operation as o
from kvdepot.wire.messages import Count, Name

T = TypeVar("T")

_NOT_A_MESSAGE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
MAXIMUM_FRAME_BYTES: Final = 4 << 20  # 65,536 digests take 2 MiB


Request = m.RegisterKVCache | m.RegisterScheduler | m.ContextRequest | o.OperatorRequest
Reply = o.Reply


@cache
def request_types() -> tuple[type[Struct], ...]:
    """Return the types of all requests that a server may know, of the kernel and of features."""
    operations = o.known_operations()  # first: it imports the modules with the requests of features
    return m.RegisterKVCache, m.RegisterScheduler, *m.ContextRequest.__subclasses__(), *operations


class OpenSession(Struct, array_like=True, tag="open_session", frozen=True):
    """Greet the depot and open a session. Afterwards the client sends single bytes as pings."""

    protocol_version: Count
    client: Name = ""


class JoinSession(Struct, array_like=True, tag="join_session", frozen=True):
    """Greet the depot on a further connection of a session. Its requests follow."""

    token: Annotated[bytes, Meta(max_length=64)]


Greeting = OpenSession | JoinSession
"""The first message of a connection. An operator's connection begins with an empty one instead."""


class SessionOpened(Struct, array_like=True, tag="session_opened", frozen=True):
    """The answer to `OpenSession`, sent with the descriptors of the pool and of the index table (read only).

    `token` joins further connections to this session.
    """

    epoch: int
    token: bytes
    pool_size_bytes: int
    table_size_bytes: int
    server_version: str


SessionReply = SessionOpened | m.ErrorReply

MOVER_NOTE: Final = b"m"
"""A byte from the server that carries a descriptor: the pidfd of a mover for a context of this session."""


LENGTH: Final = struct.Struct("<I")
"""The length before a greeting, before its answer, and before each frame."""

TOKEN_BYTES: Final = 16  # of a session: nobody guesses 128 random bits
MAXIMUM_GREETING_BYTES: Final = 4096  # far above a greeting with the longest name of a client


def _union(types: tuple[type[Struct], ...]) -> Any:
    return Union[types]  # noqa: UP007


_SEQUENCE = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()
_greeting_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_session_reply_decoder: msgspec.msgpack.Decoder[SessionReply] = msgspec.msgpack.Decoder(SessionReply)


@cache
def _request_decoder() -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(_union(request_types()))


@cache
def _reply_decoder(kind: type[Struct], _num_kinds: int) -> msgspec.msgpack.Decoder[Reply]:
    # A client may import a feature after its first reply: without the number, that feature's replies stayed unknown.
    return msgspec.msgpack.Decoder(_union((kind, *Reply.__subclasses__())))


def operation_of(kind: type[Any]) -> str:
    """Return the tag of a request or a reply."""
    return kind.__struct_config__.tag


class FrameError(Exception):
    """A frame is not a valid message. The error reply contains `code` and the text."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview, what: str) -> T:
    try:
        return decoder.decode(body)
    except _NOT_A_MESSAGE as error:
        raise FrameError(ErrorCode.MALFORMED, f"not {what}: {error}") from error


def encode_greeting(message: Greeting | SessionReply | None) -> bytes:
    """Return a greeting or its answer with its length before it. None is an operator's greeting, which is empty."""
    body = b"" if message is None else _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_greeting(body: bytes) -> Greeting:
    """Return the greeting in a message, which must not be empty.

    Raises:
        FrameError: it is malformed.
    """
    return _decode(_greeting_decoder, body, "a greeting")


def encode_frame(sequence: int, message: Request | Reply) -> bytearray:
    """Return the frame of a request or a reply."""
    frame = bytearray(_SEQUENCE.size)
    _SEQUENCE.pack_into(frame, 0, sequence)
    _encoder.encode_into(message, frame, _SEQUENCE.size)
    return frame


def sequence_of(frame: bytes | memoryview) -> int:
    """Return the sequence number of a frame, 0 if it has none."""
    return _SEQUENCE.unpack_from(frame)[0] if len(frame) >= _SEQUENCE.size else 0


def decode_request(frame: bytes | memoryview) -> Request:
    """Return the request in a frame.

    Raises:
        FrameError: it is malformed, its operation is unknown, or a field is out of range.
    """
    if len(frame) < _SEQUENCE.size:
        raise FrameError(ErrorCode.MALFORMED, f"a frame of {len(frame)} bytes has no sequence number")
    body = memoryview(frame)[_SEQUENCE.size :]
    try:
        return _request_decoder().decode(body)
    except msgspec.ValidationError as error:
        tag = _tag_of(body)
        if tag is not None and tag not in map(operation_of, request_types()):
            message = f"operation {tag[:64]!r} is not known to this server (protocol {m.PROTOCOL_VERSION})"
            raise FrameError(ErrorCode.UNKNOWN_OPERATION, message) from error
        raise FrameError(ErrorCode.MALFORMED, f"{tag or 'message'}: {error}") from error
    except _NOT_A_MESSAGE as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a message: {error}") from error


def _tag_of(body: memoryview) -> str | None:
    try:
        # Raw, not objects: a map may have unhashable keys.
        fields = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(fields[0], type=str) if fields else None
    except _NOT_A_MESSAGE:
        return None


def decode_reply(frame: bytes | memoryview, kind: type[Struct] = m.Done) -> Reply:
    """Return the reply in a frame that a server sent: of `kind`, or of any module that is imported.

    Raises:
        FrameError: it is malformed.
    """
    return _decode(_reply_decoder(kind, len(Reply.__subclasses__())), memoryview(frame)[_SEQUENCE.size :], "a reply")


def decode_session_reply(body: bytes) -> SessionReply:
    """Return the server's answer to `OpenSession`.

    Raises:
        FrameError: it is malformed.
    """
    return _decode(_session_reply_decoder, body, "a session reply")
