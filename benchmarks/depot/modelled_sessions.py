"""Replays the turns of `sessions.py` in modelled time: `python benchmarks/depot/modelled_sessions.py`.

The depot's code is the real one, in this process, over a clock that only the replay moves. Computing takes no time. The
disk of the tier moves one chunk after the other at 1 GB/s, each with 0.1 ms of latency. So the result depends on no
machine and on no neighbour, and pauses have their real length. Takes the options of `sessions.py`.

With and without sessions, prints the share of chunks that the pool had at the lookup, and the waits of lookups for the
disk. `waits` counts turns, and those that waited, by the outcome of their prefetch as in `sessions.py`; "" stands for
turns without a prefetch. `waits_longer_than_half_a_quota` counts those whose prompt is longer than a tenant may retain.
"""

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from sessions import CHUNK_TOKENS, GEOMETRY, POOL_SHARE, SHORT_SECONDS, Turn, key_of, parse_options, quotas_of, steps

from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.index.eviction import AUTO
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.keys import KeyRun, split_digests
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer, table_size_bytes
from kvdepot.server.depot import Depot
from kvdepot.server.feature import installed_features
from kvdepot.server.turns import PendingReply
from kvdepot.tiers import queue
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.jobs import Call, JobKind
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.tiers.trailer import checksum_of, make_trailer
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest

PAGE: Final = 4096  # bytes of the index's book for one chunk, whose bytes do not exist
CHUNK_SECONDS: Final = CHUNK_TOKENS * GEOMETRY.bytes_per_token / 1e9
LATENCY_SECONDS: Final = 1e-4
SESSION: Final = 1, Writer(1, 1)


class Disk(Tier):
    """A tier that remembers only keys. It never takes time itself: see `Threads`."""

    batch_entries = 1
    contains_is_instant = True

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [key in self._keys for key in keys]

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`."""
        del sizes
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        self._keys.update(keys)
        return [True] * len(keys)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`. The pool has no bytes, so the trailer is that of none."""
        sizes = zip(keys, extents, strict=True)
        return [make_trailer(key, size, checksum_of(b"")) if key in self._keys else None for key, (_, size) in sizes]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        self._keys.difference_update(keys)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. Nobody clears this one."""
        yield 0

    def probe(self) -> None:
        """See `Tier`."""

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage(len(self._keys), 0, 1 << 50, {})

    def close(self) -> None:
        """See `Tier`."""


