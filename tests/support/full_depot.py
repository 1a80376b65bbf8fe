"""A depot without sockets whose index is full of long prompts."""

import functools
from collections.abc import Callable
from typing import Any

from kvdepot.index.eviction import AUTO
from kvdepot.index.index import ChunkIndex
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import wait_until
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.server.depot import Depot
from kvdepot.testing.tier_traffic import make_pool
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.queue import TierQueue
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.features import STANDARD
from support.operate import put_tiers_below

PAGE = 4096
NUM_CHUNKS = 8192
PROMPT_CHUNKS = 2048
SPEC = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes")


@functools.cache
def prompt(name: int, num_chunks: int = PROMPT_CHUNKS, tenant: str = "a") -> KeyRun:
    run = hash_prefix(Namespace(f"{name}"), 1, range(num_chunks))
    return KeyRun(run.digests, 0, run.parent, tenant)


class Bench:
    """A depot whose index is full of long prompts."""

    def __init__(self, num_chunks: int = NUM_CHUNKS, *, policy: str = AUTO, filled: bool = True) -> None:
        self.now = 50.0
        self.table = IndexTable.in_memory(num_chunks)
        self.index = ChunkIndex(ExtentAllocator(num_chunks * PAGE), self.table, policy)
        self.depot = Depot(self.index, epoch=1, lease_seconds=10.0, clock=lambda: self.now, features=STANDARD)
        self.context = self.register()
        for name in range(num_chunks // PROMPT_CHUNKS if filled else 0):
            self.store(prompt(name, tenant="ab"[name % 2]))

    def register(self) -> int:
        details = (m.GroupDetail((PAGE,), 8),)
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", 0, 1, "none", "none", "model", SPEC, details)
        return self.ask(request).context

    def ask(self, request: frames.Request, session: int = 1) -> Any:
        return self.depot.handle(session, Writer(1, 1), request)

    def prepare(self, run: KeyRun) -> m.StorePlan:
        request = m.PrepareStore(
            self.context, "r", run.tenant, run.digests, run.first_chunk, run.parent, (run.num_chunks,)
        )
        return self.ask(request)

    def store(self, run: KeyRun) -> None:
        for start in range(0, run.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            plan = self.prepare(run.slice(start, min(start + m.MAXIMUM_STORE_ENTRIES, run.num_chunks)))
            assert plan.num_declined == 0
            if plan.ticket:
                self.ask(m.CommitStore(self.context, plan.ticket))

    def turn_until(self, is_over: Callable[[], bool]) -> None:
        """Run steps of the tiers and the background tasks until `is_over` returns True."""

        def turn() -> bool:
            for _ in range(64):
                self.depot.background.work(lambda: True)
                if self.depot.state.tiering is not None:
                    self.depot.state.tiering.turn(lambda: True)
                if is_over():
                    return True
            return False

        wait_until(turn)


def put_tier_below(bench: Bench) -> TierQueue:
    pool = make_pool(NUM_CHUNKS * PAGE)
    tier = MemoryTier(pool, 4 * NUM_CHUNKS * PAGE)
    queue = TierQueue(tier, pool, "memory", write_bytes=2 * NUM_CHUNKS * PAGE, clock=lambda: bench.now)
    put_tiers_below(bench.depot, [queue])
    return queue


def prepare_all(bench: Bench) -> list[m.StorePlan]:
    """Prepare as many chunks as one worker may: half of the pool."""
    run, step = prompt(0, NUM_CHUNKS), m.MAXIMUM_STORE_ENTRIES
    return [bench.prepare(run.slice(start, start + step)) for start in range(0, NUM_CHUNKS, step)]
