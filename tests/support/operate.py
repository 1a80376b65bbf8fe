"""Asks a depot for an operation without a socket, as `kvdepot.server.commands.Operators` does."""

from dataclasses import dataclass

from kvdepot.server.commands import HANDLERS
from kvdepot.server.depot import Depot
from kvdepot.server.replies import PendingReply
from kvdepot.wire import frames
from kvdepot.wire import operations as o


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply that nobody had to wait for."""

    reply: frames.Reply | None


def operate(depot: Depot, request: o.OperatorRequest) -> PendingReply | Answered:
    """Begin an operation. The reply may be there already.

    Raises:
        Refused: nothing was changed.
    """
    reply = depot.state.answer(HANDLERS[type(request)](depot, request, lambda: "this test"))
    return reply if isinstance(reply, PendingReply) else Answered(reply)
