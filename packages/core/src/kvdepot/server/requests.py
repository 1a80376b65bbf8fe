"""Answers frames: each becomes one request, and each request gets one reply, now or later.

Every exception of a handler becomes a typed error reply.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

from kvdepot.errors import ErrorCode
from kvdepot.operators.remote import RemoteSocket
from kvdepot.server.access import describe_peer
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.dispatch import OPEN_TO_ALL, Operators
from kvdepot.server.replies import Deferred, Refused
from kvdepot.server.sessions import Session, SessionTable
from kvdepot.server.watch import SHORTEST_SECONDS
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.histogram import Histogram

logger = logging.getLogger(__name__)

_WHY_NO_SESSION: Final = "no open session: connect to the session socket first"
_WHY_NOT_OVER_TCP: Final = (
    "over TCP only operators' requests (status, clear, warm and the like) are served: a session hands over the pool's"
    " memory, so engines attach on the depot's machine, by its directory"
)


class Requests:
    """Answers frames from Unix sockets and TCP, and measures how long each answer takes."""

    def __init__(self, depot: Depot, sessions: SessionTable, operators: Operators) -> None:
        self.latencies: dict[type, Histogram] = {
            kind: Histogram(SHORTEST_SECONDS) for kind in (*frames.Request.__args__, m.ErrorReply)
        }
        self._depot = depot
        self._sessions = sessions
        self._operators = operators

    def serve(self, connections: ConnectionTable, connection: Connection, frame: memoryview) -> None:
        """Answer a frame of the control socket."""
        began = time.monotonic()
        sequence = frames.sequence_of(frame)
        session = self._sessions.find(connection.owner) if connection.owner else None
        kind, reply = self._answer(frame, session, _WHY_NO_SESSION, lambda: describe_peer(connection.socket))
        if isinstance(reply, Deferred):
            deferred, num_bytes = reply, len(frame)
            connections.hold(connection, num_bytes)

            def send(late: frames.Reply) -> None:
                deferred.on_reply = None  # one request, one reply
                connections.release(connection, num_bytes)
                connections.send(connection, frames.encode_frame(sequence, late))
                self.latencies[kind].add(time.monotonic() - began)

            deferred.on_reply = send
        else:
            connections.send(connection, frames.encode_frame(sequence, reply))
            self.latencies[kind].add(time.monotonic() - began)

    def serve_remote(self, remote: RemoteSocket, until: float) -> None:
        """Answer frames that came over TCP until a time, one at least."""
        began = time.monotonic()
        while True:
            try:
                message = remote.take()
            except zmq.Again:
                return
            if message is not None:
                self._serve_message(remote, message, began)
            began = time.monotonic()
            if began >= until:
                return

    def _serve_message(self, remote: RemoteSocket, message: list[bytes], began: float) -> None:
        routing_id, *parts = message
        frame = parts[0] if len(parts) == 1 else b""  # which is malformed, as it has no sequence number
        sequence = frames.sequence_of(parts[0]) if parts else 0
        kind, reply = self._answer(frame, None, _WHY_NOT_OVER_TCP, lambda: "a client over TCP")

        def send(reply: frames.Reply) -> None:
            remote.send(routing_id, frames.encode_frame(sequence, reply))
            self.latencies[kind].add(time.monotonic() - began)

        if isinstance(reply, Deferred):
            reply.on_reply = send
        else:
            send(reply)

    def _answer(
        self, frame: bytes | memoryview, session: Session | None, why_no_session: str, who: Callable[[], str]
    ) -> tuple[type, frames.Reply | Deferred]:
        """Return the kind of a request, `ErrorReply` if it is none or refused, and its reply."""
        depot = self._depot
        try:
            request = frames.decode_request(frame)
            if isinstance(request, OPEN_TO_ALL):
                return type(request), self._operators.answer(request, who)
            if session is None:
                raise Refused(ErrorCode.UNKNOWN_SESSION, why_no_session)
            return type(request), depot.handle(session.number, session.writer, request)
        except (Refused, frames.FrameError) as error:
            depot.counters["requests_refused"] += 1
            return m.ErrorReply, m.ErrorReply(depot.state.epoch, error.code, str(error))
        except Exception as error:
            logger.exception("a request failed")
            depot.counters["requests_failed"] += 1
            return m.ErrorReply, m.ErrorReply(depot.state.epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
