"""Others cannot evict a tenant's chunks within its quota. Every tenant may use idle space."""

import random

import pytest

from kvdepot.config import format_size
from kvdepot.errors import ConfigError, ErrorCode
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.pins import Pin
from kvdepot.index.eviction import POLICIES
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import restore
from kvdepot.operate import operations as o
from kvdepot.operate.report import status_of
from kvdepot.pool.table import Entry
from kvdepot.server.state import MAXIMUM_ROWS
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import TenantStatus
from support.features import needs
from support.index import LEASE_SECONDS, PAGE, Bench, Worker, bench_and_worker, prompt
from support.integrity import empty_by_eviction
from support.operate import operate


def stored(worker: Worker, tenant: str, names: range) -> int:
    """Return how many of a tenant's prompts of one chunk are in the depot."""
    found = 0
    for name in names:
        reply = worker.lookup(prompt(1, name, tenant))
        found += reply.num_chunks
        worker.release(reply.lease)
    return found


def fill(worker: Worker, tenant: str, names: range) -> int:
    """Store prompts of one chunk. Return how many were declined."""
    return sum(worker.store(prompt(1, name, tenant)).num_declined for name in names)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.promise(22, 56)
def test_a_flood_leaves_others_what_their_quota_says(policy: str) -> None:
    bench, worker = bench_and_worker(pages=12, policy=policy, quotas={"a": 4, "b": 4})
    assert fill(worker, "a", range(4)) == 0
    assert fill(worker, "b", range(100)) == 0
    assert fill(worker, "nobody", range(100)) == 0
    assert stored(worker, "a", range(4)) == 4
    assert stored(worker, "b", range(100)) == 4
    assert stored(worker, "nobody", range(100)) == 4
    bench.drain()


@needs("sessions")
def test_idle_space_is_borrowed_and_given_back() -> None:
    bench, worker = bench_and_worker(pages=12, quotas={"a": 8, "b": 4})
    fill(worker, "b", range(50))
    assert stored(worker, "b", range(50)) == 12, "nobody else wants it"
    assert fill(worker, "a", range(8)) == 0
    assert (stored(worker, "a", range(8)), stored(worker, "b", range(50))) == (8, 4)
    status = status_of(bench.depot).tenants
    assert status["a"] == TenantStatus(used_bytes=8 * PAGE, quota_bytes=8 * PAGE, retained_bytes=0)


def test_two_that_both_want_more_do_not_thrash_each_other() -> None:
    bench, worker = bench_and_worker(pages=8, quotas={"a": 4, "b": 4})
    for turn in range(200):
        fill(worker, "ab"[turn % 2], range(turn, turn + 1))
    before = dict(bench.index.quotas.first_tenants(MAXIMUM_ROWS))
    fill(worker, "a", range(1000, 1100))
    assert dict(bench.index.quotas.first_tenants(MAXIMUM_ROWS)) == before == {"a": 4 * PAGE, "b": 4 * PAGE}
    assert stored(worker, "b", range(200)) == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.promise(71)
def test_leases_of_others_keep_nobody_from_its_quota(policy: str) -> None:
    bench, worker = bench_and_worker(pages=256, num_records=256, policy=policy, quotas={"a": 96})
    fill(worker, "b", range(256))
    for name in range(255):
        worker.lookup(prompt(1, name, "b"))
    assert fill(worker, "a", range(90)) == 0
    assert (stored(worker, "a", range(90)), stored(worker, "b", range(256))) == (90, 166)
    counters = status_of(bench.depot).counters
    assert (counters["chunks_evicted"], counters["chunks_evicted_leased"]) == (90, 89), (
        "what nothing needs leaves first"
    )
    bench.pass_time(LEASE_SECONDS)
    bench.drain()


def test_a_lease_within_its_quota_keeps_what_it_names() -> None:
    worker = Bench(pages=8, quotas={"a": 4, "b": 4}).worker()
    for tenant in "ab":
        fill(worker, tenant, range(4))
        for name in range(4):
            worker.lookup(prompt(1, name, tenant))
    assert (fill(worker, "a", range(10, 20)), fill(worker, "nobody", range(4))) == (10, 4)
    assert (stored(worker, "a", range(4)), stored(worker, "b", range(4))) == (4, 4)


def test_a_chunk_that_is_copied_to_a_tier_stays_until_that_is_done() -> None:
    bench = Bench(pages=3, quotas={"a": 2})
    worker, index = bench.worker(), bench.index
    fill(worker, "b", range(3))
    for name in range(3):
        worker.lookup(prompt(1, name, "b"))
    copied = index.table.entries[:2]
    nodes = index.begin_reading(copied)
    fill(worker, "a", range(2))
    assert (stored(worker, "a", range(2)), stored(worker, "b", range(2))) == (1, 2)
    index.end_reading(copied, nodes)
    fill(worker, "a", range(2))
    assert stored(worker, "a", range(2)) == 2


