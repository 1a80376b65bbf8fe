"""Mode `ipc`: workers, movers and depots are killed before, during and after a copy, on any device.

The tests of the fake device and of the real one inherit `MoverFaultSuite`. Where the device itself cannot be told to
wait, a copy is held by stopping its mover.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import Worker
from kvdepot.testing.engine import PLAN, EngineProcess
from kvdepot.testing.plan import Cache, WorkerPlan, prompt
from kvdepot.wire.status import ContextStatus

WAIT_SECONDS = 60.0  # a mover that hangs at its start is replaced after 30


def context_of(depot: DepotProcess, instance: str = "engine") -> ContextStatus:
    (context,) = [context for context in depot.status().contexts if context.instance == instance]
    return context


def wait_for_mover(depot: DepotProcess, instance: str = "engine", *, but: int = 0) -> int:
    """Wait until a worker's mover is ready and its PID is not `but`. Return its PID."""

    pids: list[int] = []

    def is_ready() -> bool:
        contexts = depot.status().contexts
        pids[:] = [found.mover_pid for found in contexts if found.instance == instance and found.mover == "ready"]
        return len(pids) == 1 and pids[0] != but

    wait_until(is_ready, WAIT_SECONDS, "the mover")
    return pids[0]


def wait_until_nothing_is_held(depot: DepotProcess) -> None:
    def is_free() -> bool:
        status = depot.status()
        return (status.num_leases, status.num_tickets, status.quarantined_bytes) == (0, 0, 0)

    wait_until(is_free, WAIT_SECONDS, "leases, tickets and quarantines to end")


def has_memory(pid: int) -> bool:
    """Return whether a process has memory mapped. A dead one has none, even before it is waited for."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path(f"/proc/{pid}/maps").read_text())
    return False


class MoverFaultSuite:
    """Name the class `Test...`, and implement `make_worker` and `engine_command` as in `FaultSuite`."""

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> Worker:
        """Return a worker of this process, in mode `ipc`."""
        raise NotImplementedError

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        """Return the command of a process that calls `obey` with a worker of the same kind."""
        raise NotImplementedError

    def hold_copies(self, mover: int) -> None:
        """Keep a mover's copies from ending from now on."""
        os.kill(mover, signal.SIGSTOP)

    def wait_for_a_copy(self, depot: DepotProcess, mover: int) -> None:
        """Wait until a copy was requested."""
        del mover
        wait_until(lambda: depot.status().num_tickets + depot.status().num_leases == 1, WAIT_SECONDS, "a copy")

    def let_go(self) -> None:
        """Let the copies of surviving movers end. Movers that were stopped are dead by now."""

    @pytest.fixture
    def depot(self) -> Iterator[DepotProcess]:
        """A depot whose movers may be slow."""
        with DepotProcess("--move-seconds", "20") as depot:
            yield depot

    @pytest.fixture
    def victim(self, depot: DepotProcess) -> Iterator[EngineProcess]:
        """The engine of the fault: it, its mover or its depot is killed."""
        engine = EngineProcess(self.engine_command(depot.url, "victim"))
        yield engine
        engine.close()

    @pytest.fixture
    def other(self, depot: DepotProcess) -> Iterator[Cache]:
        """A worker that is spared, except that its depot may be killed."""
        worker = self.make_worker(depot.url, replace(PLAN, instance="other"))
        worker.wait_until_connected(WAIT_SECONDS)
        yield Cache(worker, PLAN)
        worker.context.close()

    @pytest.mark.promise(9, 24)
    @pytest.mark.parametrize(
        ("killed", "when", "what"),
        list(itertools.product(("worker", "mover", "server"), ("before", "during", "after"), ("store", "retrieve"))),
    )
    def test_whoever_is_killed_costs_a_miss_and_holds_nothing(
        self, killed: str, when: str, what: str, depot: DepotProcess, other: Cache, victim: EngineProcess
    ) -> None:
        """Afterwards the other worker stores and retrieves the right bytes, and so does the victim if it survives."""
        before = wait_for_mover(depot, "victim")
        if what == "retrieve":
            victim.expect("3", "store 1 3")
        if when == "during":
            self.hold_copies(before)
            victim.say(f"{what} 1 3")
            self.wait_for_a_copy(depot, before)
        elif when == "after":
            victim.expect("3", f"{what} 1 3")

        if killed == "worker":
            victim.kill()
        elif killed == "mover":
            os.kill(before, signal.SIGKILL)
        else:
            depot.kill()
            depot.start()
            wait_until(lambda: not depot.status().recovering, WAIT_SECONDS)
        self.let_go()

        if killed != "worker":
            if when == "during":
                assert victim.listen() == ("missed" if what == "store" else "0")
            wait_for_mover(depot, "victim", but=before)
        if killed == "server":
            other.worker.wait_until_connected(WAIT_SECONDS)
        wait_until(lambda: not has_memory(before), WAIT_SECONDS, "the mover to die")
        wait_until_nothing_is_held(depot)
        assert other.retrieve(prompt(3, salt=1)) == (0 if what == "store" and when != "after" else 3)
        assert other.store(prompt(4, salt=2))
        assert other.retrieve(prompt(4, salt=2)) == 4
        if killed == "worker":
            wait_until(lambda: {context.instance for context in depot.status().contexts} == {"other"}, WAIT_SECONDS)
        else:
            victim.expect("3", "store 1 3")
            victim.expect("3", "retrieve 1 3")
            victim.expect("4", "retrieve 2 4")
