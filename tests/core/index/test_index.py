"""Finding, keeping, evicting and reading back in the index, through requests of workers to the depot."""

from unittest.mock import Mock

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.index.eviction import POLICIES, AdaptiveReplacement
from kvdepot.index.index import ChunkIndex
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.layout import Part
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.operate.report import status_of
from kvdepot.pool.names import Label, Names
from kvdepot.pool.table import HEADER_PAGE_BYTES, RECORD_BYTES, SEALED, IndexTable, Writer
from kvdepot.server.turns import Refused
from kvdepot.wire import messages as m
from kvdepot.wire.status import DeviceStatus
from support.index import (
    FULL,
    HYBRID,
    LEASE_SECONDS,
    ONLY_WINDOW,
    PAGE,
    PLAIN,
    SHARDED,
    Bench,
    Worker,
    bench_and_worker,
    prompt,
)
from support.records import write_record


def found(index: ChunkIndex, run: KeyRun) -> int:
    return index.visibility.match(index.spaces[0], run.digests)[0]


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.promise(9)
def test_a_store_without_a_commit_is_never_found() -> None:
    worker = Bench().worker()
    plan = worker.prepare(prompt(3))
    assert worker.lookup(prompt(3)).num_chunks == 0
    assert worker.retrieve(prompt(3)) == m.RetrievePlan(1, 0, 0, b"")
    worker.commit(plan)
    assert worker.lookup(prompt(3)).num_chunks == worker.retrieve(prompt(3)).num_chunks == 3


def test_a_chunk_waits_to_be_found_for_those_before_it() -> None:
    worker = Bench().worker()
    before, after = worker.prepare(prompt(2)), worker.prepare(prompt(4).slice(2))
    worker.commit(after)
    assert worker.lookup(prompt(4)).num_chunks == 0
    assert worker.retrieve(prompt(4).slice(2)).num_chunks == 0
    worker.commit(before)
    assert worker.lookup(prompt(4)).num_chunks == 4


def test_a_chunk_is_found_when_every_shard_of_it_is_stored() -> None:
    bench = Bench(SHARDED)
    first, second = bench.worker(0), bench.worker(1)
    first.store(prompt(3))
    assert first.lookup(prompt(3)).num_chunks == 0
    second.store(prompt(2))
    assert first.lookup(prompt(3)).num_chunks == second.retrieve(prompt(3)).num_chunks == 2


@pytest.mark.promise(21)
def test_a_digest_is_found_at_its_own_depth_only() -> None:
    worker = Bench().worker()
    worker.store(prompt(2))
    moved = KeyRun(prompt(1).digests, 1, prompt(2).parent)
    assert worker.retrieve(moved).num_chunks == 0
    forged = KeyRun(prompt(1).digests, 2, prompt(2).digests[32:])
    assert (worker.prepare(forged).ticket, worker.prepare(forged).num_declined) == (0, 1)
    assert worker.lookup(prompt(2)).num_chunks == 2


@pytest.mark.promise(60)
@pytest.mark.parametrize("groups", [PLAIN, ONLY_WINDOW])
def test_a_run_with_a_chunk_twice_ends_before_the_second_one(groups: tuple[m.GroupShape, ...]) -> None:
    """Regression: the chunk got two nodes, and the first was lost. Only a forged chain has a chunk twice."""
    bench = Bench(groups)
    worker, run = bench.worker(), prompt(2)
    plan = worker.store(KeyRun(run.digests * 2, 0, run.parent))
    assert plan.num_declined == 2
    bench.index.check_integrity()
    assert found(bench.index, run) == 2
    bench.drain()


@pytest.mark.promise(20)
def test_bytes_of_another_layout_are_a_miss() -> None:
    bench, writer = bench_and_worker()
    writer.store(prompt(2))
    writer.ask(m.Unregister(writer.context))
    other = bench.worker(page=2 * PAGE)
    assert other.retrieve(prompt(2)).num_chunks == 0


def test_two_workers_of_one_spec_write_the_same_pages() -> None:
    bench = Bench()
    bench.worker()
    with pytest.raises(Refused, match=r"CacheSpec\.format"):
        bench.worker(page=2 * PAGE)


