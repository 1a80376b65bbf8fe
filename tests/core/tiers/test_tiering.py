"""Demotion and promotion, through requests to the depot. Bytes are derived from keys."""

import errno
import itertools
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kvdepot.config import Demotion
from kvdepot.errors import ErrorCode
from kvdepot.features.flights import feature as flights
from kvdepot.features.flights.feature import FlightTable
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.index.entries import PartPlace
from kvdepot.index.eviction import AdaptiveReplacement
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, digest_at, hash_prefix
from kvdepot.lab.processes import wait_until
from kvdepot.layout import Part, heads_of_both, layers_of_both
from kvdepot.operate import operations as o
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.operate.report import status_of
from kvdepot.pool.names import Names
from kvdepot.pool.table import SEALED, Writer
from kvdepot.server import lookups
from kvdepot.server.state import SaveNames, save_nothing
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.testing.faulty_tier import NUM_THREADS, PATIENCE_SECONDS, FaultyTier
from kvdepot.testing.tier_traffic import make_pool
from kvdepot.tiers import checked, jobs, promotion, reading
from kvdepot.tiers.base import Extents
from kvdepot.tiers.jobs import JobKind
from kvdepot.tiers.keys import KEY_BYTES, RUN_BYTES, depth_of, digest_of
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.names import EntryKeys
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.tiers.trailer import checksum_of
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest
from support import index
from support.index import FULL, HYBRID, ONLY_WINDOW, PAGE, PLAIN, SHARDED, WINDOW, prompt
from support.operate import Answered, operate, put_tiers_below

WINDOWS = ONLY_WINDOW
HEADS = (m.GroupShape(FULL, 1, heads=4), m.GroupShape(WINDOW, 1, window_tokens=3, heads=4))
STAGED = (m.GroupShape(FULL, 1, layers=4, heads=2),)


