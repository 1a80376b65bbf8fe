"""Sessions of agents: their own tenant, and no other, retains, demotes or forgets their prefix by name alone."""

import mmap
import time
from collections.abc import Iterator

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.errors import ErrorCode, RemoteError
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.prefixes import MAXIMUM_TENANTS, PrefixFile
from kvdepot.index.shares import Shares
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.report import status_of
from kvdepot.server.depot import Depot
from kvdepot.server.turns import Refused
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest
from support.features import features
from support.index import HYBRID, PAGE, Bench, Worker, bench_and_worker, prompt
from support.integrity import num_ended
from support.operate import operate
from support.peer import Peer
from support.peer import prompt as peers_prompt


def remember(worker: Worker, run: KeyRun, session: str = "agent", **hints: float) -> None:
    worker.ask(Hint(worker.context, run.tenant, run.digests, session=session, **hints))  # type: ignore[arg-type]


def operated(bench: Bench, request: OperatorRequest) -> int:
    pending = operate(bench.depot, request)
    bench.depot.background.work()
    assert isinstance(pending.reply, m.Done), pending.reply
    return pending.reply.count


def fill(worker: Worker, names: range, tenant: str = "default") -> None:
    for name in names:
        worker.store(prompt(1, name, tenant))


@pytest.mark.parametrize("how", ["an operation", "a hint"])
def test_a_retained_session_stays_until_its_time_is_over(how: str) -> None:
    bench = Bench(pages=16, now=1000.0)
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    if how == "a hint":
        remember(worker, run, retain_seconds=60.0)
    else:
        remember(worker, run)
        assert operated(bench, session_operations.RetainSession("agent", 60.0)) == 8
    bench.pass_time(59.0)
    fill(worker, range(1, 40))
    assert bench.found(run) == 8
    bench.pass_time(1.0)
    fill(worker, range(40, 80))
    assert bench.found(run) < 8
    bench.index.check_integrity()
    bench.drain()


def test_a_session_that_is_retained_again_has_the_new_time_and_0_ends_it() -> None:
    bench = Bench(pages=16)
    worker, run = bench.worker(), prompt(4)
    worker.store(run)
    remember(worker, run)
    operated(bench, session_operations.RetainSession("agent", 1000.0))
    operated(bench, session_operations.RetainSession("agent", 10.0))
    assert len(bench.depot.features.of(Agents).pins) == 1
    bench.pass_time(11.0)
    assert len(bench.depot.features.of(Agents).pins) == 0
    operated(bench, session_operations.RetainSession("agent", 1000.0))
    assert operated(bench, session_operations.RetainSession("agent", 0.0)) == 4
    assert len(bench.depot.features.of(Agents).pins) == bench.depot.features.of(Agents).pins.bytes_of(0) == 0
    bench.drain()


def test_a_session_that_is_retained_again_does_not_end_at_its_first_time() -> None:
    bench = Bench(pages=16)
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    remember(worker, run)
    operated(bench, session_operations.RetainSession("agent", 10.0))
    bench.pass_time(9.0)
    operated(bench, session_operations.RetainSession("agent", 60.0))
    bench.pass_time(59.0)
    fill(worker, range(1, 40))
    assert bench.found(run) == 8
    bench.pass_time(1.0)
    fill(worker, range(40, 80))
    assert bench.found(run) < 8
    bench.drain()


def test_very_many_requests_to_retain_one_session_leave_one_pin_and_little_behind() -> None:
    bench = Bench()
    worker, run = bench.worker(), prompt(4)
    worker.store(run)
    for number in range(5000):
        remember(worker, run, retain_seconds=86400.0 + number)
    pins = bench.depot.features.of(Agents).pins
    assert len(pins) == 1
    bench.now += 86400.0 + 4000
    num_steps = sum(1 for _ in pins.expire(bench.now))
    assert num_steps < 2048, "most of what is over was thrown away"
    assert len(pins) == 1


@pytest.mark.promise(71)
def test_a_greedy_session_keeps_half_of_its_tenant_s_quota_and_nothing_of_others() -> None:
    bench, worker = bench_and_worker(pages=64, num_records=128, quotas={"greedy": 24, "other": 20})
    worker.store(prompt(20, 1, "greedy"))
    worker.store(prompt(4, 2, "greedy"))
    for name in (1, 2):
        remember(worker, prompt(20 if name == 1 else 4, name, "greedy"), f"agent-{name}")
    assert operated(bench, session_operations.RetainSession("agent-1", 600.0, "greedy")) == 12
    assert operated(bench, session_operations.RetainSession("agent-2", 600.0, "greedy")) == 0, "its tenant keeps enough"
    assert status_of(bench.depot).tenants["greedy"].retained_bytes == 12 * PAGE
    fill(worker, range(3, 40), "other")
    fill(worker, range(40, 80), "greedy")
    assert sum(bench.found(prompt(1, name, "other")) for name in range(3, 40)) >= 20
    assert bench.found(prompt(20, 1, "greedy")) >= 12
    assert bench.index.quotas.used_bytes[1] >= 24 * PAGE, "the other half takes its stores"