@pytest.mark.promise(15)
def test_a_retrieve_ends_at_the_first_chunk_that_lacks_a_group() -> None:
    worker = Bench(HYBRID).worker()
    worker.store(prompt(4), 4, 4, 0)
    assert worker.retrieve(prompt(4), 4, 2, 0).num_chunks == 4
    assert worker.retrieve(prompt(4), 4, 2, 2).num_chunks == 2
    assert worker.lookup(prompt(4)).num_chunks == 0


def test_bytes_of_a_chunk_that_a_retrieve_does_not_deliver_are_not_counted() -> None:
    bench, worker = bench_and_worker(HYBRID)
    worker.store(prompt(2), 2, 1, 1)
    assert worker.retrieve(prompt(2), 2, 2, 1).num_chunks == 0, "chunk 0 lacks its window"
    assert worker.retrieve(prompt(2), 2, 1, 1).num_chunks == 2
    assert status_of(bench.depot).devices["none"] == DeviceStatus(stored_bytes=4 * PAGE, retrieved_bytes=4 * PAGE)


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", ["lookup", "retrieve"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.promise(16)
def test_leased_chunks_are_never_evicted(policy: str, find: str) -> None:
    worker = Bench(pages=4, policy=policy).worker()
    worker.store(prompt(4))
    lease = getattr(worker, find)(prompt(4)).lease
    assert worker.store(prompt(2, 1)).num_declined == 2
    assert worker.lookup(prompt(4)).num_chunks == 4
    worker.ask(m.EndRequest(worker.context, "r"))
    assert worker.release(lease) == 0
    assert worker.store(prompt(2, 1)).num_declined == 0
    assert worker.lookup(prompt(4)).num_chunks == 2


@pytest.mark.parametrize("find", ["lookup", "retrieve"])
def test_a_lease_on_a_window_holds_every_chunk_in_it(find: str) -> None:
    worker = Bench(ONLY_WINDOW, pages=2).worker()
    worker.store(prompt(2).slice(1))  # the later chunk first, so that it does not hold the earlier one in the tree
    worker.store(prompt(1))
    getattr(worker, find)(prompt(2))
    assert worker.store(prompt(1, 1)).num_declined == 1
    assert worker.lookup(prompt(2)).num_chunks == 2


def test_the_prefix_that_was_looked_up_last_leaves_last() -> None:
    worker = Bench(pages=2).worker()
    worker.store(prompt(1, 1))
    worker.store(prompt(1, 2))
    worker.release(worker.lookup(prompt(1, 1)).lease)
    worker.store(prompt(1, 3))
    assert [worker.lookup(prompt(1, name)).num_chunks for name in (1, 2, 3)] == [1, 0, 1]


@pytest.mark.promise(16)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_into_a_full_pool_evicts_what_it_needs_and_no_more(policy: str) -> None:
    bench, worker = bench_and_worker(pages=8, policy=policy)
    for name in range(8):
        worker.store(prompt(1, name))
    for needed in (1, 3, 5):
        before = bench.index.evictor.num_evicted
        assert worker.store(prompt(needed, 10 + needed)).num_declined == 0
        assert bench.index.evictor.num_evicted == before + needed
    assert bench.index.extents.used_bytes == 8 * PAGE


def test_a_pool_that_still_grows_declines_what_has_room_later_and_evicts_nothing() -> None:
    """Once, half of the entries left a pool that was 40 % ready."""
    bench = Bench(pages=8, ready_pages=4)
    worker, extents = bench.worker(), bench.index.extents
    assert worker.store(prompt(6)).num_declined == 2
    counters = status_of(bench.depot).counters
    assert (bench.index.evictor.num_evicted, counters["store_entries_not_ready"]) == (0, 1)
    extents.grow(6 * PAGE)
    assert worker.store(prompt(6)).num_declined == 0
    assert worker.store(prompt(1, 7)).num_declined == 1
    extents.stop_growing()
    assert worker.store(prompt(1, 7)).num_declined == 0
    assert bench.index.evictor.num_evicted == 1


