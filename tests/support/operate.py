"""Asks a depot for an operation without a socket, as `kvdepot.server.commands.Operators` does."""

from dataclasses import dataclass

from msgspec import Struct

from kvdepot.server.commands import HANDLERS
from kvdepot.server.depot import Depot
from kvdepot.server.replies import PendingReply, run
from kvdepot.wire import frames
from kvdepot.wire import operations as o


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply that was there at once."""

    reply: frames.Reply | None


def operate(depot: Depot, request: o.OperatorRequest) -> PendingReply | Answered:
    """Begin an operation. Return its reply, which may be there already.

    Raises:
        Refused: the depot refused the operation and changed nothing.
    """
    handled = HANDLERS[type(request)](depot, request, lambda: "this test")
    reply = handled if isinstance(handled, Struct) else run(handled, depot.state.fail)
    return reply if isinstance(reply, PendingReply) else Answered(reply)
