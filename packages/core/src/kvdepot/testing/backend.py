"""The conformance suite of accelerator backends.

A backend's tests inherit `BackendSuite` and implement `make_worker`. Its result also gives access to device memory:

    class TestMyBackend(BackendSuite):
        def make_worker(self, url, plan, **options):
            return MyWorker(url, plan, **options)

The oracle is `PagePattern`: bytes derived from the chunk's key, so a retrieve that mixes up any of them fails. Every
test ends with right bytes or a miss. The depot is a real one, in a process of its own.

The marker `promise` lists the promises of `docs/reliability.md` that a test shows. Register it in your configuration of
pytest: `markers = ["promise(*numbers)"]`.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvdepot.backends import NO_BLOCK
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import LayoutError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import GroupKind, Part, Plane
from kvdepot.pool.folder import POOL_FILE
from kvdepot.testing.plan import FILL, PLANS, WAIT_SECONDS, Cache, GroupPlan, Worker, WorkerPlan, prompt

__all__ = ["BackendSuite", "MakeCache", "Worker", "WorkerPlan"]

MakeCache = Callable[..., Cache]

_POOL_SIZE = "16MiB"
_LAYERS = 3  # the least that two stages can split unevenly, either way


def _flip_a_byte(depot: DepotProcess, offset: int) -> None:
    with (depot.pool_directory / POOL_FILE).open("r+b") as pool:
        pool.seek(offset)
        (byte,) = pool.read(1)
        pool.seek(offset)
        pool.write(bytes([byte ^ 0x10]))


def _plans_of_engine(
    size: int, stages: tuple[int, ...], heads: int, rows: int, head_bytes: tuple[int, ...], block_tokens: int = 16
) -> Iterator[WorkerPlan]:
    """Yield the plans of an engine's ranks, stage by stage. If there are more ranks than heads, they hold replicas."""
    world_size = size * (len(stages) - 1)
    for number, (start, stop) in enumerate(itertools.pairwise(stages)):
        for rank in range(size):
            first, mine = rank * heads // size, max(1, heads // size)
            pages = tuple(block_tokens * mine * each for each in head_bytes) * (stop - start)
            part, plane = Part(start, stop - start, first, mine), Plane(_LAYERS, heads)
            group = GroupPlan(block_tokens=block_tokens, page_sizes_bytes=pages, part=part, plane=plane, rows=rows)
            window = replace(group, kind=GroupKind.SLIDING_WINDOW, window_tokens=64)
            instance, place = f"tp {size} stages {stages} blocks {block_tokens}", number * size + rank
            yield WorkerPlan((group, window), num_blocks=12, instance=instance, rank=place, world_size=world_size)


