"""Single flight: lookups wait for chunks that another request computes, but no longer than it pays off."""

import logging
import os
import random
import tracemalloc
from typing import Any

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.features.flights import feature as flights
from kvdepot.features.flights.feature import FlightTable
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, hash_prefix
from kvdepot.operate import operations as o
from kvdepot.server.turns import PendingReply
from kvdepot.wire import messages as m
from support.index import FULL, HYBRID, ONLY_WINDOW, PLAIN, SHARDED, WINDOW, Bench, Worker, bench_and_worker, prompt
from support.operate import operate

WAIT_SECONDS = 1.5
PACE = 0.01  # seconds per token


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "LEAST_TOKENS", 2)
    monkeypatch.setattr(flights, "SLACK_SECONDS", 0.0)


class Asked:
    """A lookup, and its answer once there is one."""

    def __init__(self, worker: Worker, run: KeyRun, request_id: str = "r", *, announces: bool = True, **fields: Any):
        fields = {"wait_seconds": WAIT_SECONDS, "token_seconds": PACE, "joins": True, **fields}
        request = m.Lookup(worker.context, request_id, run.digests, run.tenant, announces=announces, **fields)
        self.bench, self.asked_at = worker.bench, worker.bench.now
        self.answers: list[m.LookupReply] = []
        reply = worker.bench.depot.handle(worker.session, worker.writer, request)
        if isinstance(reply, PendingReply):
            reply.on_reply = self._take
        else:
            self._take(reply)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, m.ErrorReply):  # its context has ended
            assert reply.code == ErrorCode.UNKNOWN_CONTEXT
            reply = m.LookupReply(1, 0, 0)
        self.answers.append(reply)

    @property
    def found(self) -> int | None:
        """The number of chunks found, None while there is no answer."""
        self.bench.depot.background.work()  # as the loop does in the same turn
        assert len(self.answers) < 2
        return self.answers[0].num_chunks if self.answers else None


def waits_for_another(bench: Bench, num_chunks: int = 4, **fields: Any) -> tuple[Worker, Worker, Asked]:
    """Let a worker announce a prompt. Return it, another worker, and the other's lookup, which waits for the first."""
    first, second = bench.worker(), bench.worker()
    assert Asked(first, prompt(num_chunks)).found == 0
    waiting = Asked(second, prompt(num_chunks), **fields)
    assert waiting.found is None
    return first, second, waiting


def at(bench: Bench, now: float) -> None:
    bench.now = now
    bench.depot.state.timers.expire(now)
    bench.depot.background.work()


@pytest.mark.promise(75)
def test_a_lookup_waits_for_what_another_engine_is_computing() -> None:
    bench = Bench()
    first, _, waiting = waits_for_another(bench)
    first.store(prompt(4).slice(0, 2))
    assert waiting.found is None
    bench.now = 0.5
    first.store(prompt(4).slice(2))
    assert (waiting.found, waiting.answers[0].waited_seconds, waiting.answers[0].num_pending) == (4, 0.5, 0)
    assert not bench.depot.features.of(FlightTable)
    assert bench.depot.counters["flights_joined"] == 1


def test_the_debug_log_names_the_request_that_a_lookup_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvdepot.server.lookups")
    bench = Bench()
    first, second = bench.worker(), bench.worker()
    Asked(first, prompt(4), "first")
    waiting = Asked(second, prompt(4), "second")
    Asked(second, prompt(4), "third", wait_seconds=0.0)
    assert "lookup third of engine-2: 0 of 4 chunks, waited 0.000 s for nothing; request first computes" in caplog.text
    bench.now = 0.5
    first.store(prompt(4))
    assert waiting.found == 4
    assert "lookup second of engine-2: 4 of 4 chunks, waited 0.500 s for request first; none" in caplog.text


def test_it_waits_for_the_chunks_in_common_and_announces_the_others() -> None:
    bench = Bench()
    first, second, third = bench.worker(), bench.worker(), bench.worker()
    long, other = prompt(6), hash_prefix(Namespace("model"), 1, [0, 1, 2, 900, 901, 902])
    Asked(first, long)
    waiting = Asked(second, other)
    first.store(long.slice(0, 3))
    assert waiting.found == 3
    behind = Asked(third, other)
    assert behind.found is None
    second.store(other.slice(3))
    assert behind.found == 6


