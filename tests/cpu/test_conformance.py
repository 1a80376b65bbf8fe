"""The CPU backend passes the suite of every backend, with the compiled copy and with memcpy."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.backends import CopyBatch
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.plan import PLANS, Cache, GroupPlan, WorkerPlan, prompt
from kvdepot_cpu.context import PageCopier
from kvdepot_cpu.kernels import load_kernels
from support.cpu.workers import NumpyWorker


class TestWithTheCompiledCopy(BackendSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        assert load_kernels() is not None, "the copy kernel was not built: is there a C compiler?"
        return NumpyWorker(url, plan, **options)


@pytest.mark.slow
class TestWithMemcpy(BackendSuite):
    # The parts are cut before the copies, here as in `TestWithTheCompiledCopy`.
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(autouse=True)
    def _without_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvdepot_cpu.context.load_kernels", lambda: None)

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        return NumpyWorker(url, plan, **options)


@pytest.mark.slow
class TestWithSeveralCopyThreads(BackendSuite):
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]  # as above

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        return NumpyWorker(url, plan, copy_threads=3, **options)


@pytest.mark.parametrize(("plan", "bytes_per_token"), [("recurrent and full", [256, 0]), ("short window", [256, 31.5])])
def test_the_status_says_the_bytes_that_a_token_takes_in_each_group(plan: str, bytes_per_token: list[float]) -> None:
    """A chunk of 64 tokens keeps one state, and two blocks of a window of 33 tokens."""
    with DepotProcess() as depot, contextlib.closing(NumpyWorker(depot.url, PLANS[plan]).context) as context:
        context.wait_until_connected(10)
        (found,) = depot.status().contexts
        assert [group.bytes_per_token for group in found.groups] == bytes_per_token
        assert found.bytes_per_token == sum(bytes_per_token)


def test_a_copier_gets_only_the_blocks_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It converts all the block ids that it gets, and a long prompt has thousands."""
    plan = PLANS["window and full"]
    store, got = PageCopier.store, list[tuple[tuple[int, ...], list[list[int]]]]()

    def listen(copier: PageCopier, batch: CopyBatch) -> bytes | None:
        got.append((batch.first_covered, [list(ids) for ids in batch.block_ids]))
        return store(copier, batch)

    monkeypatch.setattr(PageCopier, "store", listen)
    with DepotProcess() as depot:
        batch_bytes = plan.chunk_size_bytes(0) + plan.chunk_size_bytes(1)  # batches of stores have two chunks
        worker = NumpyWorker(depot.url, plan, batch_bytes=batch_bytes)
        with contextlib.closing(worker.context):
            worker.wait_until_connected(10)
            full, window = Cache(worker, plan).blocks(prompt(5), covered=(5, 2))
            assert worker.context.submit_store("request", prompt(5), [full, window]).result(10)
    assert got == [((0, 2), [full[:8], []]), ((0, 1), [full[8:16], window[:4]]), ((0, 0), [full[16:], window[4:]])]


@pytest.mark.parametrize(
    ("verify", "expected"), [("off", [False, False]), ("sample", [True, False]), ("all", [True, True])]
)
def test_copies_make_the_checksums_that_the_depot_wants(
    verify: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store those of all entries; a retrieve of all or none, as one entry in 16 is cheaper to read again."""
    asked: list[bool] = []
    for name in ("store", "retrieve"):
        copy = getattr(PageCopier, name)

        def listen(copier: PageCopier, batch: CopyBatch, copy: Any = copy) -> bytes | None:
            asked.append(batch.with_checksums)
            return copy(copier, batch)

        monkeypatch.setattr(PageCopier, name, listen)
    plan = PLANS["one group"]
    with DepotProcess("--verify", verify) as depot:
        worker = NumpyWorker(depot.url, plan)
        with contextlib.closing(worker.context):
            worker.wait_until_connected(10)
            cache = Cache(worker, plan)
            assert cache.store(prompt(1))
            assert cache.retrieve(prompt(1)) == 1
    assert asked == expected


@pytest.fixture
def checking_depot() -> Iterator[DepotProcess]:
    with DepotProcess("--verify", "all") as depot:
        yield depot


@pytest.mark.promise(30)
@pytest.mark.parametrize("copy_threads", [1, 3])
def test_checksums_of_stores_and_retrieves_are_made_on_the_way(
    checking_depot: DepotProcess, monkeypatch: pytest.MonkeyPatch, copy_threads: int
) -> None:
    def made_afterwards(_payload: memoryview) -> bytes:
        raise AssertionError("the copier made no checksums")

    monkeypatch.setattr("xxhash.xxh3_128_digest", made_afterwards)
    groups = GroupPlan(page_sizes_bytes=(65536, 3072)), GroupPlan(block_tokens=32, page_sizes_bytes=(131072, 66560))
    plan = WorkerPlan(groups)
    worker = NumpyWorker(checking_depot.url, plan, copy_threads=copy_threads)
    try:
        worker.wait_until_connected(10)
        cache = Cache(worker, plan)
        assert cache.store(prompt(16))
        assert cache.retrieve(prompt(16)) == 16  # after comparing every checksum with that of the store
        assert checking_depot.status().counters["entries_corrupt"] == 0

        block = cache.blocks(prompt(16), rotate=1)[1][-1]  # of the last chunk, in the second group
        session = worker.context.connection.session
        assert session is not None and session.mapping is not None
        pool = session.mapping.pool
        pool[bytes(pool).index(worker.read_blocks(1, 1, [block])) + 5] ^= 1
        assert cache.retrieve(prompt(16)) == 15
        wait_until(lambda: checking_depot.status().counters["entries_corrupt"] == 1)
    finally:
        worker.context.close()
