"""Messages between two depots over TCP, and between a depot and its listener (`listener`).

A reader connects to a listener, and both prove that they know the token before anything else is said:

    listener -> reader    MAGIC, a random nonce
    reader -> listener    MAGIC, a random nonce, its proof
    listener -> reader    its proof

Then the reader sends frames: `Ask`, answered by `Have`, and `Read`, answered by `Coming` and the payloads, after which
the reader sends `Done`. `Take`, answered by `Taking`, offers a prefix of the sender's own pool. A depot of another
version has another MAGIC and is refused.

A frame is its length (u32, little-endian), its message, and a code of both, the frame's number and its sender. The
code's key comes from the token, which is never sent, and the nonces. Without codes, a process that relays the greeting
of two depots could read from one, and give the other bytes of its own. Payloads have the checksums of their trailers.

The listener asks its depot over a socket that keeps packets apart: `Find`, answered by `Have`, `Pin`, answered by
`Pinned`, `Take`, answered by `Taking`, and `Unpin`, which has no answer.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvdepot.config import LONGEST_TENANT
from kvdepot.errors import KVDepotError
from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers.keys import DEPTH_BYTES, KEY_BYTES, RUN_BYTES

MAGIC: Final = b"KVPEER01"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
CODE_BYTES: Final = 32
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
FRAME_BYTES: Final = 1 << 16  # 512 keys take 40 KiB
MOST_ASKED: Final = 512  # keys per question: as many as a tier is asked for by one call
MOST_READ: Final = 64  # entries per read
MOST_TAKEN: Final = 1900  # chunks per offer: what fits into a frame
_LENGTH: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("@ll")  # struct timeval

KEY_WITH_PLACE_BYTES: Final = KEY_BYTES + 2 * RUN_BYTES + DEPTH_BYTES
Key = Annotated[bytes, Meta(min_length=KEY_WITH_PLACE_BYTES, max_length=KEY_WITH_PLACE_BYTES)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

T = TypeVar("T")


class PeerError(KVDepotError):
    """A peer does not answer as agreed. The connection is of no more use."""


class Ask(Struct, frozen=True, array_like=True, tag="ask"):
    """Ask which entries a pool has. Answered by `Have`."""

    keys: Annotated[list[Key], Meta(max_length=MOST_ASKED)]


class Have(Struct, frozen=True, array_like=True, tag="have"):
    """Tell which entries a pool has: a byte for each key, 1 if it is there."""

    there: Annotated[bytes, Meta(max_length=MOST_ASKED)]


class Read(Struct, frozen=True, array_like=True, tag="read"):
    """Request entries. The peer pins them, and answers by `Coming` and their payloads. `Done` unpins them."""

    keys: Annotated[list[Key], Meta(max_length=MOST_READ)]


class Coming(Struct, frozen=True, array_like=True, tag="coming"):
    """Announce the payloads that follow this frame, one after the other.

    Attributes:
        sizes: the payload bytes of each key, 0 for an entry that is not here.
        trailers: the trailer of each key (`kvdepot.tiers.trailer`), empty for an entry that is not here.
    """

    sizes: Annotated[list[Natural], Meta(max_length=MOST_READ)]
    trailers: Annotated[list[bytes], Meta(max_length=MOST_READ)]


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """Tell that the payloads have arrived. Not answered."""


class Take(Struct, frozen=True, array_like=True, tag="take"):
    """Offer a prefix of the sender's pool, which the receiver may read from there. Answered by `Taking`.

    Attributes:
        address: HOST:PORT of the sender's own listener. Without a host, it is the one that the connection comes from.
        tenant: of the prefix.
        digests: the keys of its chunks; empty for a mere question.
    """

    address: Annotated[str, Meta(max_length=300)]
    tenant: Annotated[str, Meta(max_length=LONGEST_TENANT)] = ""
    digests: Annotated[bytes, Meta(max_length=MOST_TAKEN * DIGEST_BYTES)] = b""


class Taking(Struct, frozen=True, array_like=True, tag="taking"):
    """Tell how many offered prefixes are being read, and whether the one just offered is among them.

    Attributes:
        num_prefixes: offered ones that are being read.
        is_taken: False: offer it again later, if it was offered.
        pool_bytes: the size of the pool.
    """

    num_prefixes: Natural
    is_taken: bool
    pool_bytes: Natural


class Setup(Struct, frozen=True, array_like=True, tag="setup"):
    """Begin a listener: its first message. Not answered."""

    pool_bytes: Natural
    token: bytes


class Find(Struct, frozen=True, array_like=True, tag="find"):
    """Ask the depot which entries its pool has. Answered by `Have`."""

    keys: list[Key]


class Pin(Struct, frozen=True, array_like=True, tag="pin"):
    """Ask the depot to lease entries. Answered by `Pinned`."""

    keys: list[Key]


class Pinned(Struct, frozen=True, array_like=True, tag="pinned"):
    """Name the places of leased entries: offset, payload bytes and checksum of each; 0 bytes if it is not here."""

    lease: Natural
    places: list[tuple[Natural, Natural, bytes]]


class Unpin(Struct, frozen=True, array_like=True, tag="unpin"):
    """End a lease. Not answered."""

    lease: Natural


FromReader: TypeAlias = Ask | Read | Done | Take
FromPeer: TypeAlias = Have | Coming | Taking
FromListener: TypeAlias = Find | Pin | Unpin | Take
FromDepot: TypeAlias = Setup | Have | Pinned | Taking

encode: Final = msgspec.msgpack.Encoder().encode
_NOT_A_MESSAGE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", body: bytes | bytearray) -> T:
    try:
        return decoder.decode(body)
    except _NOT_A_MESSAGE as error:
        raise PeerError(f"not a message: {error}") from error


_from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_from_listener: msgspec.msgpack.Decoder[FromListener] = msgspec.msgpack.Decoder(FromListener)
_from_depot: msgspec.msgpack.Decoder[FromDepot] = msgspec.msgpack.Decoder(FromDepot)


def decode_from_reader(body: bytes | bytearray) -> FromReader:
    """Return a reader's message. Raise `PeerError` if it is malformed."""
    return _decode(_from_reader, body)


