"""Answers frames: each becomes one request, and each request gets one reply, now or later.

Every exception of a handler becomes a typed error reply.
"""

import logging
import time
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.server.access import describe_peer
from kvdepot.server.commands import Operators
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.replies import Deferred, Refused
from kvdepot.server.sessions import SessionTable
from kvdepot.server.watch import SHORTEST_SECONDS
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.histogram import Histogram
from kvdepot.wire.operation import Operation

logger = logging.getLogger(__name__)

_REQUESTS_REFUSED: Final = depot_counter("requests_refused", "Requests answered with an error")
_REQUESTS_FAILED: Final = depot_counter("requests_failed", "Requests that failed because of a bug")

_WHY_NO_SESSION: Final = "no open session: greet the depot with open_session first"


class Requests:
    """Answers frames of the control socket, and measures how long each answer takes."""

    def __init__(self, depot: Depot, sessions: SessionTable, operators: Operators) -> None:
        self.latencies: dict[type, Histogram] = {
            kind: Histogram(SHORTEST_SECONDS) for kind in (*frames.REQUESTS, m.ErrorReply)
        }
        self._depot = depot
        self._sessions = sessions
        self._operators = operators

    def serve(self, connections: ConnectionTable, connection: Connection, frame: memoryview) -> None:
        """Answer a frame of the control socket: decode it, have its request handled, and send the reply."""
        began, depot = time.monotonic(), self._depot
        kind: type = m.ErrorReply
        sequence = frames.sequence_of(frame)
        try:
            request = frames.decode_request(frame)
            session = self._sessions.by_token.get(connection.owner or b"")
            if isinstance(request, Operation):
                reply = self._operators.answer(request, lambda: describe_peer(connection.socket))
            elif session is None:
                raise Refused(ErrorCode.UNKNOWN_SESSION, _WHY_NO_SESSION)
            else:
                reply = depot.handle(session.number, session.writer, request)
            kind = type(request)
        except (Refused, frames.FrameError) as error:
            depot.counters[_REQUESTS_REFUSED] += 1
            reply = m.ErrorReply(depot.state.epoch, error.code, str(error))
        except Exception as error:
            logger.exception("a request failed")
            depot.counters[_REQUESTS_FAILED] += 1
            reply = m.ErrorReply(depot.state.epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
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
