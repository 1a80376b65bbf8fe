"""Answers frames: each becomes one request, and each request gets one reply, now or later.

An exception of a handler, or a reply that cannot be encoded, becomes an error reply with a code.
"""

import time
from typing import Final

from kvdepot.errors import ErrorCode
from kvdepot.server.access import describe_peer
from kvdepot.server.commands import Operators
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.replies import PendingReply, Refused
from kvdepot.server.sessions import SessionTable
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.histogram import SHORTEST_SECONDS, Histogram
from kvdepot.wire.operation import Operation

_WHY_NO_SESSION: Final = "no open session: greet the depot with open_session first"


class Requests:
    """Answers frames of the control socket, and measures the latencies."""

    def __init__(self, depot: Depot, sessions: SessionTable, operators: Operators) -> None:
        self.latencies: dict[type, Histogram] = {
            kind: Histogram(SHORTEST_SECONDS) for kind in (*frames.REQUESTS, m.ErrorReply)
        }
        self._depot = depot
        self._sessions = sessions
        self._operators = operators

    def serve(self, connections: ConnectionTable, connection: Connection, frame: memoryview) -> None:
        """Answer a frame of the control socket: decode it, pass it to its handler, and send the reply."""
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
        except Exception as error:
            reply = depot.state.fail(error)
        if isinstance(reply, PendingReply):
            pending, num_bytes = reply, len(frame)
            connections.hold(connection, num_bytes)

            def send(late: frames.Reply) -> None:
                pending.on_reply = None  # one request, one reply
                connections.release(connection, num_bytes)
                connections.send(connection, self._encode(sequence, late))
                self.latencies[kind].add(time.monotonic() - began)

            pending.on_reply = send
        else:
            connections.send(connection, self._encode(sequence, reply))
            self.latencies[kind].add(time.monotonic() - began)

    def _encode(self, sequence: int, reply: frames.Reply) -> bytearray:
        try:
            return frames.encode_frame(sequence, reply)
        except Exception as error:  # for example, the path of the pool is not UTF-8
            return frames.encode_frame(sequence, self._depot.state.fail(error))