class BackendSuite:
    """Inherit it, name the class `Test...`, and implement `make_worker`."""

    splits: ClassVar[Sequence[tuple[int, tuple[int, ...]]]] = (
        (1, (0, 3)),
        (2, (0, 3)),
        (4, (0, 3)),
        (8, (0, 3)),
        (16, (0, 3)),
        (1, (0, 1, 3)),
        (2, (0, 2, 3)),
    )
    """Engines that share: the ranks of a stage, and the layers at which stages of a pipeline begin and end."""

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> Worker:
        """Return a worker with zeroed memory; `options` are `synchronous`, `batch_bytes` and `deadline_seconds`.

        The suite closes its context.
        """
        raise NotImplementedError

    @pytest.fixture
    def depot(self) -> Iterator[DepotProcess]:
        """A depot with a small pool: itself and each worker touch all of it at their start."""
        with DepotProcess(pool_size=_POOL_SIZE) as depot:
            yield depot

    @pytest.fixture
    def cache(self, depot: DepotProcess) -> Iterator[MakeCache]:
        """Makes connected workers of a depot."""
        made: list[Cache] = []

        def make(
            plan: WorkerPlan = PLANS["one group"], *, url: str = depot.url, waits: bool = True, **options: Any
        ) -> Cache:
            worker = self.make_worker(url, plan, **options)
            made.append(Cache(worker, plan))
            if waits:
                worker.wait_until_connected(WAIT_SECONDS)
            return made[-1]

        yield make
        for cache in made:
            cache.context.close()

    # --- bytes ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", PLANS)
    @pytest.mark.promise(29, 32)
    def test_stored_bytes_are_retrieved_into_other_blocks(self, name: str, cache: MakeCache) -> None:
        """Every layout, byte for byte, through another worker."""
        writer, reader = cache(PLANS[name]), cache(replace(PLANS[name], instance="other"))
        run = prompt(5)
        assert writer.store(run)
        assert reader.retrieve(run) == 5

    @pytest.mark.parametrize("name", ["one group", "window and full", "padded pages"])
    def test_a_synchronous_context_returns_finished_futures(self, name: str, cache: MakeCache) -> None:
        """The same bytes, on the caller's thread."""
        plan = PLANS[name]
        writer = cache(plan, synchronous=True)
        run = prompt(3)
        block_ids = writer.blocks(run)
        writer.fill(run, block_ids)
        assert writer.context.submit_store("request", run, block_ids).query()
        assert writer.retrieve(run) == 3

    def test_a_long_run_is_moved_in_batches(self, cache: MakeCache) -> None:
        """Batches of two chunks to retrieve, and of four to store."""
        worker = cache(PLANS["one group"], batch_bytes=2 * 4 * 4 * 1024)
        run = prompt(15)
        assert worker.store(run)
        assert worker.retrieve(run) == 15

    def test_a_window_stores_and_fills_only_the_end_of_a_run(self, cache: MakeCache) -> None:
        """Groups may cover less than the run, always its last chunks."""
        plan = PLANS["window and full"]
        writer, reader = cache(plan), cache(replace(plan, instance="other"))
        run = prompt(6)
        stored = writer.blocks(run, covered=(6, 2))
        writer.fill(run, stored)
        assert writer.context.submit_store("request", run, stored).result(WAIT_SECONDS)
        reader.wipe()
        wanted = reader.blocks(run, rotate=1, covered=(6, 2))
        assert reader.context.submit_retrieve("request", run, wanted).result(WAIT_SECONDS)
        assert reader.holds(run, wanted)
        assert reader.untouched(wanted)

    @pytest.mark.parametrize(("name", "covered"), [("only a window", 2), ("only states", 1), ("window and full", 15)])
    def test_batches_before_the_window_do_not_end_a_retrieve(self, name: str, covered: int, cache: MakeCache) -> None:
        """Regression: without full attention, the depot has nothing of the chunks before the window."""
        plan = replace(PLANS[name], num_blocks=64)
        writer = cache(plan, batch_bytes=2 * plan.chunk_size_bytes(0))
        run = prompt(15)
        ends = (covered, 2)[: len(plan.groups)]
        stored, wanted = (writer.blocks(run, rotate=rotate, covered=ends) for rotate in (0, 1))
        writer.fill(run, stored)
        assert writer.context.submit_store("request", run, stored).result(WAIT_SECONDS)
        writer.wipe()
        future = writer.context.submit_retrieve("request", run, wanted)
        assert (future.result(WAIT_SECONDS), future.num_chunks) == (True, 15)
        assert writer.holds(run, wanted)
        assert writer.untouched(wanted)

    def test_blocks_before_the_window_are_left_out(self, cache: MakeCache) -> None:
        """`NO_BLOCK` in the first chunk that a window reaches: its other blocks are filled, nothing else is written."""
        plan = PLANS["window and full"]
        writer, reader = cache(plan), cache(replace(plan, instance="other"))
        run = prompt(6)
        assert writer.store(run)
        reader.wipe()
        wanted = reader.blocks(run, rotate=1, covered=(6, 2))
        left_out = [wanted[0], [NO_BLOCK, NO_BLOCK, *wanted[1][2:]]]
        assert reader.context.submit_retrieve("request", run, left_out).result(WAIT_SECONDS)
        assert reader.untouched(left_out)
        assert reader.holds(run.slice(5), [wanted[0][20:], wanted[1][4:]])
        for block in wanted[1][2:4]:
            assert reader.worker.read_blocks(1, 0, [block]) != bytes([FILL]) * plan.groups[1].page_sizes_bytes[0]

    @pytest.mark.parametrize("skip_tokens", [16, 48, 64, 80, 320])
    def test_tokens_that_are_skipped_keep_their_blocks(self, skip_tokens: int, cache: MakeCache) -> None:
        """A local prefix that ends within a chunk is not overwritten."""
        worker = cache()
        run = prompt(5)
        assert worker.store(run)
        block_ids = worker.blocks(run, rotate=1)
        worker.wipe()
        future = worker.context.submit_retrieve("request", run, block_ids, skip_tokens=skip_tokens)
        assert future.result(WAIT_SECONDS)
        first = -(-skip_tokens // 64)
        assert worker.holds(run.slice(first), [block_ids[0][first * 4 :]])
        assert worker.untouched([block_ids[0][skip_tokens // 16 :]])

    @pytest.mark.parametrize("skip_tokens", [16, 32, 48, 112])
    def test_skipped_tokens_keep_the_blocks_of_a_short_window(self, skip_tokens: int, cache: MakeCache) -> None:
        """Of its four blocks, a chunk keeps the last two, so a local prefix of 48 tokens ends between them."""
        worker = cache(PLANS["short window"])
        run = prompt(3)
        assert worker.store(run)
        full, window = worker.blocks(run, rotate=1)
        worker.wipe()
        future = worker.context.submit_retrieve("request", run, [full, window], skip_tokens=skip_tokens)
        assert future.result(WAIT_SECONDS)
        chunk, rest = divmod(skip_tokens, 64)
        first = 2 * chunk + max(0, rest // 16 - 2)
        assert worker.untouched([full[skip_tokens // 16 :], window[first:]])
        assert worker.holds(run.slice(chunk + 1), [full[4 * chunk + 4 :], window[2 * chunk + 2 :]])
        page = worker.plan.groups[1].page_sizes_bytes[0]
        assert worker.worker.read_blocks(1, 0, [window[first]]) != bytes([FILL]) * page

    @pytest.mark.promise(15)
    def test_a_missing_chunk_costs_only_itself_and_later_chunks(self, cache: MakeCache) -> None:
        """The retrieve returns the prefix that the depot has."""
        worker = cache()
        assert worker.store(prompt(3))
        assert worker.retrieve(prompt(5)) == 3

    @pytest.mark.promise(19, 22)
    def test_nothing_comes_from_another_prompt(self, cache: MakeCache) -> None:
        """Another salt is another key."""
        worker = cache()
        assert worker.store(prompt(3))
        assert worker.retrieve(prompt(3, salt=1)) == 0

    @pytest.mark.promise(44)
    def test_a_run_that_starts_later_is_stored_below_what_is_there(self, cache: MakeCache) -> None:
        """Chunked prefill: each step stores its new chunks."""
        worker = cache()
        run = prompt(6)
        for start in (0, 2, 4):
            assert worker.store(run.slice(start, start + 2))
        assert worker.retrieve(run) == 6

    def test_a_run_without_what_comes_before_it_is_not_kept(self, cache: MakeCache) -> None:
        """No lookup could ever find it."""
        worker = cache()
        assert not worker.store(prompt(6).slice(3))
        assert worker.retrieve(prompt(6)) == 0

    def test_chunks_that_are_there_are_not_copied_again(self, cache: MakeCache, depot: DepotProcess) -> None:
        """Two workers, one copy."""
        first, second = cache(), cache(replace(PLANS["one group"], instance="other"))
        assert first.store(prompt(4))
        assert second.store(prompt(4))
        assert depot.status().counters["entries_stored"] == 4
        assert second.retrieve(prompt(4)) == 4

    @pytest.mark.promise(20)
    def test_another_layout_is_a_miss(self, cache: MakeCache) -> None:
        """Page sizes, block sizes and formats keep caches apart."""
        base = PLANS["one group"]
        writer = cache(base)
        assert writer.store(prompt(3))
        for number, other in enumerate(
            (replace(base, format="other"), replace(base, groups=(GroupPlan(block_tokens=32),)))
        ):
            assert cache(replace(other, instance=f"other-{number}")).retrieve(prompt(3)) == 0

    def test_parts_are_found_together_or_not_at_all(self, cache: MakeCache, depot: DepotProcess) -> None:
        """A lookup finds a chunk when every rank has stored its part."""
        plans = [
            WorkerPlan((GroupPlan(part=Part(rank), plane=Plane(2)),), rank=rank, world_size=2) for rank in range(2)
        ]
        ranks = [cache(plan) for plan in plans]
        with SchedulerClient(ranks[0].worker.spec, "engine", url=depot.url) as scheduler:
            scheduler.wait_until_connected(WAIT_SECONDS)
            assert ranks[0].store(prompt(3))
            assert scheduler.lookup("request", prompt(3)).num_chunks == 0
            assert ranks[1].store(prompt(3))
            assert scheduler.lookup("request", prompt(3)).num_chunks == 3
        assert [rank.retrieve(prompt(3)) for rank in ranks] == [3, 3]

    @pytest.mark.promise(33)
    def test_replicas_of_ranks_are_stored_once_and_read_by_all(self, cache: MakeCache, depot: DepotProcess) -> None:
        """Replicated caches (MLA) have one part."""
        ranks = [cache(WorkerPlan(rank=rank, world_size=2)) for rank in range(2)]
        assert all(rank.store(prompt(3)) for rank in ranks)
        assert depot.status().num_entries == 3
        assert [rank.retrieve(prompt(3)) for rank in ranks] == [3, 3]

    @pytest.mark.parametrize("rows", [1, 16], ids=["heads outermost", "tokens outermost"])
    @pytest.mark.parametrize(
        ("heads", "head_bytes"), [(8, (8,)), (8, (8, 16)), (1, (24,))], ids=["one tensor", "keys and values", "latent"]
    )
    @pytest.mark.slow
    @pytest.mark.promise(33)
    def test_every_split_reads_every_other(
        self, rows: int, heads: int, head_bytes: tuple[int, ...], cache: MakeCache, depot: DepotProcess
    ) -> None:
        """Engines of any ranks and stages find each other's chunks, replicas, windows and skipped blocks included."""
        engines = [[cache(plan) for plan in _plans_of_engine(*split, heads, rows, head_bytes)] for split in self.splits]
        readers = [engine[rank] for engine in engines for rank in sorted({0, len(engine) // 2, len(engine) - 1})]
        num_entries = 0
        for salt, ((size, stages), writers) in enumerate(zip(self.splits, engines, strict=True)):
            run = prompt(2, salt=salt)
            assert all(writer.store(run) for writer in writers)
            num_entries += 2 * 2 * min(size, heads) * (len(stages) - 1)
            assert depot.status().num_entries == num_entries
            for reader in readers:
                assert reader.retrieve(run) == 2
                reader.wipe()
                wanted = reader.blocks(run, rotate=2, covered=(2, 1))
                left_out = [wanted[0], [NO_BLOCK, *wanted[1][1:]]]
                future = reader.context.submit_retrieve("request", run, left_out, skip_tokens=16)
                assert future.result(WAIT_SECONDS)
                own = [reader.plan.chunk_size_bytes(group) for group in (0, 1)]
                assert future.num_bytes == 2 * own[0] + own[1], "of its own part, however much the entries hold"
                assert reader.holds(run.slice(1), [wanted[0][4:], []])
                assert reader.untouched([wanted[0][1:], wanted[1][1:]])

    @pytest.mark.parametrize("tokens_a_row", [1, 16], ids=["tokens outermost", "rows of 16 tokens"])
    @pytest.mark.parametrize(("heads", "head_bytes"), [(4, (8, 16)), (1, (24,))], ids=["keys and values", "latent"])
    @pytest.mark.promise(33)
    def test_every_block_size_reads_every_other(
        self, tokens_a_row: int, heads: int, head_bytes: tuple[int, ...], cache: MakeCache, depot: DepotProcess
    ) -> None:
        """Engines of one and of two ranks share chunks: blocks of whole rows hold the same bytes at any size."""
        engines = [
            [cache(plan) for plan in _plans_of_engine(size, (0, 3), heads, tokens // tokens_a_row, head_bytes, tokens)]
            for size, tokens in itertools.product((1, 2), (16, 32, 64))
        ]
        for salt, writers in enumerate(engines):
            run = prompt(2, salt=salt)
            num_entries = depot.status().num_entries
            assert all(writer.store(run) for writer in writers)
            assert depot.status().num_entries - num_entries == 2 * 2 * min(heads, len(writers))
            for reader in (reader for readers in engines for reader in readers):
                assert reader.retrieve(run) == 2
                assert reader.context.submit_store("again", run, reader.blocks(run)).result(WAIT_SECONDS)
            assert depot.status().num_entries - num_entries == 2 * 2 * min(heads, len(writers)), "it is there"

    @pytest.mark.promise(29)
    def test_random_traffic_is_right_bytes_or_a_miss(self, cache: MakeCache) -> None:
        """The prompts exceed the pool, so that chunks are evicted."""
        plan = replace(PLANS["large pages"], num_blocks=64)
        workers = [cache(replace(plan, instance=f"engine-{number}")) for number in range(2)]
        rng = random.Random(7)
        hits = 0
        for step in range(40):
            run = prompt(rng.randint(1, 12), salt=rng.randrange(14))
            worker = rng.choice(workers)
            if rng.random() < 0.5:
                worker.store(run, rotate=step)
            else:
                hits += worker.retrieve(run, rotate=step)
        assert hits > 0

    # --- futures --------------------------------------------------------------------------------------------------

    @pytest.mark.promise(13)
    def test_several_stores_of_one_request_are_several_futures(self, cache: MakeCache) -> None:
        """No future replaces another, and each of them ends."""
        worker = cache()
        run = prompt(12)
        block_ids = worker.blocks(run)
        worker.fill(run, block_ids)
        futures = [
            worker.context.submit_store(
                "request", run.slice(start, start + 3), [block_ids[0][start * 4 : start * 4 + 12]]
            )
            for start in range(0, 12, 3)
        ]
        assert all(future.result(WAIT_SECONDS) for future in futures)
        assert all(future.query() for future in futures)
        assert worker.retrieve(run) == 12

    def test_a_store_waits_until_its_blocks_are_ready(self, cache: MakeCache) -> None:
        """The store waits for the event before it reads a byte."""
        worker = cache()
        run = prompt(2)
        block_ids = worker.blocks(run)

        class Filling:
            def synchronize(self) -> None:
                worker.fill(run, block_ids)

        assert worker.context.submit_store("request", run, block_ids, ready=Filling()).result(WAIT_SECONDS)
        assert worker.retrieve(run) == 2

    @pytest.mark.parametrize(
        ("block_ids", "skip_tokens"),
        [
            ([[0, 1, 2]], 0),
            ([[0] * 4], 0),
            ([list(range(60, 68))], 0),
            ([[-2] * 8], 0),
            ([], 0),
            ([list(range(8))] * 2, 0),
            ([list(range(8))], 8),
            ([list(range(8))], 129 * 16),
            ([list(range(8))], -16),
        ],
    )
    def test_blocks_that_do_not_fit_are_refused(
        self, block_ids: list[list[int]], skip_tokens: int, cache: MakeCache
    ) -> None:
        """The call raises before it touches anything."""
        worker = cache()
        with pytest.raises(LayoutError):
            worker.context.submit_retrieve("request", prompt(2), block_ids, skip_tokens=skip_tokens)
        if not skip_tokens:
            with pytest.raises(LayoutError):
                worker.context.submit_store("request", prompt(2), block_ids)
            with pytest.raises(LayoutError):
                worker.context.submit_store("request", prompt(2), [[NO_BLOCK] * 8])

    def test_closing_twice_is_harmless_and_later_requests_are_misses(self, cache: MakeCache) -> None:
        """No exception, no hang."""
        worker = cache()
        worker.context.close()
        worker.context.close()
        assert worker.context.submit_store("request", prompt(1), [[0, 1, 2, 3]]).result(1.0) is False

    # --- faults ---------------------------------------------------------------------------------------------------

    @pytest.mark.promise(28)
    def test_without_a_depot_everything_is_a_miss_at_once(self, cache: MakeCache, tmp_path: Any) -> None:
        """Construction does not fail either."""
        worker = cache(url=str(tmp_path), waits=False)
        run = prompt(2)
        for future in (
            worker.context.submit_store("request", run, worker.blocks(run)),
            worker.context.submit_retrieve("request", run, worker.blocks(run)),
        ):
            assert future.query()
            assert future.result(0.0) is False

    @pytest.mark.promise(23)
    def test_a_killed_depot_is_a_miss_and_its_successor_has_the_cache(
        self, cache: MakeCache, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first transfer makes the worker reconnect, which does not try by itself here."""
        monkeypatch.setattr("kvdepot.client.connection.FIRST_RETRY_SECONDS", 3600.0)
        worker = cache()
        assert worker.store(prompt(4))
        depot.kill()
        assert worker.retrieve(prompt(4)) == 0
        depot.start()
        wait_until(lambda: not depot.status().recovering)
        assert worker.retrieve(prompt(4)) == 4

    @pytest.mark.parametrize("verify", ["all", "sample"])
    @pytest.mark.promise(30)
    def test_bytes_that_changed_in_the_pool_are_a_miss_and_leave(self, verify: str, cache: MakeCache) -> None:
        """A chunk whose bytes differ from their checksum is never served. The depot drops it, and accepts it again."""
        with DepotProcess("--verify", verify, pool_size=_POOL_SIZE) as depot:
            worker = cache(url=depot.url)
            run = prompt(5)
            assert worker.store(run)
            assert worker.retrieve(run) == 5
            _flip_a_byte(depot, worker.plan.chunk_size_bytes(0) * 2 + 100)  # of the third chunk

            def num_retrieved() -> int:  # without a look at the bytes, which are wrong until they are compared
                future = worker.context.submit_retrieve("request", run, worker.blocks(run))
                future.result(WAIT_SECONDS)
                return future.num_chunks

            wait_until(lambda: num_retrieved() == 2, 30, "the wrong chunk to be compared")
            wait_until(lambda: depot.status().counters.get("entries_corrupt") == 1)
            assert depot.status().num_entries == 4
            assert worker.retrieve(run) == 2
            assert worker.store(run)
            assert worker.retrieve(run) == 5

    @pytest.mark.promise(30, 33)
    def test_a_changed_byte_is_noticed_by_a_rank_that_takes_other_heads(self, cache: MakeCache) -> None:
        """The checksum covers the whole entry, so each reader of a part compares all of it."""
        with DepotProcess("--verify", "all", pool_size=_POOL_SIZE) as depot:
            plans = [*_plans_of_engine(1, (0, 3), 8, 1, (64,)), *_plans_of_engine(2, (0, 3), 8, 1, (64,))]
            writer, *readers = [cache(replace(plan, groups=plan.groups[:1]), url=depot.url) for plan in plans]
            run = prompt(3)
            assert writer.store(run)
            assert [reader.retrieve(run) for reader in readers] == [3, 3]
            _flip_a_byte(depot, writer.plan.chunk_size_bytes(0) + 5)  # of the first head in the second chunk
            assert readers[1].retrieve(run) == 1
            wait_until(lambda: depot.status().counters.get("entries_corrupt") == 1)
            assert depot.status().num_entries == 2
            assert all(reader.store(run) for reader in readers)
            assert [each.retrieve(run) for each in (writer, *readers)] == [3, 3, 3]

    @pytest.mark.promise(30)
    def test_checksums_survive_the_depot(self, cache: MakeCache) -> None:
        """They are in the index table."""
        with DepotProcess("--verify", "all", pool_size=_POOL_SIZE) as depot:
            worker = cache(url=depot.url)
            run = prompt(3)
            assert worker.store(run)
            depot.kill()
            _flip_a_byte(depot, 5)
            depot.start()
            worker.worker.wait_until_connected(WAIT_SECONDS)
            wait_until(lambda: not depot.status().recovering)
            assert worker.retrieve(run) == 0
            wait_until(lambda: depot.status().counters.get("entries_corrupt") == 1)

    @pytest.mark.promise(16)
    def test_a_pool_full_of_leased_chunks_declines(self, cache: MakeCache, depot: DepotProcess) -> None:
        """The store is counted and does not wait; leased chunks stay."""
        plan = replace(PLANS["large pages"], num_blocks=64)
        worker = cache(plan)
        chunk_bytes = 4 * 2 * 65536
        fits = depot.status().pool_size_bytes // chunk_bytes
        with SchedulerClient(worker.worker.spec, "engine", url=depot.url) as scheduler:
            scheduler.wait_until_connected(WAIT_SECONDS)
            for salt in range(fits // 8):
                assert worker.store(prompt(8, salt=salt))
                assert scheduler.lookup(f"request-{salt}", prompt(8, salt=salt)).num_chunks == 8
            assert not worker.store(prompt(8, salt=1000))
            assert depot.status().counters["store_entries_declined"] == 8
            assert worker.retrieve(prompt(8)) == 8
        wait_until(lambda: depot.status().num_leases == 0)
        assert worker.store(prompt(8, salt=1000))

    def test_nothing_is_left_over(self, cache: MakeCache, depot: DepotProcess) -> None:
        """No lease, no ticket, no quarantine after ordinary work."""
        worker = cache()
        for length, salt in itertools.product((1, 4), range(3)):
            worker.store(prompt(length, salt=salt))
            worker.retrieve(prompt(length, salt=salt))
        wait_until(lambda: depot.status().num_leases == 0)
        status = depot.status()
        assert (status.num_tickets, status.quarantined_bytes) == (0, 0)
