"""The breaker of a tier that answers only some calls, clears that hang, and dropped writes."""

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

from kvdepot.errors import ConfigError
from kvdepot.lab.processes import wait_until
from kvdepot.testing.tier_traffic import EXTENT_BYTES, contains, extents_of, fill, make_key, make_pool, read, run, write
from kvdepot.tiers.base import Extents
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import mark_of, name_hash
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue

STEP_CALLS = 3000
NUM_KEYS = 8


class PartlyDeadTier(MemoryTier):
    """Operations in `hanging` wait until `is_over`, those in `failing` raise, and probes are answered."""

    batch_entries = 4

    def __init__(self) -> None:
        self.pool = make_pool()
        super().__init__(self.pool, 64 * EXTENT_BYTES)
        self.hanging: set[JobKind] = set()
        self.failing: set[JobKind] = set()
        self.error: BaseException = OSError(5, "Input/output error")
        self.asks_for_less = False
        self.num_waiting = 0
        self.askers: list[int] = []  # threads
        self.is_over = threading.Event()

    def _suffer(self, operation: JobKind) -> None:
        if operation in self.hanging:
            self.num_waiting += 1
            self.is_over.wait()
        if operation in self.failing:
            raise self.error

    @property
    def is_overloaded(self) -> bool:
        return self.asks_for_less

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.askers.append(threading.get_ident())
        self._suffer(JobKind.CONTAINS)
        return super().contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        self._suffer(JobKind.WRITE)
        return super().write(keys, trailers, extents)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        self._suffer(JobKind.READ)
        return super().read(keys, extents)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        self._suffer(JobKind.CLEAR)
        yield from super().clear(tenant, model)

    def close(self) -> None:
        self.is_over.set()
        super().close()


class InstantTier(PartlyDeadTier):
    contains_is_instant = True


class Bench:
    """A `PartlyDeadTier`, its queue with a deadline of 1 s, and a clock that tests set."""

    def __init__(
        self, num_threads: int = 4, tier: type[PartlyDeadTier] = PartlyDeadTier, name: str = "partly dead"
    ) -> None:
        self.now = 100.0
        self.tier = tier()
        self.queue = TierQueue(
            self.tier,
            self.tier.pool,
            name,
            deadline_seconds=1.0,
            num_threads=num_threads,
            clock=lambda: self.now,
        )
        self.keys = [make_key(number) for number in range(NUM_KEYS)]
        fill(self.tier.pool, 0, self.keys, [4096] * NUM_KEYS)

    def submit(self, operation: JobKind, num_keys: int = 1) -> bool:
        return self.queue.submit(Job(operation, self.keys[:num_keys], extents_of(0, [4096] * num_keys)))

    def hang(self, operation: JobKind, seconds: float = 1.1) -> None:
        """Make a call hang beyond its deadline."""
        before = self.tier.num_waiting
        assert self.submit(operation)
        wait_until(lambda: self.tier.num_waiting > before)
        self.now += seconds
        assert len(self.queue.expire()) == 1
        assert self.queue.is_suspended

    def probe(self) -> float:
        """Advance the clock to the next probe and wait for its end. Return the seconds until that probe."""
        due = self.queue.next_deadline()
        assert due is not None
        pause, self.now = due - self.now, max(due, self.now)
        self.queue.expire()

        def is_over() -> bool:
            self.queue.poll()
            return self.queue.next_deadline() is not None or not self.queue.is_suspended

        wait_until(is_over, what="the end of a probe")
        return round(pause, 3)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.queue.close()


def test_a_question_that_takes_no_time_is_answered_at_once_and_its_errors_suspend_the_tier() -> None:
    bench = Bench(tier=InstantTier)
    try:
        assert bench.queue.ask_now(bench.keys) == [False] * NUM_KEYS
        assert bench.tier.askers == [threading.get_ident()]
        assert write(bench.queue, bench.keys, extents_of(0, [4096] * NUM_KEYS)) == [True] * NUM_KEYS
        assert bench.queue.ask_now(bench.keys) == [True] * NUM_KEYS
        bench.tier.failing = {JobKind.CONTAINS}
        while not bench.queue.is_suspended:
            assert bench.queue.ask_now(bench.keys) is None, "a job asks again, and is judged"
            assert contains(bench.queue, bench.keys) == [False] * NUM_KEYS
        bench.tier.failing = set()
        assert bench.queue.ask_now(bench.keys) is None, "as a suspended tier is not asked"
    finally:
        bench.queue.close()