@pytest.mark.parametrize(
    ("pages", "num_records", "num_chunks"),
    [(4, 64, 1), (8, 4, 1), (5, 64, 2)],
    ids=["no room", "no record", "room for the first of two"],
)
def test_a_policy_that_raises_leaves_no_hold(
    pages: int, num_records: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the chunk that needed room stayed held for ever, with its node and maybe an extent.

    So did the chunks of the same store that had found room.
    """
    bench, worker = bench_and_worker(pages=pages, num_records=num_records)
    worker.store(prompt(4))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(AdaptiveReplacement, "victim", Mock(side_effect=RuntimeError("broken")))
        worker.store(prompt(num_chunks, 1))
    assert bench.index.extents.used_bytes == 4 * PAGE
    assert not any(bench.index.nodes.tree.holds)
    bench.index.check_integrity()
    assert worker.store(prompt(1, 1)).num_declined == 0
    bench.drain()


@pytest.mark.promise(44)
@pytest.mark.parametrize("groups", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_prefill_in_steps_leaves_the_same_entries(groups: tuple[m.GroupShape, ...], steps: int) -> None:
    def entries(num_steps: int) -> set[tuple[bytes, int, int, int]]:
        bench, worker = bench_and_worker(groups)
        for start in range(0, 6, 6 // num_steps):
            worker.store(prompt(6).slice(start, start + 6 // num_steps))
        assert worker.lookup(prompt(6)).num_chunks == 6
        return {(r.key, r.group, r.part, r.num_bytes) for r in bench.index.table.records() if r.state == SEALED}

    assert entries(steps) == entries(1)


@pytest.mark.promise(26)
def test_an_hour_of_silence_forgets_no_worker() -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(2))
    bench.pass_time(3600)
    assert worker.lookup(prompt(2)).num_chunks == worker.retrieve(prompt(2)).num_chunks == 2
    assert worker.store(prompt(1, 1)).num_declined == 0


@pytest.mark.promise(7)
def test_another_protocol_version_is_one_line_in_the_server_s_log(caplog: pytest.LogCaptureFixture) -> None:
    bench, worker = bench_and_worker()
    assert worker.refusal(m.RegisterScheduler(99, "e", "m", bench.spec)) is ErrorCode.VERSION_MISMATCH
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "99" in line
    assert f"this depot {m.PROTOCOL_VERSION}" in line
    assert "\n" not in line


def test_an_aborted_chunk_does_not_make_the_one_before_it_seem_used() -> None:
    """Regression: the chunk inherited a later use from the previous chunk with its node number, and passed it on."""
    bench, worker = bench_and_worker(pages=4)
    for name, tenant in ((1, "a"), (2, "a"), (3, "b")):
        worker.store(prompt(1, name, tenant))
    sum(clear_pool(bench.depot, "b"))
    plan = worker.prepare(hash_prefix(Namespace("model", tenant="a"), 1, [100, 101]).slice(1))
    worker.ask(m.AbortStore(worker.context, plan.ticket))
    assert worker.store(prompt(3, 4)).num_declined == 0
    here = [worker.lookup(prompt(1, name, "a")).num_chunks for name in (1, 2)]
    assert here == [0, 1]


@pytest.mark.promise(16)
def test_a_store_that_can_never_fit_evicts_nothing() -> None:
    bench, small = bench_and_worker(pages=4)
    small.store(prompt(3))
    small.ask(m.Unregister(small.context))
    large = bench.worker(page=5 * PAGE)
    assert large.store(prompt(1, 1)).num_declined == 1
    assert (bench.index.entries.num_sealed, bench.index.evictor.num_evicted) == (3, 0)


def test_a_store_without_a_free_record_gives_its_extent_back() -> None:
    bench, worker = bench_and_worker(pages=8, num_records=2)
    worker.store(prompt(2))
    worker.lookup(prompt(2))
    assert worker.store(prompt(1, 1)).num_declined == 1
    assert bench.index.extents.used_bytes == 2 * PAGE


@pytest.mark.promise(23)
@pytest.mark.parametrize("policy", POLICIES)
def test_when_there_are_too_many_holes_the_coldest_leave(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.index.index.SPARE_NODES", 0)  # allows twice as many chunks as records
    bench, worker = bench_and_worker(num_records=8, policy=policy)

    def store_with_holes(run: KeyRun) -> int:
        worker.store(run)
        nodes = [bench.index.spaces[0].nodes[run.slice(n, n + 1).digests] for n in range(run.num_chunks)]
        for node in nodes[:-1]:
            bench.index.remove_entry(bench.index.entries.sealed(node)[0])
        return nodes[-1]

    last = [store_with_holes(prompt(8, 0)), store_with_holes(prompt(7, 1))]
    assert worker.store(prompt(1, 2)).num_declined == 0
    assert len(bench.index.nodes) == 16
    bench.index.evictor.pin(last)
    lease = worker.lookup(prompt(1, 2)).lease
    assert worker.store(prompt(1, 3)).num_declined == 1
    assert bench.index.evictor.num_evicted == 0
    bench.index.evictor.unpin(last)
    for run in (prompt(1, 3), prompt(4, 4)):
        assert worker.store(run).num_declined == 0
        assert worker.lookup(run).num_chunks == run.num_chunks
    assert bench.index.evictor.num_evicted == 1
    assert worker.lookup(prompt(1, 2)).num_chunks == 1
    bench.index.check_integrity()
    worker.release(lease)
    worker.ask(m.EndRequest(worker.context, "r"))
    bench.drain()


def test_names_that_could_not_be_saved_are_saved_before_a_record_refers_to_them() -> None:
    """Regression: after a full /dev/shm, a tenant's or a layout's name was never saved, and its entries were lost."""
    saved: list[tuple[int, list[Label]]] = []
    disk_is_full = True

    def save(names: Names) -> None:
        if disk_is_full:
            raise OSError("no space left on device")
        saved.append((len(names.spaces), names.labels))

    bench = Bench(save_names=save)
    with pytest.raises(Refused, match="no space"):
        bench.worker()
    disk_is_full = False
    worker = bench.worker()
    assert saved == [(1, [])]
    disk_is_full = True
    for _ in range(2):
        assert worker.store(prompt(1)).num_declined == 1
    assert list(bench.index.table.records()) == []
    disk_is_full = False
    for _ in range(2):
        worker.store(prompt(1))
    assert saved == [(1, []), (0, [Label("default", "model")])]


def test_a_name_that_could_not_be_saved_is_in_nobody_elses_way() -> None:
    """Regression: once one tenant's name had found no room, stores and registrations of all others failed, too."""
    disk_is_full = False

    def save(_names: Names) -> None:
        if disk_is_full:
            raise OSError("no space left on device")

    bench, worker = bench_and_worker(save_names=save)
    worker.store(prompt(1, tenant="a"))
    disk_is_full = True
    assert worker.store(prompt(1, tenant="b")).num_declined == 1
    assert bench.worker().store(prompt(2, tenant="a")).num_declined == 0
    assert worker.store(prompt(1, tenant="b")).num_declined == 1


def test_each_tenant_is_charged_for_its_own() -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(3, tenant="a"))
    worker.store(prompt(1, tenant="b"))
    used = {name: tenant.used_bytes for name, tenant in status_of(bench.depot).tenants.items()}
    assert used == {"a": 3 * PAGE, "b": PAGE}
    assert sum(clear_pool(bench.depot, "a")) == 3
    assert worker.lookup(prompt(1, tenant="b")).num_chunks == 1


