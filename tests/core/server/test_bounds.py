"""However large the index, one request or one turn does a bounded amount of work."""

import contextlib
import math
import random
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdepot.config import CONTROL_SOCKET, ServerConfig
from kvdepot.index.index import MOST_EVICTED
from kvdepot.lab.processes import wait_until
from kvdepot.layout import GroupKind
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.operate.report import status_of
from kvdepot.pool.files import open_pool
from kvdepot.pool.folder import NAMES_FILE
from kvdepot.pool.names import Label
from kvdepot.pool.table import Writer
from kvdepot.server.app import DepotServer
from kvdepot.server.state import MAXIMUM_LABELS, MAXIMUM_ROWS
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.tiers import promotion
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import TenantStatus
from support.features import needs
from support.full_depot import NUM_CHUNKS, PAGE, PROMPT_CHUNKS, SPEC, Bench, prepare_all, prompt, put_tier_below
from support.peer import registration


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.promise(61)
def test_a_commit_that_many_chunks_have_waited_for() -> None:
    bench = Bench(2 * NUM_CHUNKS, filled=False)
    first, *others = prepare_all(bench)
    for plan in others:
        bench.ask(m.CommitStore(bench.context, plan.ticket))
    bench.ask(m.CommitStore(bench.context, first.ticket))
    space, digests = bench.index.spaces[0], prompt(0, NUM_CHUNKS).digests
    found = bench.index.visibility.match(space, digests)[0]
    assert found == NUM_CHUNKS


@pytest.mark.promise(61)
def test_chunks_that_left_before_they_could_be_found_are_not_found() -> None:
    bench = Bench(2 * NUM_CHUNKS, filled=False)
    first, *others = prepare_all(bench)
    for plan in others:
        bench.ask(m.CommitStore(bench.context, plan.ticket))
    bench.ask(m.CommitStore(bench.context, first.ticket))
    assert sum(bench.index.evictor.clear(lambda _label, _space: True)) == NUM_CHUNKS
    bench.depot.background.work()
    assert bench.index.visibility.match(bench.index.spaces[0], prompt(0, NUM_CHUNKS).digests)[0] == 0
    bench.index.check_integrity()


@needs("sessions")
@pytest.mark.promise(61)
def test_a_quota_and_the_status_where_tenants_have_many_models() -> None:
    bench = Bench(filled=False)
    bench.store(prompt(0, 1))
    for number in range(MAXIMUM_LABELS - 1):
        bench.depot.labels.names.append(Label("a", f"model {number}"))
        bench.index.quotas.add_label(len(bench.depot.labels.names) - 1, "a")
    steps = bench.index.evictor.set_quota("a", PAGE)
    next(steps)
    tenants = status_of(bench.depot).tenants
    assert tenants == {"a": TenantStatus(used_bytes=PAGE, quota_bytes=PAGE, retained_bytes=0)}


@pytest.mark.promise(61)
@pytest.mark.parametrize("used_again", [False, True])
def test_the_largest_store_into_a_full_index(bench: Bench, used_again: bool) -> None:
    if used_again:
        for name in range(4):
            bench.ask(m.Lookup(bench.context, "r", prompt(name).digests, "a"))
        bench.ask(m.EndRequest(bench.context, "r"))
    run = prompt(99)
    for start in range(0, run.num_chunks, m.MAXIMUM_STORE_ENTRIES):
        plan = bench.prepare(run.slice(start, start + m.MAXIMUM_STORE_ENTRIES))
        bench.ask(m.CommitStore(bench.context, plan.ticket))
        assert plan.num_declined == 0