def decode_from_peer(body: bytes | bytearray) -> FromPeer:
    """Return the message of a peer that is read from. Raise `PeerError` if it is malformed."""
    return _decode(_from_peer, body)


def decode_from_listener(body: bytes) -> FromListener:
    """Return a listener's message. Raise `PeerError` if it is malformed."""
    return _decode(_from_listener, body)


def decode_from_depot(body: bytes) -> FromDepot:
    """Return a depot's message to its listener. Raise `PeerError` if it is malformed."""
    return _decode(_from_depot, body)


READER: Final = b"reader"
LISTENER: Final = b"listener"


def _derived(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, purpose + nonces, "sha256")


class Stream:
    """A TCP connection with deadlines for whole messages, not for single calls. For one thread at a time.

    Args:
        connection: a connected socket in blocking mode; this object owns it.

    Attributes:
        until: when the present exchange must be over, by `time.monotonic`. Then calls raise TimeoutError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.until = 0.0
        self._socket = connection
        self._key = b""
        self._sides = b"", b""  # this one, the other
        self._num_sent = self._num_received = 0  # frames
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that lost its power says nothing

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    @property
    def host(self) -> str:
        """The other side's host."""
        return self._socket.getpeername()[0]

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open and has nothing to read: usable for the next exchange."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def receive_into(self, buffers: list[memoryview]) -> None:
        """Fill buffers, which this empties, one after the other.

        Raises:
            OSError: the connection is closed, or time is up.
        """
        while buffers:
            self._limit(socket.SO_RCVTIMEO)
            try:
                count: int = self._socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue  # time is up, which `_limit` reports
            if not count:
                raise ConnectionError("the peer closed the connection")
            while buffers and count >= buffers[0].nbytes:
                count -= buffers.pop(0).nbytes
            if count:
                buffers[0] = buffers[0][count:]

    def receive(self, num_bytes: int) -> bytearray:
        """Receive this many bytes. Raise OSError as `receive_into`."""
        data = bytearray(num_bytes)
        if num_bytes:
            self.receive_into([memoryview(data)])
        return data

    def greet_as_listener(self, token: bytes) -> None:
        """Let a reader prove that it knows the token. Then prove it, too.

        Raises:
            PeerError: it does not, or is no depot of this version.
            OSError: as `receive_into`.
        """
        own = MAGIC + secrets.token_bytes(NONCE_BYTES)
        self.send(own)
        nonces = own + self._hello("the reader is no depot of this version")
        if not hmac.compare_digest(self.receive(PROOF_BYTES), _derived(token, READER, nonces)):
            raise PeerError("the reader has another token")
        self.send(_derived(token, LISTENER, nonces))
        self._agree(token, nonces, LISTENER, READER)

    def greet_as_reader(self, token: bytes) -> None:
        """Prove to a listener that this side knows the token, and let it prove that, too. Raise as its counterpart."""
        hello = self._hello("no depot of this version listens there")
        own = MAGIC + secrets.token_bytes(NONCE_BYTES)
        nonces = hello + own
        self.send(own + _derived(token, READER, nonces))
        try:
            answer = self.receive(PROOF_BYTES)
        except ConnectionError:
            answer = b""
        if not hmac.compare_digest(answer, _derived(token, LISTENER, nonces)):
            raise PeerError("the peer has another token: give both the same --peer-token")
        self._agree(token, nonces, READER, LISTENER)

    def _hello(self, refusal: str) -> bytes:
        hello = bytes(self.receive(HELLO_BYTES))
        if not hello.startswith(MAGIC):
            raise PeerError(refusal)
        return hello

    def _agree(self, token: bytes, nonces: bytes, own_side: bytes, other_side: bytes) -> None:
        self._key, self._sides = _derived(token, b"frames", nonces), (own_side, other_side)

    def _code(self, side: bytes, number: int, frame: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "little") + frame, "sha256")

    def receive_frame(self) -> bytearray:
        """Receive the message of a frame, after the greeting.

        Raises:
            PeerError: it is longer than agreed, or its code is not that of the other side's next frame.
            OSError: as `receive_into`.
        """
        head = self.receive(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > FRAME_BYTES:
            raise PeerError(f"a frame of {length} bytes")
        body = self.receive(length)
        code = self._code(self._sides[1], self._num_received, head + body)
        self._num_received += 1
        if not hmac.compare_digest(self.receive(CODE_BYTES), code):
            raise PeerError("a frame was changed on its way")
        return body

    def send(self, data: bytes) -> None:
        """Send bytes. Raise OSError if the connection is closed, or time is up."""
        view = memoryview(data)
        while view:
            self._limit(socket.SO_SNDTIMEO)
            try:
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue

    def send_frame(self, message: FromReader | FromPeer) -> None:
        """Send a message as a frame, after the greeting. Raise OSError as `send`."""
        self.send(self.frame(encode(message)))

    def frame(self, body: bytes) -> bytes:
        """Return the next frame to send, with this message."""
        frame = _LENGTH.pack(len(body)) + body
        self._num_sent += 1
        return frame + self._code(self._sides[0], self._num_sent - 1, frame)

    def send_file(self, fd: int, offset: int, num_bytes: int) -> None:
        """Send a part of a file without copying it. Raise OSError as `send`."""
        end = offset + num_bytes
        while offset < end:
            self._limit(socket.SO_SNDTIMEO)
            try:
                offset += os.sendfile(self._socket.fileno(), fd, offset, end - offset)
            except BlockingIOError:
                continue

    def _limit(self, option: int) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer did not answer in time")
        seconds = int(left)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, max(1, int((left - seconds) * 1e6))))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
