"""A simulated tier: the real queue with its breaker over storage that is slow, hangs, fails and recovers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers import queue as queue_module
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.breaker import Breaker
from kvdepot.tiers.jobs import Call, JobKind
from kvdepot.tiers.keys import has_names
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.trailer import checksum_of, make_trailer
from simulation.memory import PAGE, Claim, Memory, Tag, Violation, num_pages, pages_in

DEADLINE_SECONDS = 2.0
MAXIMUM_ENTRIES = 64


@dataclass
class Storage(Tier):
    """The tier's contents, which outlive servers."""

    memory: Memory
    entries: dict[bytes, list[Tag]] = field(default_factory=dict[bytes, list[Tag]])
    is_failing: bool = False
    batch_entries: int = 2
    keeps_runs: bool = False
    wants_places: bool = False

    def _check(self) -> None:
        if self.is_failing:
            raise OSError("the storage fails")

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check()
        return [key in self.entries for key in keys]

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        del sizes
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        self._check()
        for key, (offset, num_bytes) in zip(keys, extents, strict=True):
            tags = self.memory.pages_of(offset, num_bytes)
            first = tags[0]
            cells = [tag[2] for tag in tags if tag is not None and not tag[3]] or [0]
            heads = sum(cell >> 8 == cells[0] >> 8 for cell in cells)  # cells are a rectangle, layer after layer
            pages_a_cell = max(1, len(tags) // len(cells))
            for number, tag in enumerate(tags):
                cell, page = divmod(number, pages_a_cell)
                layer, head = divmod(cell, heads)
                if first is None or tag != (key[-DIGEST_BYTES:], first[1], first[2] + (layer << 8) + head, page):
                    raise Violation(f"the tier gets other bytes than those of chunk {key[-DIGEST_BYTES:].hex()[:6]}")
            self.entries[key] = [tag for tag in tags if tag is not None]
            while len(self.entries) > MAXIMUM_ENTRIES:
                del self.entries[next(iter(self.entries))]
        return [True] * len(keys)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        self._check()
        return [self.fill(key, offset, num_bytes) for key, (offset, num_bytes) in zip(keys, extents, strict=True)]

    def fill(self, key: bytes, offset: int, num_bytes: int) -> bytes | None:
        """Copy an entry into its extent. Return its trailer: the one of zero bytes, as this pool has none."""
        tags = self.entries.get(key, [])
        for number, tag in enumerate(tags):
            self.memory.pages[offset // PAGE + number] = tag
        return make_trailer(key, num_bytes, checksum_of(b"")) if len(tags) == num_pages(num_bytes) else None

    def remove(self, keys: Sequence[bytes]) -> None:
        raise Violation(f"the tier is said to have broken {len(keys)} entries")

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        wanted = [key for key in self.entries if has_names(key, tenant, model)]
        for key in wanted:
            del self.entries[key]
        yield len(wanted)

    def probe(self) -> None:
        self._check()

    def usage(self) -> TierUsage:
        return TierUsage(len(self.entries), 0, 1 << 40, {})

    def close(self) -> None:
        return


class Threads:
    """Replaces `TierWorkers`: the history decides when a call begins and ends."""

    memory: Memory
    holder: str

    def __init__(
        self,
        name: str,
        most_writes: int,
        make_call: Callable[[Call], None],
        on_ended: Callable[[Call], None],
        clock: Callable[[], float],
    ) -> None:
        del name, most_writes
        self._make_call, self._on_ended, self._clock = make_call, on_ended, clock
        self.waiting: dict[JobKind, deque[Call]] = {operation: deque[Call]() for operation in JobKind}
        self.begun: list[Call] = []
        self.claims: dict[int, list[Claim]] = {}  # of reads, by id of the call
        self.sources: dict[int, list[int]] = {}  # the pages that a write copies, by id of the call

    def hire(self) -> None:
        return

    def dismiss(self) -> None:
        return

    def hand_in(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self.waiting[call.operation].append(call)
            if call.operation is JobKind.READ:
                job = call.job
                places = zip(job.keys[call.first : call.last], job.extents[call.first : call.last], strict=True)
                self.claims[id(call)] = [
                    self.memory.claim(self.holder, (key[-DIGEST_BYTES:], -1, -1), *extent) for key, extent in places
                ]
            elif call.operation is JobKind.WRITE:
                self.sources[id(call)] = [page for extent in call.extents for page in pages_in(*extent)]
                self.memory.copied.update(self.sources[id(call)])

    def num_waiting(self, operation: JobKind) -> int:
        return len(self.waiting[operation])

    def running(self) -> list[Call]:
        return list(self.begun)

    def take_back(self, operation: JobKind, most: int, is_wanted: Callable[[Call], bool]) -> list[Call]:
        waiting, taken = self.waiting[operation], list[Call]()
        for _ in range(min(most, len(waiting))):
            call = waiting.popleft()
            (taken if is_wanted(call) else waiting).append(call)
        for call in taken:
            self.let_go(call)
        return taken

    def begin(self) -> Call | None:
        """Begin the next call, as `TierWorkers` would choose it."""
        is_clearing = any(call.operation is JobKind.CLEAR and not call.is_late for call in self.begun)
        is_writing = any(call.operation is JobKind.WRITE and not call.is_late for call in self.begun)
        for operation in (JobKind.CONTAINS, JobKind.READ, JobKind.TOUCH, JobKind.CLEAR, JobKind.WRITE):
            is_blocked = operation in (JobKind.CLEAR, JobKind.WRITE) and (is_clearing or is_writing)
            if self.waiting[operation] and not is_blocked:
                call = self.waiting[operation].popleft()
                call.started_at = self._clock()
                self.begun.append(call)
                return call
        return None

    def finish(self, number: int) -> Call:
        """Let a call return."""
        call = self.begun.pop(number)
        self._make_call(call)
        call.has_run = True
        self.let_go(call)
        self._on_ended(call)
        return call

    def let_go(self, call: Call) -> None:
        """Release the pages of a call that no longer touches them."""
        for claim in self.claims.pop(id(call), ()):
            self.memory.end(claim)
        self.memory.copied.subtract(self.sources.pop(id(call), ()))

    def close(self, drain_seconds: float, running_seconds: float, num_hung: int) -> None:
        del drain_seconds, running_seconds, num_hung

    def end(self) -> None:
        return


class SimulatedBreaker(Breaker):
    """The real breaker, with probes that answer at once."""

    def _begin_probe(self, number: int) -> None:
        self._make_probe(number)


class SimulatedQueue(TierQueue):
    """The real queue, with simulated threads."""

    _workers: Threads  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def threads(self) -> Threads:
        return self._workers


def make_queue(storage: Storage, holder: str, clock: Callable[[], float]) -> SimulatedQueue:
    """Return a queue over storage whose calls are made by a process named `holder`."""

    def make_threads(*arguments: object) -> Threads:
        threads = Threads(*arguments)  # pyright: ignore[reportArgumentType]
        threads.memory, threads.holder = storage.memory, holder
        return threads

    with patch.multiple(queue_module, TierWorkers=make_threads, Breaker=SimulatedBreaker):
        pool = TierPool(-1, memoryview(bytearray()))
        return SimulatedQueue(storage, pool, "tier", deadline_seconds=DEADLINE_SECONDS, num_threads=4, clock=clock)
