"""The control socket for TCP: a ROUTER that only clients with listed CURVE keys can reach.

It is separate from the Unix socket because CURVE applies to whole sockets and TCP peers choose their routing ids
freely; its messages never belong to a session. ZeroMQ's I/O thread asks about each key (ZAP, RFC 27), and the server's
loop answers when `zap` is readable. A refused peer cannot send a message and holds no resources: ZeroMQ answers an
unlisted key with ERROR 400, after which its client stops retrying, and closes connections that do not finish the
handshake within two seconds. While few descriptors are left, new connections wait (`kvdepot.operators.zeromq`).
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

import zmq

from kvdepot.errors import ConfigError
from kvdepot.operators.zeromq import Listener, MessageReader
from kvdepot.wire.curve import ServerKeys

logger = logging.getLogger(__name__)

MAXIMUM_FRAME_BYTES: Final = 64 << 10  # above every request served here; bounds the memory a peer can use

_HANDSHAKE_MILLISECONDS: Final = 2000
_HEARTBEAT_MILLISECONDS: Final = 10_000  # detects clients whose machine is gone
_MOST_QUEUED: Final = 16  # messages per client and direction, of at most 64 KiB
_ANSWERS_PER_TURN: Final = 64
_SECONDS_BETWEEN_WARNINGS: Final = 10.0
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"


class RemoteSocket:
    """The ROUTER (`router`), its `listeners`, and the socket on which ZeroMQ asks who may connect (`zap`)."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoints: Sequence[str], keys: ServerKeys) -> None:
        """Bind. `context` closes the sockets.

        Raises:
            ConfigError: an endpoint cannot be bound.
        """
        self.num_refused = 0
        self.listeners: list[Listener] = []
        self._allowed = keys.allowed
        self._warned_at = float("-inf")
        self.zap = context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(_ZAP_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAXIMUM_FRAME_BYTES),
            (zmq.RCVHWM, _MOST_QUEUED),
            (zmq.SNDHWM, _MOST_QUEUED),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS),
            (zmq.CURVE_SERVER, 1),
            (zmq.ZAP_ENFORCE_DOMAIN, 1),  # refuses everybody if `zap` is missing
        ):
            self.router.setsockopt(option, value)
        self.router.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self.router.setsockopt(zmq.ZAP_DOMAIN, b"kvdepot")
        for endpoint in endpoints:
            try:
                self.listeners.append(Listener(self.router, endpoint))
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot listen on {endpoint}: {error}; give tcp://ADDRESS:PORT with an address of this machine"
                    " and a free port ('*' chooses one)"
                ) from error
        self._reader = MessageReader(self.router, most_frames=2)

    @property
    def endpoints(self) -> list[str]:
        """Where it listens."""
        return [each.endpoint for each in self.listeners]

    def take(self) -> list[bytes] | None:
        """Return a routing id and the frames after it; see `MessageReader.take`."""
        return self._reader.take()

    def send(self, routing_id: bytes, frame: bytes | bytearray) -> None:
        """Send a reply. It is lost if the client has left or has too many unread replies."""
        try:
            self.router.send_multipart((routing_id, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("dropped a reply: %s", error)

    def answer_keys(self) -> None:
        """Answer ZeroMQ's questions about keys. Never waits."""
        for _ in range(_ANSWERS_PER_TURN):
            try:
                question = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.zap.send_multipart(self._answer(question))

    def _answer(self, question: list[bytes]) -> tuple[bytes, ...]:
        version, number, _domain, address, _routing_id, mechanism, *credentials = question
        name = self._allowed.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if name is not None:
            return version, number, b"200", b"", name.encode(), b""
        self.num_refused += 1
        if time.monotonic() >= self._warned_at + _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.warning(
                "refused a key of %s that is not in --curve-clients (%d so far)",
                address.decode(errors="replace"), self.num_refused,
            )  # fmt: skip
        return version, number, b"400", b"not listed", b"", b""