def test_a_lease_whose_chunk_has_left_ends_without_a_trace() -> None:
    bench, worker = bench_and_worker(pages=4, quotas={"a": 2})
    fill(worker, "b", range(4))
    leases = [worker.lookup(prompt(1, 0, "b")).lease for _ in range(3)]
    leases += [worker.lookup(prompt(1, name, "b")).lease for name in range(1, 4)]
    assert fill(worker, "a", range(2)) == 0
    assert stored(worker, "b", range(4)) == 2
    assert len(bench.depot.leases) == len(leases)
    fill(worker, "b", range(10, 12))
    bench.index.check_integrity()
    assert [worker.release(lease) for lease in leases] == [1] * len(leases)
    bench.index.check_integrity()
    bench.drain()


@needs("sessions")
def test_prefixes_that_sessions_retain_keep_no_tenant_from_its_quota() -> None:
    bench, worker = bench_and_worker(pages=8, quotas={"a": 4})
    worker.store(prompt(4, 1, "b"))
    worker.store(prompt(8, 1, "b"))
    _, nodes = bench.index.visibility.match(bench.index.spaces[0], prompt(8, 1, "b").digests)
    bench.depot.features.of(Agents).pins.put(("b", "agent"), Pin(nodes, 0, 8 * PAGE, 600.0))
    assert fill(worker, "a", range(4)) == 0
    assert worker.lookup(prompt(8, 1, "b")).num_chunks == 4


@pytest.mark.promise(71)
def test_unfinished_stores_of_a_share_are_no_more_than_its_quota() -> None:
    bench = Bench(pages=256, num_records=512, quotas={"a": 96})
    workers, other = [bench.worker(), bench.worker()], bench.worker()
    plans = [workers[name % 2].prepare(prompt(1, name, "b")) for name in range(255)]
    assert sum(plan.num_declined for plan in plans) == 255 - 160
    assert status_of(bench.depot).counters["store_entries_over_share"] == 255 - 160
    assert fill(other, "a", range(90)) == 0
    assert sum(workers[name % 2].commit(plan) for name, plan in enumerate(plans) if plan.ticket) == 160
    assert stored(other, "a", range(90)) == 90
    bench.drain()


@pytest.mark.promise(71)
def test_unfinished_stores_of_a_small_quota_are_no_more_than_it() -> None:
    bench = Bench(pages=256, num_records=512, quotas={"a": 4, "b": 252})
    small, rest, other = bench.worker(), bench.worker(), bench.worker()
    assert sum(small.prepare(prompt(1, name, "a")).num_declined for name in range(16)) == 16 - 4
    assert sum(rest.prepare(prompt(1, name, "c")).num_declined for name in range(20)) == 20 - 16, "a sixteenth"
    assert fill(other, "b", range(236)) == 0
    for worker in (small, rest):
        bench.depot.end_session(worker.session)
        bench.depot.end_process(worker.writer)
    bench.drain()


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.promise(71)
def test_unfinished_stores_keep_nobody_from_its_quota_by_what_is_before_them(is_gone: bool) -> None:
    bench = Bench(pages=16, num_records=32, quotas={"a": 8})
    worker, other = bench.worker(), bench.worker()
    plans: list[m.StorePlan] = []
    for name in range(4):
        worker.store(prompt(3, name, "b"))
        plans.append(worker.prepare(prompt(4, name, "b").slice(3)))
    writing = {bench.index.table.extent(entry) for plan in plans for entry in entries_of(plan)}
    if is_gone:
        bench.depot.end_session(worker.session)
    assert fill(other, "a", range(8)) == 0
    given = {r.offset for r in bench.index.table.records() if bench.depot.labels.names[r.label][0] == "a"}
    assert not given & {offset for offset, _ in writing}, "somebody may still write there"
    assert stored(other, "a", range(8)) == 8
    bench.index.check_integrity()
    for plan in plans if not is_gone else []:
        reply = worker.ask(m.CommitStore(worker.context, plan.ticket))
        assert reply == m.Done(1, 1) or reply.code is ErrorCode.UNKNOWN_TICKET
    bench.drain()


def test_a_tenant_whose_engines_die_in_the_middle_of_stores_keeps_its_quota() -> None:
    bench = Bench(pages=8, quotas={"a": 4})
    for number in range(20):
        worker = bench.worker()
        worker.prepare(prompt(2, number, "a"))
        bench.pass_time(bench.depot.stores.ticket_seconds)  # the ticket is late, so its chunks may be stored again
        bench.depot.end_session(worker.session)
        bench.depot.end_process(worker.writer)
    assert bench.index.quotas.usage() == {"a": (1, 4 * PAGE, 0)}
    assert fill(bench.worker(), "a", range(4)) == 0
    bench.drain()


