"""An engine's process forks, and both processes use the clients: the child's copies are inert."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.engine import PLAN, EngineProcess
from kvdepot.testing.plan import Cache, prompt
from support.cpu.forking_child import CHILD, NUM_CHUNKS, PARENT
from support.cpu.workers import NumpyWorker
from support.stopped import stopped

pytestmark = pytest.mark.slow

FORKS, ROUNDS = 5, 20  # without inert copies, 20 such forks sealed wrong bytes under 38 of 888 prompts


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess("--verify", "all") as depot:
        yield depot


@pytest.fixture
def engine(request: pytest.FixtureRequest, depot: DepotProcess) -> Iterator[EngineProcess]:
    """An engine with a long deadline, so that a wait for a stopped depot is seen, unless a test gives another one."""
    deadline = str(getattr(request, "param", 60.0))
    engine = EngineProcess([sys.executable, "-m", "support.cpu.forking_child", depot.url, deadline])
    yield engine
    engine.close()


def right(num_chunks: int) -> dict[str, int]:
    return {"stored": num_chunks, "retrieved": num_chunks, "found": num_chunks, "wrong": 0}


def ask(engine: EngineProcess, line: str) -> Any:
    return json.loads(engine.ask(line))


@pytest.mark.promise(85)
@pytest.mark.parametrize("engine", [5.0], indirect=True, ids=[""])
@pytest.mark.parametrize("end", ["close", "exit", "collect"])
def test_a_forked_child_misses_everything_and_changes_nothing_for_its_parent(
    end: str, depot: DepotProcess, engine: EngineProcess
) -> None:
    """Regression: each process read replies of the other, and sealed its bytes under the other's keys."""
    before = depot.status()
    salts = [number * 1000 for number in range(FORKS)]
    answers = [ask(engine, f"twins {ROUNDS} {end} {salt}") for salt in salts]
    worker = NumpyWorker(depot.url, PLAN)
    worker.wait_until_connected(10)
    reader = Cache(worker, PLAN)
    for salt, both in zip(salts, answers, strict=True):
        for number in range(both["parent"]["rounds"]):
            assert reader.retrieve(prompt(NUM_CHUNKS, salt=salt + PARENT + number)) == NUM_CHUNKS
        for number in range(ROUNDS):
            assert reader.retrieve(prompt(NUM_CHUNKS, salt=salt + CHILD + number)) == 0
    worker.context.close()
    for both in answers:
        child, every = both["child"], NUM_CHUNKS * both["parent"]["rounds"]
        assert both["parent"] == {**right(every), "rounds": both["parent"]["rounds"]}
        assert both["after"] == {**right(NUM_CHUNKS), "rounds": 1}
        assert both["status"] == 0
        assert both["is_same"], "the parent kept its session"
        assert child["pending"] == 0
        assert {name: child[name] for name in right(0)} == right(0)
        assert ["forked" in line for line in child["lines"]] == [True, True], "one line of each client"
        assert child["shared"] == 0, "without the child's copies, the depot sees the death of the parent by its socket"

    wait_until(lambda: depot.status().num_sessions == before.num_sessions)
    after = depot.status()
    assert after.num_leases == 2 * FORKS, "of the parent's lookups before each fork"
    assert (after.num_tickets, after.counters.get("entries_corrupt", 0)) == (0, 0)


@pytest.mark.promise(85)
def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_held(
    depot: DepotProcess, engine: EngineProcess
) -> None:
    with stopped(depot):
        child = ask(engine, "locked")
    assert (child["stored"], child["retrieved"], child["found"], child["wrong"]) == (0,) * 4
    assert child["seconds"] < 10
    assert "forked" in child["why"]


def test_a_living_child_does_not_hide_the_end_of_a_session_from_the_waits_of_its_parent(
    depot: DepotProcess, engine: EngineProcess
) -> None:
    with stopped(depot):
        assert ask(engine, "lost") == {"is_waiting": False}
