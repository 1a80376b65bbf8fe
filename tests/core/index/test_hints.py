"""Clients hint that a session has ended, and its chunks are the first to leave."""

from typing import Any

import pytest

from kvdepot.features.estimates.feature import HitRateCurve
from kvdepot.features.sessions.messages import Hint
from kvdepot.index.eviction import POLICIES
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.server.turns import PendingReply
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.features import needs
from support.index import Bench, Worker, bench_and_worker, prompt
from support.integrity import num_ended


def session(name: int, num_chunks: int = 3, shared: int = 1) -> KeyRun:
    """Return a prompt that shares its first `shared` chunks with all others."""
    tokens = [*range(shared), *(1000 * name + place for place in range(shared, num_chunks))]
    return hash_prefix(Namespace("model"), 1, tokens)


def hint(worker: Worker, run: KeyRun, **hints: Any) -> int:
    reply = worker.ask(Hint(worker.context, run.tenant, run.digests, **hints))
    assert isinstance(reply, m.Done)
    return reply.count


policies = pytest.mark.parametrize("policy", POLICIES)


@needs("sessions")
@policies
def test_an_ended_session_leaves_first_and_its_shared_chunks_stay(policy: str) -> None:
    bench, worker = bench_and_worker(pages=5, policy=policy)
    for name in (1, 2):
        worker.store(session(name))
    assert hint(worker, session(2), session_ended=True) == 2
    worker.store(prompt(2, 9))
    assert (bench.found(session(1)), bench.found(session(2)), bench.found(prompt(2, 9))) == (3, 1, 2)
    bench.drain()


@needs("sessions")
@needs("estimates")
def test_the_sample_forgets_the_chunks_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bytes] = []

    def note(_sample: HitRateCurve, key: bytes) -> None:
        ended.append(key)

    monkeypatch.setattr(HitRateCurve, "ended", note)
    worker = Bench(pages=5).worker()
    for name in (1, 2):
        worker.store(session(name))
    hint(worker, session(1), session="agent")
    assert not ended
    hint(worker, session(2), session_ended=True)
    digests = session(2).digests
    assert ended == [digests[64:], digests[32:64]], "its own chunks, the last one first"


@needs("sessions")
@policies
def test_a_session_that_goes_on_has_not_ended(policy: str) -> None:
    worker = Bench(pages=4, policy=policy).worker()
    worker.store(prompt(2, 1))
    assert hint(worker, prompt(2, 1), session_ended=True) == 2
    worker.release(worker.lookup(prompt(2, 1)).lease)
    worker.store(prompt(2, 2))
    worker.release(worker.lookup(prompt(2, 1)).lease)
    assert hint(worker, prompt(2, 2), session_ended=True) == 2
    worker.store(prompt(2, 3))
    assert [worker.bench.found(prompt(2, name)) for name in (1, 2, 3)] == [2, 0, 2]


@needs("sessions")
def test_a_prefix_that_a_longer_one_needs_does_not_end() -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(3))
    assert hint(worker, prompt(2), session_ended=True) == 0
    assert num_ended(bench.index) == 0


@needs("sessions")
def test_nobody_ends_a_session_of_another_tenant() -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(2, 1, "a"))
    worker.store(prompt(2, 1, "b"))
    run = prompt(2, 1, "a")
    for tenant in ("b", "unknown"):
        assert hint(worker, KeyRun(run.digests, 0, run.parent, tenant), session_ended=True) == 0
    assert num_ended(bench.index) == 0
    assert hint(worker, run, session_ended=True) == 2
    assert num_ended(bench.index) == 2


