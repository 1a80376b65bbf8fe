"""The control socket for TCP: a ROUTER that only listed CURVE keys reach.

It is a socket of its own, as CURVE holds for whole sockets and as a TCP peer chooses its routing id freely: what comes
here is never taken for a session. ZMQ's I/O thread asks about every key that knows ours (ZAP, RFC 27) and the server's
loop answers: `serve` whenever `zap` is readable. A peer that is not let in gets no message and leaves nothing: ZMQ
tells a key that is not listed so (ERROR 400, whereupon it stops asking), hangs up on anything else, and closes what has
not finished its handshake after two seconds. While few descriptors are left nobody listens
(`kvdepot.operators.zeromq`).
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

import zmq

from kvdepot.errors import ConfigError
from kvdepot.operators.zeromq import MessageReader
from kvdepot.wire.curve import ServerKeys

logger = logging.getLogger(__name__)

MAXIMUM_FRAME_BYTES: Final = 64 << 10  # what is served here is smaller; it bounds what a stranger can make us hold

_HANDSHAKE_MILLISECONDS: Final = 2000
_HEARTBEAT_MILLISECONDS: Final = 10_000  # a client whose machine went away is noticed
_MOST_QUEUED: Final = 16  # messages of one client, each way: a larger question is one frame of 64 KiB
_ANSWERS_PER_TURN: Final = 64
_SECONDS_BETWEEN_WARNINGS: Final = 10.0
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"


class RemoteSocket:
    """The ROUTER (`router`), where it listens (`endpoints`), and the socket that asks who may connect (`zap`)."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoints: Sequence[str], keys: ServerKeys) -> None:
        """Bind. `context` closes the sockets.

        Raises:
            ConfigError: an endpoint cannot be bound.
        """
        self.num_refused = 0
        self.endpoints: list[str] = []
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
            (zmq.ZAP_ENFORCE_DOMAIN, 1),  # nobody is let in should `zap` ever be missing
        ):
            self.router.setsockopt(option, value)
        self.router.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self.router.setsockopt(zmq.ZAP_DOMAIN, b"kvdepot")
        for endpoint in endpoints:
            self.router.setsockopt(zmq.IPV6, int("[" in endpoint))
            try:
                self.router.bind(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot listen on {endpoint}: {error}; give tcp://ADDRESS:PORT with an address of this machine"
                    " and a port that nobody uses ('*' finds one)"
                ) from error
            self.endpoints.append(self.router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._reader = MessageReader(self.router, most_frames=2)

    def take(self) -> list[bytes] | None:
        """Return a routing id and the frames after it; see `MessageReader.take`."""
        return self._reader.take()

    def send(self, routing_id: bytes, frame: bytes | bytearray) -> None:
        """Send a reply; it is lost if nobody is there or too many wait."""
        try:
            self.router.send_multipart((routing_id, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a reply found nobody: %s", error)

    def answer_keys(self) -> None:
        """Say which keys may connect, as far as that was asked; never waits."""
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
