"""Containers that share only a folder of sockets, but no PID, IPC or mount namespace and no `/dev/shm`."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, start_child, wait_until
from kvdepot.testing.engine import EngineProcess
from support.cpu.engines import CHUNK, large_engine

_SERVER = ["unshare", "--fork", "--pid", "--ipc", "--mount-proc"]
_WORKER = [*_SERVER, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


def _why_not() -> str:
    try:
        done = subprocess.run([*_WORKER, "true"], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "needs unshare"
    return f"this user may not make namespaces: {done.stderr}" if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")


def child_of(pid: int) -> int:
    """Return the only child of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        children = []
    if len(children) != 1:
        raise ProcessLookupError(f"process {pid} has {len(children)} children")
    return int(children[0])


class DepotOfUnshare(DepotProcess):
    """The server is the only child of the command that makes its namespaces."""

    @staticmethod
    def start_child(
        command: Sequence[str], *, has_pipes: bool = False, new_session: bool = False
    ) -> subprocess.Popen[bytes]:
        return start_child([*_SERVER, *command], has_pipes=has_pipes, new_session=new_session)

    @property
    def pid(self) -> int:
        return child_of(super().pid)


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotOfUnshare() as depot:
        yield depot


@pytest.fixture
def spawn(depot: DepotProcess) -> Iterator[Callable[[str], EngineProcess]]:
    engines: list[EngineProcess] = []

    def spawn(instance: str) -> EngineProcess:
        engines.append(large_engine(depot, instance, _WORKER))
        return engines[-1]

    yield spawn
    for engine in engines:
        kill(engine)
        engine.close()


def kill(engine: EngineProcess) -> None:
    """Kill the engine itself and the command that runs it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child_of(engine.pid), signal.SIGKILL)
    engine.kill()


def stop_in_a_store(engine: EngineProcess, salt: int, num_chunks: int) -> None:
    """Stop the engine in a store when half of the chunks are written."""
    engine.expect("armed", "gate store half")
    engine.expect("reached", f"store {salt} {num_chunks}")


Spawn = Callable[[str], EngineProcess]


@pytest.mark.slow
@pytest.mark.promise(54)
def test_containers_share_what_one_of_them_stored(depot: DepotProcess, spawn: Spawn) -> None:
    one, other = spawn("one"), spawn("other")
    assert {context.pid for context in depot.status().contexts} == {0}
    one.expect("5", "store 1 5")
    other.expect("5", "lookup 1 5")
    other.expect("5", "retrieve 1 5")


@pytest.mark.slow
@pytest.mark.promise(24, 54)
def test_the_space_that_a_killed_container_had_prepared_comes_back(depot: DepotProcess, spawn: Spawn) -> None:
    victim, other = spawn("victim"), spawn("other")
    stop_in_a_store(victim, 1, 3)
    kill(victim)
    wait_until(lambda: depot.status().pool_used_bytes == 0)
    other.expect("3", "store 1 3")


@pytest.mark.slow
@pytest.mark.promise(23, 24, 54)
def test_the_next_server_waits_for_a_container_that_may_be_writing_and_for_no_other(
    depot: DepotProcess, spawn: Spawn
) -> None:
    stopped, killed, other = spawn("stopped"), spawn("killed"), spawn("other")
    stop_in_a_store(stopped, 1, 3)
    stop_in_a_store(killed, 2, 4)
    other.expect("2", "store 3 2")
    os.kill(child_of(stopped.pid), signal.SIGSTOP)
    depot.kill()
    kill(killed)
    depot.start()
    wait_until(lambda: not depot.status().recovering)
    assert depot.status().quarantined_bytes == 3 * CHUNK
    wait_until(lambda: other.ask("retrieve 3 2") == "2")
    kill(stopped)
    wait_until(lambda: depot.status().quarantined_bytes == 0)
    assert depot.status().pool_used_bytes == 2 * CHUNK


@pytest.mark.slow
@pytest.mark.promise(23, 54)
def test_a_container_that_comes_back_to_the_next_server_frees_what_it_left(depot: DepotProcess, spawn: Spawn) -> None:
    engine = spawn("engine")
    stop_in_a_store(engine, 1, 3)
    depot.kill()
    depot.start()
    engine.expect("missed", "go")
    wait_until(lambda: len(depot.status().contexts) == 2 and not depot.status().recovering)
    # Regression: after a lost connection, the engine kept the pool mapped until its next transfer.
    wait_until(lambda: depot.status().quarantined_bytes == 0)
    wait_until(lambda: engine.ask("store 1 3") == "3")
    engine.expect("3", "retrieve 1 3")