@needs("sessions")
@policies
def test_leased_chunks_of_an_ended_session_stay_until_the_lease_ends(policy: str) -> None:
    worker = Bench(pages=4, policy=policy).worker()
    worker.store(prompt(2, 1))
    lease = worker.lookup(prompt(2, 1)).lease
    hint(worker, prompt(2, 1), session_ended=True)
    worker.store(prompt(2, 2))
    assert worker.store(prompt(2, 3)).num_declined == 0
    assert worker.bench.found(prompt(2, 1)) == 2
    worker.release(lease)
    worker.store(prompt(1, 4))
    assert worker.bench.found(prompt(2, 1)) == 1


STEP_CHUNKS = 40
AT_ONCE = 2 * STEP_CHUNKS  # chunks that a hint ends before its reply
LONG = prompt(300, 1)


def long_bench(*, pages: int = 640) -> tuple[Bench, Worker]:
    bench, worker = bench_and_worker(pages=pages, num_records=pages)
    store_long(worker, LONG)
    return bench, worker


def store_long(worker: Worker, run: KeyRun) -> None:
    for start in range(0, run.num_chunks, m.MAXIMUM_STORE_ENTRIES):
        assert worker.store(run.slice(start, min(run.num_chunks, start + m.MAXIMUM_STORE_ENTRIES))).num_declined == 0


def begin_end(worker: Worker, run: KeyRun) -> frames.Reply | PendingReply:
    request = Hint(worker.context, run.tenant, run.digests, session_ended=True)
    return worker.bench.depot.handle(worker.session, worker.writer, request)


def ended(bench: Bench, run: KeyRun) -> list[int]:
    index = bench.index
    numbers = [index.spaces[0].nodes[run.slice(n, n + 1).digests] for n in range(run.num_chunks)]
    return [index.nodes.tree.ended[number] for number in numbers]


def step(bench: Bench, number: int) -> None:
    for _ in range(number):
        bench.depot.background.work(lambda: True)


@needs("sessions")
def test_a_hint_for_what_leaves_before_its_turn_changes_nothing() -> None:
    bench, worker = long_bench(pages=300)
    deferred = begin_end(worker, LONG)
    assert isinstance(deferred, PendingReply)
    sum(clear_pool(bench.depot, None))
    store_long(worker, prompt(300, 2))  # reuses the places of the evicted chunks
    bench.depot.background.work()
    assert deferred.reply == m.Done(1, AT_ONCE)
    assert num_ended(bench.index) == 0


@needs("sessions")
def test_a_hint_ends_the_last_chunks_of_a_long_prompt_at_once() -> None:
    bench, worker = long_bench()
    begin_end(worker, LONG)
    assert ended(bench, LONG) == [False] * (300 - AT_ONCE) + [True] * AT_ONCE
    bench.depot.background.work()
    assert ended(bench, LONG) == [True] * 300


@needs("sessions")
@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("length", [300, 200, 100])
def test_a_use_takes_an_end_back_that_is_under_way(num_steps: int, length: int) -> None:
    bench, worker = long_bench()
    begin_end(worker, LONG)
    step(bench, num_steps)
    worker.release(worker.lookup(LONG.slice(0, length)).lease)
    bench.depot.background.work()
    assert ended(bench, LONG) == [False] * length + [True] * (300 - length)


@needs("sessions")
def test_a_prefix_that_ends_again_while_its_end_is_taken_back() -> None:
    bench, worker = long_bench()
    hint(worker, LONG, session_ended=True)
    worker.bench.depot.handle(worker.session, worker.writer, m.Lookup(worker.context, "r", LONG.digests, "default"))
    begin_end(worker, LONG)
    bench.depot.background.work()
    assert ended(bench, LONG) == [True] * 300


@needs("sessions")
def test_ended_chunks_leave_while_the_rest_of_the_prefix_is_being_ended() -> None:
    bench, worker = long_bench()
    begin_end(worker, LONG)
    for _ in range(AT_ONCE):
        assert bench.index.evictor.make_room(1, 1)
    bench.depot.background.work()
    assert ended(bench, LONG.slice(0, 300 - AT_ONCE)) == [True] * (300 - AT_ONCE)
