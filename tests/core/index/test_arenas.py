"""In a large pool, the entries of each part lie in arenas of their own, also when it is full."""

import pytest

from kvdepot.layout import GroupKind
from kvdepot.wire import messages as m
from support.index import PAGE, Bench, Worker, prompt

RANKS = 8
NUM_CHUNKS = 2  # all ranks store 16 pages, a 32nd of the pool
ARENA_PAGES = 8
POOL_PAGES = 64 * ARENA_PAGES
SHARDED = (m.GroupShape(GroupKind.FULL_ATTENTION, 1, heads=RANKS),)


def arenas_of(plan: m.StorePlan) -> set[int]:
    return {offset // PAGE // ARENA_PAGES for *_, offset, _ in m.EXTENT.iter_unpack(plan.extents)}


def store(workers: list[Worker], name: int, arenas: list[set[int]]) -> None:
    run = prompt(NUM_CHUNKS, name)
    for worker, found in zip(workers, arenas, strict=True):
        plan = worker.store(run)
        assert plan.num_declined == 0
        found |= arenas_of(plan)


@pytest.mark.slow
def test_eight_ranks_touch_an_eighth_of_the_pool_each() -> None:
    """A full pool evicts chunks of all ranks for the store of the first one, which leaves their space to the others."""
    bench = Bench(SHARDED, pages=POOL_PAGES, num_records=POOL_PAGES, arena_pages=ARENA_PAGES)
    workers = [bench.worker(rank, ranks=RANKS) for rank in range(RANKS)]
    arenas: list[set[int]] = [set() for _ in workers]
    for name in range(80):  # 2.5 times the pool
        store(workers, name, arenas)
    assert bench.found(prompt(NUM_CHUNKS, 79)) == NUM_CHUNKS
    assert max(map(len, arenas)) <= POOL_PAGES // ARENA_PAGES // RANKS * 1.1
    assert sum(map(len, arenas)) <= POOL_PAGES // ARENA_PAGES * 1.1
    bench.index.check_integrity()


@pytest.mark.slow
def test_another_model_takes_over_the_arenas_of_one_that_is_not_used_any_more() -> None:
    bench = Bench(SHARDED, pages=POOL_PAGES, num_records=POOL_PAGES, arena_pages=ARENA_PAGES)
    arenas: list[set[int]] = [set() for _ in range(RANKS)]
    eight = [bench.worker(rank, ranks=RANKS) for rank in range(RANKS)]
    for name in range(40):
        store(eight, name, arenas)
    alone = bench.worker(name="other", page=PAGE)
    found: list[set[int]] = [set()]
    for name in range(100, 140):
        store([alone], name, found)
    assert bench.found(prompt(NUM_CHUNKS, 139)) == NUM_CHUNKS
    bench.index.check_integrity()