@pytest.mark.promise(61)
def test_a_large_chunk_among_small_ones_that_leave_in_any_order() -> None:
    """Regression: one store evicted half of the index until, by chance, neighbours had left."""
    bench, page = Bench(filled=False), 64 * PAGE
    runs = [prompt(name, 16) for name in range(NUM_CHUNKS // 16)]
    for run in runs:
        bench.store(run)
    for run in random.Random(1).sample(runs, len(runs)):
        bench.ask(m.Lookup(bench.context, "r", run.digests, "a"))
        bench.ask(m.EndRequest(bench.context, "r"))
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "large")
    details = (m.GroupDetail((page,), 8),)
    bench.context = bench.ask(
        m.RegisterKVCache(m.PROTOCOL_VERSION, "other", 0, 1, "none", "none", "model", spec, details)
    ).context
    run, num_stored, num_requests = prompt(0, 8), 0, 0
    while num_stored < run.num_chunks:
        before = bench.index.evictor.num_evicted
        plan = bench.prepare(run.slice(num_stored, run.num_chunks))
        assert bench.index.evictor.num_evicted - before <= MOST_EVICTED
        if plan.ticket:
            num_stored += bench.ask(m.CommitStore(bench.context, plan.ticket)).count
        num_requests += 1
        assert num_requests <= NUM_CHUNKS // MOST_EVICTED
    assert num_requests > 1
    assert bench.index.visibility.match(bench.index.space(spec), run.digests)[0] == run.num_chunks


@pytest.mark.promise(61)
def test_larger_requests_are_refused() -> None:
    bench = Bench(filled=False)
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),) * 2, "bytes")
    details = (m.GroupDetail((PAGE,), 8),) * 2
    context = bench.ask(registration(spec, details=details, instance="other")).context
    for most in (m.MAXIMUM_STORE_ENTRIES, m.MAXIMUM_RETRIEVE_ENTRIES):
        run = prompt(0, most)
        request: frames.Request
        for extra in (most // 2, 1):
            request = m.PrepareRetrieve(context, "r", run.digests, 0, (most, extra))
            if most == m.MAXIMUM_STORE_ENTRIES:
                request = m.PrepareStore(context, "r", "", run.digests, 0, b"", (most, extra))
            with pytest.raises(Refused, match=f"at most {most}, in several"):
                bench.ask(request)
    half = m.MAXIMUM_STORE_ENTRIES // 2
    store = m.PrepareStore(context, "r", "", prompt(0, half).digests, 0, b"", (half, half))
    assert len(bench.ask(store).extents) == m.EXTENT.size * m.MAXIMUM_STORE_ENTRIES


@pytest.mark.promise(61)
def test_a_chunk_of_many_groups_can_be_stored() -> None:
    bench = Bench(filled=False)
    num_groups = m.MAXIMUM_STORE_ENTRIES + 8
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),) * num_groups, "bytes")
    details = (m.GroupDetail((PAGE,), 8),) * num_groups
    context = bench.ask(registration(spec, details=details, instance="other")).context
    plan = bench.ask(m.PrepareStore(context, "r", "", prompt(0, 1).digests, 0, b"", (1,) * num_groups))
    assert bench.ask(m.CommitStore(context, plan.ticket)).count == num_groups


@pytest.mark.promise(61)
def test_the_status_of_many_tenants() -> None:
    bench = Bench(filled=False)
    num_tenants = MAXIMUM_ROWS + 1000
    for name in range(num_tenants):
        bench.store(prompt(name, 2, tenant=f"tenant {name}"))
    tenants = status_of(bench.depot).tenants
    assert len(tenants) == MAXIMUM_ROWS + 1
    assert tenants["tenant 7"] == TenantStatus(used_bytes=2 * PAGE)
    assert tenants["(others)"] == TenantStatus(used_bytes=2 * PAGE * (num_tenants - MAXIMUM_ROWS))


