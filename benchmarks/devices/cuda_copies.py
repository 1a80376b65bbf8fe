"""Compares all ways to copy pages between a device and the pool with one large copy.

The thresholds of the kernel (`kvdepot_cuda.gather`) come from its table. It needs twice `--largest` of device memory,
half as much host memory, and an otherwise idle device.

A cell of the table is a page size, a number of pages and a direction. The pages are in order in host memory, as in an
extent, and scattered on the device; for the merged batch, in stretches of 16 neighbours. The reference is one copy of
the same number of contiguous, registered bytes in the same round. Times are measured on the host, from the first call
until the stream is synchronised, as a retrieve waits, over enough repetitions for 64 MiB. Each way's bytes are compared
before it is timed.
"""

import argparse
import contextlib
import itertools
import json
import mmap
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.config import format_size, parse_size
from kvdepot.copying.runs import Addresses, Runs, merge
from kvdepot.errors import KVDepotError
from kvdepot.lab.bench import describe_machine
from kvdepot_cuda import backend
from kvdepot_cuda.copy import BATCH_RUNS
from kvdepot_cuda.driver import CopyKind, Driver, DriverError
from kvdepot_cuda.gather import CompileGather, Gather, KernelUnavailable, compile_gather
from kvdepot_cuda.nvidia import CudaDriver

Say = Callable[[str], None]
Row = dict[str, Any]