def test_where_quotas_leave_nothing_the_others_may_still_borrow() -> None:
    bench, worker = bench_and_worker(pages=32, quotas={"a": 32})
    assert worker.prepare(prompt(3, 1, "b")).num_declined == 1
    bench.depot.end_session(worker.session)
    bench.depot.end_process(worker.writer)
    worker = bench.worker()
    assert fill(worker, "b", range(40)) == 0
    assert stored(worker, "b", range(40)) == 32
    assert fill(worker, "a", range(32)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.promise(71)
def test_whatever_others_hold_a_tenant_has_its_quota(policy: str) -> None:
    rng = random.Random(6)
    for _ in range(60):
        bench = Bench(pages=32, num_records=rng.choice([32, 40, 64]), policy=policy, quotas={"a": 8, "b": 8})
        worker, other = bench.worker(), bench.worker()
        for number in range(rng.randint(10, 80)):
            tenant = rng.choice("bc")
            run = prompt(rng.randint(1, 6), rng.randrange(12), tenant)
            plan = worker.prepare(run.slice(rng.randrange(run.num_chunks)))
            if plan.ticket and rng.random() < 0.8:
                worker.commit(plan)
            if rng.random() < 0.8:
                worker.lookup(run)
            if number % 16 == 15 and rng.random() < 0.3:
                bench.depot.end_session(worker.session)
                worker = bench.worker()
        assert fill(other, "a", range(8)) == 0
        bench.index.check_integrity()
        assert stored(other, "a", range(8)) == 8
        bench.depot.end_session(worker.session)
        bench.drain()


def entries_of(plan: m.StorePlan) -> list[Entry]:
    return [entry for _, _, _, entry, *_ in m.EXTENT.iter_unpack(plan.extents)]


def test_quotas_are_as_before_after_a_restart() -> None:
    bench, worker = bench_and_worker(pages=8, quotas={"a": 4})
    fill(worker, "a", range(3))
    fill(worker, "b", range(5))
    again = Bench(pages=8, quotas={"a": 4})
    again.depot.labels.restore(bench.depot.labels.names)
    again.memory[:] = bench.memory
    assert [record for record in restore(again.index, [bench.spec]) if record is not None] == []
    assert again.index.quotas.used_bytes == [5 * PAGE, 3 * PAGE]


@pytest.mark.parametrize("quotas", [{"a": 5, "b": 6}, {"a": 0}, {"a": -1}])
def test_quotas_that_cannot_be_kept_are_refused(quotas: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="quotas of"):
        QuotaTable(10, quotas)


def test_more_quotas_than_a_depot_has_are_refused_at_its_start() -> None:
    assert QuotaTable(1000, {f"tenant-{number}": 1 for number in range(64)}).num_shares == 65
    with pytest.raises(ConfigError, match="65 quotas: a depot has at most 64"):
        QuotaTable(1000, {f"tenant-{number}": 1 for number in range(65)})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.promise(22)
def test_whoever_is_within_its_quota_loses_nothing_to_others(policy: str) -> None:
    rng = random.Random(3)
    bench, worker = bench_and_worker(pages=24, policy=policy, quotas={"a": 10, "b": 6})
    quota = {"a": 10 * PAGE, "b": 6 * PAGE, "c": 8 * PAGE}
    for number in range(600):
        tenant = rng.choice("abc")
        before = dict(bench.index.quotas.first_tenants(MAXIMUM_ROWS))
        worker.store(prompt(rng.randint(1, 3), number, tenant))
        after = dict(bench.index.quotas.first_tenants(MAXIMUM_ROWS))
        for other, used in before.items():
            if other != tenant:
                assert after[other] >= min(used, quota[other])
    bench.drain()


def set_quota(bench: Bench, tenant: str, pages: int) -> frames.Reply | None:
    deferred = operate(bench.depot, o.SetQuota(tenant, pages * PAGE))
    bench.depot.background.work()
    return deferred.reply


def test_bytes_being_written_count_against_a_quota_set_in_the_meantime() -> None:
    bench, worker = bench_and_worker(pages=8, quotas={"b": 2})
    plan = worker.prepare(prompt(2, 0, "a"))
    assert set_quota(bench, "a", 4) == m.Done(1, 2)
    assert worker.prepare(prompt(3, 1, "a")).num_declined == 1
    bench.index.check_integrity()
    worker.commit(plan)
    assert worker.prepare(prompt(2, 2, "a")).num_declined == 0
    bench.index.check_integrity()


@needs("sessions")
def test_a_quota_given_at_runtime_holds_for_what_is_here_already() -> None:
    bench, worker = bench_and_worker(pages=12)
    fill(worker, "a", range(4))
    assert set_quota(bench, "a", 4) == m.Done(1, 4)
    assert fill(worker, "b", range(100)) == 0
    assert (stored(worker, "a", range(4)), stored(worker, "b", range(100))) == (4, 8)
    assert status_of(bench.depot).tenants["a"] == TenantStatus(
        used_bytes=4 * PAGE, quota_bytes=4 * PAGE, retained_bytes=0
    )


def test_a_quota_that_ends_leaves_its_chunks_to_everybody() -> None:
    bench, worker = bench_and_worker(pages=12, quotas={"a": 4})
    fill(worker, "a", range(4))
    assert set_quota(bench, "a", 0) == m.Done(1, 4)
    assert set_quota(bench, "a", 0) == m.Done(1, 0)
    assert bench.index.quotas.quota_bytes == [12 * PAGE, 0]
    fill(worker, "b", range(100))
    assert (stored(worker, "a", range(4)), stored(worker, "b", range(100))) == (0, 12)
    assert set_quota(bench, "a", 12) == m.Done(1, 0)
    assert bench.index.quotas.num_shares == 2, "a tenant's share is used again"


@pytest.mark.parametrize("pages", [9, 1 << 40])
def test_a_quota_that_does_not_fit_is_refused_and_changes_nothing(pages: int) -> None:
    bench = Bench(pages=12, quotas={"b": 4})
    before = bench.index.quotas.by_name(), list(bench.index.quotas.quota_bytes)
    reply = set_quota(bench, "a", pages)
    assert isinstance(reply, m.ErrorReply)
    assert f"leave {format_size(8 * PAGE)} of the pool" in reply.message
    assert (bench.index.quotas.by_name(), bench.index.quotas.quota_bytes) == before


@needs("sessions")
@pytest.mark.parametrize("policy", POLICIES)
def test_quotas_that_change_under_load_keep_the_books(policy: str) -> None:
    rng = random.Random(4)
    bench, worker = bench_and_worker(pages=24, num_records=32, policy=policy, quotas={"a": 4})
    for number in range(600):
        tenant = rng.choice("abc")
        worker.store(prompt(rng.randint(1, 5), rng.randrange(40), tenant))
        if number % 7 == 0:
            operate(bench.depot, o.SetQuota(tenant, rng.choice([0, 2, 5, 8, 30]) * PAGE))
        if rng.random() < 0.5:
            bench.depot.background.work(lambda: True)
        if number % 20 == 0:
            worker.ask(Hint(worker.context, tenant, prompt(2, 1, tenant).digests, session_ended=True))
        bench.index.check_integrity()
        quotas = bench.index.quotas
        assert sum(quotas.quota_bytes) == 24 * PAGE
        assert quotas.used_bytes[0] >= 0
    bench.depot.background.work()
    by_share: dict[int, int] = {}
    for name, size in bench.index.quotas.first_tenants(MAXIMUM_ROWS):
        share = bench.index.quotas.share_of([label.tenant for label in bench.depot.labels.names].index(name))
        by_share[share] = by_share.get(share, 0) + size
    assert [by_share.get(n, 0) for n in range(bench.index.quotas.num_shares)] == bench.index.quotas.used_bytes
    empty_by_eviction(bench.index)


def test_whoever_is_above_its_quota_most_makes_room_first() -> None:
    rng = random.Random(5)
    table = QuotaTable(10_000, {f"{name}": rng.randint(1, 300) for name in range(20)})
    for label in range(30):
        table.add_label(label, f"{label}")
    quota, used = table.quota_bytes, table.used_bytes
    for turn in range(20_000):
        share = rng.randrange(table.num_shares)
        match rng.randrange(8):
            case 0:
                table.move(used[share] // 2, share, rng.randrange(table.num_shares))
            case 1 if share:
                table.set_quota(f"{share - 1}", rng.randint(1, quota[share] + quota[0] // 4))
            case 2 if table.end_quota(f"{share - 1}"):
                table.forget_quota(f"{share - 1}")
            case 3 | 4 | 5:
                table.account(share, share, rng.randint(1, 100))
            case _:
                table.account(share, share, -rng.randint(0, used[share]))
        if turn % 3:
            continue
        above = [number for number in range(table.num_shares) if used[number] > quota[number]]
        above.sort(key=lambda number: used[number] / max(1, quota[number]), reverse=True)
        share = rng.randrange(table.num_shares)
        expected = above if share in above else [*above, share]
        some = rng.randrange(1 + len(expected))
        assert [number for number, _ in zip(table.victims(share), range(some), strict=False)] == expected[:some]
        assert list(table.victims(share)) == expected