@pytest.mark.promise(31)
def test_a_tier_that_answers_probes_and_hangs_is_tried_ever_less_often(bench: Bench) -> None:
    bench.tier.hanging = {JobKind.READ}
    pauses: list[float] = []
    for _ in range(8):
        assert contains(bench.queue, bench.keys[:1]) == [False], "questions are answered"
        bench.hang(JobKind.READ)
        pauses.append(bench.probe())
        assert not bench.queue.is_suspended
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_tier_of_very_many_threads_comes_back_though_all_of_them_hang() -> None:
    bench = Bench(num_threads=20)
    bench.tier.hanging = {JobKind.READ}
    for _ in range(20):
        assert bench.submit(JobKind.READ)
    wait_until(lambda: bench.tier.num_waiting == 20)
    bench.now += 1.1
    assert len(bench.queue.expire()) == 20
    bench.probe()
    assert (bench.queue.is_suspended, bench.queue.status().num_hung_calls) == (False, 20)
    assert contains(bench.queue, bench.keys[:1]) == [False]
    bench.queue.close()


def test_the_thread_in_place_of_a_hanging_one_ends_when_the_call_returns() -> None:
    bench = Bench(name="replaced")

    def num_threads() -> int:
        bench.queue.poll()
        return sum(thread.name[:-1] == "kvdepot-replaced-" for thread in threading.enumerate())

    before = num_threads()
    bench.tier.hanging = {JobKind.READ}
    bench.hang(JobKind.READ)
    bench.probe()
    wait_until(lambda: num_threads() == before + 1, what="the thread in its place")
    bench.tier.is_over.set()
    wait_until(lambda: num_threads() == before, what="the end of a thread")
    bench.queue.close()


def test_a_read_in_time_ends_the_trial(bench: Bench) -> None:
    write(bench.queue, bench.keys[:1], extents_of(0, [4096]))
    bench.tier.hanging = {JobKind.READ}
    for _ in range(3):
        bench.hang(JobKind.READ)
        bench.probe()
    bench.tier.hanging = set()
    assert read(bench.queue, bench.keys[:1], extents_of(1, [4096])) == [True]
    bench.tier.failing = {JobKind.READ}
    assert read(bench.queue, bench.keys[:1], extents_of(1, [4096])) == [False]
    assert not bench.queue.is_suspended, "one error is a miss again"
    bench.tier.failing, bench.tier.hanging = set(), {JobKind.READ}
    bench.hang(JobKind.READ)
    assert bench.probe() == 0.5


@pytest.mark.parametrize("operation", [JobKind.READ, JobKind.CONTAINS])
def test_on_trial_one_error_opens_the_breaker(bench: Bench, operation: JobKind) -> None:
    bench.tier.hanging = {operation}
    bench.hang(operation)
    bench.probe()
    bench.tier.hanging, bench.tier.failing = set(), {operation}
    assert bench.submit(operation)
    wait_until(lambda: bench.queue.poll() or bench.queue.is_suspended)
    assert bench.queue.breaker.why_suspended == f"a {operation.name.lower()} failed after a probe had succeeded"
    assert bench.probe() == 1.0


def test_a_read_shows_that_questions_and_writes_work_as_well(bench: Bench) -> None:
    bench.tier.hanging = {JobKind.WRITE}
    bench.hang(JobKind.WRITE, seconds=10.1)
    bench.probe()
    read(bench.queue, bench.keys[:1], extents_of(1, [4096]))
    bench.hang(JobKind.WRITE, seconds=10.1)
    assert bench.probe() == 0.5


def test_a_tier_whose_storage_asks_for_fewer_requests_rests_until_a_probe(bench: Bench) -> None:
    bench.tier.asks_for_less = True
    assert contains(bench.queue, bench.keys) == [False] * NUM_KEYS
    assert bench.queue.is_suspended
    assert "fewer requests" in bench.queue.status().why_open
    bench.tier.asks_for_less = False
    assert bench.probe() == 0.5
    assert not bench.queue.is_suspended


def test_a_call_of_before_the_probe_says_nothing_about_the_trial(bench: Bench) -> None:
    bench.tier.hanging = {JobKind.READ}
    bench.hang(JobKind.READ)
    bench.probe()
    bench.tier.failing = {JobKind.READ}
    bench.tier.is_over.set()  # the hanging call raises now
    parts: list[JobPart] = []
    wait_until(lambda: parts.extend(bench.queue.poll()) or parts)
    assert [list(part.outcomes) for part in parts] == [[False]]
    assert not bench.queue.is_suspended


