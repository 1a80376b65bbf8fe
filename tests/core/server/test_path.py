"""A request touches only the parts of the server that it needs."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

import kvdepot
from kvdepot.config import ServerConfig
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import wait_until
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.server.app import DepotServer
from support import index as small
from support.peer import Peer, find, prompt

_ROOT = str(Path(kvdepot.__file__).parent) + "/"
_ROUNDS = 20  # the shortest one counts, as the loop sweeps twice a second


class Trace:
    """Records the functions that the server's thread calls, each with its module."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, str]] = []

    @property
    def modules(self) -> list[str]:
        """The module of each call, in order."""
        return [module for module, _ in self.functions]

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            self.functions.append((code.co_filename.removeprefix(_ROOT).removesuffix(".py"), code.co_qualname))


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[DepotServer, Trace]]:
    path = Trace()
    tiers = (f"disk://{tmp_path}/below?capacity=16MiB",)
    config = ServerConfig(ephemeral=True, directory=tmp_path, pool_size_bytes=16 << 20, tiers=tiers)
    server = DepotServer(config)
    threading.setprofile(path.note)
    try:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
    finally:
        threading.setprofile(None)
    yield server, path
    server.stop()
    thread.join(10)


def test_a_hit_asks_no_part_that_has_nothing_to_do_with_it(traced: tuple[DepotServer, Trace], tmp_path: Path) -> None:
    server, path = traced
    peer = Peer(SimpleNamespace(url=str(tmp_path)))  # type: ignore[arg-type]
    peer.store(prompt(4))
    assert server.depot.state.tiering is not None
    (queue,) = server.depot.state.tiering.queues
    wait_until(lambda: queue.counters["written_entries"] == 4)
    trips: list[list[str]] = []
    for _ in range(_ROUNDS):
        turns = sum(server.loop.turns.counts)
        path.functions.clear()
        assert peer.find(prompt(4)).num_chunks == 4
        wait_until(lambda turns=turns: sum(server.loop.turns.counts) > turns)  # until the turn has ended
        trips.append(path.modules)
    peer.close()
    least = set(min(trips, key=len))
    assert {"server/loop", "server/lookups", "index/visibility"} <= least
    assert len(least) <= 13, f"an engineer reads these: {sorted(least)}"
    idle = {"movers/table", "features/flights/feature", "timers", "server/turns"}
    assert not least & idle
    assert not any(module.startswith("tiers/") for module in least), "the tiers' next turn sees the hit"


def test_a_miss_in_a_tier_that_answers_from_memory_ends_within_the_turn(
    traced: tuple[DepotServer, Trace], tmp_path: Path
) -> None:
    server, path = traced
    peer = Peer(SimpleNamespace(url=str(tmp_path)))  # type: ignore[arg-type]
    peer.store(prompt(1))
    trips: list[list[tuple[str, str]]] = []
    for number in range(_ROUNDS):
        turns = sum(server.loop.turns.counts)
        path.functions.clear()
        assert find(peer, prompt(4, f"none {number}")) == 0
        wait_until(lambda turns=turns: sum(server.loop.turns.counts) > turns)
        trips.append(path.functions[:])
    peer.close()
    least = min(trips, key=len)
    modules = [module for module, _ in least]
    assert {"features/flights/feature", "tiers/promotion", "tiers/disk/listing"} <= set(modules)
    assert len(set(least)) <= 80, f"an engineer reads these: {sorted(set(least))}"
    assert len(set(modules)) <= 26
    assert sum(one != other for one, other in itertools.pairwise(modules)) <= 67
    assert not {"tiers/workers", "tiers/breaker", "tiers/splits", "timers"} & set(modules)


def test_a_further_chunk_of_a_store_changes_file_at_most_twelve_times(
    traced: tuple[DepotServer, Trace], tmp_path: Path
) -> None:
    """Until it is in the disk tier."""
    server, path = traced
    peer = Peer(SimpleNamespace(url=str(tmp_path)))  # type: ignore[arg-type]
    assert server.depot.state.tiering is not None
    (queue,) = server.depot.state.tiering.queues

    def changes(num_chunks: int, name: str) -> int:
        wanted = queue.counters["written_entries"] + num_chunks
        path.functions.clear()
        peer.store(prompt(num_chunks, name))
        wait_until(lambda: queue.counters["written_entries"] == wanted)
        turns = sum(server.loop.turns.counts)
        wait_until(lambda: sum(server.loop.turns.counts) > turns)
        return sum(one != other for one, other in itertools.pairwise(path.modules))

    one, nine = changes(1, "one"), changes(9, "nine")
    for each in range(_ROUNDS):  # a busy machine divides the work into more turns
        if 0 < nine - one <= 8 * 12:
            break
        one, nine = min(one, changes(1, f"one {each}")), min(nine, changes(9, f"nine {each}"))
    peer.close()
    assert 0 < nine - one <= 8 * 12


def test_a_further_chunk_of_a_store_or_a_retrieve_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a loop: the calls that a chunk adds to a request, a full pool's evictions included."""
    bench = small.Bench()
    worker = bench.worker()
    monkeypatch.setattr(small.WatchfulAllocator, "free", ExtentAllocator.free)  # its checks call functions, too

    def calls(do: Callable[[], object]) -> int:
        path = Trace()
        sys.setprofile(path.note)
        try:
            do()
        finally:
            sys.setprofile(None)
        return len(path.functions)

    def added(do: Callable[[KeyRun], object], short: KeyRun, long: KeyRun) -> float:
        """Return the calls that each further chunk adds."""
        return (calls(partial(do, long)) - calls(partial(do, short))) / (long.num_chunks - short.num_chunks)

    for name in range(4):
        worker.store(small.prompt(16, name=name))
    assert added(worker.store, small.prompt(1, name=8), small.prompt(16, name=9)) <= 6
    assert bench.index.evictor.num_evicted == 17
    assert added(worker.retrieve, small.prompt(1, name=9), small.prompt(16, name=9)) <= 3
