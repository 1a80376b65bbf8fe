"""Makes a mover of the depot copy a batch, in place of the worker's own copier.

Stores and retrieves follow `client.transfer_protocol`. In place of the copy, the worker sends a `Move` with the ticket
or lease and the block ids, and the depot replies when the copy has ended. If no reply comes, because the depot is dead
or hung, the blocks of a retrieve are not free before the mover is dead. If the depot dies, so does the mover; if the
depot hangs, the worker kills the mover. The blocks of a store are only read, and the depot protects its extents.
"""

from array import array
from typing import Final

from kvdepot.backends import CopyBatch, Direction
from kvdepot.client.session import Channel
from kvdepot.errors import DepotTimeout, DepotUnavailable, KVDepotError
from kvdepot.wire import messages as m

assert array("i").itemsize == 4

_MOST_WAIT_SECONDS: Final = 60.0  # the bound of `wait_seconds` in every message
_FOR_EVER_SECONDS: Final = 1e6  # no one can end this mover, and the blocks that it may write must not be reused


class MoveFailed(DepotUnavailable):
    """The mover did not complete the copy: a miss."""


class MoverUnavailable(KVDepotError):
    """No mover of the depot copies for this worker, and none will; the text gives the reason."""


def await_mover(channel: Channel, wait_seconds: float, deadline_seconds: float) -> None:
    """Wait until this worker's mover accepts requests.

    Args:
        channel: the channel of this thread.
        wait_seconds: the longest wait for a mover that is starting.
        deadline_seconds: the limit for the depot's own work.

    Raises:
        MoveFailed: the mover is not ready within `wait_seconds`.
        MoverUnavailable: there will be no mover.
        DepotUnavailable: the depot is away or does not answer.
    """
    wait_seconds = min(max(0.0, wait_seconds), _MOST_WAIT_SECONDS)
    request = m.Move(channel.session.context, 0, wait_seconds=wait_seconds)
    _wait(channel, channel.submit(request), wait_seconds + deadline_seconds)


def move(channel: Channel, direction: Direction, batch: CopyBatch, deadline_seconds: float) -> bool:
    """Make the mover copy a batch. Return, when the bytes are in place, whether the mover has warmed up.

    Even after an exception, no block of a retrieve is written any more. If the mover is another user's process, which
    cannot be killed, a retrieve waits for a hung depot until it resumes or dies.

    Args:
        channel: the channel of this thread.
        direction: the direction of the batch.
        batch: the batch to copy.
        deadline_seconds: the limit for the depot's own work.

    Raises:
        MoveFailed: the mover failed or is not ready.
        MoverUnavailable: there will be no other mover.
        RemoteError: the depot refused the move.
        DepotUnavailable: the depot is away or does not answer.
    """
    session = channel.session
    request = m.Move(
        session.context,
        batch.grant_id,
        direction is Direction.STORE,
        tuple(array("i", ids).tobytes() for ids in batch.block_ids),
        batch.first_covered,
        batch.skip_blocks,
        min(deadline_seconds, _MOST_WAIT_SECONDS),
    )
    sequence = channel.submit(request)
    can_end_it = direction is Direction.STORE or session.can_kill_movers()
    try:
        return _wait(
            channel, sequence, 2 * deadline_seconds + session.move_seconds if can_end_it else _FOR_EVER_SECONDS
        )
    except MoveFailed:
        raise
    except DepotTimeout:
        if direction is Direction.RETRIEVE:
            session.wait_for_movers(kill=True)
        raise
    except DepotUnavailable:
        session.wait_for_movers()
        raise


def _wait(channel: Channel, sequence: int, seconds: float) -> bool:
    reply = channel.wait(sequence, seconds)
    if not isinstance(reply, m.Moved):
        raise MoveFailed(f"unexpected reply to a move: {type(reply).__name__}")
    if reply.outcome is m.MoveOutcome.UNAVAILABLE:
        raise MoverUnavailable(reply.why)
    if reply.outcome is not m.MoveOutcome.DONE:
        raise MoveFailed(reply.why)
    return reply.is_warm
