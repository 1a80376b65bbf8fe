"""An eviction policy that fails costs the store that needed it, and nothing else."""

from typing import Any

import pytest

from kvdepot.index.eviction import NO_NODE, POLICIES, ChunkTree, LeastRecentlyUsed, Preference
from support.index import PAGE, Bench, prompt

METHODS = ["added", "used", "unpinned", "removed", "victim"]


class Failing(LeastRecentlyUsed):
    """Fails in one method as long as `fails` says so."""

    fails = ""
    proposal: int | None = None  # the victim that it proposes, whatever can leave

    def __init__(self, tree: ChunkTree, preference: Preference) -> None:
        super().__init__(tree, preference)
        for name in METHODS:
            setattr(self, name, self.failing(name, getattr(self, name)))

    def failing(self, name: str, method: Any) -> Any:
        def call(*arguments: int) -> Any:
            if Failing.fails == name:
                raise RuntimeError(f"{name} has a bug")
            if name == "victim" and Failing.proposal is not None:
                return Failing.proposal
            return method(*arguments)

        return call


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A depot with a full pool of four pages."""
    monkeypatch.setitem(POLICIES, "failing", Failing)
    monkeypatch.setattr(Failing, "fails", "")
    bench = Bench(pages=4, policy="failing")
    worker = bench.worker()
    for name in range(4):
        worker.store(prompt(1, name))
    return bench


@pytest.mark.promise(43)
def test_a_policy_that_fails_costs_one_store_and_a_counter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.worker()
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "fails", "victim")
        plan = worker.store(prompt(3, 10))
        assert (plan.ticket, plan.num_declined) == (0, 3)
    assert bench.depot.status.fields()["counters"]["policy_errors"] == 1
    bench.index.check_integrity()
    assert bench.index.extents.used_bytes == 4 * PAGE
    assert worker.store(prompt(3, 10)).num_declined == 0
    worker.release(worker.lookup(prompt(3, 10)).lease)
    bench.drain()


@pytest.mark.promise(43)
@pytest.mark.parametrize("method", METHODS)
def test_whatever_fails_in_a_policy_the_depot_stays_whole(
    method: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = bench.worker()
    monkeypatch.setattr(Failing, "fails", method)
    for name in range(10, 14):
        worker.store(prompt(2, name))
        worker.release(worker.lookup(prompt(2, name)).lease)
        bench.index.check_integrity()
    assert bench.depot.status.fields()["counters"]["policy_errors"] > 0
    bench.drain()


@pytest.mark.promise(43)
@pytest.mark.parametrize("node", [0, 10**6, NO_NODE, -1])
def test_a_victim_that_cannot_leave_does_not_leave(node: int, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.worker()
    worker.lookup(prompt(1, 0))
    assert bench.index.node(bench.index.spaces[0], prompt(1, 0).digests, 0) == 0
    monkeypatch.setattr(Failing, "proposal", node)
    assert worker.store(prompt(1, 10)).num_declined == 1
    assert worker.lookup(prompt(1, 0)).num_chunks == 1
    bench.index.check_integrity()
