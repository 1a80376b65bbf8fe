"""Mode `auto` compares its mover with the worker, by clocks of the tests alone."""

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from kvdepot.backends import CopyBarrier, CopyBatch
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.movers.client import MoveFailed
from kvdepot.movers.client import move as real_move
from kvdepot.pool.files import PoolMapping, PoolMemory
from kvdepot.testing.backend import PLANS, Cache, prompt
from kvdepot.wire import messages as m
from kvdepot_cuda import carrier, probation
from kvdepot_cuda.copy import CopyEngine
from kvdepot_cuda.driver import DriverError
from kvdepot_cuda.probation import LEAST_BYTES, PAIRS, Probation, slower
from kvdepot_cuda.testing import FakeDriver
from support.cuda.fake_worker import NUM_PIECES
from support.cuda.node import FakeDevice

PLAN = PLANS["large pages"]
WAIT_SECONDS = 60.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """The part of a `CopyEngine` that is used."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.is_covered = True
        self.error: DriverError | None = None
        self.attached: list[tuple[PoolMemory | None, int | None]] = []
        self.num_copies = 0

    def covers(self, batch: CopyBatch) -> bool:
        del batch
        return bool(self.attached) and self.is_covered

    def attach(
        self, mapping: PoolMemory | None, barrier: CopyBarrier, *,
        only_at: int | None = None,
    ) -> None:  # fmt: skip
        del barrier
        self.attached.append((mapping, only_at))

    def retrieve(self, batch: CopyBatch) -> None:
        if self.error is not None:
            raise self.error
        self.num_copies += 1
        self.clock.now += self.seconds(m.EXTENT.unpack(batch.extents)[-1])


class Rig:
    """A probation, a mover that takes so many seconds a copy, and a worker; and both take some for each MiB."""

    def __init__(
        self, by_mover: float, by_worker: float, *, is_settled: bool = True, a_mib: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.clock = Clock()
        self.engine = Engine(self.clock, lambda num_bytes: by_worker + a_mib[1] * num_bytes / 2**20)
        self.by_mover, self.a_mib = by_mover, a_mib[0]
        self.is_settled = is_settled
        self.num_moves = 0
        self.made = Probation(cast("CopyEngine", self.engine), nullcontext, self.clock)

    def retrieve(self, num_bytes: int = LEAST_BYTES) -> None:
        extents = m.EXTENT.pack(0, 0, 0, 0, 0, 0, 12345, num_bytes)
        self.made.retrieve(CopyBatch(MAPPING, extents, (), (), ()), lambda: self.move(num_bytes))

    def move(self, num_bytes: int) -> bool:
        self.num_moves += 1
        self.clock.now += self.by_mover + self.a_mib * num_bytes / 2**20
        return self.is_settled


MAPPING = cast("PoolMapping", object())
GIVEN_BACK = [(MAPPING, 12345), (None, None)]


@pytest.mark.parametrize(
    ("by_mover", "by_worker", "expected"),
    [
        ([1.25] * 8, [1.0] * 8, ""),
        ([1.26] * 8, [1.0] * 8, "measured slower"),
        ([1.0] * 8, [9.0] * 8, ""),
        ([1.0] * 5 + [900.0] * 3, [1.0] * 8, ""),
        ([2.0] * 5 + [0.1] * 3, [1.0] * 5 + [90.0] * 3, "measured slower"),
    ],
)
def test_the_medians_decide_and_little_is_nothing(by_mover: list[float], by_worker: list[float], expected: str) -> None:
    found = slower(by_mover, by_worker)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_the_text_has_both_figures() -> None:
    assert slower([0.61e-3 / 2**20], [0.2e-3 / 2**20]) == (
        "measured slower: a mover needs 0.610 ms a MiB, the worker 0.200"
    )


@pytest.mark.parametrize(("by_mover", "is_slower"), [(4.0, True), (1.0, False)])
def test_mover_and_worker_take_turns_and_then_it_is_over(by_mover: float, is_slower: bool) -> None:
    rig = Rig(by_mover, 2.0)
    for number in range(2 * PAIRS):
        rig.retrieve()
        assert rig.made.is_over is False
        assert (rig.num_moves, rig.engine.num_copies) == (1 + (number + 1) // 2, number // 2)
    rig.retrieve()
    assert rig.made.is_over
    assert bool(rig.made.why_slower) is is_slower
    assert rig.engine.attached == GIVEN_BACK
    rig.retrieve()
    assert rig.engine.num_copies == PAIRS
    assert rig.engine.attached == GIVEN_BACK


def test_nothing_is_registered_before_the_mover_is_settled() -> None:
    """An older depot never says so."""
    rig = Rig(9.0, 1.0, is_settled=False)
    for _ in range(2 * probation.MOST_SEEN):
        rig.retrieve()
    assert rig.engine.attached == []
    rig.made.end()
    assert rig.engine.attached == []


def test_a_mover_that_took_another_s_place_is_not_compared_before_it_is_settled() -> None:
    rig = Rig(1.0, 1.0)
    rig.retrieve()
    rig.is_settled, rig.by_mover = False, 100.0
    for _ in range(4 * PAIRS):
        rig.retrieve()
    assert rig.engine.num_copies == 0
    rig.is_settled, rig.by_mover = True, 1.0
    for _ in range(2 * PAIRS):
        rig.retrieve()
    assert rig.made.is_over
    assert rig.made.why_slower == ""


def test_small_batches_are_not_compared() -> None:
    rig = Rig(9.0, 1.0)
    for _ in range(4 * PAIRS):
        rig.retrieve(LEAST_BYTES - 1)
    assert rig.engine.attached == []
    assert not rig.made.is_over


@pytest.mark.parametrize("phase", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(64, 16), (64, 64, 20), (64, 33, 17), (64, 64)])
@pytest.mark.parametrize(
    ("a_copy", "a_mib", "is_slower"),
    [((1.0, 1.0), (0.02, 0.02), False), ((1.0, 1.0), (0.05, 0.02), True), ((0.0, 0.0), (0.02, 0.02), False)],
)
def test_retrieves_that_repeat_their_sizes_are_compared_like_with_like(
    phase: int, sizes: tuple[int, ...], a_copy: tuple[float, float], a_mib: tuple[float, float], is_slower: bool
) -> None:
    """Long prompts come as full batches and a rest: no side is slower for having got the rests."""
    rig = Rig(a_copy[0], a_copy[1], a_mib=a_mib)
    for number in range(8 * PAIRS):
        rig.retrieve(sizes[(number + phase) % len(sizes)] << 20)
    assert rig.made.is_over
    assert bool(rig.made.why_slower) is is_slower
    assert rig.engine.num_copies == PAIRS


def test_batches_of_which_no_two_are_alike_give_no_verdict() -> None:
    rig = Rig(9.0, 1.0)
    for number in range(20):
        rig.retrieve(int(LEAST_BYTES * 1.126**number) + number)
    assert rig.engine.num_copies == 0
    rig.retrieve(int(LEAST_BYTES * 1.126**19 * 1.05))
    assert rig.engine.num_copies == 1


def test_batches_that_are_not_registered_end_it_without_a_verdict() -> None:
    rig = Rig(9.0, 1.0)
    rig.engine.is_covered = False
    for _ in range(probation.MOST_SEEN):
        assert not rig.made.is_over
        rig.retrieve()
    assert rig.made.is_over
    assert rig.made.why_slower == ""
    assert rig.engine.num_copies == 0
    assert rig.engine.attached == GIVEN_BACK


def test_a_worker_that_cannot_copy_leaves_it_to_the_mover(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(9.0, 1.0)
    rig.engine.error = DriverError("copy", "CUDA_ERROR_UNKNOWN (999)")
    for _ in range(5):
        rig.retrieve()
    assert rig.num_moves == 5
    assert rig.made.is_over
    assert rig.made.why_slower == ""
    assert rig.engine.attached == GIVEN_BACK
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_device_that_is_lost_is_an_error() -> None:
    rig = Rig(9.0, 1.0)
    rig.engine.error = DriverError("copy", "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    rig.retrieve()
    rig.retrieve()
    with pytest.raises(DriverError):
        rig.retrieve()
    assert rig.made.is_over
    assert rig.num_moves == 2


def test_a_move_that_fails_is_not_compared() -> None:
    rig = Rig(9.0, 1.0)
    rig.retrieve()
    batch = CopyBatch(MAPPING, m.EXTENT.pack(0, 0, 0, 0, 0, 0, 0, LEAST_BYTES), (), (), ())

    def fail() -> bool:
        raise MoveFailed("it ended")

    with pytest.raises(MoveFailed):
        rig.made.retrieve(batch, fail)
    rig.retrieve()
    assert rig.engine.num_copies == 0
    rig.retrieve()
    assert rig.engine.num_copies == 1


# --- with movers ------------------------------------------------------------------------------------------------------


class TimedDriver(FakeDriver):
    """Of a worker that takes two seconds for what it copies itself."""

    clock: Clock

    def synchronize_stream(self, stream: int) -> None:
        super().synchronize_stream(stream)
        self.clock.now += 2.0


@pytest.fixture
def depot(depot_with_movers: DepotProcess) -> DepotProcess:
    return depot_with_movers


def make_worker(
    device: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch, by_mover: float, mode: str
) -> tuple[Cache, TimedDriver]:
    clock = Clock()

    def move(*arguments: Any) -> bool:
        is_settled = real_move(*arguments)
        clock.now += by_mover
        return is_settled

    monkeypatch.setattr(carrier, "move", move)
    monkeypatch.setattr(probation, "LEAST_BYTES", 4 << 20)
    monkeypatch.setattr(carrier, "Probation", functools.partial(Probation, clock=clock))
    driver = TimedDriver(root=device.memory)
    driver.clock = clock
    worker = Cache(device.worker(depot.url, PLAN, mode=mode, driver=driver), PLAN)
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert worker.store(prompt(12))  # 6 MiB in the first piece of 8
    return worker, driver


def test_a_slower_mover_is_given_up_with_the_figures_in_the_status(
    device: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, driver = make_worker(device, depot, monkeypatch, 3.0, "auto")
    made: Any = worker.context
    register_as = made.connection.register_as
    modes: list[str] = []

    def noted(registration: m.RegisterKVCache) -> None:
        modes.append(made.transfer_mode)
        register_as(registration)
        assert made.connection.link is None

    monkeypatch.setattr(made.connection, "register_as", noted)
    wait_until(
        lambda: worker.retrieve(prompt(12)) in (0, 12) and made.transfer_mode == "direct", WAIT_SECONDS, "the verdict"
    )
    wait_until(lambda: [c.transfer_mode for c in depot.status().contexts] == ["direct"], WAIT_SECONDS)
    (found,) = depot.status().contexts
    assert found.fallback == "measured slower: a mover needs 500.000 ms a MiB, the worker 333.333"
    assert found.mover == ""
    assert modes == ["ipc"]  # no mover copies any more when stores leave their waits to the worker's streams
    worker.context.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: made.num_registered == NUM_PIECES, WAIT_SECONDS)
    assert worker.retrieve(prompt(12)) == 12
    assert worker.store(prompt(12, salt=1))
    assert len([record for record in caplog.records if "copies by itself" in record.message]) == 1
    worker.context.close()
    assert driver.violations == []
    assert driver.left_over == {}


@pytest.mark.parametrize(("mode", "by_mover"), [("auto", 2.0), ("ipc", 3.0)])
def test_a_mover_that_is_no_slower_copies_on_and_nothing_stays_registered(
    mode: str, by_mover: float, device: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode `ipc` nobody asks."""
    worker, driver = make_worker(device, depot, monkeypatch, by_mover, mode)
    made: Any = worker.context
    copies = PAIRS if mode == "auto" else 0
    moves = depot.status().counters["moves"]
    wait_until(
        lambda: worker.retrieve(prompt(12)) == 12
        and driver.calls["synchronize_stream"] == copies
        and depot.status().counters["moves"] >= moves + 3 * PAIRS,
        WAIT_SECONDS, "the verdict",
    )  # fmt: skip
    wait_until(lambda: driver.registered_bytes == 0, WAIT_SECONDS, "the pool to be unregistered")
    for _ in range(3):
        assert worker.retrieve(prompt(12)) == 12
    assert driver.calls["synchronize_stream"] == copies
    assert driver.calls["register_host"] == driver.calls["unregister_host"] == bool(copies)
    assert made.transfer_mode == "ipc"
    worker.context.close()
    assert driver.violations == []
    assert driver.left_over == {}


@pytest.mark.promise(9)
def test_a_depot_that_is_killed_ends_the_comparison(
    device: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it the registration of a pool that may be another one by then."""
    worker, driver = make_worker(device, depot, monkeypatch, 3.0, "auto")
    wait_until(
        lambda: worker.retrieve(prompt(12)) == 12 and driver.calls["synchronize_stream"], WAIT_SECONDS, "a comparison"
    )
    depot.kill()
    depot.start()
    worker.context.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: not depot.status().recovering, WAIT_SECONDS)
    wait_until(lambda: driver.registered_bytes == 0, WAIT_SECONDS, "the pool to be unregistered")
    copies = driver.calls["synchronize_stream"]
    for _ in range(2 * PAIRS):
        assert worker.retrieve(prompt(12)) == 12
    assert driver.calls["synchronize_stream"] == copies
    worker.context.close()
    assert driver.violations == []
    assert driver.left_over == {}
