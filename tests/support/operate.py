"""Asks a depot for an operation, and puts tiers below it, as its server does, without a socket."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from kvdepot.server.depot import Depot
from kvdepot.server.turns import PendingReply
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.wire import frames
from kvdepot.wire.operation import OperatorRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply that was there at once."""

    reply: frames.Reply | None


def operate(depot: Depot, request: OperatorRequest) -> PendingReply | Answered:
    """Begin an operation. Return its reply, which may be there already.

    Raises:
        Refused: the depot refused the operation and changed nothing.
    """
    reply = depot.operate(SimpleNamespace(depot=depot, epoch=depot.state.epoch), request, lambda: "this test")
    return reply if isinstance(reply, PendingReply) else Answered(reply)


def put_tiers_below(depot: Depot, queues: Sequence[TierQueue], settings: TieringSettings | None = None) -> Tiering:
    """Give a depot tiers, fastest first, with the depot's clock."""
    depot.state.tiering = tiering = Tiering(
        depot.index,
        [*queues],
        settings or TieringSettings(),
        names_of=depot.labels.names.__getitem__,
        end_store=depot.stores.end_one_above_quota,
        other_splits=depot.contexts.other_splits,
        on_corrupt=depot.remove_corrupt,
        timers=depot.state.timers,
        clock=depot.state.clock,
    )
    return tiering