# --- owners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["commits", "aborts", "leaves", "unregisters"])
@pytest.mark.promise(72)
def test_a_store_of_a_living_worker_ends_by_time_and_keeps_its_extents(how: str) -> None:
    bench = Bench(pages=8)
    slow, quick = bench.worker(), bench.worker()
    slow.store(prompt(2))
    plan = slow.prepare(prompt(4).slice(2))
    bench.now += 4 * LEASE_SECONDS - 1
    bench.depot.expire()
    assert status_of(bench.depot).num_tickets == 1
    bench.pass_time(1)
    status = status_of(bench.depot)
    assert (status.num_tickets, status.quarantined_bytes) == (0, 2 * PAGE)
    assert quick.store(prompt(8)).num_declined == 2, "its chunks can be stored again, its extents are not given away"
    assert (quick.lookup(prompt(8)).num_chunks, bench.index.extents.used_bytes) == (6, 8 * PAGE)
    bench.index.check_integrity()
    match how:
        case "commits":
            reply = slow.ask(m.CommitStore(slow.context, plan.ticket))
            assert (reply.code, "ended: after 40 s" in reply.message) == (ErrorCode.UNKNOWN_TICKET, True)
            assert slow.refusal(m.CommitStore(slow.context, plan.ticket)) is ErrorCode.UNKNOWN_TICKET
        case "aborts":
            assert slow.ask(m.AbortStore(slow.context, plan.ticket)) == m.Done(1, 2)
        case "leaves":
            bench.depot.end_session(slow.session)
            assert status_of(bench.depot).quarantined_bytes == 2 * PAGE
            bench.depot.end_process(slow.writer)
        case _:
            slow.ask(m.Unregister(slow.context))
    assert (status_of(bench.depot).quarantined_bytes, bench.index.extents.used_bytes) == (0, 6 * PAGE)
    assert quick.store(prompt(8)).num_declined == 0
    bench.pass_time(LEASE_SECONDS)
    bench.drain()


