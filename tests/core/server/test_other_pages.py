"""Engines with equal specs but other page sizes, one after the other: the later one gets no promise of entries that it
cannot read, and stores its own."""

import msgspec
import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import messages as m
from support.index import PAGE, Bench, prompt
from support.peer import DETAIL, FULL, Peer, registration
from support.peer import prompt as peers_prompt

RUN = peers_prompt(8)
STAGES = (m.GroupShape(FULL, 1, layers=4, heads=2),)


def engine(depot: DepotProcess, page: int, instance: str) -> Peer:
    """Return the only engine of a depot, with pages of this size."""
    wait_until(lambda: depot.status().num_sessions == 0)
    detail = msgspec.structs.replace(DETAIL, page_sizes_bytes=(page,))
    return Peer(depot, registration(details=(detail,), instance=instance))


def readable(peer: Peer) -> int:
    plan = peer.ask(m.PrepareRetrieve(peer.context, "r", RUN.digests, 0, (RUN.num_chunks,)))
    assert isinstance(plan, m.RetrievePlan)
    return plan.num_chunks


@pytest.mark.promise(32)
@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_with_other_pages_replaces_the_entries_of_one_that_left(restarts: bool, depot: DepotProcess) -> None:
    # Regression: each lookup promised all chunks, each retrieve delivered none, and each store called all present.
    for number, page in enumerate((64, 128, 64)):
        peer = engine(depot, page, f"engine {number}")
        if number:
            expected = 8 if restarts else 8 * number
            wait_until(lambda: depot.status().counters["entries_unreadable"] == expected)  # noqa: B023
            assert peer.find(RUN).num_chunks == 0
        assert peer.prepare(RUN).num_present == 0
        peer.close()
        peer = engine(depot, page, f"engine {number}")
        assert peer.store(RUN) == 8
        assert (peer.find(RUN).num_chunks, readable(peer)) == (8, 8)
        peer.close()
        if restarts:
            depot.kill()
            depot.start()


def test_only_entries_with_layers_of_the_new_worker_are_removed_leased_ones_too() -> None:
    bench, run = Bench(STAGES), prompt(3)
    first, second = bench.worker(0, stages=2), bench.worker(1, stages=2)
    for worker in (first, second):
        worker.store(run)
    assert first.lookup(run).num_chunks == 3
    bench.depot.end_session(first.session)
    other = bench.worker(0, stages=2, page=2 * PAGE)
    bench.depot.background.work()
    bench.index.check_integrity()
    assert bench.index.entries.num_sealed == 3
    assert other.store(run).num_present == 0
    assert second.prepare(run).num_present == 3
    bench.drain()


def test_an_engine_with_equal_pages_keeps_what_another_has_stored() -> None:
    bench, run = Bench(STAGES), prompt(3)
    first = bench.worker(0)
    first.store(run)
    bench.depot.end_session(first.session)
    for stage in range(4):
        reader = bench.worker(stage, stages=4)
        plan = reader.retrieve(run)
        assert plan.num_chunks == 3
        reader.release(plan.lease)
    bench.depot.background.work()
    assert "entries_unreadable" not in bench.depot.counters
    bench.drain()
