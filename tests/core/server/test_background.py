"""Long work in the background: its order, its bounds, its outcome and its failures."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.pins import Pin
from kvdepot.lab.processes import wait_until
from kvdepot.layout import GroupKind
from kvdepot.operate import operations as o
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.operate.report import status_of
from kvdepot.pool.table import Writer
from kvdepot.server.state import MAXIMUM_ROWS
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.wire import messages as m
from support.features import needs
from support.full_depot import NUM_CHUNKS, PAGE, PROMPT_CHUNKS, Bench, prepare_all, prompt, put_tier_below
from support.integrity import num_ended
from support.operate import operate


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.promise(61)
@pytest.mark.parametrize("tenant", ["a", None])
def test_clearing(bench: Bench, tenant: str | None) -> None:
    operate(bench.depot, o.Clear(tenant))
    bench.depot.background.work()
    assert bench.index.entries.num_sealed == (NUM_CHUNKS // 2 if tenant else 0)


@pytest.mark.promise(61)
def test_clearing_a_prefix(bench: Bench) -> None:
    for name in (0, 1):
        sum(
            bench.index.evictor.clear_end(
                bench.index.visibility.match(bench.index.spaces[0], prompt(name).digests)[1][0]
            )
        )
        assert bench.index.entries.num_sealed == NUM_CHUNKS - (name + 1) * PROMPT_CHUNKS


@needs("sessions")
@pytest.mark.promise(61)
def test_a_hint_for_a_long_prompt(bench: Bench) -> None:
    run = prompt(0)
    reply = bench.ask(Hint(bench.context, run.tenant, run.digests, session_ended=True))
    bench.depot.background.work()
    assert reply.reply == m.Done(1, PROMPT_CHUNKS)


def let_sessions_end(bench: Bench) -> None:
    """Hint that the session of every prompt has ended. The rest of each prompt ends in the background."""
    for name in range(4):
        run = prompt(name, tenant="ab"[name % 2])
        bench.ask(Hint(bench.context, run.tenant, run.digests, session_ended=True))


@needs("sessions")
@pytest.mark.promise(61)
def test_sessions_that_end_in_the_same_second(bench: Bench) -> None:
    let_sessions_end(bench)
    bench.depot.background.work()
    assert num_ended(bench.index) == NUM_CHUNKS


@pytest.mark.promise(61)
def test_leases_that_expire_in_the_same_second(bench: Bench) -> None:
    for number in range(2000):
        bench.ask(m.Lookup(bench.context, f"request {number}", prompt(0).digests, "a"))
    bench.now += 11
    bench.depot.expire()
    bench.depot.background.work()
    assert bench.depot.leases.num_expired == 2000


@pytest.mark.promise(61)
@pytest.mark.parametrize("ends", ["request", "session"])
def test_a_request_with_many_leases(bench: Bench, ends: str) -> None:
    for _ in range(2000):
        bench.ask(m.Lookup(bench.context, "request", prompt(0).digests, "a"))
    if ends == "request":
        assert bench.ask(m.EndRequest(bench.context, "request")) == m.Done(1, 2000)
    else:
        bench.depot.end_session(1)
    bench.depot.background.work()
    assert len(bench.depot.leases) == 0


@pytest.mark.promise(61)
def test_a_worker_that_leaves_many_unfinished_entries() -> None:
    bench = Bench(filled=False)
    for name in range(64):
        bench.prepare(prompt(name, m.MAXIMUM_STORE_ENTRIES))
    bench.depot.end_session(1)
    bench.depot.end_process(Writer(1, 1))
    status_of(bench.depot)
    bench.depot.background.work()
    assert len(bench.index.nodes) == 0


@pytest.mark.promise(61)
def test_stores_of_a_long_prompt_that_are_aborted_one_by_one() -> None:
    bench = Bench(2 * NUM_CHUNKS, filled=False)
    for plan in prepare_all(bench):
        bench.ask(m.AbortStore(bench.context, plan.ticket))
    bench.depot.background.work()
    assert len(bench.index.nodes) == 0


@pytest.mark.promise(61)
def test_clearing_goes_on_where_there_are_many_holes() -> None:
    bench = Bench(filled=False)
    bench.store(prompt(0))
    space = bench.index.spaces[0]
    for node in [space.nodes[prompt(0).slice(place, place + 1).digests] for place in range(100, PROMPT_CHUNKS - 100)]:
        bench.index.remove_entry(bench.index.entries.sealed(node)[0])
    operate(bench.depot, o.Clear("a"))
    bench.depot.background.work()
    assert len(bench.index.nodes) == bench.index.entries.num_sealed == 0


@pytest.mark.promise(10)
def test_leases_that_expire_do_not_wait_for_what_takes_long(bench: Bench) -> None:
    for number in range(100):
        bench.ask(m.Lookup(bench.context, f"request {number}", prompt(0).digests, "a"))
    operate(bench.depot, o.Clear("b"))
    bench.now += 11
    bench.depot.expire()
    for _ in range(101):
        bench.depot.background.work(lambda: True)
    assert len(bench.depot.leases) == 0
    assert bench.depot.background.num_waiting
    bench.depot.background.work()
    assert bench.index.entries.num_sealed == NUM_CHUNKS // 2


def test_a_failure_between_messages_is_counted_and_the_rest_goes_on(bench: Bench) -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise RuntimeError("a mistake")

    bench.depot.background.ends.add(failing())
    deferred = operate(bench.depot, o.Clear())
    bench.depot.background.work()
    assert bench.depot.counters["chores_failed"] == 1
    assert deferred.reply == m.Done(1, NUM_CHUNKS)


@needs("sessions")
@pytest.mark.parametrize("what", ["clearing", "a hint", "a session"])
def test_a_request_that_waits_for_failing_work_gets_an_error(
    what: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_arguments: Any) -> Iterator[Any]:
        yield from [40] * 3
        raise RuntimeError("a mistake")

    monkeypatch.setattr(bench.index.evictor, "clear", failing)
    monkeypatch.setattr(bench.index.shares, "end_session", failing)
    run = prompt(0)
    bench.ask(Hint(bench.context, run.tenant, run.digests, session="agent"))
    deferred = {
        "clearing": lambda: operate(bench.depot, o.Clear()),
        "a hint": lambda: bench.ask(Hint(bench.context, run.tenant, run.digests, session_ended=True)),
        "a session": lambda: operate(bench.depot, session_operations.ForgetSession("agent", run.tenant)),
    }[what]()
    bench.depot.background.work()
    assert deferred.reply == m.ErrorReply(1, ErrorCode.INTERNAL, "RuntimeError: a mistake")
    assert bench.depot.counters["requests_failed"] == 1


@needs("sessions")
@pytest.mark.promise(61)
def test_a_use_of_a_long_prompt_that_had_ended(bench: Bench) -> None:
    run = prompt(0)
    bench.ask(Hint(bench.context, run.tenant, run.digests, session_ended=True))
    bench.depot.background.work()
    assert num_ended(bench.index) == PROMPT_CHUNKS
    bench.ask(m.Lookup(bench.context, "r", run.digests, run.tenant))
    bench.depot.background.work()
    assert num_ended(bench.index) == 0


@needs("estimates")
@pytest.mark.promise(61)
def test_very_long_lookups_wait_for_one_sample_at_a_time(bench: Bench) -> None:
    run = prompt(99, 16_384)
    for _ in range(100):
        bench.ask(m.Lookup(bench.context, "r", run.digests, "a"))
    bench.depot.background.work()
    assert bench.depot.counters["lookups_not_sampled"] == 99
    bench.ask(m.Lookup(bench.context, "r", run.digests, "a"))
    assert bench.depot.background.num_waiting


@pytest.mark.slow
@pytest.mark.promise(61)
def test_very_many_hints_wait_neither_without_bound_nor_before_operators(bench: Bench) -> None:
    runs = [prompt(name, tenant="ab"[name % 2]) for name in range(4)]
    replies = [
        bench.ask(Hint(bench.context, run.tenant, run.digests, session_ended=True)) for _ in range(500) for run in runs
    ]
    waiting = [reply for reply in replies if isinstance(reply, PendingReply)]
    assert len(waiting) == 1024
    assert {reply.count for reply in replies if isinstance(reply, m.Done)} == {80}
    assert bench.depot.counters["ends_cut"] == len(replies) - len(waiting)
    deferred = operate(bench.depot, o.Clear())
    num_steps = 0
    while deferred.reply is None:
        bench.depot.background.work(lambda: True)
        num_steps += 1
    assert num_steps <= 2 * (NUM_CHUNKS // 25 + 20)
    assert deferred.reply == m.Done(1, NUM_CHUNKS)
    bench.depot.background.work()
    assert None not in [reply.reply for reply in waiting]


@pytest.mark.promise(61)
def test_so_many_requests_of_operators_wait_and_no_more(bench: Bench) -> None:
    replies = [operate(bench.depot, o.Clear("a")) for _ in range(64)]
    with pytest.raises(Refused, match="64 such requests wait already: ask again"):
        operate(bench.depot, o.Clear("a"))
    bench.depot.background.work()
    assert all(reply.reply is not None for reply in replies)
    operate(bench.depot, o.Clear("a"))


@pytest.mark.promise(61)
def test_a_warm_request_is_answered_however_many_wait_when_the_tiers_have_answered() -> None:
    bench, run = Bench(filled=False), prompt(0, 8)
    queue = put_tier_below(bench)
    warmed = operate(bench.depot, o.Warm(tenant=run.tenant, digests=run.digests))
    bench.depot.background.work()
    tiering = bench.depot.state.tiering
    assert tiering is not None
    assert len(tiering.promotions) == 1
    others = [operate(bench.depot, o.Clear("b")) for _ in range(64)]
    wait_until(lambda: tiering.turn() or len(tiering.promotions) == 0)
    bench.turn_until(lambda: all(each.reply is not None for each in [warmed, *others]))
    assert warmed.reply == m.Done(1, 0)
    queue.close()


def test_a_warm_request_for_a_tenant_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, run = Bench(filled=False), prompt(0, 8)
    queue = put_tier_below(bench)
    monkeypatch.setattr("kvdepot.server.state.MAXIMUM_LABELS", 0)
    warmed = operate(bench.depot, o.Warm(tenant="new", digests=run.digests))
    bench.depot.background.work()
    assert isinstance(warmed.reply, m.ErrorReply)
    assert warmed.reply.code is ErrorCode.MALFORMED
    assert "no room for 'new'" in warmed.reply.message
    assert "chores_failed" not in bench.depot.counters
    queue.close()


@needs("sessions")
@pytest.mark.promise(10)
def test_leases_that_expire_do_not_wait_for_sessions_that_end(bench: Bench) -> None:
    let_sessions_end(bench)
    bench.depot.background.work(lambda: True)
    bench.ask(m.Lookup(bench.context, "r", prompt(99).digests, "a"))
    bench.depot.leases.grant(bench.context, "r", (), bench.now)
    bench.now += 11
    bench.depot.expire()
    bench.depot.background.work(lambda: True)
    assert len(bench.depot.leases) == 0
    assert bench.depot.background.num_waiting
    bench.depot.background.work()
    assert num_ended(bench.index) == NUM_CHUNKS


@pytest.mark.promise(61)
def test_urgent_work_does_not_keep_operators_waiting_for_ever(bench: Bench) -> None:
    deferred = operate(bench.depot, o.Clear("b"))
    for _ in range(NUM_CHUNKS // 2 // 25 + 30):
        for request in range(5):
            bench.depot.leases.grant(bench.context, f"{request}", (), bench.now - 20)
        bench.depot.expire()
        bench.depot.background.work(lambda: True)
    assert deferred.reply is not None
    assert len(bench.depot.leases) > 0


def test_work_of_many_steps_keeps_its_place_in_its_queue(bench: Bench) -> None:
    done = list[str]()

    def work(name: str) -> Iterator[None]:
        for _ in range(3):
            done.append(name)
            yield

    turns = bench.depot.background.queue(2)
    for name in "ab":
        turns.add(work(name))
    bench.depot.background.work()
    assert done == [*"aaabbb"]


def pin_very_often(bench: Bench) -> None:
    bench.store(prompt(0, 8))
    _, nodes = bench.index.visibility.match(bench.index.spaces[0], prompt(0, 8).digests)
    for number in range(20_000):
        bench.depot.features.of(Agents).pins.put(("a", str(number)), Pin(nodes, 0, 8, bench.now + 10))
    bench.depot.expire()


@needs("sessions")
@pytest.mark.promise(61)
def test_very_many_pins_that_expire() -> None:
    """Regression: each sweep looked at all pins, twice."""
    bench = Bench(filled=False)
    pin_very_often(bench)
    bench.now += 10
    bench.depot.expire()
    bench.depot.background.work()
    assert len(bench.depot.features.of(Agents).pins) == bench.depot.features.of(Agents).pins.bytes_of(0) == 0
    assert sum(clear_pool(bench.depot, None)) == 8, "nothing holds them any more"


@pytest.mark.promise(61)
def test_a_prefix_is_warmed_in_many_caches_step_by_step() -> None:
    """Regression: the step of the request searched every cache, and the step of the answer did so again."""
    bench, num_caches = Bench(filled=False), 1000
    queue = put_tier_below(bench)
    specs = [m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), f"{n}") for n in range(num_caches)]
    detail = m.GroupDetail((PAGE,), 8)
    for session, spec in enumerate(specs, 2):
        bench.ask(m.RegisterKVCache(m.PROTOCOL_VERSION, "e", 0, 1, "none", "none", "model", spec, (detail,)), session)
    run = prompt(0, 8)
    bench.store(run)
    bench.turn_until(lambda: not queue.queued_write_bytes and not queue.has_results)
    sum(clear_pool(bench.depot, None))
    warmed = operate(bench.depot, o.Warm(tenant=run.tenant, digests=run.digests))
    bench.turn_until(lambda: warmed.reply is not None)
    assert warmed.reply == m.Done(1, run.num_chunks)
    assert bench.depot.state.tiering is not None
    assert bench.depot.state.tiering.counters["promotions"] == num_caches + 1
    queue.close()


@pytest.mark.promise(61)
def test_a_prefix_is_looked_for_in_many_caches_step_by_step(bench: Bench) -> None:
    for number in range(1000):
        bench.index.space(m.CacheSpec(64, (m.GroupShape(GroupKind.FULL_ATTENTION, 64),), "bytes", f"{number}"))
    wanted, unwanted = prompt(0).digests, o.Clear(digests=prompt(1).digests)
    found = operate(bench.depot, o.Find(wanted))
    cleared = operate(bench.depot, unwanted)
    bench.depot.background.work()
    assert isinstance(found.reply, o.Found)
    assert [(prefix.num_chunks, prefix.tenant) for prefix in found.reply.prefixes] == [(PROMPT_CHUNKS, "a")]
    assert cleared.reply == m.Done(1, PROMPT_CHUNKS)


@pytest.mark.slow
@pytest.mark.promise(61)
def test_of_very_many_caches_those_are_named_that_have_the_most_of_a_prefix(bench: Bench) -> None:
    details = (m.GroupDetail((PAGE,), 8),)
    for number in range(MAXIMUM_ROWS + 50):
        spec = m.CacheSpec(64, (m.GroupShape(GroupKind.FULL_ATTENTION, 64),), "bytes", f"{number}")
        request = m.RegisterKVCache(
            m.PROTOCOL_VERSION, "engine", 0, 1, "none", "none", f"model {number}", spec, details
        )
        bench.context = bench.ask(request, session=number + 2).context
        run = prompt(0, 2 if number % 2 else 1)
        request = m.PrepareStore(
            bench.context, "r", run.tenant, run.digests, run.first_chunk, run.parent, (run.num_chunks,)
        )
        plan = bench.ask(request, session=number + 2)
        bench.ask(m.CommitStore(bench.context, plan.ticket), session=number + 2)
    found = operate(bench.depot, o.Find(prompt(0, 2).digests))
    bench.depot.background.work()
    assert isinstance(found.reply, o.Found)
    num_chunks = [prefix.num_chunks for prefix in found.reply.prefixes]
    assert num_chunks == [2] * (num_chunks.count(2)) + [1] * num_chunks.count(1)
    assert (len(num_chunks), num_chunks.count(2)) == (MAXIMUM_ROWS, (MAXIMUM_ROWS + 50) // 2 + 1)