def test_nobody_ends_the_late_store_of_another_context() -> None:
    bench = Bench()
    slow, other = bench.worker(), bench.worker()
    plan = slow.prepare(prompt(2))
    bench.pass_time(4 * LEASE_SECONDS)
    assert other.refusal(m.CommitStore(other.context, plan.ticket)) is ErrorCode.UNKNOWN_TICKET
    assert other.ask(m.AbortStore(other.context, plan.ticket)) == m.Done(1, 0)
    assert status_of(bench.depot).quarantined_bytes == 2 * PAGE


@pytest.mark.promise(72)
def test_a_worker_that_ends_no_store_has_half_of_the_pool_and_one_store_at_most() -> None:
    bench = Bench(pages=64)
    forgetful, other = bench.worker(), bench.worker()
    plans = [forgetful.prepare(prompt(4, name)) for name in range(16)]
    assert [bool(plan.ticket) for plan in plans] == [True] * 9 + [False] * 7
    assert status_of(bench.depot).counters["stores_without_commit"] == 7
    assert other.store(prompt(28, 20)).num_declined == 0
    forgetful.commit(plans[0])
    assert forgetful.store(prompt(4, 30)).num_declined == 0


def test_tickets_and_contexts_belong_to_one_session() -> None:
    bench = Bench()
    owner, thief = bench.worker(), bench.worker()
    plan = owner.prepare(prompt(1))
    assert thief.refusal(m.CommitStore(thief.context, plan.ticket)) is ErrorCode.UNKNOWN_TICKET
    assert thief.ask(m.AbortStore(thief.context, plan.ticket)).count == 0
    assert thief.refusal(m.CommitStore(owner.context, plan.ticket)) is ErrorCode.UNKNOWN_CONTEXT
    assert owner.commit(plan) == 1
    assert owner.refusal(m.CommitStore(owner.context, plan.ticket)) is ErrorCode.UNKNOWN_TICKET


def test_extents_of_a_lost_session_wait_for_its_process_or_its_return() -> None:
    bench = Bench(pages=2)
    for returns in (True, False):
        lost = bench.worker(name="engine")
        lost.prepare(prompt(2))
        bench.depot.end_session(lost.session)
        assert status_of(bench.depot).quarantined_bytes == 2 * PAGE
        bench.depot.end_process(Writer(1, 1))
        assert bench.worker().store(prompt(1, 1)).num_declined == 1
        if returns:
            bench.worker(writer=lost.writer, name="engine")
        else:
            bench.depot.end_process(lost.writer)
        assert bench.index.extents.used_bytes == 0


def test_a_worker_that_returned_before_its_lost_session_ended_leaves_no_extents_behind() -> None:
    bench = Bench(pages=4)
    lost, other = bench.worker(name="engine"), bench.worker()
    lost.prepare(prompt(2))
    other.prepare(prompt(2, 1))
    returned = bench.worker(writer=lost.writer, name="engine")
    for session in (other.session, lost.session):
        bench.depot.end_session(session)
    bench.depot.background.work()
    assert status_of(bench.depot).quarantined_bytes == 2 * PAGE, "those of the worker that is away"
    assert status_of(bench.depot).events[-1][1] == "engine left"
    returned.store(prompt(2))
    assert returned.lookup(prompt(2)).num_chunks == 2
    bench.depot.end_session(returned.session)
    bench.drain()


def test_a_draining_depot_declines_stores_and_goes_on_serving() -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(2))
    bench.depot.state.accepts_stores = False
    assert worker.store(prompt(2, 1)) == m.StorePlan(1, 0, b"", 0, 2)
    assert worker.retrieve(prompt(2)).num_chunks == 2


# --- restarts of a server -------------------------------------------------------------------------------------------