@pytest.mark.slow
@pytest.mark.promise(61)
def test_a_thousand_workers_of_one_cache() -> None:
    bench, num_workers, num_groups = Bench(filled=False), 1000, 4
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1, 0, num_workers),) * num_groups, "bytes")
    space = bench.index.space(spec)

    def register(shard: int, page: int = PAGE, name: str = "engine") -> m.RegisterKVCache:
        details = (m.GroupDetail((page,), 8, shard << 16),) * num_groups
        return m.RegisterKVCache(
            m.PROTOCOL_VERSION, name, shard, num_workers, "none", "none", f"{name}'s model", spec, details
        )

    for shard in range(num_workers):
        assert bench.depot.contexts.places(space) == ((), "")
        bench.ask(register(shard), 2 + shard)
    contexts = status_of(bench.depot).contexts
    assert [len(context.groups) for context in contexts[1:]] == [num_groups] * num_workers
    places, model = bench.depot.contexts.places(space, "engine")
    assert [(place.group, place.part) for place in places] == [
        (group, shard << 16) for group in range(num_groups) for shard in range(num_workers)
    ]
    assert model == "engine's model"
    assert bench.depot.contexts.places(space, "nobody") == (places, model)
    last = max(bench.depot.contexts.by_number)
    bench.ask(register(5, name="other"), 1)
    assert bench.depot.contexts.places(space, "other") == (places, "other's model")
    with pytest.raises(Refused, match=rf"group 0, Part\(first_layer=7, .*: 1 bytes a chunk, but engine regi.* {PAGE}"):
        bench.ask(register(7, 1))
    bench.ask(m.Unregister(last), 1 + num_workers)
    assert bench.depot.contexts.places(space) == ((), "")
    assert bench.ask(register(num_workers - 1, 1)).context


@pytest.mark.promise(61)
@pytest.mark.parametrize(("num_new", "expected"), [(8000, 10), (8192, 0)])
def test_a_boundary_of_states_is_looked_for_so_far_and_no_further(num_new: int, expected: int) -> None:
    bench = Bench(filled=False)
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.RECURRENT, 1),), "bytes")
    context = bench.ask(registration(spec, details=(m.GroupDetail((PAGE,), 8),), instance="other")).context
    run = prompt(0, 10 + num_new)
    plan = bench.ask(m.PrepareStore(context, "r", "", run.slice(0, 10).digests, 0, b"", (10,)))
    bench.ask(m.CommitStore(context, plan.ticket))
    assert bench.index.visibility.match(bench.index.space(spec), run.digests)[0] == expected


