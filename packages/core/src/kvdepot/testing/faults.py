"""The fault suite of accelerator backends: workers and servers that are killed or stopped in the middle of a copy.

Inherit `FaultSuite` beside `BackendSuite`, and implement `make_worker` for this process and `engine_command` for an
engine in its own (`kvdepot.testing.engine.obey`). Every test ends with right bytes or a miss, and the depot frees the
space and the leases of dead processes.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import Worker
from kvdepot.testing.engine import PLAN, EngineProcess
from kvdepot.testing.plan import Cache, WorkerPlan, prompt

_WAIT_SECONDS: Final = 30.0  # for a depot to clean up after a process, which takes milliseconds on an idle machine
_CHUNK_BYTES: Final = PLAN.chunk_size_bytes(0)
_PLACES: Final = ("before", "half", "after")

Spawn = Callable[[str], EngineProcess]


class FaultSuite:
    """Name the class `Test...`, and implement `make_worker` and `engine_command`."""

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> Worker:
        """Return a worker of this process, as in `BackendSuite`."""
        raise NotImplementedError

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        """Return the command of a process that calls `obey` with a worker of the same kind."""
        raise NotImplementedError

    @pytest.fixture
    def depot(self) -> Iterator[DepotProcess]:
        """A depot with a pool of 16 MiB."""
        with DepotProcess(pool_size="16MiB") as depot:
            yield depot

    @pytest.fixture
    def spawn(self, depot: DepotProcess) -> Iterator[Spawn]:
        """Starts engines in processes of their own."""
        engines: list[EngineProcess] = []

        def spawn(instance: str) -> EngineProcess:
            engines.append(EngineProcess(self.engine_command(depot.url, instance)))
            return engines[-1]

        yield spawn
        for engine in engines:
            engine.close()

    @pytest.fixture
    def victim(self, spawn: Spawn) -> EngineProcess:
        """An engine in which a fault happens."""
        return spawn("victim")

    @pytest.fixture
    def other(self, depot: DepotProcess) -> Iterator[Cache]:
        """A worker without faults."""
        worker = self.make_worker(depot.url, PLAN)
        worker.wait_until_connected(_WAIT_SECONDS)
        yield Cache(worker, PLAN)
        worker.context.close()

    # --- the worker -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("where", _PLACES)
    @pytest.mark.promise(9, 24)
    def test_a_worker_killed_in_a_store_leaves_nothing(
        self, where: str, depot: DepotProcess, victim: EngineProcess, other: Cache
    ) -> None:
        """No lookup finds its chunks, their space is freed, and others can store the same chunks."""
        victim.expect("armed", f"gate store {where}")
        victim.expect("reached", "store 1 4")
        assert depot.status().pool_used_bytes == 4 * _CHUNK_BYTES
        victim.kill()
        wait_until(lambda: depot.status().pool_used_bytes == 0, _WAIT_SECONDS)
        assert other.retrieve(prompt(4, salt=1)) == 0
        assert other.store(prompt(4, salt=1))
        assert other.retrieve(prompt(4, salt=1)) == 4

    @pytest.mark.parametrize("where", _PLACES)
    @pytest.mark.promise(10, 24, 26)
    def test_a_worker_killed_in_a_retrieve_gives_its_leases_back(
        self, where: str, depot: DepotProcess, victim: EngineProcess, other: Cache
    ) -> None:
        """The other engine's bytes stay right."""
        assert other.store(prompt(4))
        victim.expect("armed", f"gate retrieve {where}")
        victim.expect("reached", "retrieve 0 4")
        assert depot.status().num_leases == 1
        victim.kill()
        wait_until(lambda: depot.status().num_leases == 0, _WAIT_SECONDS)
        assert other.retrieve(prompt(4)) == 4

    @pytest.mark.promise(25)
    def test_a_stopped_worker_keeps_its_space_until_it_is_dead(
        self, depot: DepotProcess, victim: EngineProcess, other: Cache
    ) -> None:
        """The worker may resume and write to its extents."""
        victim.expect("armed", "gate store half")
        victim.expect("reached", "store 1 4")
        victim.signal(signal.SIGSTOP)
        assert other.store(prompt(3, salt=2))
        assert other.retrieve(prompt(3, salt=2)) == 3
        assert depot.status().num_tickets == 1
        victim.kill()
        wait_until(lambda: depot.status().pool_used_bytes == 3 * _CHUNK_BYTES, _WAIT_SECONDS)
        assert other.retrieve(prompt(3, salt=2)) == 3

    def test_a_worker_that_was_stopped_goes_on(self, depot: DepotProcess, victim: EngineProcess, other: Cache) -> None:
        """The transfer that was interrupted is right or a miss."""
        victim.expect("armed", "gate store half")
        victim.expect("reached", "store 1 4")
        victim.signal(signal.SIGSTOP)
        assert other.store(prompt(3, salt=2))
        victim.signal(signal.SIGCONT)
        assert victim.ask("go") in ("4", "missed")
        wait_until(lambda: victim.ask("store 1 4") == "4", _WAIT_SECONDS)
        victim.expect("4", "retrieve 1 4")
        assert other.retrieve(prompt(4, salt=1)) == 4

    def test_the_successor_of_a_killed_engine_finds_what_it_had_stored(self, spawn: Spawn) -> None:
        """The cache belongs to the depot, not to the engine."""
        engine = spawn("engine")
        engine.expect("8", "store 1 8")
        engine.kill()
        successor = spawn("engine")
        successor.expect("8", "lookup 1 8")
        successor.expect("8", "retrieve 1 8")

    # --- the server -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("where", _PLACES)
    @pytest.mark.promise(9, 23)
    def test_a_server_killed_in_a_store_makes_it_a_miss(
        self, where: str, depot: DepotProcess, victim: EngineProcess
    ) -> None:
        """Everything stored before is found again, and the worker reconnects."""
        victim.expect("4", "store 1 4")
        victim.expect("armed", f"gate store {where}")
        victim.expect("reached", "store 2 4")
        depot.kill()
        depot.start()
        victim.expect("missed", "go")
        wait_until(lambda: victim.ask("retrieve 1 4") == "4", _WAIT_SECONDS)
        wait_until(lambda: victim.ask("store 2 4") == "4", _WAIT_SECONDS)
        victim.expect("4", "retrieve 2 4")
        wait_until(lambda: depot.status().quarantined_bytes == 0, _WAIT_SECONDS)
        assert depot.status().pool_used_bytes == 8 * _CHUNK_BYTES

    @pytest.mark.parametrize("where", _PLACES)
    @pytest.mark.promise(9, 23)
    def test_worker_and_server_killed_in_a_store_leave_what_was_sealed(
        self, where: str, depot: DepotProcess, victim: EngineProcess, other: Cache
    ) -> None:
        """Lookups find sealed chunks, and no chunk of the interrupted store."""
        victim.expect("4", "store 1 4")
        victim.expect("armed", f"gate store {where}")
        victim.expect("reached", "store 2 4")
        depot.kill()
        victim.kill()
        depot.start()
        other.worker.wait_until_connected(_WAIT_SECONDS)
        wait_until(lambda: depot.status().pool_used_bytes == 4 * _CHUNK_BYTES, _WAIT_SECONDS)
        assert other.retrieve(prompt(4, salt=2)) == 0
        assert other.retrieve(prompt(4, salt=1)) == 4

    @pytest.mark.parametrize("where", _PLACES)
    @pytest.mark.promise(23, 29)
    def test_a_server_killed_in_a_retrieve_serves_no_wrong_byte(
        self, where: str, depot: DepotProcess, victim: EngineProcess
    ) -> None:
        """The worker's mapping of the pool outlives the server."""
        victim.expect("4", "store 1 4")
        victim.expect("armed", f"gate retrieve {where}")
        victim.expect("reached", "retrieve 1 4")
        depot.kill()
        depot.start()
        assert victim.ask("go") in ("0", "4")
        wait_until(lambda: victim.ask("retrieve 1 4") == "4", _WAIT_SECONDS)

    @pytest.mark.parametrize("direction", ["store", "retrieve"])
    def test_a_server_that_hangs_costs_a_miss_and_comes_back(
        self, direction: str, depot: DepotProcess, victim: EngineProcess
    ) -> None:
        """Each wait has a deadline."""
        victim.expect("4", "store 1 4")
        victim.expect("armed", f"gate {direction} half")
        victim.expect("reached", f"{direction} {2 if direction == 'store' else 1} 4")
        depot.signal(signal.SIGSTOP)
        assert victim.ask("go") in ("missed", "0", "4")
        assert victim.ask("retrieve 1 4") == "0"
        depot.signal(signal.SIGCONT)
        wait_until(lambda: victim.ask("retrieve 1 4") == "4", _WAIT_SECONDS)
        wait_until(lambda: victim.ask("store 3 4") == "4", _WAIT_SECONDS)
        victim.expect("4", "retrieve 3 4")
        wait_until(lambda: depot.status().num_tickets == 0, _WAIT_SECONDS)

    @pytest.mark.promise(29)
    def test_killing_the_server_over_and_over_under_load_serves_no_wrong_byte(
        self, depot: DepotProcess, spawn: Spawn
    ) -> None:
        """Two engines store and retrieve meanwhile; after the last kill, both work again."""
        engines = [spawn("one"), spawn("two")]
        for number in range(4):
            for engine in engines:
                engine.say(f"store {number} 8")
            depot.kill()
            for engine in engines:
                engine.listen()
                engine.say(f"retrieve {number} 8")
            depot.start()
            for engine in engines:
                assert not engine.listen().startswith("wrong")
        for engine in engines:
            wait_until(lambda engine=engine: engine.ask("store 9 8") == "8", _WAIT_SECONDS)
            engine.expect("8", "retrieve 9 8")