def test_a_call_that_hangs_opens_the_breaker_though_its_job_was_late_before() -> None:
    """Regression: it took a thread from the queue, which went on as if nothing had happened."""
    bench = Bench(num_threads=2)
    gate = threading.Event()
    bench.tier.contains = lambda keys: [gate.wait()] * len(keys)  # type: ignore[method-assign]
    assert bench.submit(JobKind.CONTAINS)
    bench.tier.hanging = {JobKind.READ}
    assert bench.submit(JobKind.READ, NUM_KEYS), "two calls"
    wait_until(lambda: bench.tier.num_waiting == 1)
    bench.now += 0.9
    gate.set()
    wait_until(lambda: bench.tier.num_waiting == 2)
    bench.now += 0.2
    assert len(bench.queue.expire()) == 1
    bench.probe()
    assert not bench.queue.is_suspended
    bench.now += 0.4
    assert bench.queue.expire() == []
    assert bench.queue.is_suspended
    bench.probe()
    bench.tier.hanging = set()
    assert contains(bench.queue, bench.keys[:1]) == [True]
    bench.queue.close()


class SteppingTier(MemoryTier):
    """Clears one entry a step, on demand."""

    def __init__(self) -> None:
        self.pool = make_pool()
        super().__init__(self.pool, 64 * EXTENT_BYTES)
        self.steps = threading.Semaphore(0)
        self.num_steps = 0

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        for _ in range(30):
            self.steps.acquire(timeout=30.0)
            self.num_steps += 1
            yield 1


def test_a_clear_takes_as_long_as_it_takes_while_its_steps_keep_their_deadlines() -> None:
    """Regression: the whole clear had ten deadlines, which a store of very many objects overran."""
    now = [100.0]
    tier = SteppingTier()
    queue = TierQueue(tier, tier.pool, "stepping", deadline_seconds=1.0, clock=lambda: now[0])
    job = Job(JobKind.CLEAR, names=(None, None))
    assert queue.submit(job)
    for step in range(30):
        tier.steps.release()
        wait_until(lambda step=step: tier.num_steps > step)
        if step < 29:
            wait_until(lambda: queue.next_deadline() == now[0] + 10.0, what="a new deadline")
        now[0] += 9.0
        assert queue.expire() == []
    wait_until(lambda: bool(queue.poll()))
    assert (job.num_cleared, queue.is_suspended) == (30, False)
    assert queue.submit(Job(JobKind.CLEAR, names=(None, None)))
    wait_until(lambda: queue.next_deadline() is not None)
    now[0] += 10.1
    assert len(queue.expire()) == 1
    assert queue.is_suspended, "a step hangs"
    tier.steps.release(30)
    queue.close()


def test_a_clear_that_hangs_does_not_hold_up_writes_for_ever(bench: Bench) -> None:
    bench.tier.hanging = {JobKind.CLEAR}
    assert bench.queue.submit(Job(JobKind.CLEAR, names=(None, None)))
    wait_until(lambda: bench.tier.num_waiting)
    assert bench.submit(JobKind.WRITE)
    bench.now += 10.1
    bench.queue.expire()
    bench.probe()
    assert write(bench.queue, bench.keys[:2], extents_of(0, [4096] * 2)) == [True] * 2
    assert bench.queue.queued_write_bytes == 0
    bench.tier.hanging = set()
    assert bench.queue.submit(Job(JobKind.CLEAR, names=(None, None))), "the next one runs, too"
    wait_until(lambda: any(part.job.operation is JobKind.CLEAR for part in bench.queue.poll()))
    assert contains(bench.queue, bench.keys[:2]) == [False] * 2


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300", "9" * 400, "soon", "0"])
@pytest.mark.parametrize("option", ["deadline", "threads"])
def test_numbers_of_a_url_that_no_clock_can_count_are_refused(option: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(1 << 20))
    with (tmp_path / "pool").open("r+b") as file:
        opener = TierOpener(file.fileno(), 1 << 20, lambda: None)
        with pytest.raises(ConfigError, match=rf"--tier memory://: {option}={value}: a number from [\d.]+ to [\d,]+$"):
            opener.open_all([f"memory://?{option}={value}"])