@pytest.mark.parametrize("end", ["withdraw", "leave", "unregister"])
def test_it_is_answered_when_the_other_gives_up(end: str) -> None:
    bench = Bench()
    first, _, waiting = waits_for_another(bench)
    first.store(prompt(1))
    if end == "withdraw":
        first.ask(m.EndRequest(first.context, "r"))
    elif end == "leave":
        bench.depot.end_session(first.session)
    else:
        first.ask(m.Unregister(first.context))
    assert waiting.found == 1
    assert Asked(bench.worker(), prompt(4)).found is None, "it computes the rest now, and has said so"


@pytest.mark.promise(75)
def test_it_waits_no_longer_than_its_deadline() -> None:
    bench = Bench()
    first, _, waiting = waits_for_another(bench, 400)
    at(bench, 1.0)
    first.store(prompt(400).slice(0, 2))
    at(bench, WAIT_SECONDS - 0.01)
    assert waiting.found is None
    at(bench, WAIT_SECONDS)
    assert (waiting.found, waiting.answers[0].num_pending) == (2, 398)


def test_a_flight_that_stalls_is_over_for_all() -> None:
    bench = Bench()
    first, _, waiting = waits_for_another(bench, wait_seconds=60.0, token_seconds=0.0)
    limit = flights.GRACE_SECONDS + 2 * 4 * PACE
    at(bench, limit - 0.001)
    assert waiting.found is None
    at(bench, limit)
    assert waiting.found == 0
    assert Asked(first, prompt(4), "another").found is None, "the other computes it now"


def test_a_flight_that_moves_has_its_time_again() -> None:
    bench = Bench()
    first, _, waiting = waits_for_another(bench, wait_seconds=60.0, token_seconds=0.0)
    for chunk in range(3):
        at(bench, bench.now + flights.GRACE_SECONDS)
        first.store(prompt(4).slice(chunk, chunk + 1))
        assert waiting.found is None
    at(bench, bench.now + flights.GRACE_SECONDS)
    first.store(prompt(4).slice(3))
    assert waiting.found == 4


@pytest.mark.parametrize(
    "other", [{"token_seconds": 3 * PACE}, {"ahead_tokens": 5}], ids=["a slower engine", "an engine with more to do"]
)
def test_nobody_waits_for_what_it_computes_sooner(other: dict[str, Any]) -> None:
    bench = Bench()
    Asked(bench.worker(), prompt(4), **other)
    asked = Asked(bench.worker(), prompt(4))
    assert (asked.found, asked.answers[0].num_pending) == (0, 0)
    told = Asked(bench.worker(), prompt(4), awaits=4)
    assert told.found is None, "but if its request says that another engine computes the prompt"


def test_without_an_estimate_it_waits() -> None:
    bench, first = bench_and_worker()
    Asked(first, prompt(4), token_seconds=0.0, ahead_tokens=1000)
    waiting = Asked(bench.worker(), prompt(4), token_seconds=0.0)
    at(bench, 1.0)
    assert waiting.found is None
    first.store(prompt(4))
    assert waiting.found == 4


@pytest.mark.promise(75)
@pytest.mark.parametrize("pace", [0.0, 1e-7, PACE])
def test_nobody_waits_longer_than_twice_its_own_time_whatever_is_announced(pace: float) -> None:
    """Not even by asking again while the announcement is repeated."""
    bench = Bench()
    liar, engine = bench.worker(), bench.worker()
    Asked(liar, prompt(4), token_seconds=pace)
    own_seconds = 4 * PACE
    waiting = Asked(engine, prompt(4), "waiting", announces=False)
    at(bench, 2 * own_seconds - 0.001)
    assert waiting.found is None
    at(bench, 2 * own_seconds)
    assert waiting.found == 0
    while waiting.answers[0].num_pending:
        assert bench.now < 6 * own_seconds
        Asked(liar, prompt(4), token_seconds=pace)
        waiting = Asked(engine, prompt(4), "waiting", announces=False)
        while waiting.found is None:
            at(bench, bench.now + 0.01)
    told = Asked(engine, prompt(4), "told", awaits=4)
    assert told.found is None, "but if its request says that another engine computes the prompt"