@pytest.mark.slow
@pytest.mark.promise(61)
def test_a_victim_is_found_in_a_few_steps_when_nearly_all_was_used_again() -> None:
    """The victim need not be the coldest chunk, but must not be among the most recently used ones."""
    bench = Bench(NUM_CHUNKS, filled=False, policy="lru")
    for name in range(NUM_CHUNKS):
        bench.store(prompt(name, 1))
    order = list(range(1, NUM_CHUNKS))
    random.Random(7).shuffle(order)
    for name in [*order, 0]:
        bench.ask(m.Lookup(bench.context, "r", prompt(name, 1).digests, "a"))
        bench.ask(m.EndRequest(bench.context, "r"))
    for name in range(NUM_CHUNKS, NUM_CHUNKS + NUM_CHUNKS // 4):
        bench.store(prompt(name, 1))
    space = bench.index.spaces[0]
    is_here = [bench.index.visibility.match(space, prompt(name, 1).digests)[0] for name in order]
    assert sum(is_here[len(order) // 2 :]) >= 0.9 * len(order) / 2
    assert sum(is_here[: len(order) // 2]) <= 0.6 * len(order) / 2


@pytest.mark.slow
@pytest.mark.promise(61)
def test_leaves_that_were_popped_over_are_found_later() -> None:
    """Leases hold the coldest chunks. Evictable chunks must still be found, if necessary by the next store."""
    bench = Bench(NUM_CHUNKS, filled=False)
    for name in range(NUM_CHUNKS):
        bench.store(prompt(name, 1))
    for name in range(NUM_CHUNKS - 1):
        bench.ask(m.Lookup(bench.context, "r", prompt(name, 1).digests, "a"))
    declined = 0
    for _ in range(8):
        plan = bench.prepare(prompt(-1, 1))
        if plan.ticket:
            break
        declined += 1
    assert declined <= 2
    assert bench.index.visibility.match(bench.index.spaces[0], prompt(NUM_CHUNKS - 1, 1).digests) == (0, ())


@pytest.mark.slow
@pytest.mark.promise(61)
@pytest.mark.parametrize("num_prompts", [1, 64])
def test_a_promotion_of_many_chunks(num_prompts: int) -> None:
    bench = Bench(filled=False)
    queue = put_tier_below(bench)
    runs = [prompt(name, NUM_CHUNKS // 2 // num_prompts) for name in range(num_prompts)]
    for run in runs:
        bench.store(run)
    bench.turn_until(lambda: not queue.queued_write_bytes and not queue.has_results)
    sum(clear_pool(bench.depot, None))
    replies: list[PendingReply] = []
    for run in runs:
        replies.append(bench.ask(m.Lookup(bench.context, "r", run.digests, "a", 60.0)))
    bench.turn_until(lambda: all(reply.reply is not None for reply in replies))
    assert [reply.reply.num_chunks for reply in replies if isinstance(reply.reply, m.LookupReply)] == [
        run.num_chunks for run in runs
    ]
    queue.close()


@pytest.mark.promise(61)
def test_a_long_prefix_that_a_new_tier_lacks_goes_down_step_by_step() -> None:
    bench = Bench()
    queue = put_tier_below(bench)
    assert bench.ask(m.Lookup(bench.context, "r", prompt(0).digests, "a")).num_chunks == PROMPT_CHUNKS
    bench.turn_until(lambda: queue.tier.usage().num_entries == PROMPT_CHUNKS and not queue.queued_write_bytes)
    queue.close()


@pytest.mark.promise(61)
def test_so_many_promotions_are_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAXIMUM_PROMOTIONS", 3)
    bench = Bench(filled=False)
    queue = put_tier_below(bench)
    bench.store(prompt(9, 1))
    replies = [bench.ask(m.Lookup(bench.context, "r", prompt(name, 4).digests, "a", 60.0)) for name in range(5)]
    assert [isinstance(reply, PendingReply) for reply in replies] == [True] * 3 + [False] * 2
    assert [reply.num_chunks for reply in replies[3:]] == [0, 0]
    assert bench.depot.state.tiering is not None
    assert bench.depot.state.tiering.counters["promotions_refused"] == 2
    bench.turn_until(lambda: all(reply.reply is not None for reply in replies[:3]))
    queue.close()


def make_server(folder: Path) -> DepotServer:
    (folder / "pool").mkdir(exist_ok=True)
    config = ServerConfig(directory=folder / "depot", pool_directory=folder / "pool", pool_size_bytes=1 << 20)
    files = open_pool(config.pool_path, 1 << 20, 1024, server="an earlier depot")
    files.take_place()
    files.close(remove=False)
    server = DepotServer(config)
    assert server.restoring is not None
    server.restoring.go_on(lambda: False)
    return server


@pytest.mark.promise(61)
def test_the_name_of_a_new_tenant_is_all_that_its_first_store_writes(tmp_path: Path) -> None:
    known = [Label(f"tenant {number}", "model") for number in range(20_000)]
    with closing(make_server(tmp_path)) as server:
        depot, file = server.depot, server.config.pool_path / NAMES_FILE
        for label in known:
            depot.labels.number_of(label.tenant, label.model)
        registered = depot.handle(1, Writer(1, 1), registration(SPEC, details=(m.GroupDetail((PAGE,), 8),)))
        assert isinstance(registered, m.Registered)
        before = file.stat()
        store = m.PrepareStore(registered.context, "r", "one more", prompt(1, 1).digests, 0, b"", (1,))
        depot.handle(1, Writer(1, 1), store)
        assert file.stat().st_ino == before.st_ino
        assert before.st_size < file.stat().st_size < before.st_size + 64
    with closing(make_server(tmp_path)) as server:
        assert server.depot.labels.names == [*known, Label("one more", "model")]


@pytest.mark.promise(61)
def test_requests_that_wait_are_left_for_the_next_turn_when_the_time_is_over(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with closing(server), socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(server.config.directory / CONTROL_SOCKET))
        hello = frames.encode_frame(1, m.Hello(m.PROTOCOL_VERSION, "test"))
        asker.sendall(frames.encode_greeting(None) + 10 * (frames.LENGTH.pack(len(hello)) + hello))
        latencies = server.requests.latencies[m.Hello]
        for number in range(1, 11):
            wait_until(lambda number=number: server.sockets.connections.serve(0.0) or sum(latencies.counts) == number)
            assert sum(latencies.counts) == number, "one request at a time, when the time is over"


@pytest.mark.promise(61)
def test_connections_are_accepted_one_at_a_time_and_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(make_server(tmp_path)) as server, contextlib.ExitStack() as stack:
        connections, path = server.sockets.connections, str(server.config.directory / CONTROL_SOCKET)

        def connect() -> socket.socket:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(path)
            return client

        first = connect()
        connections.serve(0.0)
        strangers = [connect() for _ in range(20)]
        first.sendall(frames.encode_greeting(frames.OpenSession(m.PROTOCOL_VERSION, "first")))
        for turn in range(1, 21):
            connections.serve(0.0)
            assert len(connections) <= 1 + turn
        wait_until(lambda: connections.serve(0.0) or len(connections) == len(strangers))
        assert len(server.sockets.sessions) == 1
        monkeypatch.setattr("kvdepot.server.connections.time", SimpleNamespace(monotonic=lambda: math.inf))
        for num_left in range(len(strangers) - 1, -1, -1):
            connections.sweep(lambda: True)
            assert len(connections) == num_left, "nor are those that say nothing closed all at once"
        assert len(server.sockets.sessions) == 1


def test_a_session_too_many_is_refused_and_says_how_many_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.server.sessions.MAXIMUM_SESSIONS", 2)
    with closing(make_server(tmp_path)) as server, contextlib.ExitStack() as stack:
        replies: list[frames.SessionReply] = []
        for number in range(3):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(server.config.directory / CONTROL_SOCKET))
            client.sendall(frames.encode_greeting(frames.OpenSession(m.PROTOCOL_VERSION, f"client {number}")))
            client.setblocking(False)
            answer: list[bytes] = []

            def is_answered(client: socket.socket = client, answer: list[bytes] = answer) -> bool:
                server.sockets.connections.serve(0.0)
                with contextlib.suppress(BlockingIOError):
                    answer.append(client.recv(4096))
                return bool(answer)

            wait_until(is_answered)
            replies.append(frames.decode_session_reply(answer[0][frames.LENGTH.size :]))
        assert [type(reply) for reply in replies] == [frames.SessionOpened, frames.SessionOpened, m.ErrorReply]
        assert "2 sessions" in replies[2].message  # type: ignore[union-attr]
        assert len(server.sockets.sessions) == 2


@pytest.mark.promise(61)
def test_a_thousand_processes_without_a_number_that_die_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one step cleaned up after all of them, and for each looked at the leftovers of all others."""
    with closing(make_server(tmp_path)) as server:
        writers = [Writer(0, (1 << 61) + number) for number in range(1000)]
        mappings = set(writers)
        monkeypatch.setattr(server.sockets.sessions, "is_mapping", mappings.__contains__)
        for writer in writers:
            assert server.sockets.sessions.await_death(writer)
            server.depot.quarantine.hold((writer, b""), [], 0)
        mappings.clear()
        for num_left in range(len(writers) - 1, -1, -1):
            server.sockets.sessions.find_dead(lambda: True)
            assert len(server.depot.quarantine.held) == num_left