def test_a_successor_evicts_what_was_stored_longest_ago() -> None:
    bench, worker = bench_and_worker(pages=3)
    for name in (1, 2, 3):
        bench.now = 100.0 - name
        worker.store(prompt(1, name))
    again = bench.successor()
    again.evictor.make_room(1, 1)
    assert [found(again, prompt(1, name)) for name in (1, 2, 3)] == [1, 1, 0]


@pytest.mark.promise(64)
def test_a_successor_keeps_the_extent_of_a_writer_whose_chunk_lost_its_parent() -> None:
    bench = Bench()
    first, second = bench.worker(), bench.worker()
    plan = first.prepare(prompt(1))
    assert second.prepare(prompt(2)).num_present == 1
    first.ask(m.AbortStore(first.context, plan.ticket))
    again = bench.successor()
    assert [again.table.key_of(entry) for entry in bench.unfinished] == [prompt(2).digests[32:]]
    assert again.extents.used_bytes == PAGE


@pytest.mark.promise(64)
def test_a_successor_keeps_the_extents_of_two_writers_of_one_chunk() -> None:
    bench, worker = bench_and_worker()
    worker.prepare(prompt(1))
    bench.index.abandon_entry(next(bench.index.table.records()).entry)  # like a tier's read that hangs
    worker.prepare(prompt(1))
    again = bench.successor()
    assert len(bench.unfinished) == 2
    assert again.extents.used_bytes == 2 * PAGE


@pytest.mark.promise(64)
def test_a_successor_keeps_the_extent_of_a_writer_whose_cache_or_tenant_has_no_name_any_more() -> None:
    bench = Bench()
    bench.worker().prepare(prompt(1))
    again = bench.successor(specs=[])
    assert (len(bench.unfinished), again.extents.used_bytes) == (1, PAGE)
    again.discard_entry(bench.unfinished[0])
    assert again.extents.used_bytes == 0


def test_the_bytes_of_a_writer_without_a_name_are_no_later_tenant_s() -> None:
    """Regression: the next tenant got the number of the lost name, and later its bytes were negative."""
    bench = Bench()
    bench.worker().prepare(prompt(1))
    again = bench.successor(specs=[])
    again.quotas.add_label(0, "somebody")
    again.discard_entry(bench.unfinished[0])
    assert list(again.quotas.first_tenants(1)) == [("somebody", 0)]
    again.check_integrity()


@pytest.mark.promise(30)
def test_entries_whose_parent_is_damaged_are_freed_with_it() -> None:
    bench = Bench()
    bench.worker().store(prompt(3))
    record = next(record for record in bench.index.table.records() if record.depth == 1)
    damaged = bytearray(bench.memory)
    damaged[HEADER_PAGE_BYTES + record.entry * RECORD_BYTES + 40] ^= 1
    again = bench.successor(damaged)
    assert found(again, prompt(3)) == again.entries.num_sealed == len(again.nodes) == 1
    assert again.extents.used_bytes == PAGE
    assert [record.depth for record in again.table.records()] == [0]
    taken: set[int] = set()
    while again.entries.num_free:
        taken.update(again.entries.take(1))
    assert len(taken) == bench.num_records - 1, "all others can be used again"


@pytest.mark.promise(30)
@pytest.mark.parametrize("forged", ["parent two chunks up", "part that the cache does not have"])
def test_records_that_no_server_writes_are_freed(forged: str) -> None:
    bench = Bench()
    bench.worker().store(prompt(3))
    memory = bytearray(bench.memory)
    table = IndexTable(memory, bench.num_records)
    first, second, third = sorted(table.records(), key=lambda record: record.depth)
    table.free([second.entry])
    table.free([third.entry])
    is_parent = forged.startswith("parent")
    write_record(
        table,
        third.entry,
        space=third.space,
        group=third.group,
        part=third.part if is_parent else Part(1).number,
        offset=third.offset,
        num_bytes=third.num_bytes,
        key=third.key if is_parent else second.key,
        parent=first.key[:16],
        depth=2 if is_parent else 1,
        check=third.check,
        label=third.label,
        writer=third.writer,
        owner=third.owner,
    )
    table.seal([third.entry], 1)
    again = bench.successor(memory)
    assert [record.entry for record in again.table.records()] == [first.entry]
    assert (again.entries.num_sealed, again.extents.used_bytes) == (1, PAGE)