_STRETCH: Final = 16  # neighbouring pages of the merged batch: 256 tokens in blocks of 16
_TIMED_BYTES: Final = 64 << 20  # copied per timing if `_MOST_REPETITIONS` allows: 1.3 ms at 52 GB/s
_MOST_REPETITIONS: Final = 32  # bounds the time of small cells, in which the calls take longer than the bytes
_NUM_COMPARED: Final = 32  # pages per way
_POISON: Final = 0xEE  # fills pages of random bytes before a copy, so that a copy that does nothing differs


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The sizes, counts and directions to measure."""

    page_bytes: tuple[int, ...] = tuple(size << 10 for size in (4, 8, 16, 24, 32, 64, 256, 2048))
    counts: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    directions: tuple[CopyKind, ...] = (CopyKind.TO_DEVICE, CopyKind.TO_HOST)
    rounds: int = 5
    largest_bytes: int = 512 << 20  # limit of one copy; larger cells are left out
    seconds: float = 240.0  # cells that have not begun by then are left out

    def cells(self) -> Iterator[tuple[CopyKind, int, int]]:
        """Yield direction, page size and number of pages."""
        for direction, page_bytes, count in itertools.product(self.directions, self.page_bytes, self.counts):
            if page_bytes * count <= self.largest_bytes:
                yield direction, page_bytes, count


def bench_copies(
    driver: Driver, plan: BenchPlan, *, compile_gather: CompileGather = compile_gather, say: Say = lambda _line: None
) -> dict[str, Any]:
    """Measure the table. The driver stays open.

    Raises:
        DriverError: the device refuses an operation that every way needs.
    """
    deadline = time.monotonic() + plan.seconds
    rows: list[Row] = []
    left_out = 0
    with driver.activated(), _Memory.of(driver, plan) as memory:
        gather, why_not = _gather_of(driver, plan, compile_gather)
        say(f"{driver.description}; kernel: {why_not or 'compiled'}; ratios to one large copy in the same round")
        try:
            for direction, page_bytes, count in plan.cells():
                if time.monotonic() > deadline:
                    left_out += 1
                    continue
                cell = _Cell(driver, memory, gather, direction, page_bytes, count)
                rows.append(cell.measure(plan))
                say(describe_row(rows[-1]))
        finally:
            if gather is not None:
                gather.close()
    if left_out:
        say(f"{left_out} cells were left out after {plan.seconds:g} s")
    return {
        "bench": "cuda",
        "device": driver.description,
        "kernel": why_not or "compiled",
        "rows": rows,
        "cells_left_out": left_out,
    }


def describe_row(row: Row) -> str:
    """Return one row of the table as text."""
    ways = "; ".join(f"{name} {way['ratio']:.2f}" for name, way in row["ways"].items())
    problems = "".join(f"; {name}: {reason}" for name, reason in row["failed"].items())
    return (
        f"{row['direction']:9} {format_size(row['page_bytes']):>6} x {row['count']:4}:"
        f" one copy {row['reference_gb_per_s']:6.2f} GB/s; {ways}{problems}"
    )


def _gather_of(driver: Driver, plan: BenchPlan, compile_gather: CompileGather) -> tuple[Gather | None, str]:
    try:
        return Gather(driver, compile_gather(driver.capability), max(plan.counts)), ""
    except (DriverError, KernelUnavailable) as error:
        return None, f"not there ({error})"


class _Memory:
    """Host memory, shared and registered like the pool, twice as much on the device, and a page to compare with."""

    def __init__(self, driver: Driver, num_bytes: int, page_bytes: int, undo: contextlib.ExitStack) -> None:
        self.num_bytes = num_bytes
        self.host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.host.view(np.uint64)[:] = np.random.default_rng(0).integers(0, 1 << 63, num_bytes // 8, np.uint64)
        self.page = np.frombuffer(mmap.mmap(-1, page_bytes), np.uint8)
        self.page_address = self.page.ctypes.data
        self.address = self.host.ctypes.data
        for address, size in ((self.address, num_bytes), (self.page_address, page_bytes)):
            driver.register_host(address, size)
            undo.callback(driver.unregister_host, address)
        self.on_device = driver.allocate_device(2 * num_bytes)
        undo.callback(driver.free_device, self.on_device)
        self.stream = driver.create_stream()
        undo.callback(driver.destroy_stream, self.stream)
        undo.callback(driver.synchronize_stream, self.stream)
        for half in (0, num_bytes):
            driver.copy(self.address, self.on_device + half, num_bytes, CopyKind.TO_DEVICE, self.stream)
        driver.synchronize_stream(self.stream)
        try:
            self.host_on_device = driver.device_address_of(self.address)
        except DriverError:
            self.host_on_device = 0

    @classmethod
    @contextlib.contextmanager
    def of(cls, driver: Driver, plan: BenchPlan) -> "Generator[_Memory]":
        largest = max(page_bytes * count for _, page_bytes, count in plan.cells())
        with contextlib.ExitStack() as undo:
            yield cls(driver, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE, max(plan.page_bytes), undo)


class _Cell:
    """One page size, number of pages and direction."""

    def __init__(
        self, driver: Driver, memory: _Memory, gather: Gather | None, direction: CopyKind, page_bytes: int, count: int
    ) -> None:
        self._driver, self._memory, self._gather = driver, memory, gather
        self._direction, self._page_bytes, self._count = direction, page_bytes, count
        rng = np.random.default_rng(count)
        stretch = min(_STRETCH, count)
        starts = rng.permutation(2 * count // stretch)[: -(-count // stretch)] * stretch
        self._scattered = self._runs(rng.permutation(2 * count)[:count])
        self._neighbours = self._runs((starts[:, None] + np.arange(stretch)).reshape(-1)[:count])

    def _runs(self, places: npt.NDArray[np.int64]) -> Runs:
        size = np.uint64(self._page_bytes)
        return Runs(
            np.uint64(self._memory.on_device) + places.astype(np.uint64) * size,
            np.arange(self._count, dtype=np.uint64) * size,
            np.full(self._count, size),
        )

    def measure(self, plan: BenchPlan) -> Row:
        num_bytes = self._page_bytes * self._count
        failed: dict[str, str] = {}
        ways: dict[str, Callable[[], None]] = {}
        for name, runs, way in self._ways():
            try:
                way()
                self._driver.synchronize_stream(self._memory.stream)
                self._compare(runs, way)
            except (DriverError, _WrongBytes) as error:
                if isinstance(error, DriverError) and error.is_permanent:
                    raise
                failed[name] = str(error)
            else:
                ways[name] = way
        repetitions = max(1, min(_MOST_REPETITIONS, _TIMED_BYTES // num_bytes))
        references: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in ways}
        submitting: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(plan.rounds):
            references.append(self._time(self._reference, repetitions)[0])
            for name, way in ways.items():
                whole, submit = self._time(way, repetitions)
                times[name].append(whole)
                submitting[name].append(submit)
        row: Row = {
            "direction": self._direction.value,
            "page_bytes": self._page_bytes,
            "count": self._count,
            "reference_gb_per_s": round(num_bytes / statistics.median(references) / 1e9, 3),
            "ways": {},
            "failed": failed,
        }
        for name, seconds in times.items():
            ratios = sorted(one / other for one, other in zip(references, seconds, strict=True))
            row["ways"][name] = {
                "ratio": round(statistics.median(ratios), 4),
                "spread": [round(ratios[0], 4), round(ratios[-1], 4)],
                "gb_per_s": round(num_bytes / statistics.median(seconds) / 1e9, 3),
                "submit_us": round(statistics.median(submitting[name]) * 1e6, 1),
            }
        return row

    def _ways(self) -> Iterator[tuple[str, Runs, Callable[[], None]]]:
        yield "loop", self._scattered, self._loop
        if self._driver.has_batch_copy:
            yield "batch", self._scattered, lambda: self._batches(self._scattered)
            yield "merged batch", self._neighbours, lambda: self._batches(merge(self._neighbours))
        if self._gather is not None and self._memory.host_on_device:
            yield "kernel", self._scattered, self._launch

    def _reference(self) -> None:
        memory, num_bytes = self._memory, self._page_bytes * self._count
        if self._direction is CopyKind.TO_DEVICE:
            self._driver.copy(memory.address, memory.on_device, num_bytes, self._direction, memory.stream)
        else:
            self._driver.copy(memory.on_device, memory.address, num_bytes, self._direction, memory.stream)

    def _ends(self, runs: Runs, host: int) -> tuple[Addresses, Addresses]:
        """Return sources and targets, with host memory at `host`."""
        pool = runs.offsets + np.uint64(host)
        return (pool, runs.blocks) if self._direction is CopyKind.TO_DEVICE else (runs.blocks, pool)

    def _loop(self) -> None:
        sources, targets = self._ends(self._scattered, self._memory.address)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._driver.copy(source, target, self._page_bytes, self._direction, self._memory.stream)

    def _batches(self, runs: Runs) -> None:
        sources, targets = self._ends(runs, self._memory.address)
        for start in range(0, len(runs), BATCH_RUNS):
            some = slice(start, start + BATCH_RUNS)
            self._driver.copy_batch(
                sources[some], targets[some], runs.sizes[some], self._direction, self._memory.stream
            )

    def _launch(self) -> None:
        """Launch the kernel. The rows are the same each time, so that repetitions need no wait between them."""
        assert self._gather is not None
        sources, targets = self._ends(self._scattered, self._memory.host_on_device)
        self._gather.copy(sources, targets, self._scattered.sizes, self._memory.stream)

    def _time(self, submit: Callable[[], None], repetitions: int) -> tuple[float, float]:
        """Return the seconds of one repetition, and the part of them that submitting took."""
        started = time.perf_counter()
        for _ in range(repetitions):
            submit()
        submitted = time.perf_counter()
        self._driver.synchronize_stream(self._memory.stream)
        return (time.perf_counter() - started) / repetitions, (submitted - started) / repetitions

    def _compare(self, runs: Runs, way: Callable[[], None]) -> None:
        """Run the way once more with other bytes in host memory, and compare some pages on both sides."""
        memory, size = self._memory, self._page_bytes
        some = np.unique(np.linspace(0, len(runs) - 1, _NUM_COMPARED).astype(np.int64)).tolist()
        for number in some:
            offset = int(runs.offsets[number])
            if self._direction is CopyKind.TO_DEVICE:
                memory.host[offset : offset + size] += np.uint8(1)  # bytes that no way before has copied
            else:
                memory.host[offset : offset + size] = _POISON
        way()
        self._driver.synchronize_stream(memory.stream)
        for number in some:
            offset = int(runs.offsets[number])
            self._driver.copy(int(runs.blocks[number]), memory.page_address, size, CopyKind.TO_HOST, memory.stream)
            self._driver.synchronize_stream(memory.stream)
            if not np.array_equal(memory.host[offset : offset + size], memory.page[:size]):
                raise _WrongBytes(f"page {number} of {self._count} has wrong bytes")


class _WrongBytes(KVDepotError):
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each cell of the table, or all of it as JSON."""
    usual = BenchPlan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the device (default 0)")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="number of rounds per cell of the table")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="time after which no cell is begun")
    parser.add_argument("--largest", type=parse_size, default=usual.largest_bytes, help="size of the largest copy")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    plan = replace(usual, rounds=options.rounds, seconds=options.seconds, largest_bytes=options.largest)
    if plan.rounds < 1 or not any(True for _ in plan.cells()):
        parser.error("nothing to measure: give --rounds of 1 or more, and --largest of 64KiB or more")
    try:
        reason = backend.why_unavailable()
        driver = CudaDriver(options.device) if reason is None else None
    except DriverError as error:
        reason, driver = f"device {options.device} cannot be used: {error}", None
    if driver is None:
        parser.exit(1, f"{reason}\n")
    try:
        result = bench_copies(driver, plan, say=(lambda _line: None) if options.json else print)
    finally:
        driver.close()
    if options.json:
        print(json.dumps(result | {"machine": describe_machine()}, indent=2))


if __name__ == "__main__":
    main()