def test_a_lookup_that_no_longer_believes_a_flight_begins_its_own() -> None:
    bench = Bench()
    stopped, first, second = bench.worker(), bench.worker(), bench.worker()
    Asked(stopped, prompt(4), token_seconds=0.0)
    at(bench, 1.0)
    assert Asked(first, prompt(4)).found == 0
    waiting = Asked(second, prompt(4))
    assert waiting.found is None, "it waits for the engine that computes now"
    first.store(prompt(4))
    assert waiting.found == 4


@pytest.mark.parametrize("end", ["the depot drains", "its worker leaves", "its scheduler leaves"])
def test_nobody_waits_for_chunks_that_cannot_be_stored(end: str) -> None:
    bench = Bench()
    first, second = bench.worker(name="engine"), bench.worker()
    scheduler = m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", bench.spec)
    reply = bench.depot.handle(first.session, first.writer, scheduler)
    assert isinstance(reply, m.Registered)
    announcer = Worker(bench, first.session, first.writer, reply.context, 0)
    Asked(announcer, prompt(4))
    waiting = Asked(second, prompt(4))
    assert waiting.found is None
    if end == "the depot drains":
        operate(bench.depot, o.Drain(True))
        bench.depot.expire()
    elif end == "its worker leaves":
        first.ask(m.Unregister(first.context))
    else:
        announcer.ask(m.Unregister(announcer.context))
    assert (waiting.found, waiting.answers[0].num_pending) == (0, 0)
    if end != "its scheduler leaves":
        Asked(announcer, prompt(4))
        assert Asked(second, prompt(4)).found == 0


@pytest.mark.parametrize("end", ["aborted", "late"])
def test_nobody_waits_for_a_store_that_was_given_up(end: str) -> None:
    bench = Bench()
    first, second, waiting = waits_for_another(bench, 400, wait_seconds=60.0, token_seconds=1.0)
    ticket = first.prepare(prompt(4)).ticket
    assert waiting.found is None
    if end == "aborted":
        first.ask(m.AbortStore(first.context, ticket))
    else:
        bench.now = bench.depot.stores.ticket_seconds
        for _ in bench.depot.stores.end_late(bench.now):
            pass
    assert waiting.found == 0
    Asked(second, prompt(400), "other")
    assert len(bench.depot.features.of(FlightTable)) == 1, "another request may announce the chunks now"
    other = Asked(first, prompt(400), "waits", wait_seconds=60.0, token_seconds=1.0)
    first.ask(m.AbortStore(first.context, ticket))
    assert other.found is None, "it waits for a request whose store goes on"


HEADS = (m.GroupShape(FULL, 1, heads=4),)
HEADS_AND_WINDOWS = (*HEADS, m.GroupShape(WINDOW, 1, window_tokens=3, heads=4))


def engine(bench: Bench, ranks: int) -> list[Worker]:
    """Return the workers of an engine. The first one also sends the scheduler's requests."""
    return [bench.worker(rank, ranks=ranks, name=f"of {ranks}") for rank in range(ranks)]


