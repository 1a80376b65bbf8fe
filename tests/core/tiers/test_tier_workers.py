"""Threads of a tier: each call runs once, sleeping threads are woken, and the loop never waits for a call."""

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import wait_until
from kvdepot.testing.faulty_tier import FaultyTier
from kvdepot.testing.tier_traffic import EXTENT_BYTES, extents_of, make_key, make_pool
from kvdepot.tiers.jobs import Call, Job, JobKind
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.workers import TierWorkers

NUM_THREADS = 4
ROUNDS = 300


@pytest.fixture
def hasty_interpreter() -> Iterator[None]:
    """Switch threads every few bytecodes."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(seconds)


class Notebook:
    """Notes its calls, and which of them run at the same time."""

    def __init__(self) -> None:
        self.made: Counter[Call] = Counter()
        self.ended: list[Call] = []
        self.problems: list[str] = []
        self._running: Counter[JobKind] = Counter()
        self._lock = threading.Lock()

    def make(self, call: Call) -> None:
        with self._lock:
            self._running[call.operation] += 1
            running = +self._running
            if running[JobKind.WRITE] > NUM_THREADS - 1:
                self.problems.append(f"{running[JobKind.WRITE]} writes")
            if running[JobKind.CLEAR] and (running[JobKind.WRITE] or running[JobKind.CLEAR] > 1):
                self.problems.append(f"a clear beside {running}")
            self.made[call] += 1
        os.sched_yield()
        with self._lock:
            self._running[call.operation] -= 1

    def wait_for(self, num_ended: int) -> None:
        wait_until(lambda: len(self.ended) == num_ended, 20, what="the last call")

    def hire(self, count: int) -> TierWorkers:
        workers = TierWorkers("notebook", NUM_THREADS - 1, self.make, self.ended.append, time.monotonic)
        for _ in range(count):
            workers.hire()
        return workers


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.mark.usefixtures("hasty_interpreter")
def test_every_call_is_made_once_and_nobody_sleeps_beside_work(notebook: Notebook) -> None:
    workers, rng, total = notebook.hire(NUM_THREADS), random.Random(7), 0
    for _ in range(ROUNDS):
        kinds = rng.choices(list(JobKind), (1, 5, 10, 20, 10, 1), k=rng.randrange(1, 12))
        calls = [Call(Job(kind), 0, 0) for kind in kinds]
        total += len(calls)
        workers.hand_in(calls)
        if rng.random() < 0.1:
            workers.dismiss()
            workers.hire()
        if rng.random() < 0.3:  # otherwise more calls come while threads work
            notebook.wait_for(total)
    notebook.wait_for(total)
    assert set(notebook.made.values()) == {1}
    assert len(notebook.made) == total
    assert not workers.running()
    assert notebook.problems == []
    workers.end()


@pytest.mark.usefixtures("hasty_interpreter")
def test_calls_that_are_taken_back_are_not_made(notebook: Notebook) -> None:
    workers, rng, taken, total = notebook.hire(NUM_THREADS), random.Random(8), list[Call](), 0
    for _ in range(ROUNDS):
        calls = [Call(Job(JobKind.WRITE), number, number) for number in range(20)]
        total += len(calls)
        workers.hand_in(calls)
        taken += workers.take_back(JobKind.WRITE, rng.randrange(30), lambda call: bool(call.first % 2))
    wait_until(lambda: len(notebook.ended) + len(taken) == total, 20, what="the last call")
    assert not notebook.made.keys() & set(taken)
    assert all(call.first % 2 for call in taken)
    assert taken, "else nothing was tried"
    workers.end()


@pytest.mark.usefixtures("hasty_interpreter")
@pytest.mark.parametrize("num_threads", [1, NUM_THREADS])
def test_a_call_that_comes_as_a_worker_falls_asleep_is_made(num_threads: int, notebook: Notebook) -> None:
    workers = notebook.hire(num_threads)
    for number in range(1, 10 * ROUNDS):
        workers.hand_in([Call(Job(JobKind.READ), 0, 0)])
        while len(notebook.ended) < number - number % 2:  # every other time, the worker is about to sleep
            os.sched_yield()
    notebook.wait_for(10 * ROUNDS - 1)
    workers.end()


@pytest.mark.usefixtures("hasty_interpreter")
@pytest.mark.parametrize("num_reads", [0, 1])
def test_writes_that_waited_for_a_clear_are_made_side_by_side(num_reads: int) -> None:
    """Also if the thread of the clear takes a read next."""
    may_end, writers, ended = threading.Event(), threading.Barrier(NUM_THREADS - 1), list[Call]()

    def make(call: Call) -> None:
        if call.operation is JobKind.WRITE:
            writers.wait(20)
        else:
            may_end.wait(30)

    workers = TierWorkers("clear", NUM_THREADS - 1, make, ended.append, time.monotonic)
    for _ in range(NUM_THREADS):
        workers.hire()
    for _ in range(20):
        ended.clear()
        may_end.clear()
        workers.hand_in([Call(Job(JobKind.CLEAR), 0, 0)])
        wait_until(lambda: len(workers.running()) == 1)
        workers.hand_in([Call(Job(JobKind.WRITE), 0, 0) for _ in range(NUM_THREADS - 1)])
        workers.hand_in([Call(Job(JobKind.READ), 0, 0) for _ in range(num_reads)])
        assert workers.num_waiting(JobKind.WRITE) == NUM_THREADS - 1
        may_end.set()
        wait_until(lambda: len(ended) == NUM_THREADS + num_reads, 25)
    assert not writers.broken
    workers.end()


def test_a_dismissed_thread_ends_and_the_others_go_on(notebook: Notebook) -> None:
    workers = notebook.hire(NUM_THREADS)
    assert num_threads("kvdepot-notebook") == NUM_THREADS
    for _ in range(NUM_THREADS - 1):
        workers.dismiss()
    wait_until(lambda: num_threads("kvdepot-notebook") == 1)
    workers.hand_in([Call(Job(JobKind.READ), 0, 0)])
    wait_until(lambda: len(notebook.ended) == 1)
    workers.end()
    wait_until(lambda: not num_threads("kvdepot-notebook"))


def num_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_the_loop_does_not_wait_for_workers_whose_calls_hang() -> None:
    pool = make_pool()
    tier = FaultyTier(MemoryTier(pool, 64 * EXTENT_BYTES))
    queue = TierQueue(tier, pool, "stuck", num_threads=NUM_THREADS)
    keys = [make_key(number) for number in range(3)]
    tier.hang = True
    began = time.monotonic()
    for number in range(1, NUM_THREADS + 1):
        assert queue.submit(Job(JobKind.READ, keys, extents_of(0, [4096] * 3)))
        wait_until(lambda number=number: tier.num_calls == number)
    for operation in (JobKind.CONTAINS, JobKind.READ, JobKind.WRITE):
        assert queue.submit(Job(operation, keys, extents_of(0, [4096] * 3)))
    queue.expire()
    assert queue.poll() == []
    assert queue.next_deadline() is not None
    assert queue.status().num_waiting_writes == 1
    assert [list(dropped) for dropped in [queue.drop_writes(None, None)]] == [[1]]
    assert time.monotonic() - began < 10, "the calls would end after a minute"
    tier.hang = False
    wait_until(lambda: bool(queue.poll()))
    queue.close()