class Threads:
    """Replaces the threads of a tier: calls begin when `begin` is called, and end when the model's disk has done them.

    Reads come before writes. One thread never takes writes.
    """

    def __init__(
        self,
        name: str,
        most_writes: int,
        make_call: Callable[[Call], None],
        on_ended: Callable[[Call], None],
        clock: Callable[[], float],
    ) -> None:
        del name
        self._most_writes, self._make_call, self._on_ended, self._clock = most_writes, make_call, on_ended, clock
        self._waiting: dict[JobKind, deque[Call]] = {operation: deque[Call]() for operation in JobKind}
        self._begun: list[Call] = []
        self._free_at = 0.0  # when the disk has moved all chunks of begun calls

    def hire(self) -> None:
        """Do nothing, as `begin` counts the threads."""

    def hand_in(self, calls: Iterable[Call]) -> None:
        """Queue calls."""
        for call in calls:
            self._waiting[call.operation].append(call)

    def num_waiting(self, operation: JobKind) -> int:
        """Return the number of waiting calls of a kind."""
        return len(self._waiting[operation])

    def running(self) -> list[Call]:
        """Return the calls that have begun but not ended."""
        return list(self._begun)

    def begin(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Begin the next calls. Yield the time and the action of the end of each."""
        while len(self._begun) <= self._most_writes:
            num_writing = sum(call.operation is JobKind.WRITE for call in self._begun)
            kinds = [kind for kind in (JobKind.READ, JobKind.TOUCH, JobKind.WRITE) if self._waiting[kind]]
            if not kinds or (kinds[0] is JobKind.WRITE and num_writing == self._most_writes):
                return
            call = self._waiting[kinds[0]].popleft()
            call.started_at = now = self._clock()
            self._begun.append(call)
            if call.operation is not JobKind.TOUCH:
                self._free_at = max(self._free_at, now) + len(call.keys) * CHUNK_SECONDS
                now = self._free_at + LATENCY_SECONDS
            yield now, partial(self._end, call)

    def _end(self, call: Call) -> None:
        self._begun.remove(call)
        self._make_call(call)
        call.has_run = True
        self._on_ended(call)


class World:
    """A depot over a disk, and the agents that use it.

    Args:
        turns: all turns, ordered by time.
        speed: how many times faster than the turns' times to replay.
        num_tenants: tenants with equal quotas.
        with_sessions: whether agents name their sessions and move them.
    """

    def __init__(self, turns: list[Turn], speed: float, num_tenants: int, *, with_sessions: bool) -> None:
        self._speed, self._with_sessions = speed, with_sessions
        self.now = 0.0
        num_chunks = len({digest for turn in turns for digest in split_digests(key_of(turn).digests)})
        num_pages = int(POOL_SHARE * num_chunks)
        self._quotas = QuotaTable(num_pages * PAGE, quotas_of(num_tenants, num_pages * PAGE))
        table = IndexTable(bytearray(table_size_bytes(4 * num_pages)), 4 * num_pages)
        self._index = ChunkIndex(ExtentAllocator(num_pages * PAGE), table, AUTO, self._quotas)
        self._depot = Depot(
            self._index, epoch=1, lease_seconds=60.0, clock=self.clock, features=installed_features(["routers"])
        )
        with patch.object(queue, "TierWorkers", Threads):
            self._queue = TierQueue(Disk(), TierPool(-1, memoryview(bytearray())), "disk", clock=self.clock)
        self._threads: Any = self._queue._workers  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._tiering = self._depot.state.tiering = Tiering(
            self._index,
            [self._queue],
            TieringSettings(),
            names_of=self._depot.labels.names.__getitem__,
            end_store=self._depot.stores.end_one_above_quota,
            other_splits=self._depot.contexts.other_splits,
            on_corrupt=self._depot.remove_corrupt,
            timers=self._depot.state.timers,
            clock=self.clock,
        )
        shape = m.GroupShape(GroupKind.FULL_ATTENTION, 1)
        detail = m.GroupDetail((PAGE // CHUNK_TOKENS,), 8)
        spec = m.CacheSpec(CHUNK_TOKENS, (shape,), "bytes")
        registered: Any = self._ask(
            m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", 0, 512, "none", "none", "bench", spec, (detail,))
        )
        self._context: int = registered.context
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prefetched: dict[str, tuple[int, list[int]]] = {}  # chunks of a session, and how many were retained
        self._waited: list[tuple[float, str, bool]] = []
        self._num_wanted = self._num_here = 0
        self._largest = [0.0, 0.0]
        for at, kind, turn in steps(turns, speed):
            self._at(max(at, 0.0), partial(self._look_up if kind else self._prefetch, turn))

    def clock(self) -> float:
        """Return the modelled time in seconds."""
        return self.now

    def replay(self) -> dict[str, Any]:
        """Replay all turns, and return the figures to print."""
        while self._events:
            until = self._events[0][0]
            if self.now < self._depot.state.timers.due < until:
                self.now = self._depot.state.timers.due
            else:
                _, _, event = heapq.heappop(self._events)
                self.now = until
                event()
            self._settle()
        waits = sorted(seconds for seconds, _, _ in self._waited)
        outcomes: dict[str, list[int]] = {}
        for seconds, outcome, _ in self._waited:
            counts = outcomes.setdefault(outcome, [0, 0])
            counts[0] += 1
            counts[1] += seconds > 0
        return {
            "turns": len(waits),
            "pool_hit_share": round(self._num_here / self._num_wanted, 3),
            "wait_p50_ms": round(waits[len(waits) // 2] * 1e3, 2),
            "wait_p99_ms": round(waits[int(len(waits) * 0.99)] * 1e3, 2),
            "waits": outcomes,
            "waits_longer_than_half_a_quota": sum(is_longer and seconds > 0 for seconds, _, is_longer in self._waited),
            "largest_use_of_a_quota": round(self._largest[0], 3),
            "largest_retained_of_a_quota": round(self._largest[1], 3),
        }

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _settle(self) -> None:
        """Do all work that takes no time."""
        self._depot.state.timers.expire(self.now)
        self._depot.expire()
        is_busy = True
        while is_busy:
            self._depot.background.work()
            self._tiering.turn()
            ends = list(self._threads.begin())
            for end in ends:
                self._at(*end)
            is_busy = bool(ends) or bool(self._depot.background.num_waiting) or self._queue.has_results

    def _ask(self, request: frames.Request) -> frames.Reply | PendingReply:
        return self._depot.handle(*SESSION, request)

    def _operate(self, operation: OperatorRequest, retained: list[int]) -> None:
        """Begin an operation. At its end, its count is appended."""

        def on_reply(reply: frames.Reply) -> None:
            retained.append(reply.count if isinstance(reply, m.Done) else 0)

        pending: Any = self._depot.operate(None, operation, lambda: "the replay")
        pending.on_reply = on_reply

    def _prefetch(self, turn: Turn) -> None:
        if self._with_sessions:
            retained = list[int]()
            self._operate(session_operations.PrefetchSession(turn.session, turn.tenant, 5.0), retained)
            self._prefetched[turn.session] = key_of(turn).num_chunks, retained

    def _look_up(self, turn: Turn) -> None:
        key, asked = key_of(turn), self.now
        num_here = self._index.visibility.match(self._index.spaces[0], key.digests)[0] if self._index.spaces else 0
        self._num_wanted += key.num_chunks
        self._num_here += num_here
        reply: Any = self._ask(m.Lookup(self._context, turn.session, key.digests, turn.tenant, wait_seconds=2.0))
        if isinstance(reply, PendingReply) and reply.reply is None:
            reply.on_reply = lambda reply: self._at(self.now, partial(self._found, turn, key, asked, reply))
        else:
            self._found(turn, key, asked, getattr(reply, "reply", None) or reply)

    def _found(self, turn: Turn, key: KeyRun, asked: float, reply: Any) -> None:
        """Note the wait of a turn, store its new chunks, and move its session."""
        outcome = ""
        if turn.session in self._prefetched:
            num_chunks, retained = self._prefetched.pop(turn.session)
            outcome = "late" if not retained else "part" if retained[0] < num_chunks else "all"
        share, quota, used = self._quotas.usage()[turn.tenant]
        self._waited.append((self.now - asked, outcome, key.num_chunks * PAGE > quota / 2))
        for start in range(reply.num_chunks, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            part = key.slice(start, start + m.MAXIMUM_STORE_ENTRIES)
            plan: Any = self._ask(
                m.PrepareStore(
                    self._context,
                    turn.session,
                    part.tenant,
                    part.digests,
                    part.first_chunk,
                    part.parent,
                    (part.num_chunks,),
                )
            )
            if plan.ticket:
                self._ask(m.CommitStore(self._context, plan.ticket))
            if plan.num_declined:
                break
        pause = turn.pause / self._speed
        if self._with_sessions:
            kept = pause + 1 if pause < SHORT_SECONDS else 0.0
            self._ask(
                Hint(
                    self._context,
                    turn.tenant,
                    key.digests,
                    session_ended=pause == math.inf,
                    session=turn.session,
                    retain_seconds=kept,
                )
            )
        self._ask(m.EndRequest(self._context, turn.session))
        if self._with_sessions and SHORT_SECONDS <= pause < math.inf:
            self._operate(session_operations.DemoteSession(turn.session, turn.tenant), [])
        _, _, used = self._quotas.usage()[turn.tenant]
        parts = used / quota, self._depot.features.of(Agents).pins.bytes_of(share) / quota
        self._largest = [max(pair) for pair in zip(self._largest, parts, strict=True)]


def main() -> None:
    """Replay with and without sessions, and print. The speed is 1 unless it is given."""
    options, turns = parse_options(__doc__, speed=1.0)
    for with_sessions in (False, True):
        found = World(turns, options.speed, options.tenants, with_sessions=with_sessions).replay()
        print(json.dumps({"sessions": with_sessions} | found), flush=True)


if __name__ == "__main__":
    main()