@pytest.mark.parametrize("groups", [(), PLAIN, SHARDED])
def test_records_that_fit_no_known_space_are_freed(groups: tuple[m.GroupShape, ...]) -> None:
    bench = Bench((m.GroupShape(FULL, 1), *SHARDED))
    workers = [bench.worker(0), bench.worker(1)]
    for worker in workers:
        worker.store(prompt(2))
    again = bench.successor(specs=[m.CacheSpec(1, groups, "bytes")] if groups else [])
    kept = list(again.table.records())
    assert all(record.group == 0 for record in kept)
    assert len(kept) == again.entries.num_sealed == (2 if groups else 0)
    assert again.extents.used_bytes == len(kept) * PAGE


def test_a_record_that_is_there_twice_counts_once() -> None:
    bench, other = Bench(), Bench()
    bench.worker().store(prompt(1))
    worker = other.worker()
    worker.store(prompt(1, 1))
    worker.store(prompt(1))  # the same chunk, in the second extent and the second record
    second = slice(HEADER_PAGE_BYTES + RECORD_BYTES, HEADER_PAGE_BYTES + 2 * RECORD_BYTES)
    memory = bytearray(bench.memory)
    memory[second] = other.memory[second]
    again = bench.successor(memory)
    assert (again.entries.num_sealed, again.extents.used_bytes, len(list(again.table.records()))) == (1, PAGE, 1)


@pytest.mark.promise(60)
def test_of_two_keys_that_begin_alike_one_is_found_after_a_restart_and_all_can_leave() -> None:
    """Regression: the other chunk was kept but not found, and never evicted. Only a malicious peer makes such keys."""
    bench, worker = bench_and_worker()
    run = prompt(1)
    alike = KeyRun(run.digests[:16] + bytes(16), 0, run.parent)
    worker.store(run)
    worker.store(alike)
    again = bench.successor()
    assert sorted((found(again, run), found(again, alike))) == [0, 1]
    assert (again.entries.num_sealed, again.extents.used_bytes) == (1, PAGE)
    assert again.evictor.make_room(1, 1)
    assert (len(again.nodes), again.extents.used_bytes) == (0, 0)


def test_chunks_after_two_keys_that_begin_alike_are_not_found_after_a_restart() -> None:
    """Regression: they followed the one of the two that was read first, which hid that their parent was gone."""
    bench = Bench()
    worker, run = bench.worker(), prompt(3)
    alike = KeyRun(run.digests[32:48] + bytes(16), 1, run.digests[:32])
    worker.store(run.slice(0, 1))
    worker.store(alike)
    worker.store(run.slice(1))
    again = bench.successor()
    assert found(again, run) == 1
    assert again.entries.num_sealed == 2
    again.check_integrity()


def test_a_child_stored_before_its_parent_was_aborted_and_stored_again_survives_a_restart() -> None:
    bench, worker = bench_and_worker()
    first, after = worker.prepare(prompt(1)), worker.prepare(prompt(2).slice(1))
    worker.commit(after)
    worker.ask(m.AbortStore(worker.context, first.ticket))
    worker.store(prompt(1, 1))  # takes the aborted chunk's record
    assert found(bench.successor(), prompt(2)) == 0
    worker.store(prompt(1))
    assert found(bench.successor(), prompt(2)) == worker.lookup(prompt(2)).num_chunks == 2


# --- wrong bytes ----------------------------------------------------------------------------------------------------


def report(worker: Worker, run: KeyRun, chunk: int) -> int:
    """Report an entry of a run as corrupt."""
    extents = [*m.EXTENT.iter_unpack(worker.retrieve(run).extents)]
    entries = tuple((extent[3], extent[5]) for extent in extents if extent[0] == chunk)
    return worker.ask(m.ReportCorrupt(worker.context, entries)).count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [0, 2, 3])
@pytest.mark.promise(30)
def test_a_corrupt_entry_hides_what_comes_after_it_until_it_is_stored_again(chunk: int, policy: str) -> None:
    bench, worker = bench_and_worker(pages=8, policy=policy)
    worker.store(prompt(4))
    assert report(worker, prompt(4), chunk) == 1
    worker.ask(m.EndRequest(worker.context, "r"))
    assert worker.lookup(prompt(4)).num_chunks == worker.retrieve(prompt(4)).num_chunks == chunk
    assert status_of(bench.depot).num_entries == 3
    assert worker.store(prompt(4)).num_present == 3
    assert worker.lookup(prompt(4)).num_chunks == 4
    worker.ask(m.EndRequest(worker.context, "r"))
    assert worker.store(prompt(8, 1)).num_declined == 0, "all of it can leave"
    bench.drain()