@pytest.mark.parametrize("groups", [HEADS, HEADS_AND_WINDOWS], ids=["full", "full and windows"])
@pytest.mark.parametrize(("computed_by", "waited_by"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_an_engine_of_another_size_waits_until_every_rank_has_stored(
    groups: tuple[m.GroupShape, ...], computed_by: int, waited_by: int
) -> None:
    bench = Bench(groups, num_records=256, pages=256)
    writers, readers = engine(bench, computed_by), engine(bench, waited_by)
    assert Asked(writers[0], prompt(4)).found == 0
    waiting = Asked(readers[0], prompt(4))
    for piece in (prompt(4).slice(0, 2), prompt(4).slice(2)):
        for writer in writers:
            assert waiting.found is None
            writer.store(piece)
    assert waiting.found == 4
    assert not bench.depot.features.of(FlightTable)
    for reader in readers:
        plan = reader.retrieve(prompt(4), *(4,) * len(groups))
        assert plan.num_chunks == 4
        reader.release(plan.lease)
        assert reader.prepare(prompt(4)).ticket == 0, "nobody computes or stores it again"


@pytest.mark.parametrize("end", ["its store is given up", "it finds no room", "it leaves"])
def test_a_rank_that_stores_nothing_ends_the_flight_for_an_engine_of_another_size(end: str) -> None:
    bench = Bench(HEADS, pages=12 if end == "it finds no room" else 64)
    (left, right), (whole,) = engine(bench, 2), engine(bench, 1)
    Asked(left, prompt(4))
    waiting = Asked(whole, prompt(4), wait_seconds=60.0, token_seconds=1.0)
    left.store(prompt(4))  # eight pages
    plan = right.prepare(prompt(4))
    assert waiting.found is None
    if end == "it finds no room":
        assert plan.num_declined == 2
        right.commit(plan)
        assert waiting.found == 2
        return
    if end == "its store is given up":
        right.ask(m.AbortStore(right.context, plan.ticket))
    else:
        bench.depot.end_session(right.session)
        bench.depot.end_process(right.writer)
    assert waiting.found == 0
    assert whole.store(prompt(4)).num_present == 0
    assert whole.lookup(prompt(4)).num_chunks == 4


def test_nobody_waits_for_chunks_that_find_no_room() -> None:
    """Regression: lookups waited until the flight's deadline for chunks that the store had been declined."""
    bench = Bench(pages=6)
    first, second, waiting = waits_for_another(bench, 8, wait_seconds=60.0, token_seconds=1.0)
    plan = first.prepare(prompt(8))
    assert (plan.num_declined, waiting.found) == (2, None)
    late = Asked(second, prompt(8), "late", wait_seconds=60.0, token_seconds=1.0)
    first.commit(plan)
    assert (waiting.found, late.found) == (6, 6)
    assert second.lookup(prompt(8)).lease
    Asked(first, prompt(8), "again", token_seconds=PACE)
    waiting = Asked(second, prompt(8), "other", wait_seconds=60.0, token_seconds=1.0)
    assert waiting.found is None
    first.ask(
        m.PrepareStore(first.context, "again", "default", prompt(8).slice(6).digests, 6, prompt(6).digests[-32:], (2,))
    )
    assert waiting.found == 6


@pytest.mark.parametrize(("groups", "is_over"), [(PLAIN, False), (HYBRID, True)], ids=["full", "hybrid"])
def test_a_declined_end_is_no_end_for_those_who_can_use_the_beginning(
    groups: tuple[m.GroupShape, ...], is_over: bool
) -> None:
    """A hybrid model's windows and states are complete only at the end of the prefix."""
    bench = Bench(groups)
    first, _, waiting = waits_for_another(bench, 8)
    end = prompt(8).slice(4)
    covered = tuple(4 if group.kind is FULL else 1 for group in groups)
    first.ask(m.PrepareStore(first.context, "r", end.tenant, end.digests, 4, end.parent, covered))  # nothing before it
    assert waiting.found == (0 if is_over else None)


@pytest.mark.slow
def test_ended_announcements_and_lookups_hold_no_bytes() -> None:
    """Announcements are withdrawn and lookups answered long before their deadlines."""
    bench = Bench()
    first, second = bench.worker(), bench.worker()

    def announce_and_end(name: str) -> None:
        run = KeyRun(os.urandom(4096 * DIGEST_BYTES), 0, bytes(DIGEST_BYTES))
        Asked(first, run, name, token_seconds=60.0)
        waiting = Asked(second, run, name, wait_seconds=60.0, token_seconds=0.0)
        assert waiting.found is None
        first.ask(m.EndRequest(first.context, name))
        assert waiting.found == 0
        second.ask(m.EndRequest(second.context, name))

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20):
            announce_and_end(str(number))
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20, "of 5 MiB of digests"
    finally:
        tracemalloc.stop()


def test_a_flight_ends_after_a_minute_however_slow_its_engine_is() -> None:
    bench = Bench()
    Asked(bench.worker(), prompt(4), token_seconds=60.0, ahead_tokens=1 << 30)
    at(bench, flights.MAXIMUM_SECONDS)
    assert not bench.depot.features.of(FlightTable)


def test_no_engine_takes_all_flights_nor_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAXIMUM_FLIGHTS", 8)
    monkeypatch.setattr(flights, "MAXIMUM_WAITING", 8)
    bench = Bench()
    greedy, modest = bench.worker(), bench.worker()
    for number in range(10):
        Asked(greedy, prompt(4, number), str(number))
    assert len(bench.depot.features.of(FlightTable)) == 4
    Asked(modest, prompt(4, 10))
    assert len(bench.depot.features.of(FlightTable)) == 5
    asked = [Asked(greedy, prompt(4, 10), f"waiting {number}") for number in range(10)]
    assert [each.found for each in asked].count(None) == 4
    assert Asked(modest, prompt(4, 0), "waiting").found is None


def test_waits_that_end_together_are_answered_in_steps() -> None:
    bench = Bench()
    first, second = bench.worker(), bench.worker()
    Asked(first, prompt(4))
    asked = [Asked(second, prompt(4), str(number)) for number in range(20)]
    assert not any(each.answers for each in asked)
    bench.now = WAIT_SECONDS
    bench.depot.state.timers.expire(bench.now, lambda: True)
    bench.depot.background.work(lambda: True)
    assert 0 < len([each for each in asked if each.answers]) < 3
    first.ask(m.EndRequest(first.context, "r"))
    bench.depot.background.work(lambda: True)
    assert len([each for each in asked if each.answers]) < 5
    assert all(each.found == 0 for each in asked)


def test_a_request_does_not_wait_for_itself_and_others_of_its_engine_do() -> None:
    worker = Bench().worker()
    Asked(worker, prompt(4), "one")
    waiting = Asked(worker, prompt(4), "two")
    assert Asked(worker, prompt(4), "one").found == 0
    assert waiting.found is None, "to ask again is not to give up"
    worker.store(prompt(4))
    assert waiting.found == 4


@pytest.mark.promise(75)
def test_tenants_do_not_wait_for_each_other() -> None:
    bench, worker = bench_and_worker()
    run = prompt(4)
    Asked(worker, run)
    same_keys = KeyRun(run.digests, 0, run.parent, tenant="other")
    assert Asked(bench.worker(), same_keys).found == 0
    waiting = Asked(bench.worker(), same_keys)
    assert waiting.found is None, "within a tenant they do"
    worker.store(run)
    assert waiting.found == 4


def test_a_lookup_waits_only_if_it_joins_and_is_waited_for_only_if_it_announces() -> None:
    bench = Bench()
    first, second = bench.worker(), bench.worker()
    Asked(first, prompt(4), announces=False)
    assert Asked(second, prompt(4)).found == 0
    assert Asked(first, prompt(4), "again", joins=False).found == 0
    assert Asked(first, prompt(4), "and again", announces=False).found is None


def test_every_shard_has_to_arrive() -> None:
    bench = Bench(SHARDED)
    ranks = bench.worker(0, name="engine"), bench.worker(1, name="engine")
    Asked(ranks[0], prompt(4))
    waiting = Asked(bench.worker(0), prompt(4))
    ranks[0].store(prompt(4))
    assert waiting.found is None
    ranks[1].store(prompt(4))
    assert waiting.found == 4


def test_few_tokens_and_models_without_full_attention_have_no_flights() -> None:
    for bench, run in ((Bench(), prompt(1)), (Bench(ONLY_WINDOW), prompt(4))):
        Asked(bench.worker(), run)
        assert Asked(bench.worker(), run).found == 0


@pytest.mark.promise(75)
def test_a_hybrid_model_s_lookup_waits_for_the_last_state() -> None:
    bench = Bench(HYBRID)
    first, second, waiting = waits_for_another(bench, 6, wait_seconds=60.0, token_seconds=0.0)
    first.store(prompt(6).slice(0, 3), 3, 3, 1)
    late = Asked(second, prompt(6), "late", wait_seconds=60.0, token_seconds=0.0)
    first.store(prompt(6).slice(3), 3, 3, 0)
    at(bench, 4.0)
    assert (waiting.found, late.found) == (None, None), "all attention is here, and no state at the end"
    later = Asked(second, prompt(6), "later", wait_seconds=60.0, token_seconds=0.0)
    assert later.found is None
    first.store(prompt(6).slice(5), 1, 1, 1)
    assert (waiting.found, late.found, later.found) == (6, 6, 6)
    assert not bench.depot.features.of(FlightTable)


def test_a_longer_prompt_of_a_hybrid_model_waits_and_one_that_diverges_does_not() -> None:
    bench = Bench(HYBRID)
    first, second = bench.worker(), bench.worker()
    Asked(first, prompt(4))
    waiting = Asked(second, prompt(7), "longer")
    other = hash_prefix(Namespace("model"), 1, [0, 1, 2, 900])
    assert [Asked(second, run, "other").found for run in (other, prompt(3))] == [0, 0]
    first.store(prompt(4), 4, 4, 1)
    assert waiting.found == 4


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAXIMUM_FLIGHTS", 4)
    monkeypatch.setattr(flights, "MAXIMUM_WAITING_FOR_ONE", 1)
    monkeypatch.setattr(flights, "MAXIMUM_DIGEST_BYTES", 16 * 32)
    bench = Bench()
    first, second = bench.worker(), bench.worker()
    for name in range(3):
        Asked(first, prompt(4, name), str(name))
    assert len(bench.depot.features.of(FlightTable)) == 2
    asked = [Asked(second, prompt(4), str(number)) for number in range(2)]
    assert [each.found for each in asked] == [None, 0]
    first.ask(m.EndRequest(first.context, "1"))
    Asked(first, prompt(9, 5), "5")
    assert len(bench.depot.features.of(FlightTable)) == 1


@pytest.mark.parametrize("groups", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.promise(75)
def test_whatever_happens_everybody_is_answered_in_time_and_nothing_stays(
    seed: int, groups: tuple[m.GroupShape, ...]
) -> None:
    rng = random.Random(seed)
    bench = Bench(groups, pages=256, num_records=256)
    engines = [bench.worker() for _ in range(3)]
    asked: list[Asked] = []
    computing: list[tuple[Worker, KeyRun, int]] = []

    def run_of(name: int, num_chunks: int) -> KeyRun:
        return hash_prefix(Namespace("model"), 1, [0, 1, 2, *(100 * name + place for place in range(num_chunks))])

    for number in range(200):
        at(bench, bench.now + rng.choice([0.0, 0.01, 0.1, 0.4]))
        for each in asked:
            assert each.answers or bench.now < each.asked_at + WAIT_SECONDS
        worker = rng.choice(engines)
        action = rng.random()
        if action < 0.5:
            run = run_of(rng.randrange(3), rng.randrange(8))
            asked.append(Asked(worker, run, str(number), token_seconds=rng.choice([0.0, PACE])))
            computing.append((worker, run, 0))
        elif action < 0.85 and computing:
            worker, run, done = computing.pop(rng.randrange(len(computing)))
            stop = rng.randint(done, run.num_chunks)
            if worker in engines and stop > done:
                worker.store(run.slice(done, stop))
                computing.append((worker, run, stop))
        elif action < 0.95:
            worker.ask(m.EndRequest(worker.context, str(rng.randrange(number + 1))))
        else:
            engines.remove(worker)
            bench.depot.end_session(worker.session)
            bench.depot.end_process(worker.writer)
            engines.append(bench.worker())
    for worker in engines:
        bench.depot.end_session(worker.session)
        bench.depot.end_process(worker.writer)
    table = bench.depot.features.of(FlightTable)
    assert all(each.found is not None for each in asked)
    assert (len(table), len(bench.depot.state.timers)) == (0, 0)
    table.check_integrity()
    bench.depot.background.work()
    bench.drain()
