"""Frames of messages, the unions of all messages, and the session socket.

A frame is 8 bytes of sequence number (little-endian, chosen by the client and repeated in the reply) and one msgpack
array whose first item is the message's tag. On the control socket a length precedes each frame, and the connection
begins with a greeting that names its session.
"""

import struct
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvdepot.errors import ErrorCode
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.messages import Count, Name

MAXIMUM_FRAME_BYTES: Final = 4 << 20


Request = (
    m.Hello
    | m.RegisterKVCache
    | m.RegisterScheduler
    | m.Unregister
    | m.Lookup
    | m.Release
    | m.EndRequest
    | m.PrepareStore
    | m.CommitStore
    | m.AbortStore
    | m.PrepareRetrieve
    | m.Move
    | m.ReportCorrupt
    | m.Hint
    | m.NoteContents
    | m.BlendLookup
    | o.Status
    | o.Clear
    | o.Warm
    | o.Unpin
    | o.Find
    | o.SetQuota
    | o.AddTier
    | o.RemoveTier
    | o.Drain
    | o.SetLogLevel
    | o.Configuration
)


Reply = (
    m.ErrorReply
    | m.HelloReply
    | m.Registered
    | m.Done
    | m.LookupReply
    | m.BlendReply
    | m.StorePlan
    | m.RetrievePlan
    | m.Moved
    | o.StatusReply
    | o.Found
    | o.ConfigurationReply
)


class OpenSession(Struct, array_like=True, tag="open_session", frozen=True):
    """The only message of a client on the session socket. Afterwards the client sends single bytes as pings."""

    protocol_version: Count
    client: Name = ""


class SessionOpened(Struct, array_like=True, tag="session_opened", frozen=True):
    """The answer, with the descriptors of the pool and of the index table (read only).

    `token` begins every connection of this session to the control socket.
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
"""The length before a greeting and before each frame on the control socket."""

TOKEN_BYTES: Final = 16

_SEQUENCE = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_session_request_decoder = msgspec.msgpack.Decoder(OpenSession)
_session_reply_decoder: msgspec.msgpack.Decoder[SessionReply] = msgspec.msgpack.Decoder(SessionReply)

OPERATIONS: Final = frozenset(struct_type.__struct_config__.tag for struct_type in Request.__args__)


def operation_of(kind: type[Any]) -> str:
    """Return the tag of a request or a reply."""
    return kind.__struct_config__.tag


class FrameError(Exception):
    """A frame is not a valid message. The error reply carries `code` and the text."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode_greeting(token: bytes) -> bytes:
    """Return the greeting of a connection to the control socket: a session's token, empty for an operator."""
    return LENGTH.pack(len(token)) + token


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
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        tag = _tag_of(body)
        if tag is not None and tag not in OPERATIONS:
            message = f"operation {tag[:64]!r} is not known to this server (protocol {m.PROTOCOL_VERSION})"
            raise FrameError(ErrorCode.UNKNOWN_OPERATION, message) from error
        raise FrameError(ErrorCode.MALFORMED, f"{tag or 'message'}: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a message: {error}") from error


def _tag_of(body: memoryview) -> str | None:
    try:
        fields = msgspec.msgpack.decode(body, type=list[msgspec.Raw])  # not objects: a map may have unhashable keys
        return msgspec.msgpack.decode(fields[0], type=str) if fields else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Return the reply in a frame that a server sent.

    Raises:
        FrameError: it is malformed.
    """
    try:
        return _reply_decoder.decode(memoryview(frame)[_SEQUENCE.size :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a reply: {error}") from error


def encode_session(message: OpenSession | SessionReply) -> bytes:
    """Return a message of the session socket, preceded by its length (u32, little-endian)."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def decode_open_session(body: bytes) -> OpenSession:
    """Return the first message of a client on the session socket.

    Raises:
        FrameError: it is malformed.
    """
    try:
        return _session_request_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a session request: {error}") from error


def decode_session_reply(body: bytes) -> SessionReply:
    """Return the server's answer on the session socket.

    Raises:
        FrameError: it is malformed.
    """
    try:
        return _session_reply_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a session reply: {error}") from error