def test_a_lookup_ends_at_the_first_of_several_breaks() -> None:
    bench, worker = bench_and_worker(pages=32)
    for number in range(2):
        worker.store(prompt(12, number))
    for chunk in (7, 3, 10):
        assert report(worker, prompt(12), chunk) == (chunk < 10)  # chunks after a gap are not served, so none is found
    assert report(worker, prompt(12, 1), 1) == 1
    assert [worker.lookup(prompt(n)).num_chunks for n in (1, 2, 3, 4, 12)] == [1, 2, 3, 3, 3]
    assert [worker.lookup(prompt(n, 1)).num_chunks for n in (1, 2, 12)] == [1, 1, 1]
    worker.store(prompt(5))
    assert [worker.lookup(prompt(n)).num_chunks for n in (5, 7, 12)] == [5, 7, 7]
    worker.store(prompt(12))
    assert worker.lookup(prompt(12)).num_chunks == 12
    worker.ask(m.EndRequest(worker.context, "r"))
    bench.drain()


def test_a_leased_entry_can_be_corrupt_too() -> None:
    bench, worker = bench_and_worker(pages=4)
    worker.store(prompt(2))
    lease = worker.lookup(prompt(2)).lease
    assert report(worker, prompt(2), 1) == 1
    assert worker.release(lease) == 1
    worker.ask(m.EndRequest(worker.context, "r"))
    bench.drain()


def test_a_window_s_corrupt_entry_blocks_only_what_needs_it() -> None:
    bench, worker = bench_and_worker(HYBRID)
    worker.store(prompt(6))
    extents = [*m.EXTENT.iter_unpack(worker.retrieve(prompt(6)).extents)]
    window = [(extent[3], extent[5]) for extent in extents if extent[:2] == (3, 1)]
    worker.ask(m.ReportCorrupt(worker.context, tuple(window)))
    worker.ask(m.EndRequest(worker.context, "r"))
    assert [worker.lookup(prompt(n)).num_chunks for n in (3, 4, 5, 6)] == [3, 3, 3, 6]
    worker.ask(m.EndRequest(worker.context, "r"))
    bench.drain()


def test_only_sealed_entries_of_the_space_are_removed() -> None:
    bench = Bench()
    worker, other = bench.worker(), bench.worker()
    worker.store(prompt(2))
    plan = worker.prepare(prompt(1, 1))
    (writing,) = ((extent[3], extent[5]) for extent in m.EXTENT.iter_unpack(plan.extents))
    for entries in (((0, 5),), ((10**6, 2),), (writing,)):
        assert other.ask(m.ReportCorrupt(other.context, entries)).count == 0
    assert worker.lookup(prompt(2)).num_chunks == 2


def test_checksums_of_another_number_of_entries_are_refused() -> None:
    worker = Bench().worker()
    plan = worker.prepare(prompt(2))
    assert worker.refusal(m.CommitStore(worker.context, plan.ticket, bytes(16))) is ErrorCode.MALFORMED
    assert worker.commit(plan) == 2


def test_the_number_of_different_caches_is_bounded_and_known_ones_still_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdepot.server.state.MAXIMUM_SPACES", 2)
    worker = Bench().worker()

    def register(dtype: str) -> m.RegisterScheduler:
        return m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", m.CacheSpec(1, PLAIN, dtype))

    assert isinstance(worker.ask(register("other")), m.Registered)
    assert worker.refusal(register("one too many")) is ErrorCode.BAD_LAYOUT
    assert isinstance(worker.ask(register("other")), m.Registered)


def test_the_ages_of_chunks_that_are_evicted_to_make_room_are_counted() -> None:
    bench, worker = bench_and_worker(pages=4)
    worker.store(prompt(4))
    bench.pass_time(5.0)
    worker.store(prompt(4, name=1))
    assert bench.index.evictor.eviction_ages.counts[:4] == [0, 0, 0, 4], "4 to 8 seconds"
    worker.store(prompt(3, name=2))
    assert bench.index.evictor.eviction_ages.counts[:4] == [3, 0, 0, 4]
