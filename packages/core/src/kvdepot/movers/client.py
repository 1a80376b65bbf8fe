"""Transfers whose bytes a mover of the depot copies: what a worker sends in place of a copy, and what it waits for.

A store asks for space and commits as in `client.transfers`, a retrieve takes a lease and checks it; in between stands a
`Move`, which names the ticket or the lease and the block ids. Its reply comes when nothing is being copied any more. If
it does not come, because the depot died or hangs, the blocks of a retrieve are not free before the mover is dead: the
depot's death kills it, and who waited for a hanging depot kills it himself. A store's blocks are only read, and what
becomes of its extents is the depot's affair.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from kvdepot.client.connection import Channel
from kvdepot.client.transfers import CopyBatch
from kvdepot.errors import DepotTimeout, DepotUnavailable, ErrorCode, KVDepotError, RemoteError
from kvdepot.wire import frames
from kvdepot.wire import messages as m

assert array("i").itemsize == 4

_MOST_WAIT_SECONDS: Final = 60.0
_FOR_EVER_SECONDS: Final = 1e6


class MoveFailed(DepotUnavailable):
    """A copy was not made, or not to its end: a miss."""


class MoverUnavailable(KVDepotError):
    """No mover of the depot copies for this worker, and none will; the text says why."""


def await_mover(channel: Channel, wait_seconds: float, deadline_seconds: float) -> None:
    """Return when this worker's mover can be asked.

    Args:
        channel: of this thread.
        wait_seconds: how long it may still be starting.
        deadline_seconds: for the depot's own part of it.

    Raises:
        MoveFailed: not ready within `wait_seconds`.
        MoverUnavailable: it never will be.
        DepotUnavailable: the depot is away, or does not answer.
    """
    wait_seconds = min(max(0.0, wait_seconds), _MOST_WAIT_SECONDS)
    request = m.Move(channel.link.context, 0, wait_seconds=wait_seconds)
    _wait(channel, channel.submit(request), wait_seconds + deadline_seconds)


def move(channel: Channel, lane: int, batch: CopyBatch, deadline_seconds: float) -> bool:
    """Have a batch copied; return when the bytes are in place, and whether the mover makes nothing ready any more.

    Whatever is raised, no block of a retrieve is written any more. Where the mover is another user's process and cannot
    be killed, a retrieve waits for a depot that hangs until that goes on or dies.

    Args:
        channel: of this thread.
        lane: 0 for a store, 1 for a retrieve.
        batch: what to copy.
        deadline_seconds: for the depot's own part of it.

    Raises:
        MoveFailed: the mover failed, or is not ready.
        MoverUnavailable: no other comes.
        RemoteError: the depot refused it.
        DepotUnavailable: the depot is away, or does not answer.
    """
    link = channel.link
    starts = [max(0, first) for first in batch.first_covered]
    request = m.Move(
        link.context, batch.number, lane == 0,
        tuple(
            _pack(ids, (start - first) * per_chunk, (batch.num_chunks - first) * per_chunk)
            for ids, start, first, per_chunk in zip(
                batch.block_ids, starts, batch.first_covered, batch.blocks_per_chunk, strict=True
            )
        ),
        tuple(starts), batch.skip_blocks, min(deadline_seconds, _MOST_WAIT_SECONDS),
    )  # fmt: skip
    sequence = channel.submit(request)
    can_end_it = lane == 0 or link.can_kill_movers()
    try:
        return _wait(channel, sequence, 2 * deadline_seconds + link.move_seconds if can_end_it else _FOR_EVER_SECONDS)
    except MoveFailed:
        raise
    except DepotTimeout:
        if lane == 1:
            link.wait_for_movers(kill=True)
        raise
    except DepotUnavailable:
        link.wait_for_movers()
        raise


def _wait(channel: Channel, sequence: int, seconds: float) -> bool:
    try:
        return _check(channel.wait(sequence, seconds))
    except RemoteError as error:
        if error.code is not ErrorCode.UNKNOWN_OPERATION:
            raise
        raise MoverUnavailable("the depot is of a version without movers") from error


def _check(reply: frames.Reply) -> bool:
    if not isinstance(reply, m.Moved):
        raise MoveFailed(f"it answered a move with {type(reply).__name__}")
    if reply.outcome is m.MoveOutcome.UNAVAILABLE:
        raise MoverUnavailable(reply.why)
    if reply.outcome is not m.MoveOutcome.DONE:
        raise MoveFailed(reply.why)
    return reply.is_settled


def _pack(block_ids: Sequence[int], start: int, stop: int) -> bytes:
    return array("i", block_ids[start:stop]).tobytes()
