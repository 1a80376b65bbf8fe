"""Threads of a tier: each call is made once, whoever sleeps is woken, and who hands calls in never waits for them."""

import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock, patch

import pytest

from kvdepot.lab.processes import wait_until
from kvdepot.testing.tier import EXTENT_BYTES, extents_of, make_key, make_pool
from kvdepot.tiers.jobs import Call, Job, Operation
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.workers import Workers

NUM_THREADS = 4
ROUNDS = 300


@pytest.fixture
def hasty_interpreter() -> Iterator[None]:
    """Threads change every few bytecodes."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(seconds)


class Notebook:
    """Makes calls by noting what runs beside what."""

    def __init__(self) -> None:
        self.made: Counter[Call] = Counter()
        self.ended: list[Call] = []
        self.problems: list[str] = []
        self._running: Counter[Operation] = Counter()
        self._lock = threading.Lock()

    def make(self, call: Call) -> None:
        with self._lock:
            self._running[call.operation] += 1
            running = +self._running
            if running[Operation.WRITE] > NUM_THREADS - 1:
                self.problems.append(f"{running[Operation.WRITE]} writes")
            if running[Operation.CLEAR] and (running[Operation.WRITE] or running[Operation.CLEAR] > 1):
                self.problems.append(f"a clear beside {running}")
            self.made[call] += 1
        os.sched_yield()
        with self._lock:
            self._running[call.operation] -= 1

    def wait_for(self, num_ended: int) -> None:
        wait_until(lambda: len(self.ended) == num_ended, 20, what="the last call")

    def hire(self, count: int) -> Workers:
        workers = Workers("notebook", NUM_THREADS - 1, self.make, self.ended.append, time.monotonic)
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
        kinds = rng.choices(list(Operation), (1, 5, 10, 20), k=rng.randrange(1, 12))
        calls = [Call(Job(kind), 0, 0) for kind in kinds]
        total += len(calls)
        workers.hand_in(calls)
        if rng.random() < 0.1:
            workers.dismiss()
            workers.hire()
        if rng.random() < 0.3:  # else more comes while they are at it
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
        calls = [Call(Job(Operation.WRITE), number, number) for number in range(20)]
        total += len(calls)
        workers.hand_in(calls)
        taken += workers.take_back(Operation.WRITE, rng.randrange(30), lambda call: bool(call.first % 2))
    wait_until(lambda: len(notebook.ended) + len(taken) == total, 20, what="the last call")
    assert not notebook.made.keys() & set(taken)
    assert all(call.first % 2 for call in taken)
    assert taken, "else nothing was tried"
    workers.end()


class Bells(deque[object]):
    """A deque in which workers leave their bells, and what is to happen just before and just after one does."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.num_left = 0

    def append(self, bell: object, /) -> None:
        self.num_left += 1
        for event in self.before[:1]:
            self.before.remove(event)
            event()
        super().append(bell)
        for event in self.after[:1]:
            self.after.remove(event)
            event()


@pytest.fixture
def bells() -> Iterator[Bells]:
    """What the workers that are made keep their bells in."""
    bells = Bells()
    with patch("kvdepot.tiers.workers.deque", MagicMock(side_effect=[bells, deque()])) as made:
        made.__getitem__.return_value = deque
        yield bells


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_that_comes_as_a_worker_falls_asleep_is_made(when: str, notebook: Notebook, bells: Bells) -> None:
    workers = notebook.hire(0)
    setattr(bells, when, [lambda: workers.hand_in([Call(Job(Operation.READ), 0, 0)])] * 5)
    workers.hire()
    notebook.wait_for(5)
    workers.hand_in([Call(Job(Operation.READ), 0, 0)])
    notebook.wait_for(6)
    workers.end()


def test_writes_that_waited_for_a_clear_are_made_side_by_side(bells: Bells) -> None:
    may_end, writers, ended = threading.Event(), threading.Barrier(NUM_THREADS - 1), list[Call]()

    def make(call: Call) -> None:
        if call.operation is Operation.CLEAR:
            may_end.wait(30)
        else:
            writers.wait(20)

    workers = Workers("clear", NUM_THREADS - 1, make, ended.append, time.monotonic)
    for _ in range(NUM_THREADS):
        workers.hire()
    wait_until(lambda: bells.num_left == NUM_THREADS)
    workers.hand_in([Call(Job(Operation.CLEAR), 0, 0)])
    wait_until(lambda: bool(workers.running()))
    workers.hand_in([Call(Job(Operation.WRITE), 0, 0) for _ in range(NUM_THREADS - 1)])
    wait_until(lambda: bells.num_left == 2 * NUM_THREADS - 1, what="those who were woken in vain")
    may_end.set()
    wait_until(lambda: len(ended) == NUM_THREADS, 25)
    assert not writers.broken
    workers.end()


def test_who_is_dismissed_ends_and_the_others_go_on(notebook: Notebook) -> None:
    workers = notebook.hire(NUM_THREADS)
    assert num_threads("kvdepot-notebook") == NUM_THREADS
    for _ in range(NUM_THREADS - 1):
        workers.dismiss()
    wait_until(lambda: num_threads("kvdepot-notebook") == 1)
    workers.hand_in([Call(Job(Operation.READ), 0, 0)])
    wait_until(lambda: len(notebook.ended) == 1)
    workers.end()
    wait_until(lambda: not num_threads("kvdepot-notebook"))


def num_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_the_loop_does_not_wait_for_a_worker_that_holds_what_workers_share() -> None:
    """The clock stands still for workers only: they look at it while they hold their lock."""
    loop, may_go_on, num_stuck = threading.current_thread(), threading.Event(), Counter[str]()

    def clock() -> float:
        if threading.current_thread() is not loop:
            num_stuck["workers"] += 1
            may_go_on.wait(30)
        return time.monotonic()

    pool = make_pool()
    queue = TierQueue(MemoryTier(pool, 64 * EXTENT_BYTES), pool, "stuck", num_threads=NUM_THREADS, clock=clock)
    keys = [make_key(number) for number in range(3)]

    def submit(operation: Operation) -> None:
        assert queue.submit(Job(operation, keys, extents_of(0, [4096] * 3)))

    submit(Operation.READ)
    wait_until(lambda: num_stuck["workers"] == 1)
    began = time.monotonic()
    for operation in (Operation.CONTAINS, Operation.READ, Operation.WRITE):
        submit(operation)
    queue.expire()
    assert queue.poll() == []
    assert queue.next_deadline() is None
    assert queue.status().num_waiting_writes == 1
    assert [list(dropped) for dropped in [queue.drop_writes(None, None)]] == [[1]]
    assert time.monotonic() - began < 10, "the worker's lock would be free after 30 s"
    may_go_on.set()
    wait_until(lambda: bool(queue.poll()))
    queue.close()