@pytest.mark.parametrize(
    "operation",
    [
        session_operations.RetainSession("agent", 60.0, "b"),
        session_operations.PrefetchSession("agent", "b"),
        session_operations.DemoteSession("agent", "b"),
        session_operations.ForgetSession("agent", "b"),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_a_session_of_another_tenant_is_unknown(operation: OperatorRequest) -> None:
    bench, worker = bench_and_worker()
    worker.store(prompt(4, tenant="a"))
    remember(worker, prompt(4, tenant="a"))
    with pytest.raises(Refused, match="tenant b has no session agent") as caught:
        operate(bench.depot, operation)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    assert bench.found(prompt(4, tenant="a")) == 4


@pytest.mark.parametrize("at_once", [True, False])
def test_keys_of_another_tenant_under_a_session_s_name_move_nothing_of_it(at_once: bool) -> None:
    """An engine lies about keys, which it would have to know."""
    bench = Bench()
    worker, secret = bench.worker(), prompt(4, tenant="a")
    worker.store(secret)
    worker.ask(Hint(worker.context, "b", secret.digests, session="thief"))
    assert operated(bench, session_operations.RetainSession("thief", 60.0, "b")) == 0
    assert operated(bench, session_operations.ForgetSession("thief", "b", at_once)) == 0
    assert bench.found(secret) == 4
    assert num_ended(bench.index) == 0


def test_a_session_is_forgotten_first_or_at_once_as_far_as_no_other_needs_it() -> None:
    bench = Bench()
    worker, run = bench.worker(), prompt(8)
    branch = hash_prefix(Namespace("model", tenant="default"), 1, [0, 1, 2, 3, 4, 95, 96, 97])
    for each in (run, branch):
        worker.store(each)
    remember(worker, run)
    operated(bench, session_operations.RetainSession("agent", 60.0))
    assert operated(bench, session_operations.ForgetSession("agent")) == 3
    assert num_ended(bench.index) == 3
    remember(worker, run)
    operated(bench, session_operations.RetainSession("agent", 60.0))
    assert operated(bench, session_operations.ForgetSession("agent", at_once=True)) == 3
    assert (bench.found(run), bench.found(branch)) == (5, 8)
    assert not len(bench.depot.features.of(Agents).prefixes)
    bench.drain()


def test_chunks_that_a_request_holds_while_their_session_is_forgotten_are_evicted_first_afterwards() -> None:
    # Regression: they did not end, and nobody could end them, as the name was gone.
    bench = Bench(pages=16)
    worker, run, other = bench.worker(), prompt(4), prompt(4, 1)
    worker.store(run)
    worker.store(other)
    remember(worker, run)
    lease = worker.lookup(run).lease
    assert operated(bench, session_operations.ForgetSession("agent", at_once=True)) == 0
    assert bench.found(run) == 4
    assert num_ended(bench.index) == 4
    worker.ask(m.Release(worker.context, (lease,)))
    fill(worker, range(2, 14))
    assert (bench.found(run), bench.found(other)) == (0, 4)
    bench.drain()


@pytest.mark.slow
def test_sessions_of_one_tenant_too_many_are_counted_and_the_answer_says_why() -> None:
    # Regression: nothing said that they were not remembered.
    run = peers_prompt(2)
    with DepotProcess(pool_size="1MiB") as depot:
        worker = Peer(depot)
        worker.store(run)
        for number in range(MAXIMUM_TENANTS + 2):
            worker.ask(Hint(worker.context, f"tenant-{number}", run.digests, session="agent"))
        last = f"tenant-{MAXIMUM_TENANTS + 1}"
        with pytest.raises(RemoteError, match=f"tenant {last} has no session agent: 1,024 other tenants have sessions"):
            ask_depot(session_operations.RetainSession("agent", 60.0, last), depot.url, 10)
        with pytest.raises(RemoteError, match="no engine named it"):
            ask_depot(session_operations.RetainSession("another", 60.0, "tenant-0"), depot.url, 10)
        assert depot.status().counters["sessions_not_remembered"] == 2
        worker.close()


def test_one_line_says_whose_sessions_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvdepot.features.sessions.prefixes.MAXIMUM_TENANTS", 1)
    bench, worker = bench_and_worker()
    for tenant in "abb":
        remember(worker, prompt(1, tenant=tenant))
    worker.ask(Hint(worker.context, "b", b"", session="agent"))
    assert [record.getMessage() for record in caplog.records] == [
        "sessions of tenant b are not remembered, as 1,024 other tenants have some; further ones are only counted"
    ]
    assert bench.depot.counters["sessions_not_remembered"] == 2


def test_a_hint_that_ends_a_session_forgets_it() -> None:
    bench = Bench()
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    remember(worker, run, retain_seconds=60.0)
    remember(worker, run, session_ended=True)
    assert num_ended(bench.index) == 8
    assert not len(bench.depot.features.of(Agents).prefixes)
    assert not len(bench.depot.features.of(Agents).pins)


def test_a_session_of_a_model_with_windows_and_states_is_kept_whole() -> None:
    bench = Bench(HYBRID, pages=128)
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    remember(worker, run)
    assert operated(bench, session_operations.RetainSession("agent", 60.0)) == 8
    assert bench.depot.features.of(Agents).pins.bytes_of(0) == (8 + 2 + 1) * PAGE
    fill(worker, range(1, 90))
    assert worker.lookup(run).num_chunks == 8


def test_a_session_with_parts_in_two_caches_is_kept_in_the_one_that_has_more() -> None:
    bench, longer = bench_and_worker()
    longer.store(prompt(8))
    bench.spec = m.CacheSpec(1, bench.groups, "another cache")
    bench.worker().store(prompt(3))
    remember(longer, prompt(8))
    assert operated(bench, session_operations.RetainSession("agent", 60.0)) == 8


def test_without_an_engine_of_its_cache_nothing_is_kept() -> None:
    bench = Bench()
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    remember(worker, run)
    bench.depot.end_session(worker.session)
    assert operated(bench, session_operations.RetainSession("agent", 60.0)) == 0


@pytest.mark.promise(23)
def test_sessions_are_known_to_the_next_server_and_pins_are_not() -> None:
    bench, memory = Bench(), mmap.mmap(-1, 64 * 1024)
    bench.depot = Depot(
        bench.index,
        epoch=1,
        lease_seconds=10.0,
        clock=lambda: bench.now,
        features=features(prefixes=PrefixFile(memory)),
    )
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    remember(worker, run, retain_seconds=60.0)
    prefixes = PrefixFile(memory)
    for _ in prefixes.restore():
        pass
    index = bench.successor()
    depot = Depot(index, epoch=2, lease_seconds=10.0, clock=lambda: bench.now, features=features(prefixes=prefixes))
    assert depot.features.of(Agents).prefix_of(("default", "agent")) == run.digests
    assert not len(depot.features.of(Agents).pins)


def test_nothing_is_remembered_while_an_earlier_server_s_sessions_are_read() -> None:
    bench = Bench()
    worker, run = bench.worker(), prompt(8)
    worker.store(run)
    bench.depot.state.is_restoring = True
    remember(worker, run)
    assert not len(bench.depot.features.of(Agents).prefixes)


@pytest.mark.promise(61)
@pytest.mark.slow
def test_operations_take_as_long_among_100_000_sessions_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = prompt(1500), dict[tuple[str, int], list[float]]()
    benches = {num_others: Bench(pages=4096, num_records=4096) for num_others in (0, 100_000)}
    workers = {num_others: bench.worker() for num_others, bench in benches.items()}
    for num_others, bench in benches.items():
        for start in range(0, 1500, m.MAXIMUM_STORE_ENTRIES):
            workers[num_others].store(run.slice(start, min(1500, start + m.MAXIMUM_STORE_ENTRIES)))
        for name in range(num_others):
            bench.depot.features.of(Agents).prefixes.remember(
                f"tenant-{name % 9}", f"{name}", run.digests[name % 40 * 32 :][:32]
            )

    def in_one_step(*_arguments: object) -> Iterator[int]:
        yield 1

    monkeypatch.setattr(Shares, "end_session", in_one_step)  # its steps are tested elsewhere
    for _ in range(20):
        for num_others, bench in benches.items():
            for name, act in {
                "hint": lambda: remember(workers[num_others], run, retain_seconds=60.0),  # noqa: B023
                "retain": lambda: operated(bench, session_operations.RetainSession("agent", 60.0)),  # noqa: B023
                "forget": lambda: operated(bench, session_operations.ForgetSession("agent")),  # noqa: B023
            }.items():
                began = time.perf_counter()
                act()
                times.setdefault((name, num_others), []).append(time.perf_counter() - began)
    for name in ("hint", "retain", "forget"):
        alone, among = min(times[name, 0]), min(times[name, 100_000])
        assert among < 5 * alone, f"{name}: {among} s, alone {alone} s; a look at each session takes 100 times as long"