@pytest.mark.promise(61)
def test_a_call_writes_entries_of_one_tenant_and_model_so_that_no_others_are_dropped_with_them() -> None:
    bench = Bench(num_threads=2)  # one of them writes
    bench.tier.hanging = {JobKind.WRITE}
    assert bench.submit(JobKind.WRITE)
    wait_until(lambda: bench.tier.num_waiting)
    keys = [make_key(0, "a"), make_key(1, "a"), make_key(2, "b"), make_key(3, "b", "another model")]
    job = Job(JobKind.WRITE, keys, extents_of(0, [1] * 4))
    outcomes: list[tuple[int, Sequence[bool]]] = []
    job.on_part = lambda part: outcomes.append((part.first, part.outcomes))
    assert bench.queue.submit(job)
    assert sum(bench.queue.drop_writes(name_hash("b"), name_hash("a model"))) == 1
    for part in bench.queue.poll():
        part.job.on_part(part)
    assert outcomes == [(2, [False])]
    assert bench.queue.status().num_waiting_writes == 2


def test_writes_are_dropped_in_small_steps_and_others_stay_in_their_order() -> None:
    bench = Bench(num_threads=2)  # one of them writes
    bench.tier.hanging = {JobKind.WRITE}
    assert bench.submit(JobKind.WRITE)
    wait_until(lambda: bench.tier.num_waiting)
    jobs: list[Job] = []
    for number in range(6000):
        keys = [make_key(number, "ab"[number % 2])]
        jobs.append(Job(JobKind.WRITE, keys, extents_of(0, [1])))
        assert bench.queue.submit(jobs[-1])
    steps, num_dropped, most, num_calls, num_steps = bench.queue.drop_writes(name_hash("a"), None), 0, 0, 0, 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    dropped: int | None = 0
    while dropped is not None:
        num_calls = 0
        sys.setprofile(count)
        dropped = next(steps, None)
        sys.setprofile(None)
        most, num_steps, num_dropped = max(most, num_calls), num_steps + 1, num_dropped + (dropped or 0)
    assert (most <= STEP_CALLS, num_steps > 10, num_dropped) == (True, True, 3000)
    assert [part.job for part in bench.queue.poll()] == jobs[::2]
    assert bench.queue.status().num_waiting_writes == 3000
    written: list[Job] = []
    bench.tier.is_over.set()
    wait_until(lambda: written.extend(part.job for part in bench.queue.poll()) or len(written) > 3000)
    assert written[1:] == jobs[1::2]
    bench.queue.close()


class Panic(BaseException):
    """An error that is no `Exception`, such as a panic of a library in Rust."""


def test_calls_and_probes_that_panic_are_reported_and_end_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_threads=2)

    def panic() -> None:
        raise Panic

    bench.tier.error, bench.tier.failing = Panic(), {JobKind.CONTAINS, JobKind.WRITE}
    monkeypatch.setattr(bench.tier, "probe", panic)
    assert contains(bench.queue, bench.keys) == [False] * NUM_KEYS
    assert write(bench.queue, bench.keys[:1], extents_of(0, [4096])) == [False]
    assert contains(bench.queue, bench.keys) == [False] * NUM_KEYS
    assert (bench.queue.counters["errors"], bench.queue.queued_write_bytes) == (3, 0)
    assert bench.queue.is_suspended
    bench.probe()
    assert bench.queue.status().why_open.startswith("Panic")
    monkeypatch.undo()
    bench.tier.failing = set()
    bench.probe()
    assert write(bench.queue, bench.keys, extents_of(0, [4096] * NUM_KEYS)) == [True] * NUM_KEYS
    assert contains(bench.queue, bench.keys) == [True] * NUM_KEYS
    bench.queue.close()


def test_a_tier_that_cannot_say_what_it_holds_is_shown_as_it_was_last() -> None:
    """Regression: `kvdepot status` failed, and so did the tiers' turn every second."""
    pool = make_pool()
    tier = MemoryTier(pool, 1 << 20)
    queue = TierQueue(tier, pool, "silent")
    assert queue.status().capacity_bytes == 1 << 20
    tier.usage = lambda: 1 / 0  # type: ignore[method-assign,return-value]
    assert queue.status().capacity_bytes == 1 << 20
    assert queue.status().counters["usage_failed"] == 2
    queue.close()


def test_a_tier_hears_through_its_queue_which_weights_are_outdated() -> None:
    pool = make_pool()
    keys = [make_key(number, weights=f"lineage {7 + number // 2}") for number in (2, 3, 0, 1)]
    queue = TierQueue(MemoryTier(pool, 4 * EXTENT_BYTES), pool, "memory")
    try:
        assert write(queue, keys, extents_of(0, [EXTENT_BYTES] * 4)) == [True] * 4
        run(queue, Job(JobKind.OUTDATE, generations=frozenset([name_hash("a model") + mark_of("lineage 7")])))
        assert write(queue, [make_key(9)], extents_of(0, [EXTENT_BYTES])) == [True]
        assert contains(queue, keys) == [True, True, False, True]
    finally:
        queue.close()