class Bench(index.Bench):
    """A depot with a small pool, and tiers in memory that can be made to fail."""

    def __init__(
        self,
        groups: tuple[m.GroupShape, ...] = PLAIN,
        *,
        pages: int = 16,
        num_tiers: int = 1,
        demotion: Demotion = Demotion.STORE,
        least_tokens: int = 0,
        promotion_least_tokens: int = 0,
        write_bytes: int = 1 << 20,
        tier_pages: int = 256,
        verify: bool = False,
        ranks: int = 1,
        save_names: SaveNames = save_nothing,
        gathers_stores: bool = False,
        stored: int = 0,  # chunks of a prompt that pool and tiers have
        demoted: int = 0,  # chunks of a prompt that tiers alone have
    ) -> None:
        super().__init__(groups, pages=pages, num_records=256, now=50.0, save_names=save_names)
        self.pool = make_pool(pages * PAGE)
        self.tiers = [FaultyTier(MemoryTier(self.pool, tier_pages * PAGE)) for _ in range(num_tiers)]
        for tier in self.tiers:
            tier.gathers_stores = gathers_stores
        queues = [
            TierQueue(
                tier, self.pool, f"tier-{number}", write_bytes=write_bytes, deadline_seconds=1.0, clock=self.clock
            )
            for number, tier in enumerate(self.tiers)
        ]
        settings = TieringSettings(demotion, least_tokens, 1.0, promotion_least_tokens)
        self.tiering = put_tiers_below(self.depot, queues, settings)
        self.verify = verify
        self.time_passes = False  # if True, waiting advances the clock while a tier hangs
        self.contexts: list[int] = []
        self.attach(max(ranks, *(group.layers for group in groups if group.heads == 1), 1))
        if demoted:
            self.store_long(prompt(demoted))
            self.forget()
        self.store_long(prompt(stored))
        self.settle()

    def attach(self, ranks: int, stages: int = 1) -> None:
        """Replace the engine with one of `ranks` ranks a stage."""
        for context in self.contexts:
            self.ask(m.Unregister(context))
        self.ranks, self.stages = ranks, stages
        self.contexts = [self.register(rank) for rank in range(ranks * stages)]

    def register(self, rank: int, session: int = 1, model: str = "model", instance: str = "engine") -> int:
        details = tuple(
            m.GroupDetail((PAGE * part.num_heads,) * part.num_layers, 8, part=part.number) for part in self.parts(rank)
        )
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, instance, rank, 8, "none", "none", model, self.spec, details)
        return self.ask(request, session).context

    def parts(self, rank: int) -> list[Part]:
        """Return a rank's part of each group."""
        return [self.part(group, rank, self.ranks, self.stages) for group in self.groups]

    def clock(self) -> float:
        return self.now

    def ask(self, request: frames.Request, session: int = 1) -> Any:
        return self.depot.handle(session, Writer(1, 1), request)

    def store(self, run: KeyRun, *covered: int) -> None:
        """Store a run from every rank."""
        covered = covered or (run.num_chunks,) * len(self.spec.groups)
        for context in self.contexts:
            plan = self.ask(m.PrepareStore(context, "r", run.tenant, run.digests, run.first_chunk, run.parent, covered))
            if plan.ticket:
                self.fill(plan, run, context)

    def store_long(self, run: KeyRun) -> None:
        """Store a run that is too long for one request."""
        for start in range(0, run.num_chunks, 8):
            self.store(run.slice(start, min(start + 8, run.num_chunks)))

    def checksums(self) -> dict[tuple[bytes, int, int], bytes]:
        """Return the checksum of each sealed entry, by key, group and part."""
        table = self.index.table
        entries = [record.entry for record in table.records() if record.state == SEALED]
        return {(table.key_of(entry), *table.place_of(entry)): table.owner_of(entry) for entry in entries}

    def turn(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let timers and the tiering take a turn, as the server's loop does."""
        self.depot.state.timers.expire(self.now, is_over)
        self.tiering.turn(is_over)

    def turn_until(self, is_over: Callable[[], object], what: str = "") -> None:
        """Let the tiering take turns until `is_over` returns something true."""
        wait_until(lambda: (self.turn(), is_over())[1], what=what)

    def settle(self) -> None:
        """Wait until all demotions have arrived."""
        self.turn_until(
            lambda: not (any(q.queued_write_bytes for q in self.tiering.queues) or self.tiering.num_refreshing),
            "the end of demotions",
        )

    def end_leases(self) -> None:
        """Let all leases end."""
        self.now += 100.0
        self.depot.expire()
        self.depot.background.work()

    def hold(self, run: KeyRun) -> int:
        """Return a lease of a prompt."""
        return self.wait(self.begin_lookup(run)).lease

    def release(self, lease: int) -> None:
        self.ask(m.Release(self.contexts[0], (lease,)))

    def operate(self, request: OperatorRequest) -> Any:
        """Return the answer to an operation."""
        return self.wait(operate(self.depot, request))

    def fill(self, plan: m.StorePlan, run: KeyRun, context: int = 0) -> None:
        """Write the bytes of planned entries and commit them."""
        checksums = b""
        for chunk, group, heads, _, layers, _, offset, size in m.EXTENT.iter_unpack(plan.extents):
            data = content(run, run.first_chunk + chunk, group, Part.of(layers << 16 | heads))
            self.pool.view[offset : offset + size] = data
            if self.verify:
                checksums += checksum_of(data)
        self.ask(m.CommitStore(context or self.contexts[0], plan.ticket, checksums))

    def lookup(self, run: KeyRun, *, wait_seconds: float = 5.0, token_seconds: float = 0.0, **fields: Any) -> int:
        """Return how many chunks are found. Check all their bytes."""
        reply = self.wait(self.begin_lookup(run, wait_seconds, token_seconds, **fields))
        assert reply.num_chunks <= run.num_chunks
        self.check(run.slice(0, reply.num_chunks))
        if reply.lease:
            self.ask(m.Release(self.contexts[0], (reply.lease,)))
        return reply.num_chunks

    def begin_lookup(
        self, run: KeyRun, wait_seconds: float = 5.0, token_seconds: float = 0.0, name: str = "r", **fields: Any
    ) -> m.LookupReply | PendingReply:
        request = m.Lookup(self.contexts[0], name, run.digests, run.tenant, wait_seconds, token_seconds, **fields)
        return self.ask(request)

    def wait(self, reply: Any) -> Any:
        if isinstance(reply, Answered):
            return reply.reply
        if not isinstance(reply, PendingReply):
            return reply

        def is_here() -> bool:
            self.depot.background.work(lambda: True)
            if self.time_passes and any(tier.hang for tier in self.tiers):
                self.now += 0.1
            self.turn()
            return reply.reply is not None

        wait_until(is_here, what="the answer to a lookup")
        return reply.reply

    def check(self, run: KeyRun) -> None:
        if not run.num_chunks:
            return
        reach = [
            run.num_chunks if g.kind is FULL else min(run.num_chunks, 3 if g.kind is WINDOW else 1)
            for g in self.spec.groups
        ]
        covered = tuple(
            min(chunks, 2) if g.kind is WINDOW else chunks for g, chunks in zip(self.spec.groups, reach, strict=True)
        )
        for rank, context in enumerate(self.contexts):
            plan = self.ask(m.PrepareRetrieve(context, "r", run.digests, 0, covered))
            assert plan.num_chunks == run.num_chunks
            parts, cells = self.parts(rank), Counter[tuple[int, int]]()
            for chunk, group, heads, _, layers, _, offset, size in m.EXTENT.iter_unpack(plan.extents):
                part = Part.of(layers << 16 | heads)
                assert self.pool.view[offset : offset + size] == content(run, chunk, group, part), "wrong bytes"
                mine = parts[int(group)]
                cells[chunk, group] += len(layers_of_both(mine, part)) * len(heads_of_both(mine, part))
            for (_, group), count in cells.items():
                assert count == parts[group].num_cells, "each head of each layer once"
            self.ask(m.Release(context, (plan.lease,)))

    def forget(self) -> None:
        """Empty the pool, but not the tiers."""
        self.settle()
        sum(clear_pool(self.depot, None))
        assert self.index.extents.used_bytes == 0

    def finish_promotions(self) -> None:
        self.turn_until(
            lambda: len(self.tiering.promotions) == num_under_way(self.tiering) == 0, "the end of promotions"
        )

    def audit(self) -> None:
        """Check that nothing is left under way or pinned."""
        for tier in self.tiers:
            tier.hang = False
        self.settle()
        self.finish_promotions()
        self.end_leases()
        sum(clear_pool(self.depot, None))
        assert (self.index.extents.used_bytes, self.index.entries.num_sealed, len(self.index.nodes)) == (0, 0, 0)
        assert num_under_way(self.tiering) == 0

    def close(self) -> None:
        self.tiering.close()


def num_under_way(tiering: Tiering) -> int:
    """Return the number of running calls of tiers and of entries that are being promoted."""
    return sum(queue.num_calls for queue in tiering.queues) + tiering.promotions.num_coming


def content(run: KeyRun, chunk: int, group: int, part: Part) -> bytes:
    chunk -= run.first_chunk
    key = run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
    layers = range(part.first_layer, part.first_layer + part.num_layers)
    heads = range(part.first_head, part.first_head + part.num_heads)
    cells = [bytes([group, layer, head]) for layer in layers for head in heads]
    return b"".join(random.Random(key + cell).randbytes(PAGE) for cell in cells)


@dataclass
class Maker:
    benches: list[Bench]

    def __call__(self, *arguments: Any, **options: Any) -> Bench:
        self.benches.append(Bench(*arguments, **options))
        return self.benches[-1]


@pytest.fixture
def make() -> Iterator[Maker]:
    maker = Maker([])
    yield maker
    for bench in maker.benches:
        bench.audit()
        bench.close()


@pytest.mark.parametrize(("stored_by", "read_by"), list(itertools.permutations([1, 2, 4, 8], 2)))
@pytest.mark.parametrize("groups", [HEADS, HEADS[:1], HEADS[1:]], ids=["window and full", "full", "window"])
def test_entries_of_an_engine_of_any_size_come_back_from_a_tier(
    groups: tuple[m.GroupShape, ...], stored_by: int, read_by: int, make: Maker
) -> None:
    """An engine of eight ranks has two replicas of each of four heads."""
    bench, run = make(groups, ranks=stored_by, pages=64, demoted=5), prompt(5)
    bench.attach(read_by)
    assert bench.lookup(run) == 5
    num_read = sum(5 if group.kind is FULL else 2 for group in groups)
    assert bench.index.entries.num_sealed == min(stored_by, 4) * num_read, "as they were stored"
    before = bench.index.entries.num_sealed
    bench.store(run)
    assert bench.index.entries.num_sealed == before + min(read_by, 4) * (5 * len(groups) - num_read)


@pytest.mark.parametrize("stored_by", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("read_by", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_entries_of_an_engine_of_any_stages_come_back_from_a_tier(
    stored_by: tuple[int, int], read_by: tuple[int, int], make: Maker
) -> None:
    bench, run = make(STAGED, pages=64), prompt(5)
    bench.attach(*stored_by)
    bench.store(run)
    bench.forget()
    bench.attach(*read_by)
    assert bench.lookup(run) == 5
    assert bench.index.entries.num_sealed == math.prod(stored_by) * 5, "as they were stored"
    bench.store(run)
    assert bench.index.entries.num_sealed == math.prod(stored_by) * 5, "nothing is stored again"


def test_entries_of_an_attached_engine_come_back_however_it_divides_the_layers(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, run = make(STAGED, pages=64), prompt(5)
    even, [shape] = bench.contexts, STAGED

    def uneven(rank: int) -> list[Part]:
        return [(Part(0, 1, 0, shape.heads), Part(1, shape.layers - 1, 0, shape.heads))[rank]]

    monkeypatch.setattr(bench, "parts", uneven)
    bench.contexts = [bench.register(rank, instance="uneven") for rank in range(2)]
    bench.store(run)
    bench.forget()
    bench.contexts = even
    assert bench.lookup(run) == 5
    assert bench.index.entries.num_sealed == 2 * 5, "as they were stored"


def test_a_prompt_that_engines_of_two_sizes_continued_comes_back_whole(make: Maker) -> None:
    bench, run = make(HEADS[:1], pages=64), prompt(6)
    bench.store(run.slice(0, 3))
    bench.attach(2)
    bench.store(run.slice(3, 6))
    bench.forget()
    bench.attach(4)
    assert bench.lookup(run) == 6


@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_of_which_the_pool_has_only_some_heads_come_back_whole(ranks: int, make: Maker) -> None:
    bench, run = make(HEADS[:1], pages=64, demoted=4), prompt(4)
    bench.attach(ranks)
    contexts, bench.contexts = bench.contexts, bench.contexts[:1]
    bench.store(run)
    bench.contexts = contexts
    assert bench.lookup(run) == 4
    assert bench.index.entries.num_sealed == 4 + 4


def test_of_windows_alone_the_size_whose_prefix_is_longest_comes_back(make: Maker) -> None:
    """No size has the beginning of the prompt in the tier, and the reader's own size has no entry there."""
    bench, run = make(HEADS[1:], pages=64), prompt(12)
    bench.store(run.slice(0, 4))
    bench.attach(4)
    bench.store(run.slice(4, 10))
    bench.forget()
    bench.attach(2)
    assert bench.lookup(run) == 10
    assert bench.index.entries.num_sealed == 4 * 2, "what the window reaches"


def test_of_windows_alone_another_size_is_asked_for_what_follows_its_own(make: Maker) -> None:
    bench, run = make(HEADS[1:], pages=64), prompt(8)
    for ranks, num_chunks in ((4, 8), (2, 4)):
        bench.attach(ranks)
        bench.store(prompt(num_chunks))
        bench.forget()
    assert bench.lookup(run) == 8


def test_a_prompt_that_no_tier_knows_costs_one_small_question_more(make: Maker) -> None:
    asked: list[int] = []
    sizes = ((HEADS[:1], 2), (SHARDED, 2), (PLAIN, 1), (HEADS[1:], 2), (HEADS[1:], 1), (WINDOWS, 1), (STAGED, 1))
    for groups, ranks in sizes:
        bench = make(groups, ranks=ranks)
        original = bench.tiers[0].contains

        def contains(keys: Any, original: Any = original) -> Any:
            asked.append(len(keys))
            return original(keys)

        bench.tiers[0].contains = contains
        assert bench.lookup(prompt(8)) == 0
    assert asked[:4] == [2, 2, 2, 1], "the parts of two ranks; one part for each of one and of four; opaque caches"
    assert asked[4:9] == [16, 16, 8, 8, 8], "with windows alone each chunk; at most as many questions again"
    assert asked[9:] == [1, 5], "one and two ranks of one, two and four stages"
    bench = make(demoted=8)
    contains = Mock(side_effect=bench.tiers[0].contains)
    bench.tiers[0].contains = contains  # type: ignore[method-assign]
    assert bench.lookup(prompt(16)) == 8
    assert [len(call.args[0]) for call in contains.call_args_list] == [1, 16], "the first chunk, then all of it"


def test_a_prompt_that_no_tier_knows_is_answered_at_once_if_the_tier_needs_no_storage_for_that(make: Maker) -> None:
    bench = make()
    bench.tiers[0].contains_is_instant = True
    reply = bench.begin_lookup(prompt(4))
    assert isinstance(reply, m.LookupReply), "nobody else would send it"
    assert reply.num_chunks == 0


@pytest.mark.parametrize("groups", [PLAIN, SHARDED, HYBRID], ids=["plain", "sharded", "hybrid"])
def test_a_shorter_and_a_longer_prompt_get_what_they_share(groups: tuple[m.GroupShape, ...], make: Maker) -> None:
    bench = make(groups, pages=64, demoted=8)
    assert bench.lookup(prompt(12)) == 8
    bench.forget()
    if groups is HYBRID:  # here, every chunk is stored with its states
        assert bench.lookup(prompt(5)) == 5
    assert bench.lookup(prompt(5, name=1)) == 0


@pytest.mark.promise(50)
def test_a_pool_hit_waits_for_no_tier_and_only_entries_that_the_pool_lacks_are_read(make: Maker) -> None:
    bench = make(demoted=8, stored=4)
    before = bench.tiers[0].num_calls
    assert bench.lookup(prompt(4)) == 4
    assert bench.tiers[0].num_calls == before
    assert bench.lookup(prompt(8)) == 8
    assert bench.tiering.counters["entries_promoted"] == 4
    before = bench.tiers[0].num_calls
    bench.lookup(prompt(8))
    bench.settle()
    assert bench.tiers[0].num_calls == before, "no tier is asked again for what it had"


def test_the_tiers_are_asked_in_their_order(make: Maker) -> None:
    bench = make(num_tiers=2, demoted=8)
    inner = bench.tiers[0].inner
    assert isinstance(inner, MemoryTier)
    assert sum(inner.clear(None, None)) == 8
    bench.store(prompt(3))
    bench.forget()
    assert bench.lookup(prompt(8)) == 8
    counters = [queue.counters["read_entries"] for queue in bench.tiering.queues]
    assert counters == [3, 5]


@pytest.mark.promise(52)
def test_a_tier_is_not_asked_for_what_an_engine_computes_faster(make: Maker) -> None:
    bench = make(promotion_least_tokens=6, demoted=8, stored=4)
    before = bench.tiers[0].num_calls
    assert bench.lookup(prompt(8)) == 4
    assert bench.tiers[0].num_calls == before
    bench.forget()
    assert bench.lookup(prompt(8)) == 8


@pytest.mark.promise(52)
def test_a_tier_that_was_slower_than_the_engine_is_not_read_but_tried_now_and_then(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    tier, run = bench.tiers[0], prompt(4)
    read = tier.read

    def slow_read(keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
        bench.now += 0.1
        return read(keys, extents)

    monkeypatch.setattr(tier, "read", slow_read)
    bench.store(run)
    bench.settle()
    for _ in range(3):  # until the tier's speed is known: 25 ms a token
        bench.forget()
        assert bench.lookup(run, token_seconds=0.001) == 4
    bench.forget()
    assert bench.lookup(run, token_seconds=0.03) == 4
    bench.forget()
    found = [bench.lookup(run, token_seconds=0.001) for _ in range(16)]
    assert found == [0] * 15 + [4]
    assert bench.tiering.counters["promotions_not_worth_it"] == 15
    bench.forget()
    assert bench.lookup(run) == 4, "an engine that does not say how fast it is"


def test_the_debug_log_says_what_a_promotion_reads_or_why_not(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    bench = make(demoted=4)
    caplog.set_level(logging.DEBUG, "kvdepot")
    assert bench.lookup(prompt(4)) == 4
    assert f"promotion for r from tier tier-0: reads chunks 0 to 4, {4 * PAGE} bytes" in caplog.text
    assert "lookup r of engine: 4 of 4 chunks, waited 0.000 s for the tiers; none is missing" in caplog.text
    assert bench.lookup(prompt(5)) == 4
    assert "from tier tier-0: it does not have chunk 4" in caplog.text
    bench.forget()
    look_up_too_slowly(bench)
    assert "from tier tier-0: the lookup's time is up before the last chunk has arrived" in caplog.text


def test_the_debug_log_says_that_the_pool_has_no_room_for_a_promotion(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(demoted=8)
    bench.store(prompt(14, name=1))
    bench.wait(bench.begin_lookup(prompt(14, name=1)))
    caplog.set_level(logging.DEBUG, "kvdepot")
    assert bench.lookup(prompt(8)) == 2
    why = "all chunks that it may evict are in use"
    assert f"promotion for r from tier tier-0: cut, no room from chunk 2 on: {why}" in caplog.text
    assert "from tier tier-0: brought no chunk from chunk 2 on" in caplog.text


def test_a_tier_that_is_added_gets_what_is_used_and_one_that_is_removed_is_left_alone(make: Maker) -> None:
    bench = make(stored=4)
    more = FaultyTier(MemoryTier(bench.pool, 1 << 20))
    bench.tiers.append(more)
    bench.tiering.add(TierQueue(more, bench.pool, "more", deadline_seconds=1.0, clock=bench.clock))
    assert bench.tiering.num_used == 2
    assert bench.lookup(prompt(4)) == 4
    bench.settle()
    assert more.usage().num_entries == 4
    assert bench.tiering.remove("tier-0")
    assert not bench.tiering.remove("tier-0")
    assert [tier.name for tier in bench.tiering.status()] == ["more"]
    before = bench.tiers[0].num_calls
    bench.forget()
    assert bench.lookup(prompt(4)) == 4, "from the other"
    bench.store(prompt(2, 1))
    bench.settle()
    assert bench.tiers[0].num_calls == before
    assert bench.operate(o.Clear()).count >= 6


@pytest.mark.parametrize("how", ["added", "suspended", "hanging"])
def test_a_tier_that_was_not_there_when_weights_became_outdated_hears_it_later(how: str, make: Maker) -> None:
    bench = make(pages=32, tier_pages=12)
    present, old = "lineage 2", "lineage 1"
    scheduler = bench.ask(m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", bench.spec, weights=present))
    bench.store(prompt(2))
    bench.ask(m.ChangeWeights(scheduler.context, old))
    bench.store(prompt(3, 1))  # used last
    bench.settle()
    [tier], [queue], num_calls = bench.tiers, bench.tiering.queues, bench.tiers[0].num_calls
    if how == "added":
        tier.close = lambda: None  # type: ignore[method-assign]  # it keeps its entries
        assert bench.tiering.remove(queue.name)
    elif how == "suspended":
        queue.breaker.suspend("it is away")
    else:
        tier.hang = True
        bench.begin_lookup(prompt(1, 20))
        for name in range(10, 14):
            bench.store(prompt(1, name))
        bench.turn_until(lambda: tier.num_calls == num_calls + NUM_THREADS)
    bench.ask(m.ChangeWeights(scheduler.context, present))
    bench.depot.background.work()
    bench.turn()
    if how == "added":
        queue = TierQueue(tier, bench.pool, "more", deadline_seconds=1.0, clock=bench.clock)
        bench.tiering.add(queue)
    elif how == "hanging":
        bench.now += PATIENCE_SECONDS
        bench.turn()
        assert queue.is_suspended
        tier.hang = False
    bench.now += 1.0
    bench.turn_until(lambda: not queue.is_suspended and not queue.num_calls)
    bench.store(prompt(8, 2))
    bench.forget()
    assert bench.lookup(prompt(2)) == 2
    bench.ask(m.ChangeWeights(scheduler.context, old))
    assert bench.lookup(prompt(3, 1)) < 3


def test_a_tier_that_is_removed_is_closed_when_its_calls_have_ended(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    tier = bench.tiers[0]
    closed: list[int] = []
    monkeypatch.setattr(tier, "close", lambda: closed.append(1))
    bench.store(prompt(4))
    bench.settle()
    bench.forget()
    tier.hang = True
    before = tier.num_calls
    reply = bench.begin_lookup(prompt(4))
    wait_until(lambda: tier.num_calls > before, what="the call that hangs")
    assert bench.tiering.remove("tier-0")
    bench.turn()
    assert not closed
    tier.hang = False
    assert bench.wait(reply).num_chunks == 0, "what it was asked for is not taken any more"

    bench.turn_until(lambda: closed, what="the tier to be closed")
    bench.now += 100.0
    bench.turn()
    assert bench.tiering.queues[0].is_suspended, "nobody probes it"
    assert bench.lookup(prompt(4)) == 0


@pytest.mark.promise(57)
def test_retrieved_tokens_count_as_time_saved(make: Maker) -> None:
    bench = make(SHARDED)
    bench.store(prompt(4))
    bench.ask(m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", bench.spec))
    assert bench.lookup(prompt(4), token_seconds=0.5) == 4
    before = bench.depot.state.usage.saved_seconds
    run = prompt(4).slice(1, 4)
    for context in bench.contexts:
        bench.ask(m.PrepareRetrieve(context, "r", run.digests, run.first_chunk, (3,)))
    saved = status_of(bench.depot).prefill_seconds_saved
    assert saved == before + 3 * 0.5, "three tokens, once and not for each rank"


@pytest.mark.parametrize("groups", [PLAIN, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("num_turns", range(8))
def test_a_lookup_during_a_promotion_waits_for_what_is_on_its_way_and_gets_all_of_it(
    num_turns: int, groups: tuple[m.GroupShape, ...], make: Maker
) -> None:
    bench = make(groups, pages=96, demoted=40)
    bench.tiers[0].hang = True
    first = bench.begin_lookup(prompt(40))
    for _ in range(num_turns):  # turns of the promotion: its questions are answered, its reads hang
        bench.tiers[0].hang = False
        wait_until(lambda: bench.tiering.queues[0].num_calls == 0 or bench.tiering.queues[0].has_results, what="a call")
        bench.tiers[0].hang = True
        bench.turn(lambda: True)
    others = [bench.begin_lookup(prompt(40)) for _ in range(2)]
    bench.tiers[0].hang = False
    replies = [bench.wait(each) for each in (first, *others)]
    assert [(reply.num_chunks, reply.num_promoted) for reply in replies] == [(40, 40)] * 3
    assert bench.tiering.counters["entries_promoted"] == 40 * len(bench.contexts), "each is read once"


@pytest.mark.parametrize("num_turns", range(8))
def test_an_engine_that_begins_to_write_during_a_promotion_leaves_no_gap(num_turns: int, make: Maker) -> None:
    bench, run = make(demoted=8), prompt(8)
    pending = bench.begin_lookup(run)
    for _ in range(num_turns):
        wait_until(lambda: bench.tiering.queues[0].num_calls == 0 or bench.tiering.queues[0].has_results, what="a call")
        bench.turn(lambda: True)
    plan = bench.ask(m.PrepareStore(bench.contexts[0], "w", run.tenant, run.slice(0, 1).digests, 0, b"", (1,)))
    assert bench.wait(pending).num_chunks == (0 if plan.ticket else 8), "all, unless the engine writes the first one"
    bench.finish_promotions()
    if plan.ticket:
        bench.fill(plan, run.slice(0, 1))
    assert bench.lookup(run) == 8


def test_nothing_is_read_behind_a_chunk_that_an_engine_is_writing(make: Maker) -> None:
    """No lookup can use those chunks before the engine commits, if it ever does."""
    bench, run = make(demoted=8), prompt(8)
    bench.store(run.slice(0, 2))
    bench.settle()
    mine = run.slice(2, 4)
    plan = bench.ask(m.PrepareStore(bench.contexts[0], "w", mine.tenant, mine.digests, 2, mine.parent, (2,)))
    assert bench.lookup(run) == 2
    assert bench.tiering.queues[0].counters["read_entries"] == 0
    bench.fill(plan, mine)
    assert bench.lookup(run) == 8
    assert bench.tiering.queues[0].counters["read_entries"] == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_entries_that_engines_of_any_size_store_while_a_tier_is_asked_are_not_read_and_all_others_are(
    ranks: int, make: Maker
) -> None:
    bench, run = make(HEADS[:1], pages=192, demoted=40), prompt(40)
    bench.tiers[0].hang = True
    pending = bench.begin_lookup(run)
    before, bench.contexts, bench.ranks = bench.contexts, [], ranks
    bench.contexts = [bench.register(rank, instance="other") for rank in range(ranks)]
    bench.store(run.slice(0, 8))
    bench.contexts, bench.ranks = before, 1
    bench.tiers[0].hang = False
    reply = bench.wait(pending)
    assert (reply.num_chunks, reply.num_promoted) == (40, 32)
    assert bench.tiering.counters["entries_promoted"] == 32
    assert bench.tiering.counters["promotions_without_room"] == 0
    assert bench.lookup(run) == 40


def test_a_lookup_waits_no_longer_than_it_wants_and_later_chunks_are_kept(make: Maker) -> None:
    bench = make(demoted=8)
    bench.tiers[0].hang = True
    pending = bench.begin_lookup(prompt(8), wait_seconds=0.5)
    bench.turn()
    assert isinstance(pending, PendingReply)
    assert pending.reply is None
    bench.now += 0.6
    assert bench.wait(pending).num_chunks == 0
    bench.tiers[0].hang = False
    bench.finish_promotions()
    before = bench.tiers[0].num_calls
    assert bench.lookup(prompt(8)) == 8
    assert bench.tiers[0].num_calls == before


@pytest.mark.promise(26, 31)
def test_a_tier_that_hangs_costs_one_deadline_and_then_nothing_and_keeps_nothing(make: Maker) -> None:
    bench = make(demoted=8, stored=4)
    before = bench.tiers[0].num_calls
    bench.tiers[0].hang = True
    pending = bench.begin_lookup(prompt(8))
    wait_until(lambda: bench.tiers[0].num_calls > before)
    bench.now += 1.1
    replies = [bench.wait(pending)]
    assert bench.tiering.queues[0].is_suspended
    replies.append(bench.begin_lookup(prompt(8)))
    assert [reply.num_chunks for reply in replies] == [4, 4], "the second at once"
    for reply in replies:
        bench.release(reply.lease)
    assert len(bench.tiering.promotions) == 0
    assert sum(clear_pool(bench.depot, None)) == 4


def hang_reads_of(bench: Bench, run: KeyRun, chunks: set[int]) -> tuple[threading.Event, list[bytes]]:
    """Make reads of some chunks hang in the first tier until an event is set. Return it and the hanging reads' keys."""
    tier, end, hung = bench.tiers[0], threading.Event(), list[bytes]()
    tier.batch_entries = 1
    read = tier.read
    hanging = {run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] for chunk in chunks}

    def read_or_hang(keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
        if keys[0][-DIGEST_BYTES:] in hanging:
            hung.append(keys[0])
            end.wait()
        return read(keys, extents)

    tier.read = read_or_hang
    return end, hung


@pytest.mark.promise(26, 31)
@pytest.mark.parametrize("hanging", [{0}, {20}, {0, 1, 30}, set(range(40))], ids=["first", "middle", "some", "all"])
def test_a_read_that_hangs_keeps_only_what_it_may_write_to(hanging: set[int], make: Maker) -> None:
    bench, run = make(pages=64, demoted=40), prompt(40)
    end, hung = hang_reads_of(bench, run, hanging)
    num_hanging = min(len(hanging), 4)  # the tier has four threads
    pending = bench.begin_lookup(run)

    counters = bench.tiering.queues[0].counters
    bench.turn_until(lambda: len(hung) == num_hanging and counters["read_entries"] == 40 - len(hanging))
    bench.now += 1.1
    found = bench.wait(pending).num_chunks
    assert found == min(hanging)
    assert len(bench.tiering.promotions) == 0
    assert bench.index.extents.used_bytes <= (found + num_hanging) * PAGE
    bench.store_long(run)
    assert bench.found(run) == 40, "engines store what was given up"
    assert bench.index.extents.used_bytes <= (40 + num_hanging) * PAGE
    end.set()
    bench.turn_until(lambda: not num_under_way(bench.tiering))
    assert bench.index.extents.used_bytes == 40 * PAGE
    assert bench.lookup(run) == 40


@pytest.mark.promise(26)
def test_a_clear_that_hangs_is_answered_at_its_deadline(make: Maker) -> None:
    bench = make(stored=4)
    before = bench.tiers[0].num_calls
    bench.tiers[0].hang = True
    cleared = operate(bench.depot, o.Clear())

    bench.turn_until(lambda: (bench.depot.background.work(), bench.tiers[0].num_calls > before)[1])
    bench.now += 10.1
    reply = bench.wait(cleared)
    assert isinstance(reply, m.ErrorReply)
    assert reply.code is ErrorCode.TIER_UNAVAILABLE
    assert reply.message.startswith("4 entries were removed, but not in every tier: tier-0 hangs."), "those of the pool"
    bench.tiers[0].hang = False


@pytest.mark.parametrize("how", ["suspended", "failing"])
def test_a_clear_says_in_which_tiers_it_was_not_done(how: str, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the reply said that it was done, but the remaining chunks were served again later."""
    bench = make(num_tiers=2, stored=4)
    if how == "failing":
        monkeypatch.setattr(bench.tiers[0], "clear", Mock(side_effect=OSError("no")))
    else:
        bench.tiering.queues[0].breaker.why_suspended = "it failed"
    reply = bench.operate(o.Clear())
    assert isinstance(reply, m.ErrorReply)
    assert reply.code is ErrorCode.TIER_UNAVAILABLE
    assert "8 entries were removed" in reply.message, "in the pool and in the other tier"
    assert ("tier-0 failed." if how == "failing" else "tier-0 is suspended (it failed).") in reply.message
    assert "tier-1" not in reply.message


class HeldReads:
    """Holds the results of reads, or of jobs of another kind, to release them later and in another order."""

    def __init__(self, queue: TierQueue, monkeypatch: pytest.MonkeyPatch, kind: JobKind = JobKind.READ) -> None:
        self.held: list[jobs.JobPart] = []
        self.ready: list[jobs.JobPart] = []
        self._poll = queue.poll
        self._kind: JobKind | None = kind
        monkeypatch.setattr(queue, "poll", self.poll)

    def poll(self, most: int) -> list[jobs.JobPart]:
        for part in self._poll():
            (self.held if part.job.operation is self._kind else self.ready).append(part)
        parts, self.ready = self.ready[:most], self.ready[most:]
        return parts

    def release(self, parts: Sequence[jobs.JobPart]) -> None:
        last = {id(part.job): part for part in parts}
        self.ready += [replace(part, is_last=part is last[id(part.job)]) for part in parts]

    def end(self) -> None:
        """Release all, and hold no more."""
        self.release(self.held)
        self.held, self._kind = [], None


def test_a_promotion_under_way_brings_nothing_after_a_clear(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a promotion under way put the entries that it had read into the cleared pool."""
    bench = make(pages=160)
    for tenant in ("a", "b"):
        bench.store_long(prompt(40, tenant=tenant))
    bench.forget()
    reads = HeldReads(bench.tiering.queues[0], monkeypatch)
    pending: list[Any] = [bench.begin_lookup(prompt(40, tenant=tenant)) for tenant in ("a", "b")]
    bench.turn_until(lambda: sum(len(part.outcomes) for part in reads.held) == 80)
    cleared = operate(bench.depot, o.Clear("a"))
    bench.depot.background.work()

    def are_answered() -> bool:
        bench.depot.background.work()
        bench.turn()
        reads.release(reads.held)
        reads.held.clear()
        return cleared.reply is not None and all(reply.reply is not None for reply in pending)

    wait_until(are_answered)
    bench.finish_promotions()
    assert [reply.reply.num_chunks for reply in pending] == [0, 40]
    assert bench.index.entries.num_sealed == 40, "those of the other tenant"
    assert bench.lookup(prompt(40, tenant="a")) == 0


@pytest.mark.parametrize("seed", range(12))
def test_lookups_of_one_prompt_wait_for_each_other_in_any_order(
    seed: int, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: ending one of them ended the other, which ended the first again, and so others' holds were lost."""
    bench = make(pages=160)
    bench.tiers[0].batch_entries = 1
    run, source = prompt(97), random.Random(seed)
    bench.store_long(run)
    bench.forget()
    bench.store(run.slice(0, 1))
    bench.settle()
    reads = HeldReads(bench.tiering.queues[0], monkeypatch)
    pending = [bench.begin_lookup(run) for _ in range(2 + seed % 2)]

    def are_all_read() -> bool:
        bench.turn(lambda: True)
        return len(reads.held) == 96

    wait_until(are_all_read)
    first_job = min((part.job for part in reads.held), key=lambda job: job.extents[0])

    def order(part: jobs.JobPart) -> tuple[bool, float]:
        return not part.first and part.job is not first_job, source.random()

    reads.release(sorted(reads.held, key=order))
    assert [bench.wait(reply).num_chunks for reply in pending] == [97] * len(pending)
    for _ in pending:
        assert sum(clear_pool(bench.depot, None)) == 0, "leases keep it"
    for reply in pending:
        bench.ask(m.Release(bench.contexts[0], (bench.wait(reply).lease,)))
    assert sum(clear_pool(bench.depot, None)) == 97


@pytest.mark.promise(31)
def test_a_tier_that_lies_about_existence_gives_its_space_back(make: Maker) -> None:
    bench = make(demoted=2)
    bench.tiers[0].lie = True
    assert bench.lookup(prompt(6)) == 2
    assert bench.index.extents.used_bytes == 2 * PAGE


def test_a_chunk_that_cannot_be_read_costs_itself_and_later_chunks(make: Maker) -> None:
    bench = make(demoted=8)
    entries = cast("dict[bytes, tuple[bytes, bytes]]", vars(bench.tiers[0].inner)["_entries"])
    damaged = sorted(entries, key=lambda key: prompt(8).digests.index(key[-DIGEST_BYTES:]))[5]
    entries[damaged] = entries[damaged][0], b"short"
    assert bench.lookup(prompt(8)) == 5
    assert bench.index.extents.used_bytes == 5 * PAGE
    assert bench.tiering.queues[0].counters["corrupt"] == 1


@pytest.mark.promise(31)
def test_a_tier_that_raises_is_a_miss_and_the_next_tier_is_asked(make: Maker) -> None:
    bench = make(num_tiers=2, demoted=8)
    bench.tiers[0].error = OSError("broken")
    assert bench.lookup(prompt(8)) == 8


def test_without_a_descriptor_nothing_is_read_and_nobody_waits_for_it(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every turn failed until the lookup's deadline."""
    bench, run = make(stored=4), prompt(4)
    sum(clear_pool(bench.depot, None))

    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "process_start_time", fail)
        assert bench.lookup(run) == 0
    assert len(bench.tiering.promotions) == 0
    assert bench.lookup(run) == 4


@pytest.mark.parametrize("error", [OSError("no space left on device"), Refused(ErrorCode.MALFORMED, "too many")])
def test_a_lookup_whose_tenant_finds_no_name_gets_what_the_pool_has(
    make: Maker, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the lookup failed, and so did every client's lookup once one name had found no room."""
    caplog.set_level(logging.DEBUG, "kvdepot.server.lookups")
    disk_is_full = False

    def save(_names: Names) -> None:
        if disk_is_full:
            raise error

    bench = make(save_names=save)
    known, new = prompt(4), prompt(4, 1, tenant="new")
    bench.store(known)
    disk_is_full = True
    assert bench.lookup(new) == 0
    assert "the tiers are not asked as the name of its tenant or model found no room" in caplog.text
    assert bench.lookup(prompt(6)) == 4
    assert (bench.depot.counters["lookups_without_name"], bench.tiering.counters["promotions"]) == (1, 1)


def test_other_layouts_and_other_models_are_misses(make: Maker) -> None:
    bench = make(demoted=4)
    bench.ask(m.Unregister(bench.contexts[0]))
    bench.contexts = [bench.register(0, model="another")]
    assert bench.lookup(prompt(4)) == 0
    bench.ask(m.Unregister(bench.contexts[0]))
    details = (m.GroupDetail((PAGE // 2,), 8),)
    request = m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", 0, 1, "none", "none", "model", bench.spec, details)
    bench.contexts = [bench.ask(request).context]
    assert bench.lookup(prompt(4)) == 0


def test_without_a_worker_nobody_knows_what_to_make_room_for_and_a_new_tenant_gets_no_name(make: Maker) -> None:
    bench = make(SHARDED, demoted=4)
    bench.ask(m.Unregister(bench.contexts[1]))
    scheduler = bench.ask(m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", bench.spec)).context
    for tenant in (prompt(4).tenant, "new"):
        reply = bench.ask(m.Lookup(scheduler, "r", prompt(4).digests, tenant, 1.0))
        assert isinstance(reply, m.LookupReply)
        assert reply.num_chunks == 0
    assert [label.tenant for label in bench.depot.labels.names] == [prompt(4).tenant]
    bench.contexts = bench.contexts[:1]


def test_a_promotion_in_which_a_policy_raises_ends_with_all_that_it_had_begun(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the entries that a tier was reading stayed unfinished for ever, and the lookup got no reply."""
    bench = make(pages=48, demoted=40)
    bench.store_long(prompt(24, 1))
    bench.settle()
    bench.tiers[0].hang = True  # so that the first entries are still being read
    asked = bench.begin_lookup(prompt(40))
    assert isinstance(asked, PendingReply)
    with monkeypatch.context() as patch:
        patch.setattr(AdaptiveReplacement, "victim", Mock(side_effect=RuntimeError("broken")))
        bench.tiers[0].hang = False

        def fails() -> bool:
            try:
                bench.turn()
            except RuntimeError:
                return True
            return False

        wait_until(fails, what="the second part of the promotion")
    assert bench.wait(asked).num_chunks < 40
    assert len(bench.tiering.promotions) == 0
    bench.audit()


def test_promotion_evicts_what_it_needs_but_never_what_it_continues(make: Maker) -> None:
    bench = make(pages=8, demoted=6)
    bench.store(prompt(3))
    bench.store(prompt(5, name=1))
    bench.settle()
    assert bench.lookup(prompt(6)) == 6
    assert bench.index.extents.used_bytes == 8 * PAGE


def test_a_prefix_for_which_there_is_not_enough_room_comes_as_far_as_there_is_room(make: Maker) -> None:
    bench = make(pages=32, demoted=20)
    bench.store(prompt(16, name=1))
    bench.settle()
    lease = bench.hold(prompt(16, name=1))
    assert bench.lookup(prompt(20)) == 16
    bench.release(lease)


@pytest.mark.parametrize("is_session", [True, False])
def test_a_lookup_whose_session_or_context_ends_while_it_waits_gets_a_reply_and_no_lease(
    is_session: bool, make: Maker
) -> None:
    bench = make(demoted=8)
    bench.tiers[0].hang = True
    pending = bench.begin_lookup(prompt(8))
    assert isinstance(pending, PendingReply)
    assert pending.reply is None
    (context,) = bench.contexts
    if is_session:
        bench.depot.end_session(1)
        bench.contexts = [bench.register(0, session=2)]
    else:
        bench.ask(m.Unregister(context))
    bench.tiers[0].hang = False
    bench.finish_promotions()
    assert isinstance(pending.reply, m.ErrorReply)
    assert pending.reply.code is ErrorCode.UNKNOWN_CONTEXT
    assert f"context {context} ended while its lookup waited" in pending.reply.message
    assert len(bench.depot.leases) == 0


@pytest.mark.parametrize("verify", [False, True])
def test_a_server_that_does_not_know_the_entries_of_a_tier_does_not_write_them_again(
    verify: bool, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a restart, the first use of a prefix wrote all of it again, for example to an object store."""
    bench = make(pages=160, verify=verify, stored=40)
    storage = bench.tiers[0].inner
    write = Mock(side_effect=storage.write)
    monkeypatch.setattr(storage, "write", write)
    queue = TierQueue(storage, bench.pool, "found", deadline_seconds=1.0, clock=bench.clock)
    bench.tiering.add(queue)
    assert bench.lookup(prompt(40)) == 40
    bench.settle()
    asked = Mock(side_effect=storage.contains)
    monkeypatch.setattr(storage, "contains", asked)
    assert bench.lookup(prompt(40)) == 40
    bench.settle()
    assert not asked.called, "by now it is known"
    assert not write.called
    assert queue.counters["written_entries"] == queue.counters["written_bytes"] == 0
    bench.store(prompt(2, name=1))
    bench.settle()
    assert queue.counters["written_entries"] == 2


def test_with_reuse_only_entries_used_again_go_down(make: Maker) -> None:
    bench = make(demotion=Demotion.REUSE)
    bench.store(prompt(4))
    bench.store(prompt(4, name=1))
    bench.settle()
    assert bench.lookup(prompt(3)) == 3
    bench.settle()
    assert bench.tiers[0].usage().num_entries == 3


@pytest.mark.parametrize("demotion", [Demotion.REUSE, Demotion.STORE])
@pytest.mark.parametrize("groups", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_a_long_prompt_that_is_used_again_goes_down_from_its_beginning(
    groups: tuple[m.GroupShape, ...], demotion: Demotion, make: Maker
) -> None:
    """Regression: only its last 32 chunks were written, which are useless without the others."""
    bench = make(groups, pages=224, demotion=demotion, write_bytes=1 << 30)
    bench.tiers[0].error = OSError("away")
    bench.store_long(prompt(97))
    bench.settle()
    assert bench.tiers[0].usage().num_entries == 0
    bench.tiers[0].error = None
    bench.now += 100.0
    bench.turn_until(lambda: not bench.tiering.queues[0].is_suspended)
    assert bench.lookup(prompt(97)) == 97
    bench.forget()
    assert bench.lookup(prompt(97)) == 97


def test_a_store_behind_a_gap_in_a_tier_closes_it(make: Maker) -> None:
    """Regression: chunks dropped under pressure were never written, so the chunks after them were useless."""
    bench = make(pages=64, write_bytes=16 * PAGE)
    bench.tiers[0].hang = True
    bench.store(prompt(14))
    bench.store(prompt(22).slice(14, 22))
    assert bench.tiering.counters["demotions_dropped"] > 0
    bench.tiers[0].hang = False
    bench.settle()
    bench.store(prompt(26).slice(22, 26))
    bench.forget()
    assert bench.lookup(prompt(26)) == 26


def test_with_evict_leaving_chunks_go_down_and_the_pool_keeps_a_reserve(make: Maker) -> None:
    bench = make(pages=40, demotion=Demotion.EVICT)
    for name in range(12):
        bench.store(prompt(5, name=name))
        bench.settle()
    assert bench.tiers[0].usage().num_entries >= 60 - 40
    assert bench.index.extents.free_bytes >= 2 * PAGE
    assert [bench.lookup(prompt(5, name=name)) for name in range(12)] == [5] * 12


def test_with_evict_a_tier_that_hangs_gets_no_more_than_the_reserve_needs(make: Maker) -> None:
    bench = make(pages=40, demotion=Demotion.EVICT)
    bench.tiers[0].hang = True
    for name in range(8):
        bench.store(prompt(5, name=name))
    for _ in range(4):
        bench.tiering.stored(())  # wakes it, as each store does
        bench.turn()
    assert bench.tiering.queues[0].queued_write_bytes == 5 * PAGE, "one leaf and the chunks before it"
    bench.tiers[0].hang = False


def test_with_evict_chunks_of_outdated_weights_leave_without_a_write(make: Maker) -> None:
    bench = make(pages=40, demotion=Demotion.EVICT)
    request = m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", bench.spec, weights="lineage 1")
    scheduler = bench.ask(request).context
    for name in range(7):
        bench.store(prompt(5, name=name))
    bench.ask(m.ChangeWeights(scheduler, "lineage 2"))
    bench.depot.background.work()
    for name in range(7, 14):
        bench.store(prompt(5, name=name))
        bench.settle()
    assert bench.tiers[0].usage().num_entries == 0
    assert [bench.lookup(prompt(5, name=name)) for name in range(7, 14)] == [5] * 7
    for name in range(14, 17):
        bench.store(prompt(5, name=name))
        bench.settle()
    assert bench.tiers[0].usage().num_entries > 0, "those of the present weights are written"


def test_with_evict_the_end_of_a_lease_wakes_the_depot_that_found_nothing_to_evict(make: Maker) -> None:
    bench = make(pages=40, demotion=Demotion.EVICT)
    leased = [bench.store(prompt(8, name=name)) or bench.begin_lookup(prompt(8, name=name)) for name in range(5)]
    bench.settle()
    assert bench.index.extents.free_bytes == 0
    assert not bench.tiering.has_work
    assert isinstance(leased[0], m.LookupReply)
    bench.ask(m.Release(bench.contexts[0], (leased[0].lease,)))
    assert bench.tiering.has_work
    bench.settle()
    assert bench.index.extents.free_bytes >= 2 * PAGE


def test_short_prefixes_stay_in_the_pool(make: Maker) -> None:
    bench = make(least_tokens=4)
    bench.store(prompt(3))
    bench.store(prompt(4, name=1))
    bench.settle()
    assert bench.tiers[0].usage().num_entries == 4


def test_under_pressure_the_beginning_of_each_prefix_is_kept(make: Maker) -> None:
    bench = make(pages=64, write_bytes=16 * PAGE)
    bench.tiers[0].hang = True
    bench.store(prompt(12))
    bench.store(prompt(8, name=1))
    bench.store(prompt(8, name=2))
    bench.tiers[0].hang = False
    bench.forget()
    assert bench.lookup(prompt(12)) == 12
    assert 0 < bench.lookup(prompt(8, name=1)) < 8
    assert bench.tiering.counters["demotions_dropped"] > 8


def test_stores_of_one_chunk_are_not_the_first_that_are_dropped(make: Maker) -> None:
    """Regression: with the queue half full, the allowed share of a chunk was rounded down to none."""
    bench = make(pages=64, write_bytes=16 * PAGE)
    bench.tiers[0].hang = True
    for name in range(16):
        bench.store(prompt(1, name=name))
    assert bench.tiering.counters["demotions_dropped"] == 4, "from three quarters on"
    bench.tiers[0].hang = False


def test_a_tier_with_no_room_for_writes_that_wait_is_only_read(make: Maker) -> None:
    """Regression: with `queue=0`, every store divided by zero, and every use of its prefix asked the tier again."""
    bench = make(stored=4)
    bench.tiering.queues[0].write_bytes = 0
    bench.store(prompt(4, name=1))
    before = bench.tiers[0].num_calls
    for _ in range(5):
        assert bench.lookup(prompt(4, name=1)) == 4
        bench.settle()
    assert bench.tiers[0].num_calls == before + 1
    bench.forget()
    assert bench.lookup(prompt(4)) == 4
    assert bench.lookup(prompt(4, name=1)) == 0
    assert bench.tiering.counters["demotions_dropped"] == 0


def test_a_tier_that_declines_entries_is_asked_for_them_once_a_second(make: Maker) -> None:
    bench = make(tier_pages=0, stored=4)
    for _ in range(3):
        before = bench.tiers[0].num_calls
        bench.now += 1.0
        for _ in range(5):
            bench.lookup(prompt(4))
            bench.settle()
        assert bench.tiers[0].num_calls == before + 2, "a question and a write"


def test_a_prompt_that_is_stored_in_pieces_costs_a_tier_that_gathers_stores_few_calls(make: Maker) -> None:
    bench = make(pages=240, tier_pages=480, write_bytes=4 << 20, gathers_stores=True)
    bench.tiers[0].batch_entries = 256
    bench.store_long(prompt(240))
    assert not bench.tiers[0].num_calls
    bench.now += 1.0
    bench.settle()
    stored = bench.tiers[0].num_calls
    assert 0 < stored <= 10, "30 stores"
    bench.forget()
    assert bench.wait(bench.begin_lookup(prompt(240))).num_chunks == 240
    assert bench.tiers[0].num_calls - stored <= 10


@pytest.mark.parametrize(("groups", "ranks"), [(PLAIN, 1), (SHARDED, 2)], ids=["plain", "sharded"])
def test_chunks_that_wait_for_more_reach_their_tier_though_the_pool_needs_room(
    groups: tuple[m.GroupShape, ...], ranks: int, make: Maker
) -> None:
    bench = make(groups, pages=24 * ranks, write_bytes=16 * PAGE * ranks, gathers_stores=True)
    tier = bench.tiers[0]
    bench.store(prompt(4))
    tier.hang = True
    for name in range(1, 4):
        bench.store(prompt(8, name))
        bench.turn()
        assert bench.found(prompt(8, name)) == 8
    bench.now += 3.0
    bench.turn()  # now the tier is asked for them
    bench.store(prompt(8, 4))
    assert bench.found(prompt(8, 4)) == 8, "waiting chunks hold a part of the pool only"
    tier.hang = False
    bench.settle()
    bench.store(prompt(8, 5))
    bench.store(prompt(8, 6))
    bench.store(prompt(8, 7))
    assert bench.found(prompt(4)) == 0, "they hold it no longer"
    bench.now += 3.0
    assert bench.lookup(prompt(4)) == 4


@pytest.mark.parametrize("what", ["a tenant", "a prefix", "a session"])
def test_chunks_that_wait_for_more_are_cleared(what: str, make: Maker) -> None:
    bench, run, other = make(gathers_stores=True), prompt(4, tenant="a"), prompt(4, tenant="b")
    bench.store(run)
    bench.store(other)
    bench.ask(Hint(bench.contexts[0], "a", run.digests, session="s"))
    request = {
        "a tenant": o.Clear("a"),
        "a prefix": o.Clear(digests=run.digests),
        "a session": session_operations.ForgetSession("s", "a", at_once=True),
    }[what]
    assert bench.operate(request).count == 4
    assert bench.found(run) == 0
    bench.now += 3.0
    bench.forget()
    assert bench.lookup(run) == 0, "nor were they written"
    assert bench.lookup(other) == 4


def test_a_store_finds_room_beside_requests_whose_last_chunks_wait_for_more(make: Maker) -> None:
    bench = make(gathers_stores=True, pages=32)
    for name in range(4):
        bench.store(prompt(7, name))
    bench.now += 3.0
    bench.settle()
    for name in range(4):
        bench.store(prompt(8, name).slice(7))
    bench.store(prompt(8, 4))
    assert bench.found(prompt(8, 4)) == 8
    bench.now += 3.0


@pytest.mark.parametrize("is_earlier", [True, False], ids=["before", "meanwhile"])
def test_the_pool_keeps_no_chunks_for_a_suspended_tier(is_earlier: bool, make: Maker) -> None:
    bench, run = make(gathers_stores=True), prompt(4)
    (queue,) = bench.tiering.queues
    if is_earlier:
        queue.breaker.suspend("it is away")
    bench.store(run)
    (last,) = bench.index.entries.sealed(bench.index.spaces[0].nodes[digest_at(run.digests, 3)])
    assert bench.index.entries.is_reading(last) != is_earlier
    queue.breaker.suspend("it is away")
    bench.turn()
    assert not bench.index.entries.is_reading(last)


def test_a_chunk_that_waits_in_place_of_a_cleared_one_is_kept_no_longer_than_it_waits(make: Maker) -> None:
    bench = make(gathers_stores=True)
    bench.store(prompt(1))
    bench.operate(o.Clear())
    bench.lookup(prompt(1, 1), hands_over=True)
    bench.store(prompt(1, 1))
    for _ in range(2):
        bench.now += 1.5
        bench.settle()
    bench.forget()


def test_chunks_wait_for_more_after_a_restore_that_failed(make: Maker) -> None:
    bench = make(gathers_stores=True)
    bench.index.make_parts()
    bench.store(prompt(4))
    assert bench.tiering.num_unwritten == 1
    bench.now += 3.0
    bench.forget()
    assert bench.lookup(prompt(4)) == 4


def test_bytes_that_changed_in_the_pool_never_go_down(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(verify=True)
    has_changed = threading.Event()

    def checksum_later(payload: memoryview) -> bytes:
        has_changed.wait(30.0)
        return checksum_of(payload)

    monkeypatch.setattr(checked, "checksum_of", checksum_later)
    run = prompt(4)
    bench.store(run)
    entry = bench.index.entries.sealed(bench.index.visibility.find(bench.index.spaces[0], run.digests[64:96], 2) or 0)[
        0
    ]
    bench.pool.view[bench.index.table.extent(entry)[0]] ^= 1
    has_changed.set()
    bench.settle()
    assert bench.depot.counters["entries_corrupt"] == 1
    assert bench.tiers[0].usage().num_entries == 3
    bench.forget()
    assert bench.lookup(run) == 2


def test_an_entry_removed_while_it_is_being_written_keeps_its_extent_until_then(make: Maker) -> None:
    bench = make(pages=4)
    bench.tiers[0].hang = True
    bench.store(prompt(4))
    node = bench.index.visibility.find(bench.index.spaces[0], prompt(4).digests[-32:], 3)
    assert node is not None
    (entry,) = bench.index.entries.sealed(node)
    assert bench.depot.remove_corrupt(entry, bench.index.table.header(entry))
    assert bench.index.extents.free_bytes == 0, "the tier may still be reading it"
    bench.tiers[0].hang = False
    bench.settle()
    assert bench.index.extents.free_bytes == PAGE


def test_a_lookup_that_awaits_no_other_node_begins_no_flight_for_one(make: Maker) -> None:
    bench = make(demoted=3)
    assert bench.wait(bench.begin_lookup(prompt(8), joins=True)).num_chunks == 3
    assert len(bench.depot.features.of(FlightTable)) == 0


def test_clear_reaches_the_tiers(make: Maker) -> None:
    bench = make(num_tiers=2)
    bench.store(prompt(4, tenant="a"))
    bench.store(prompt(4, tenant="b"))
    bench.settle()
    reply = bench.operate(o.Clear("a"))
    assert reply.count == 12
    assert bench.lookup(prompt(4, tenant="a")) == 0
    bench.forget()
    assert bench.lookup(prompt(4, tenant="b")) == 4


def test_a_leased_prompt_that_stays_after_a_clear_is_written_again_before_it_leaves(make: Maker) -> None:
    bench, run = make(stored=4), prompt(4)
    remembered(bench, run)
    lease = bench.hold(run)
    assert bench.operate(o.Clear()).count == 4, "in the tier"
    bench.release(lease)
    assert bench.operate(session_operations.DemoteSession("agent", run.tenant)).count == 4
    bench.settle()
    assert bench.found(run) == 0
    assert bench.lookup(run) == 4


def test_a_waiting_write_does_not_come_back_after_a_clear(make: Maker) -> None:
    bench = make(pages=64)
    bench.tiers[0].batch_entries = 1
    bench.tiers[0].hang = True
    bench.store(prompt(16, tenant="a"))
    bench.store(prompt(2, tenant="b"))
    deferred = operate(bench.depot, o.Clear("a"))
    for _ in range(3):
        bench.depot.background.work(lambda: True)
        bench.turn()
    bench.tiers[0].hang = False
    bench.wait(deferred)
    bench.forget()
    assert bench.lookup(prompt(16, tenant="a")) == 0
    assert bench.lookup(prompt(2, tenant="b")) == 2


def test_clear_waits_for_a_write_under_way(make: Maker) -> None:
    bench, run = make(), prompt(8)
    bench.tiers[0].hang = True
    bench.store(run)
    wait_until(lambda: bench.tiers[0].num_calls, what="a write")
    deferred = operate(bench.depot, o.Clear())
    for _ in range(3):
        bench.depot.background.work()
        bench.turn()
    assert isinstance(deferred, PendingReply)
    assert deferred.reply is None
    bench.tiers[0].hang = False
    assert bench.wait(deferred).count == 16
    assert bench.index.extents.used_bytes == 0
    assert bench.lookup(run) == 0


def test_clear_removes_chunks_that_are_promoted_meanwhile(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, run = make(demoted=8), prompt(8)
    storage = bench.tiers[0].inner
    clear, looked_up, is_clear = storage.clear, threading.Event(), threading.Event()

    def clear_later(*names: Any) -> Iterator[int]:
        is_clear.set()
        looked_up.wait(30.0)
        yield from clear(*names)

    monkeypatch.setattr(storage, "clear", clear_later)
    deferred = operate(bench.depot, o.Clear())

    bench.turn_until(lambda: (bench.depot.background.work(), is_clear.is_set())[1], what="the clear of the tier")
    assert bench.lookup(run) == 8
    looked_up.set()
    assert bench.wait(deferred).count == 16
    assert bench.index.extents.used_bytes == 0
    assert bench.lookup(run) == 0


@pytest.mark.promise(31)
def test_entries_on_their_way_from_a_tier_that_hangs_are_waited_for_once(make: Maker) -> None:
    bench = make(num_tiers=2, demoted=8)
    assert sum(bench.tiers[1].inner.clear(None, None)) == 8
    inner, stuck = bench.tiers[0].inner, FaultyTier(bench.tiers[0].inner)
    answers = inner.contains
    stuck.contains = answers  # type: ignore[method-assign]
    stuck.hang = True
    bench.tiers[0].inner = stuck
    first = bench.begin_lookup(prompt(8))
    bench.turn_until(lambda: stuck.num_calls > 0)
    bench.now += 1.1
    assert bench.wait(first).num_chunks == 0
    second = bench.begin_lookup(prompt(8))
    assert bench.wait(second).num_chunks == 0, "no time has passed"
    stuck.hang = False


def test_lookups_that_do_not_wait_do_not_make_a_tier_slow(make: Maker) -> None:
    bench = make(demoted=8)
    for _ in range(10):
        bench.wait(bench.begin_lookup(prompt(8), wait_seconds=0.0))
        bench.finish_promotions()
        bench.forget()
    assert not bench.tiering.queues[0].is_suspended


def look_up_too_slowly(bench: Bench) -> None:
    """Look up chunks that a tier returns after the lookup's deadline, but before the tier's own deadline."""
    bench.tiering.queues[0].deadline_seconds = 100.0
    bench.tiers[0].hang = True
    pending = bench.begin_lookup(prompt(8))
    bench.now += 1.1
    assert bench.wait(pending).num_chunks == 0
    bench.tiers[0].hang = False
    bench.finish_promotions()
    bench.forget()


def test_a_tier_that_stays_too_slow_costs_ever_fewer_lookups(make: Maker) -> None:
    """Regression: its reads ended before its deadline, so it was used again after 0.5 s, for three lookups."""
    bench = make(demoted=8)
    queue = bench.tiering.queues[0]

    def seconds_until_used() -> float:
        began = bench.now
        while queue.is_suspended:
            bench.now = queue.next_deadline() or bench.now
            bench.turn_until(lambda: queue.next_deadline() != bench.now or not queue.is_suspended)
        return bench.now - began

    for _ in range(3):
        assert not queue.is_suspended
        look_up_too_slowly(bench)
    assert "3 lookups in a row" in queue.breaker.why_suspended
    pauses = [seconds_until_used()]
    while len(pauses) < 4:
        look_up_too_slowly(bench)
        assert queue.is_suspended, "at the first that waits in vain"
        pauses.append(seconds_until_used())
    assert [later > 1.9 * earlier for earlier, later in itertools.pairwise(pauses)] == [True] * 3
    assert bench.lookup(prompt(8)) == 8
    bench.forget()
    for _ in range(2):
        look_up_too_slowly(bench)
    assert not queue.is_suspended, "it had been in time since"


def test_a_lookup_for_which_the_pool_has_no_room_does_not_show_that_a_tier_is_quick(make: Maker) -> None:
    """Regression: such a lookup, which reads nothing, counted as in time, so the tier could be late two more times."""
    bench = make(demoted=8)
    for _ in range(2):
        look_up_too_slowly(bench)
    bench.store(prompt(16, name=1))
    lease = bench.hold(prompt(16, name=1))
    assert bench.lookup(prompt(8)) == 0
    assert bench.tiering.counters["promotions_without_room"] == 1
    bench.release(lease)
    bench.forget()
    look_up_too_slowly(bench)
    assert bench.tiering.queues[0].is_suspended


def test_a_tier_that_brings_something_to_every_lookup_in_time_is_used_on(make: Maker) -> None:
    """Regression: three long prompts in a row suspended a healthy tier that brought a part of each in time."""
    bench, run = make(pages=64), prompt(40)
    bench.store_long(run)
    bench.tiering.queues[0].deadline_seconds = 100.0
    for _ in range(4):
        bench.forget()
        end, _ = hang_reads_of(bench, run, {30})
        pending = bench.begin_lookup(run)
        bench.turn_until(lambda: bench.index.entries.num_sealed == 30)
        bench.now += 1.1
        assert bench.wait(pending).num_chunks == 30
        end.set()
        bench.finish_promotions()
        bench.end_leases()
    assert not bench.tiering.queues[0].is_suspended


@pytest.mark.parametrize("groups", [PLAIN, SHARDED, WINDOWS, HYBRID], ids=["plain", "sharded", "windows", "hybrid"])
@pytest.mark.parametrize("most", [1, 4, 7])
def test_a_tier_is_asked_again_until_it_was_asked_for_all_of_a_prompt(
    groups: tuple[m.GroupShape, ...], most: int, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a lookup asked each tier once, for 4,096 entries: 8,192 tokens with eight shards and chunks of 16."""
    monkeypatch.setattr(promotion, "MAXIMUM_QUESTIONS", most)
    bench, run = make(groups, pages=128, demoted=24), prompt(24)
    assert bench.lookup(run) == 24
    bench.forget()
    bench.store(run.slice(0, 5))
    assert bench.lookup(run) == 24


@pytest.mark.parametrize("groups", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_promoted_entries_have_their_checksums_again(groups: tuple[m.GroupShape, ...], make: Maker) -> None:
    """Regression: `--verify all` did not check entries from a tier."""
    bench, run = make(groups, pages=128, verify=True), prompt(30)
    bench.store_long(run)
    before = bench.checksums()
    assert all(map(any, before.values()))
    bench.forget()
    assert bench.lookup(run) == 30
    after = bench.checksums()
    assert after.items() <= before.items()
    assert len(after) >= 30


@pytest.mark.promise(31)
@pytest.mark.parametrize("verify", [False, True])
def test_a_read_that_reports_too_little_costs_what_it_did_not_report(verify: bool, make: Maker) -> None:
    """Regression: with `--verify`, the unreported entry was never given up, and its space was never freed."""
    bench = make(verify=verify, demoted=8)
    tier = bench.tiers[0]
    read = tier.read
    tier.read = lambda keys, extents: read(keys, extents)[:-1]  # type: ignore[method-assign]
    assert bench.lookup(prompt(8)) == 7
    bench.finish_promotions()
    assert bench.index.extents.used_bytes == 7 * PAGE


def lose(bench: Bench, run: KeyRun, chunks: Sequence[int]) -> None:
    """Remove chunks from the first tier, which does not report it."""
    keys, table = EntryKeys(bench.index, bench.depot.labels.names.__getitem__), bench.index.table
    digests = {run.slice(chunk, chunk + 1).digests for chunk in chunks}
    entries = [record.entry for record in table.records() if record.state == SEALED and record.key in digests]
    bench.tiers[0].inner.remove([key[:KEY_BYTES] for key in keys.keys_of(entries)])


def test_lookups_and_stores_name_an_entry_its_run_and_its_depth_alike(make: Maker) -> None:
    """The pool reuses the places of chunks that left, and stores make names in any order."""
    bench, chance = make(pages=160, tier_pages=1024), random.Random(1)
    keys, index = EntryKeys(bench.index, bench.depot.labels.names.__getitem__), bench.index
    for name in range(3):
        run = prompt(150, 10 * name)
        bench.store_long(run)
        bench.settle()
        entries = {record.key: record.entry for record in index.table.records() if record.state == SEALED}
        for chunk in [100, *chance.sample(range(150), 150), 75]:  # the 75th one's place may be the 74th one's next time
            entry = entries[digest_at(run.digests, chunk)]
            node, (group, part) = index.entries.node_of(entry), index.table.place_of(entry)
            place = PartPlace(group, part, index.table.extent(entry)[1], index.table.check_of(entry))
            key = keys.key(index.nodes.label[node], index.nodes.space_of(node), place, run.digests, chunk)
            assert keys.keys_of([entry]) == [key]
            assert key[KEY_BYTES : KEY_BYTES + RUN_BYTES] == digest_at(run.digests, chunk - chunk % 128)[:RUN_BYTES]
            assert depth_of(key) == chunk
        sum(clear_pool(bench.depot, None))


@pytest.mark.parametrize("groups", [PLAIN, SHARDED, HYBRID], ids=["plain", "sharded", "hybrid"])
@pytest.mark.parametrize("lost", [range(40), [0], [3, 4, 20], [39]], ids=["all", "root", "some", "last"])
@pytest.mark.parametrize("demotion", [Demotion.STORE, Demotion.REUSE])
@pytest.mark.promise(78)
def test_entries_that_a_tier_lost_are_written_again_when_they_are_used(
    demotion: Demotion, lost: Sequence[int], groups: tuple[m.GroupShape, ...], make: Maker
) -> None:
    bench = make(groups, pages=160, demotion=demotion)
    bench.store_long(prompt(40))
    assert bench.lookup(prompt(40)) == 40
    bench.settle()
    lose(bench, prompt(40), lost)
    num_written = bench.tiering.queues[0].counters["written_entries"]
    bench.now += 1.0
    assert bench.lookup(prompt(40)) == 40, "from the pool"
    bench.settle()
    num_again = bench.tiering.queues[0].counters["written_entries"] - num_written
    assert num_again == len(lost) * len(groups) * len(bench.contexts), "these alone"
    bench.forget()
    assert bench.lookup(prompt(40)) == 40


def test_a_used_prefix_is_asked_for_once_a_second_with_one_question(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(pages=256, stored=120)
    storage = bench.tiers[0].inner
    touch = Mock(side_effect=storage.touch)
    monkeypatch.setattr(storage, "touch", touch)
    for seconds, num_questions in ((0.5, 0), (0.5, 1), (0.0, 1), (0.5, 1), (0.5, 2)):
        bench.now += seconds
        assert bench.lookup(prompt(120)) == 120
        bench.settle()
        assert touch.call_count == num_questions
    assert [len(call.args[0]) for call in touch.call_args_list] == [120, 120]
    assert bench.lookup(prompt(90)) == 90
    bench.settle()
    assert touch.call_count == 2, "a prefix of what was asked for is fresh, too"


def test_lookups_leave_the_questions_to_the_next_turn_which_asks_once(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MOST_USED", 2)
    bench = make(pages=64)
    for name in range(3):
        bench.store(prompt(4, name))
    bench.settle()
    bench.now += 1.0
    bench.turn()
    num_calls = bench.tiers[0].num_calls
    for name in (0, 0, 1, 0, 1, 2):
        assert bench.lookup(prompt(4, name)) == 4
    assert not bench.tiering.has_work, "an idle turn is soon enough"
    bench.settle()
    assert bench.tiers[0].num_calls == num_calls + 1, "one for the first two"
    assert bench.lookup(prompt(4, 2)) == 4
    bench.settle()
    assert bench.tiers[0].num_calls == num_calls + 2, "the third was noted when it was found again"


def test_used_prefixes_wait_while_too_many_are_asked_for(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.tiers.refreshing.MOST_PREFIXES", 2)
    bench = make(pages=64)
    for name in range(4):
        bench.store(prompt(4, name))
    bench.settle()
    num_calls = bench.tiers[0].num_calls
    bench.now += 1.0
    for name in range(4):
        assert bench.lookup(prompt(4, name)) == 4
    bench.tiers[0].hang = True
    bench.turn_until(lambda: not bench.tiering.has_work, "nothing can be done until the tier answers")
    assert (bench.tiering.num_refreshing, len(bench.tiering.used)) == (2, 2)
    bench.tiers[0].hang = False
    bench.turn_until(lambda: bench.tiers[0].num_calls == num_calls + 2, "a question about two prefixes each time")


def store_many(bench: Bench, names: range) -> None:
    """Store prompts that wait for more, and let their wait end."""
    for name in names:
        bench.store(prompt(2, name))
    bench.now += 3.0


@pytest.mark.promise(89)
def test_stored_prefixes_wait_while_too_many_are_asked_for_and_are_asked_for_together(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.tiers.refreshing.MOST_PREFIXES", 4)
    bench = make(pages=64, gathers_stores=True)
    bench.tiers[0].hang = True
    store_many(bench, range(10))
    bench.turn()
    assert bench.tiering.num_unwritten == 10
    assert not bench.tiering.has_work, "nothing can be done until the tier answers"
    bench.tiers[0].hang = False
    bench.settle()
    assert (bench.tiering.num_unwritten, bench.tiering.counters["prefixes_dropped"]) == (0, 0)
    assert bench.tiers[0].num_calls == 6, "three times a question and a write"
    bench.forget()
    assert [bench.lookup(prompt(2, name)) for name in range(10)] == [2] * 10


def test_handed_over_prefixes_do_not_wait_behind_others(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.tiers.refreshing.MOST_PREFIXES", 1)
    bench = make(pages=64, gathers_stores=True)
    write = Mock(side_effect=bench.tiers[0].inner.write)
    monkeypatch.setattr(bench.tiers[0].inner, "write", write)
    bench.tiers[0].hang = True
    store_many(bench, range(3))
    bench.turn()
    bench.begin_lookup(prompt(2, 3), wait_seconds=0.0, hands_over=True)  # a hit would ask for its prefix at once
    store_many(bench, range(3, 4))
    bench.turn()
    bench.tiers[0].hang = False
    bench.settle()
    firsts = [digest_of(call.args[0][0]) for call in write.call_args_list]
    assert firsts == [digest_at(prompt(2, name).digests, 0) for name in (0, 3, 1, 2)]


@pytest.mark.promise(89)
@pytest.mark.parametrize("most", [4, 16], ids=["some wait", "all are asked for"])
def test_stored_prefixes_that_leave_before_they_are_written_are_counted(
    most: int, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.tiers.refreshing.MOST_PREFIXES", most)
    bench = make(pages=64, gathers_stores=True)
    bench.tiers[0].hang = True
    store_many(bench, range(10))
    bench.turn()
    sum(clear_pool(bench.depot, None))
    for node in [*bench.index.kept]:
        bench.index.kept.let_go(node)
    sum(clear_pool(bench.depot, None))
    assert not len(bench.index.nodes)
    store_many(bench, range(10, 13))  # reuses their nodes
    bench.turn()
    bench.tiers[0].hang = False
    bench.settle()
    assert (bench.tiering.num_unwritten, bench.tiering.counters["prefixes_dropped"]) == (0, 10)
    bench.forget()
    assert [bench.lookup(prompt(2, name)) for name in range(13)] == [0] * 10 + [2] * 3


def test_a_prefix_that_leaves_while_it_waits_for_more_is_counted(make: Maker) -> None:
    bench = make(pages=64, gathers_stores=True)
    for name in range(2):
        bench.store(prompt(2, name))
        for node in [*bench.index.kept]:
            bench.index.kept.let_go(node)
        sum(clear_pool(bench.depot, None))
    bench.now += 3.0
    bench.settle()
    assert bench.tiering.counters["prefixes_dropped"] == 2


def test_a_question_that_fails_for_one_of_several_prefixes_is_asked_for_each(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(pages=64, gathers_stores=True)
    storage, touch = bench.tiers[0].inner, bench.tiers[0].inner.touch
    broken = digest_at(prompt(2, 1).digests, 0)

    def fail(keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bool]:
        if broken in map(digest_of, keys):
            raise OSError("one entry is broken")
        return touch(keys, sizes)

    monkeypatch.setattr(storage, "touch", fail)
    store_many(bench, range(4))
    bench.settle()
    assert bench.tiering.counters["prefixes_dropped"] == 1
    bench.forget()
    assert [bench.lookup(prompt(2, name)) for name in range(4)] == [2, 0, 2, 2]


def test_a_tier_with_runs_is_not_asked_for_two_branches_of_a_run_together(make: Maker) -> None:
    bench = make(pages=64, gathers_stores=True)
    bench.tiers[0].wants_places = bench.tiering.queues[0].keeps_runs = True
    branch = hash_prefix(Namespace("model", tenant="default"), 1, [0, 1, 95, 96])
    for run in (prompt(4), branch, prompt(4, 1)):
        bench.store(run)
    bench.now += 3.0
    touch = Mock(side_effect=bench.tiers[0].inner.touch)
    bench.tiers[0].inner.touch = touch  # type: ignore[method-assign]
    bench.settle()
    assert [len({key[KEY_BYTES:][:RUN_BYTES] for key in call.args[0]}) for call in touch.call_args_list] == [1, 2]


def test_a_turn_with_many_used_prefixes_ends_in_time_and_another_one_follows(make: Maker) -> None:
    bench = make(pages=64)
    for name in range(3):
        bench.store(prompt(4, name))
    bench.settle()
    for name in range(3):
        assert bench.lookup(prompt(4, name)) == 4
    for num_left in (2, 1, 0):
        bench.turn(lambda: True)
        assert len(bench.tiering.used) == num_left
        assert bench.tiering.has_work == bool(num_left)


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_used_prefix_may_leave_before_the_turn_that_writes_it(
    is_reused: bool, make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(demotion=Demotion.REUSE)
    bench.store(prompt(4))
    (node,) = bench.index.visibility.match(bench.index.spaces[0], prompt(4).digests).nodes
    assert bench.lookup(prompt(4)) == 4
    sum(clear_pool(bench.depot, None))
    if is_reused:
        bench.store(prompt(4, name=1))
        assert bench.index.visibility.match(bench.index.spaces[0], prompt(4, name=1).digests).nodes == (node,)
    bench.forget()
    assert not caplog.records
    assert bench.lookup(prompt(4)) == 0
    assert bench.lookup(prompt(4, name=1)) == (4 if is_reused else 0), "written too early, which does no harm"


@pytest.mark.parametrize("num_turns", range(1, 10))
def test_chunks_that_leave_between_the_steps_of_a_refresh_are_not_asked_for(
    num_turns: int, make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the refresh asked for the key of an entry that was evicted meanwhile, and ended with an error."""
    bench = make(pages=256, stored=120)
    bench.now += 1.0
    assert bench.lookup(prompt(120)) == 120
    for _ in range(num_turns):
        bench.turn(lambda: True)
    space = bench.index.spaces[0]
    for num_chunks in range(120, 60, -1):
        assert bench.index.evictor.evict(bench.index.visibility.match(space, prompt(num_chunks).digests).nodes[-1])
    bench.settle()
    assert not caplog.records
    assert bench.lookup(prompt(120)) == 120, "from the tier"


@pytest.mark.parametrize("is_written", [False, True])
def test_an_answer_about_an_entry_whose_record_was_reused_says_nothing_about_the_new_one(
    is_written: bool, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, run, other = make(), prompt(4), prompt(4, name=1)
    storage, is_asked, may_answer = bench.tiers[0].inner, threading.Event(), threading.Event()

    def decline(keys: Sequence[bytes], *_: object) -> list[bool]:
        return [False] * len(keys)

    def touch_late(keys: Sequence[bytes], *_: object) -> list[bool]:
        is_asked.set()
        may_answer.wait(PATIENCE_SECONDS)
        return [True] * len(keys)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", decline)
        patch.setattr(storage, "touch", touch_late)
        bench.store(run)
        bench.settle()
        records = {record.entry for record in bench.index.table.records()}
        bench.now += 1.0
        assert bench.lookup(run) == 4
        bench.turn_until(is_asked.is_set)
        sum(clear_pool(bench.depot, None))
        if is_written:
            patch.undo()
        bench.store(other)
        assert records == {record.entry for record in bench.index.table.records()}
        bench.turn_until(lambda: not bench.tiering.queues[0].queued_write_bytes)
        may_answer.set()
        bench.settle()
    num_calls = bench.tiers[0].num_calls
    if is_written:
        assert bench.lookup(other) == 4
        bench.settle()
        assert bench.tiers[0].num_calls == num_calls, "it is still known to be there"
    remembered(bench, other)
    assert bench.operate(session_operations.DemoteSession("agent", other.tenant)).count == 4
    bench.settle()
    assert bench.found(other) == 0
    assert bench.lookup(other) == 4, "it was written before it left"


def test_a_tier_that_does_not_answer_gets_nothing_again(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(stored=4)
    monkeypatch.setattr(bench.tiers[0].inner, "touch", Mock(side_effect=OSError("away")))
    for _ in range(2):
        bench.now += 1.0
        assert bench.lookup(prompt(4)) == 4
        bench.settle()
    assert bench.tiering.queues[0].counters["written_entries"] == 4
    assert bench.tiering.queues[0].counters["errors"] == 2


def test_a_question_that_hangs_is_given_up_and_the_prefix_asked_for_again(make: Maker) -> None:
    bench = make(stored=4)
    lose(bench, prompt(4), range(4))
    bench.now += 1.0
    bench.tiers[0].hang = True
    assert bench.lookup(prompt(4)) == 4
    bench.turn()
    assert bench.tiering.num_refreshing == 1
    wait_until(lambda: bench.tiers[0].num_calls == 2, what="a write and a touch")
    bench.now += 100.0
    bench.turn()
    assert (bench.tiering.num_refreshing, bench.tiering.queues[0].is_suspended) == (0, True)
    bench.tiers[0].hang = False
    bench.now += 100.0
    bench.turn_until(lambda: not bench.tiering.queues[0].is_suspended)
    assert bench.lookup(prompt(4)) == 4
    bench.forget()
    assert bench.lookup(prompt(4)) == 4


def test_entries_in_use_stay_in_a_tier_that_evicts_by_use(make: Maker) -> None:
    bench = make(pages=64, tier_pages=16)
    bench.store(prompt(4))
    for name in range(1, 9):
        bench.store(prompt(4, name=name))
        bench.settle()
        bench.now += 1.0
        assert bench.lookup(prompt(4)) == 4
        bench.settle()
    assert bench.tiering.queues[0].counters["written_entries"] == 36, "each once"
    bench.forget()
    assert bench.lookup(prompt(4)) == 4


def test_with_evict_entries_that_a_tier_lost_are_written_when_they_leave(make: Maker) -> None:
    bench = make(pages=24, demotion=Demotion.EVICT)
    bench.store(prompt(4))
    for name in range(1, 7):  # evicts the first prompt
        bench.store(prompt(4, name=name))
        bench.settle()
    assert bench.lookup(prompt(4)) == 4, "from the tier"
    lose(bench, prompt(4), range(4))
    bench.now += 1.0
    assert bench.lookup(prompt(4)) == 4
    bench.settle()
    bench.ask(Hint(bench.contexts[0], "default", prompt(4).digests, session_ended=True))
    for name in range(7, 14):
        bench.store(prompt(4, name=name))
        bench.settle()
    bench.forget()
    assert bench.lookup(prompt(4)) == 4


def remembered(bench: Bench, run: KeyRun, session: str = "agent") -> None:
    bench.ask(Hint(bench.contexts[0], run.tenant, run.digests, session=session))


def test_a_session_is_brought_up_and_stays_for_a_time(make: Maker) -> None:
    bench, run = make(pages=24), prompt(8)
    bench.store(run)
    remembered(bench, run)
    bench.forget()
    prefetch = session_operations.PrefetchSession("agent", run.tenant, 60.0)
    assert bench.operate(prefetch).count == 8
    for name in range(1, 9):
        bench.store(prompt(4, name=name))
        bench.settle()
    before = bench.tiers[0].num_calls
    assert bench.lookup(run) == 8
    assert bench.tiers[0].num_calls == before
    bench.now += 61.0
    bench.depot.expire()
    bench.depot.background.work()
    sum(clear_pool(bench.depot, None))
    assert bench.found(run) == 0
    assert not bench.depot.features.of(Agents).pins
    bench.index.check_integrity()


@pytest.mark.parametrize("num_chunks", [64, 70])
@pytest.mark.parametrize("demotion", list(Demotion))
def test_a_session_that_is_demoted_leaves_the_pool_and_comes_back(
    make: Maker, demotion: Demotion, num_chunks: int
) -> None:
    bench = make(pages=80, demotion=demotion)
    agent, other = prompt(num_chunks), prompt(4, name=1)
    bench.store_long(agent)
    bench.store(other)
    bench.settle()
    remembered(bench, agent)
    assert bench.operate(session_operations.RetainSession("agent", 60.0, agent.tenant)).count == 40
    assert bench.operate(session_operations.DemoteSession("agent", agent.tenant)).count == num_chunks
    bench.settle()
    assert bench.found(agent) == 0
    assert bench.found(other) == 4
    assert not sum(bench.index.evictor.eviction_ages.counts), "the pool was not too small"
    assert bench.lookup(agent) == num_chunks
    bench.index.check_integrity()


@pytest.mark.parametrize("lost", [range(70), [0], [40], [69]], ids=["all", "root", "middle", "last"])
@pytest.mark.promise(88)
def test_a_tier_is_asked_for_a_session_before_it_leaves_and_gets_what_it_lost(lost: Sequence[int], make: Maker) -> None:
    bench, agent = make(pages=80, stored=70), prompt(70)
    remembered(bench, agent)
    lose(bench, agent, lost)
    bench.now += 1.0
    assert bench.operate(session_operations.DemoteSession("agent", agent.tenant)).count == 70
    bench.settle()
    assert bench.tiering.queues[0].counters["written_entries"] == 70 + len(lost)
    assert bench.found(agent) == 0
    assert bench.lookup(agent) == 70


def test_a_session_leaves_without_a_question_if_the_tier_had_it_within_the_last_second(make: Maker) -> None:
    bench, agent = make(stored=8), prompt(8)
    remembered(bench, agent)
    bench.now += 0.5
    before = bench.tiers[0].num_calls
    assert bench.operate(session_operations.DemoteSession("agent", agent.tenant)).count == 8
    assert (bench.found(agent), bench.tiers[0].num_calls) == (0, before)


def test_a_session_that_leaves_slowly_is_asked_for_again_and_again(make: Maker) -> None:
    bench, agent = make(pages=80, stored=70), prompt(70)
    remembered(bench, agent)
    bench.now += 1.0
    bench.operate(session_operations.DemoteSession("agent", agent.tenant))

    def turn_slowly() -> bool:
        bench.now += 1.0
        bench.turn(lambda: True)
        return bench.found(agent) == 0

    wait_until(turn_slowly, what="the end of the session")
    assert bench.lookup(agent) == 70


def test_a_session_that_leaves_is_not_evicted_before_the_tier_has_answered(make: Maker) -> None:
    bench, agent = make(stored=8), prompt(8)
    remembered(bench, agent)
    lose(bench, agent, [7])
    bench.now += 1.0
    bench.tiers[0].hang = True
    bench.operate(session_operations.DemoteSession("agent", agent.tenant))
    bench.store(prompt(8, name=1))
    bench.store(prompt(4, name=2))
    bench.tiers[0].hang = False
    bench.settle()
    assert bench.lookup(agent) == 8


def test_a_session_that_a_tier_without_room_for_writes_has_lost_stays(make: Maker) -> None:
    bench, agent = make(stored=8), prompt(8)
    remembered(bench, agent)
    lose(bench, agent, [3])
    bench.tiering.queues[0].write_bytes = 0
    bench.now += 1.0
    bench.operate(session_operations.DemoteSession("agent", agent.tenant))
    bench.settle()
    assert bench.found(agent) == 4, "the chunks after the lost one left, as the tier has them"


def test_the_beginning_that_others_need_is_not_demoted(make: Maker) -> None:
    bench = make(pages=32)
    agent = prompt(8)
    branch = hash_prefix(Namespace("model", tenant="default"), 1, [0, 1, 2, 3, 4, 95, 96, 97])
    for run in (agent, branch):
        bench.store(run)
    bench.settle()
    remembered(bench, agent)
    assert bench.operate(session_operations.DemoteSession("agent", agent.tenant)).count == 3
    bench.settle()
    assert (bench.found(agent), bench.found(branch)) == (5, 8)


def test_a_chunk_that_no_tier_takes_stays(make: Maker) -> None:
    bench, run = make(pages=32, demotion=Demotion.REUSE), prompt(8)
    bench.store(run)
    remembered(bench, run)
    bench.tiers[0].error = OSError("broken")
    bench.operate(session_operations.DemoteSession("agent", run.tenant))
    bench.settle()
    assert bench.found(run) == 8


@pytest.mark.parametrize("declined", [range(92, 100), range(20, 28)], ids=["the end", "a gap"])
def test_all_of_a_long_session_leaves_though_a_tier_declined_a_part_of_it(
    make: Maker, declined: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, run = make(pages=128), prompt(100)
    storage, write = bench.tiers[0].inner, bench.tiers[0].inner.write
    digests = {digest_at(run.digests, chunk) for chunk in declined}

    def decline(keys: Sequence[bytes], *rest: Any) -> list[bool]:
        write(keys, *rest)
        storage.remove([key for key in keys if digest_of(key) in digests])
        return list(storage.contains(keys))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", decline)
        bench.store_long(run)
        bench.settle()
    assert storage.usage().num_entries == 92
    remembered(bench, run)
    assert bench.operate(session_operations.DemoteSession("agent", run.tenant)).count == 100
    bench.settle()
    assert bench.found(run) == 0
    assert bench.lookup(run) == 100


def test_a_session_that_is_being_written_leaves_when_it_is_demoted(make: Maker) -> None:
    bench, run = make(pages=32), prompt(8)
    bench.tiers[0].hang = True
    bench.store(run)
    remembered(bench, run)
    assert bench.operate(session_operations.DemoteSession("agent", run.tenant)).count == 8
    assert bench.found(run) == 8
    bench.tiers[0].hang = False
    bench.settle()
    assert bench.found(run) == 0
    assert bench.lookup(run) == 8


def test_a_new_chunk_in_place_of_one_that_was_about_to_leave_stays(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(pages=80, demotion=Demotion.EVICT, gathers_stores=True)
    writes = HeldReads(bench.tiering.queues[0], monkeypatch, JobKind.WRITE)
    for name in range(80):
        bench.store(prompt(1, name))
    bench.turn_until(
        lambda: sum(len(part.outcomes) for part in writes.held) == 4,
        "the writes of the four that leave for the reserve",
    )
    writes.end()
    bench.turn(lambda: not writes.ready)  # takes the results, and has no time left to evict all four
    for name in range(100, 104):  # evicts the rest
        bench.store(prompt(1, name))
    for _ in range(4):
        bench.turn(lambda: not writes.ready)
    assert [bench.found(prompt(1, name)) for name in range(4)] == [0] * 4
    assert [bench.found(prompt(1, name)) for name in range(100, 104)] == [1] * 4


def test_without_a_tier_in_use_nothing_is_demoted(make: Maker) -> None:
    bench, run = make(pages=32, stored=8), prompt(8)
    remembered(bench, run)
    assert bench.tiering.remove("tier-0")
    reply = bench.operate(session_operations.DemoteSession("agent", run.tenant))
    assert reply.code is ErrorCode.TIER_UNAVAILABLE
    assert bench.found(run) == 8


def test_entries_of_any_model_of_a_space_are_warmed(make: Maker) -> None:
    bench = make(pages=32)
    runs = {"model": prompt(4), "another": prompt(3, name=1)}
    contexts = {"model": bench.contexts[0], "another": bench.register(0, model="another")}
    for model, run in runs.items():
        bench.contexts = [contexts[model]]
        bench.store(run)
    bench.forget()
    for run in runs.values():
        assert bench.operate(o.Warm(tenant=run.tenant, digests=run.digests)).count == run.num_chunks
        bench.check(run)


def test_nothing_is_warmed_without_an_engine(make: Maker) -> None:
    bench = make(demoted=2)
    bench.depot.end_session(1)
    assert bench.operate(o.Warm(digests=prompt(2).digests)).count == 0


@pytest.mark.slow
@pytest.mark.promise(29, 31)
@pytest.mark.parametrize("demotion", Demotion)
@pytest.mark.parametrize("groups", [PLAIN, SHARDED, WINDOWS, HYBRID], ids=["plain", "sharded", "windows", "hybrid"])
def test_random_traffic_with_bad_days_is_right_bytes_or_a_miss(
    groups: tuple[m.GroupShape, ...], demotion: Demotion, make: Maker
) -> None:
    rng = random.Random(7)
    bench = make(groups, pages=30, num_tiers=2, demotion=demotion)
    bench.time_passes = True
    pending: list[tuple[KeyRun, Any]] = []
    hits = 0
    for step in range(250):
        run = prompt(rng.randint(1, 8), name=rng.randint(0, 7), tenant=f"tenant-{rng.randint(0, 1)}")
        match rng.randint(0, 9):
            case 0 | 1 | 2:
                bench.store(run)
            case 3 | 4 | 5:
                hits += bench.lookup(run)
            case 6:
                pending.append((run, bench.begin_lookup(run, wait_seconds=0.5)))
            case 7:
                tier = rng.choice(bench.tiers)
                tier.hang, tier.lie = rng.random() < 0.2, rng.random() < 0.3
                tier.error = OSError("broken") if rng.random() < 0.3 else None
                bench.now += rng.random()
            case _:
                bench.now += 0.7
                bench.turn()
        if step % 25 == 24:
            for tier in bench.tiers:
                tier.hang, tier.lie, tier.error = False, False, None
            bench.now += 31
            bench.settle()
            for _, reply in pending:
                lease = bench.wait(reply).lease
                if lease:
                    bench.release(lease)
            pending.clear()
    assert hits > 20


def test_a_tier_whose_queue_fails_costs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the engine's commit was refused, although its chunks were in the pool."""
    bench = Bench()

    def submit(_job: object) -> bool:
        raise AttributeError("batch_entries")

    monkeypatch.setattr(bench.tiering.queues[0], "submit", submit)
    bench.store(prompt(2))
    assert bench.lookup(prompt(2)) == 2
    bench.turn()
    assert bench.tiering.counters["demotions_failed"] == 2, "the store, and the use of what was stored"


# --- hand-over from another node ------------------------------------------------------------------------------------


class OtherNode:
    """Another node: the only tier shows the first `num_here` chunks of `run`. Counts the questions about them."""

    def __init__(self, bench: Bench, run: KeyRun) -> None:
        self.bench = bench
        self.num_here = self.num_questions = 0
        bench.store(run)
        bench.forget()
        contains, hidden = bench.tiers[0].contains, [run.digests[end - 32 : end] for end in range(32, 257, 32)]

        def answer(keys: Sequence[bytes]) -> list[bool]:
            self.num_questions += 1
            away = hidden[self.num_here :]
            return [
                is_there and not any(key.endswith(digest) for digest in away)
                for key, is_there in zip(keys, contains(keys), strict=True)
            ]

        bench.tiers[0].contains = answer  # type: ignore[method-assign]

    def wait(self, asked: Any, seconds: float = 1.0) -> Any:
        """Return the answer to a lookup, None if there is none after `seconds` of the clock."""
        bench, until = self.bench, self.bench.now + seconds
        bench.depot.background.work()
        while asked.reply is None and bench.now < until:
            bench.now += 0.005
            bench.depot.state.timers.expire(bench.now)
            bench.depot.background.work()
            bench.finish_promotions()
        return asked.reply


@pytest.fixture
def awaited(make: Maker, monkeypatch: pytest.MonkeyPatch) -> OtherNode:
    monkeypatch.setattr(flights, "LEAST_TOKENS", 2)
    return OtherNode(make(), prompt(8))


def awaits(node: OtherNode, num_chunks: int = 8, **fields: Any) -> PendingReply:
    asked = node.bench.begin_lookup(prompt(8), joins=True, awaits=num_chunks, **fields)
    assert isinstance(asked, PendingReply)
    assert node.wait(asked, 0.1) is None
    return asked


@pytest.mark.promise(77)
def test_a_lookup_waits_for_chunks_that_another_node_brings_to_a_tier(awaited: OtherNode) -> None:
    asked = awaits(awaited)
    awaited.num_here = 3
    assert awaited.wait(asked, 0.1) is None
    awaited.num_here = 8
    reply = awaited.wait(asked, 0.1)
    assert (reply.num_chunks, reply.num_pending, reply.num_promoted) == (8, 0, 8)
    awaited.bench.check(prompt(8))


@pytest.mark.promise(77)
def test_chunks_that_are_handed_over_come_however_few_they_are(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "LEAST_TOKENS", 2)
    node = OtherNode(make(promotion_least_tokens=100), prompt(8))
    asked = awaits(node, 7)
    node.num_here = 6
    assert node.wait(asked, 0.1) is None
    node.num_here = 7
    assert node.wait(asked, 0.1).num_chunks == 7
    node.num_here = 8
    assert node.bench.lookup(prompt(8)) == 7, "the last one is not handed over"


@pytest.mark.promise(77)
@pytest.mark.parametrize("num_here", [0, 3])
def test_at_its_deadline_it_says_whether_more_is_to_be_expected(num_here: int, awaited: OtherNode) -> None:
    asked = awaits(awaited, wait_seconds=0.5)
    awaited.num_here = num_here
    reply = awaited.wait(asked, 0.45)
    assert (reply.num_chunks, reply.num_pending) == (num_here, 5 if num_here else 0)
    assert awaited.bench.now < 50.0 + 0.52


def test_chunks_that_the_lookup_itself_promotes_count_as_arrived(awaited: OtherNode) -> None:
    asked = awaits(awaited, wait_seconds=0.2)
    assert awaited.wait(asked, 0.2).num_pending == 0
    awaited.num_here = 3
    asked = awaits(awaited, wait_seconds=0.2)
    reply = awaited.wait(asked, 0.2)
    assert (reply.num_chunks, reply.num_pending) == (3, 5)


def test_a_tier_is_asked_at_a_bounded_pace_and_only_while_a_lookup_waits(awaited: OtherNode) -> None:
    before = awaited.num_questions
    asked = [awaits(awaited, name=str(number), wait_seconds=0.5) for number in range(3)]
    for each in asked:
        assert awaited.wait(each, 1.0) is not None
    num_polls = awaited.num_questions - before - len(asked)
    assert 10 <= num_polls <= 41, "every 20 ms, in 0.8 s"
    idle = Answered(None)
    assert awaited.wait(idle, 1.0) is None
    assert awaited.num_questions - before - len(asked) <= num_polls + 1


def test_many_awaited_prompts_share_the_questions_of_a_second(awaited: OtherNode) -> None:
    bench, before = awaited.bench, awaited.num_questions
    asked = [
        bench.begin_lookup(prompt(8, number), name=str(number), joins=True, awaits=8, wait_seconds=0.5)
        for number in range(1, 41)
    ]
    for each in asked:
        assert awaited.wait(each).num_chunks == 0
    assert 100 <= awaited.num_questions - before - len(asked) <= 250, "400 a second; each prompt alone has 50"


def test_a_tier_is_asked_as_often_after_many_flights_have_ended(awaited: OtherNode) -> None:
    for number in range(40):
        asked = awaits(awaited, name=str(number))
        awaited.bench.ask(m.EndRequest(awaited.bench.contexts[0], str(number)))
        assert awaited.wait(asked, 0.0) is not None
    before = awaited.num_questions
    assert awaited.wait(awaits(awaited, wait_seconds=0.5), 1.0) is not None
    assert awaited.num_questions - before >= 10, "every 20 ms for half a second"


def test_an_engine_of_this_node_that_begins_takes_over(awaited: OtherNode) -> None:
    """That engine does not wait, and its end is noticed at once."""
    asked = awaits(awaited)
    announced = awaited.bench.begin_lookup(prompt(8), name="prefill", joins=True, announces=True)
    assert awaited.wait(announced, 0.02) is not None
    reply = awaited.wait(asked, 0.0)
    assert (reply.num_chunks, reply.num_pending) == (0, 8)
    asked = awaits(awaited)
    awaited.bench.ask(m.EndRequest(awaited.bench.contexts[0], "prefill"))
    assert awaited.wait(asked, 0.02) is not None, "once the tiers were asked, too"


@pytest.mark.parametrize("rule", Demotion)
def test_handed_over_chunks_are_written_first_whatever_the_rule(rule: Demotion, make: Maker) -> None:
    bench = make(pages=64, demotion=rule)
    tier = bench.tiers[0]
    tier.hang = True
    bench.store_long(prompt(8, name=1))
    bench.begin_lookup(prompt(4), hands_over=True)
    bench.store(prompt(4))
    written: list[bytes] = []
    write = tier.write

    def note(keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        written.extend(key[-DIGEST_BYTES:] for key in keys)
        return write(keys, trailers, extents)

    tier.write = note  # type: ignore[method-assign]
    tier.hang = False
    bench.settle()
    assert set(written[:4]) == {prompt(4).digests[start : start + 32] for start in range(0, 128, 32)}
    bench.ask(m.EndRequest(bench.contexts[0], "r"))
    bench.store(prompt(4, name=2))
    bench.settle()
    assert (len(written) > 4) is (rule is Demotion.STORE), "the hand-over is over"


def test_handed_over_chunks_are_written_whole_although_the_queue_fills_up(make: Maker) -> None:
    bench = make(pages=64, write_bytes=16 * PAGE)
    bench.tiers[0].hang = True
    bench.store(prompt(8, name=1))
    bench.store(prompt(4, name=2))
    bench.begin_lookup(prompt(4), hands_over=True)
    bench.store(prompt(4))
    assert bench.tiering.counters["demotions_dropped"] == 0
    bench.tiers[0].hang = False
