"""Mooncake as a tier: the suite on a real cluster on loopback, and processes that die or hang."""

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.testing.tier_traffic import EXTENT_BYTES, clear, contains, content, extents_of, fill, make_key, read, write
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl
from kvdepot.tiers.url import open_tier as open_any_tier
from kvdepot_mooncake.options import MooncakeUnavailable, parse_options
from kvdepot_mooncake.tier import MooncakeTier, open_tier
from support.mooncake.cluster import Client, Master, Node, need_sdk
from support.mooncake.node import make_shared_pool
from support.peer import Peer, find, prompt
from support.tiers.direct import read_from, write_to
from support.tiers.servers import is_written

EXTENTS: Final = extents_of(0, [EXTENT_BYTES] * 8)
KEYS: Final = [make_key(number) for number in range(8)]


@pytest.fixture(scope="module")
def _sdk() -> None:
    need_sdk()


needs_sdk = pytest.mark.usefixtures("_sdk")


@pytest.fixture(scope="module")
def cluster(_sdk: None) -> Iterator[tuple[Master, Node]]:
    """A master, and a node that keeps the entries of others."""
    master = Master()
    with contextlib.closing(Node(f"mooncake://{master.address}?segment=64MiB")) as node:
        yield master, node
    master.kill()


@pytest.fixture
def master() -> Iterator[Master]:
    """A master for one test."""
    master = Master()
    yield master
    master.kill()


@pytest.fixture
def pool() -> Iterator[TierPool]:
    """Memory that stands for a pool. Another process can map it."""
    pool = make_shared_pool()
    yield pool
    os.close(pool.fd)


@pytest.fixture
def tier(master: Master, pool: TierPool) -> Iterator[MooncakeTier]:
    """A tier that is the only node of its cluster."""
    with contextlib.closing(join(master, pool, "segment=64MiB&timeout=5")) as tier:
        yield tier


def join(master: Master, pool: TierPool, options: str) -> MooncakeTier:
    return open_tier(TierUrl.parse(f"mooncake://{master.address}?{options}"), pool)


def is_dead(pid: int) -> bool:
    return stat_of(str(pid))[1] == "Z"


def stat_of(pid: str) -> tuple[str, str, str]:
    """Return the PID, the state and the parent of a process."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return pid, "Z", ""
    return pid, state, parent


def is_back(tier: MooncakeTier) -> bool:
    try:
        tier.probe()
    except MooncakeUnavailable:
        return False
    return True


@needs_sdk
class TestMooncakeTier(TierSuite):
    _prefixes = itertools.count()

    @pytest.fixture(autouse=True)
    def _join(self, cluster: tuple[Master, Node]) -> None:
        self.master, self.node = cluster
        self.prefix = f"test{next(self._prefixes)}"

    @pytest.fixture
    def pool(self) -> Iterator[TierPool]:
        pool = make_shared_pool()
        yield pool
        os.close(pool.fd)

    def open_tier(self, pool: TierPool) -> MooncakeTier:
        return join(self.master, pool, f"segment=0&prefix={self.prefix}")

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        self.node.ask("damage", self.prefix, key.hex(), other.hex(), how.name)


@needs_sdk
def test_a_node_reads_the_entries_of_another(master: Master, tier: MooncakeTier, pool: TierPool) -> None:
    with contextlib.closing(Node(f"mooncake://{master.address}?segment=0")) as node:
        assert node.ask("write", [0, 1, 2]) == [True] * 3
        assert read_from(tier, pool, KEYS[:4], EXTENTS[:4]) == [True, True, True, False]
        for key, (offset, size) in zip(KEYS[:3], EXTENTS[:3], strict=True):
            assert pool.view[offset : offset + size] == content(key, size)
        fill(pool, 3, KEYS[3:4], [EXTENT_BYTES])
        assert write_to(tier, pool, KEYS[3:4], EXTENTS[3:4]) == [True]
        assert node.ask("read", [2, 3, 4]) == [True, True, False]


@needs_sdk
def test_a_master_that_dies_opens_the_breaker_and_one_that_starts_anew_knows_nothing(
    master: Master, pool: TierPool
) -> None:
    tier = join(master, pool, "segment=64MiB")
    queue = TierQueue(tier, pool, "test", deadline_seconds=1.0)
    fill(pool, 0, KEYS, [EXTENT_BYTES] * 8)
    assert write(queue, KEYS, EXTENTS) == [True] * 8
    child_pid = tier.writer_pid
    master.kill()

    jobs: list[Job] = []

    def is_open() -> bool:
        jobs.append(Job(JobKind.READ, KEYS[:1], EXTENTS[:1]))
        if not queue.submit(jobs[-1]):
            jobs.pop()
        queue.expire()
        queue.poll()
        return queue.is_suspended

    wait_until(is_open, what="the breaker")
    assert master.start()

    def is_over() -> bool:
        queue.expire()
        queue.poll()
        return not queue.is_suspended and not any(job.num_left for job in jobs)

    wait_until(is_over, 30.0, what="the end of the outage")
    assert tier.writer_pid == child_pid
    assert read(queue, KEYS, EXTENTS) == [False] * 8
    wait_until(lambda: all(write(queue, KEYS, EXTENTS)), what="room: the node has to say again that it has some")
    assert read(queue, KEYS, EXTENTS) == [True] * 8
    queue.close()


@needs_sdk
def test_entries_of_a_node_that_dies_are_misses_and_no_errors(
    master: Master, pool: TierPool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        contextlib.closing(Node(f"mooncake://{master.address}?segment=64MiB")) as node,
        contextlib.closing(join(master, pool, "segment=0")) as tier,
    ):
        fill(pool, 0, KEYS, [EXTENT_BYTES] * 8)
        assert write_to(tier, pool, KEYS, EXTENTS) == [True] * 8
        os.kill(node.child_pid, signal.SIGKILL)
        wait_until(lambda: is_dead(node.child_pid))
        assert read_from(tier, pool, KEYS, EXTENTS) == [False] * 8
        assert tier.usage().counters["transfer_failed"] > 0
        assert "removing entry" not in caplog.text
        wait_until(lambda: not any(tier.contains(KEYS)), what="the master to forget the node")
        assert write_to(tier, pool, KEYS, EXTENTS) == [False] * 8
        tier.probe()


@needs_sdk
def test_a_child_that_is_killed_makes_calls_fail_until_a_probe_starts_another(
    tier: MooncakeTier, pool: TierPool
) -> None:
    fill(pool, 0, KEYS, [EXTENT_BYTES] * 8)
    write_to(tier, pool, KEYS, EXTENTS)
    old = tier.writer_pid
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: tier.writer_pid == 0)
    for _ in range(2):
        with pytest.raises(MooncakeUnavailable):
            read_from(tier, pool, KEYS, EXTENTS)
    wait_until(lambda: is_back(tier))
    assert tier.writer_pid not in (0, old)
    assert tier.usage().counters["child_starts"] == 2
    wait_until(lambda: not any(tier.contains(KEYS)), what="the master to forget the node of before")
    wait_until(lambda: all(write_to(tier, pool, KEYS, EXTENTS)))
    assert read_from(tier, pool, KEYS, EXTENTS) == [True] * 8


@needs_sdk
@pytest.mark.parametrize("num_threads", [4, 7])
def test_calls_of_a_child_that_stands_still_end_when_it_is_dead(
    master: Master, pool: TierPool, num_threads: int
) -> None:
    url = TierUrl.parse(f"mooncake://{master.address}?segment=64MiB&timeout=0.5&threads={num_threads}")
    with contextlib.closing(cast("MooncakeTier", open_any_tier(url, pool))) as tier:
        wait_until(lambda: is_back(tier), 60.0, what="the start of the child")
        pid = tier.writer_pid
        os.kill(pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{pid}/task")  # each thread stops when it next leaves the kernel
        wait_until(lambda: all(") T " in (each / "stat").read_text() for each in tasks.iterdir()), what="its stop")
        died: list[bool] = []

        def call() -> None:
            with pytest.raises(MooncakeUnavailable):
                read_from(tier, pool, KEYS, EXTENTS)
            died.append(is_dead(pid))

        threads = [threading.Thread(target=call) for _ in range(8)]  # more than there are lanes
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert len(died) == 8
        assert sum(died) >= num_threads, (
            "those that waited for a lane have asked nothing of the child, and need not wait for its end"
        )
        wait_until(lambda: is_back(tier))
        assert tier.writer_pid not in (0, pid)


@needs_sdk
@pytest.mark.slow
@pytest.mark.promise(78)
def test_entries_lost_with_a_node_are_written_again_by_the_next_depot_that_uses_them(master: Master) -> None:
    url, runs = f"mooncake://{master.address}", [prompt(64, f"{number}") for number in range(4)]
    with (
        DepotProcess("--tier", f"{url}?segment=64MiB") as one,
        DepotProcess("--tier", f"{url}?segment=0") as two,
        contextlib.closing(Peer(one)) as first,
        contextlib.closing(Peer(two)) as second,
    ):
        with contextlib.closing(Node(f"{url}?segment=64MiB")):
            for run in runs:
                for chunk in range(0, 64, 32):
                    assert first.store(run.slice(chunk, chunk + 32)) == 32
            wait_until(lambda: is_written(one), what="the end of writes")
        with contextlib.closing(Node(f"{url}?segment=64MiB")):
            forgotten = time.monotonic() + 3.0  # the master forgets a node two seconds after its last sign of life
            wait_until(lambda: time.monotonic() > forgotten)
            assert [find(first, run) for run in runs] == [64] * 4, "from its pool"
            wait_until(lambda: [find(second, run) for run in runs] == [64] * 4, 5, "all entries, used once more")
        # The cluster has an entry a moment before the depot counts it.
        wait_until(lambda: one.status().tiers[0].counters["written_entries"] > 4 * 64, what="entries written again")


@needs_sdk
@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_a_child_dies_with_its_parent(master: Master, number: signal.Signals) -> None:
    with contextlib.closing(Node(f"mooncake://{master.address}?segment=64MiB")) as node:
        os.kill(node.child_pid, number)
        node.kill()
        wait_until(lambda: is_dead(node.child_pid), what="the end of the child")


@needs_sdk
def test_signals_to_the_whole_group_do_not_end_the_child(tier: MooncakeTier, pool: TierPool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(tier.writer_pid, number)
    assert write_to(tier, pool, KEYS[:1], EXTENTS[:1]) == [True]
    assert tier.usage().counters["child_starts"] == 1


@needs_sdk
def test_the_process_that_drives_the_tier_never_loads_the_sdk(tier: MooncakeTier, pool: TierPool) -> None:
    assert write_to(tier, pool, KEYS[:1], EXTENTS[:1]) == [True]
    assert not [name for name in sys.modules if name == "mooncake" or name.startswith("mooncake.")]
    assert "/mooncake/store." not in Path("/proc/self/maps").read_text()
    assert "/mooncake/store." in Path(f"/proc/{tier.writer_pid}/maps").read_text()


@needs_sdk
def test_an_entry_that_finds_no_room_is_not_written(tier: MooncakeTier, master: Master, pool: TierPool) -> None:
    with contextlib.closing(join(master, pool, "segment=0&replicas=2")) as other:
        assert all(write_to(other, pool, KEYS, EXTENTS)), "one copy is what one node can keep"
    big = make_shared_pool(80 << 20)
    with contextlib.closing(join(master, big, "segment=0")) as other:
        assert write_to(other, big, [make_key(99)], [(0, 80 << 20)]) == [False]
        assert other.usage().counters["no_space"] == 1
    os.close(big.fd)


@needs_sdk
def test_a_full_cluster_makes_room(master: Master, pool: TierPool) -> None:
    with contextlib.closing(join(master, pool, "segment=16MiB")) as tier:
        keys, written = KEYS, 0
        for first in range(0, 4096, 8):  # 32 MiB
            keys = [make_key(number) for number in range(first, first + 8)]
            fill(pool, 0, keys, [64] * 8)
            written += sum(write_to(tier, pool, keys, EXTENTS))
        assert written > 3500
        assert read_from(tier, pool, keys, EXTENTS) == [True] * 8


@needs_sdk
def test_clear_leaves_other_prefixes_alone(tier: MooncakeTier, master: Master, pool: TierPool) -> None:
    write_to(tier, pool, KEYS, EXTENTS)
    with contextlib.closing(join(master, pool, "segment=0&prefix=kvdepot2")) as other:
        assert write_to(other, pool, KEYS[:2], EXTENTS[:2]) == [True] * 2
        assert sum(tier.clear(None, None)) == 8
        assert other.contains(KEYS) == [True] * 2 + [False] * 6


@needs_sdk
def test_calls_of_many_threads_get_their_own_answers(tier: MooncakeTier, pool: TierPool) -> None:
    queue = TierQueue(tier, pool, "test", deadline_seconds=10.0, num_threads=8)
    keys = [make_key(number) for number in range(48)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 48)
    assert all(write(queue, keys, extents_of(0, [EXTENT_BYTES] * 48)))
    for _ in range(5):
        assert read(queue, keys, extents_of(48, [EXTENT_BYTES] * 48)) == [True] * 48
        assert pool.view[48 * EXTENT_BYTES :] == pool.view[: 48 * EXTENT_BYTES]
        assert contains(queue, [*keys, make_key(99)]) == [True] * 48 + [False]
    assert clear(queue, None, None) == 48
    queue.close()


@needs_sdk
def test_closing_ends_the_child_and_the_calls_under_way(master: Master, pool: TierPool) -> None:
    tier = join(master, pool, "segment=64MiB")
    pid = tier.writer_pid
    os.kill(pid, signal.SIGSTOP)
    ended = threading.Event()

    def call() -> None:
        with pytest.raises(MooncakeUnavailable):
            read_from(tier, pool, KEYS, EXTENTS)
        ended.set()

    threading.Thread(target=call).start()
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < 4.0
    assert is_dead(pid)
    assert ended.wait(5.0)
    with pytest.raises(MooncakeUnavailable):
        tier.probe()


@needs_sdk
def test_a_master_that_is_away_does_not_hold_anyone_up_and_is_found_later(pool: TierPool) -> None:
    master = Master()
    master.kill()
    started = time.monotonic()
    with contextlib.closing(join(master, pool, "segment=64MiB")) as tier:
        assert time.monotonic() - started < 1.0
        assert tier.writer_pid == 0
        with pytest.raises(MooncakeUnavailable, match="no master at"):
            tier.contains(KEYS)
        with pytest.raises(MooncakeUnavailable, match="no master at"):
            tier.probe()
        assert master.start()
        wait_until(lambda: is_back(tier))
        wait_until(lambda: all(write_to(tier, pool, KEYS, EXTENTS)))
    master.kill()


@needs_sdk
def test_a_master_that_accepts_and_says_nothing_costs_a_child_and_nothing_else(pool: TierPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        url = f"mooncake://127.0.0.1:{server.getsockname()[1]}?segment=0&start=2"
        with contextlib.closing(open_tier(TierUrl.parse(url), pool)) as tier:
            assert time.monotonic() - started < 1.0
            pid = tier.writer_pid
            with pytest.raises(MooncakeUnavailable):
                tier.contains(KEYS)
            wait_until(lambda: is_dead(pid), what="the end of a child that does not start")


class DepotOfCluster:
    """A depot whose tier is the cluster, and an engine on it."""

    def __init__(self, master: Master, options: str) -> None:
        pytest.importorskip("kvdepot_cpu", reason="engines need kvdepot-cpu")
        self.depot = DepotProcess("--tier", f"mooncake://{master.address}?{options}")
        self._engine: Any = importlib.import_module("support.cpu.engines").large_engine(self.depot, "engine")

    def ask(self, command: str) -> str:
        return self._engine.ask(command)

    def say(self, command: str) -> None:
        self._engine.say(command)

    def listen(self) -> str:
        return self._engine.listen()

    def settle(self) -> None:
        wait_until(lambda: is_written(self.depot), what="the end of writes")

    def child_pid(self) -> int:
        stats = [stat_of(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return next(int(pid) for pid, _, parent in stats if parent == str(self.depot.pid))

    def close(self) -> None:
        self._engine.close()
        self.depot.close()


@needs_sdk
def test_stored_chunks_serve_engines_of_other_nodes_and_a_killed_depot_leaves_nothing(master: Master) -> None:
    with (
        contextlib.closing(DepotOfCluster(master, "segment=256MiB")) as one,
        contextlib.closing(DepotOfCluster(master, "segment=0")) as two,
    ):
        assert one.ask("store 1 16") == "16"
        one.settle()
        assert two.ask("lookup 1 16") == "16"
        assert two.ask("retrieve 1 16") == "16"
        child_pid = one.child_pid()
        assert "/mooncake/store." not in Path(f"/proc/{one.depot.pid}/maps").read_text()
        assert "/mooncake/store." in Path(f"/proc/{child_pid}/maps").read_text()
        assert one.ask("store 2 16") == "16"
        one.settle()
        one.depot.kill()
        wait_until(lambda: is_dead(child_pid), what="the end of the child")
        assert two.ask("lookup 2 16") == "0", "it died with its node"
        assert two.ask("lookup 1 16") == "16", "it was promoted"


@needs_sdk
def test_entries_outlive_their_depot_in_the_memory_of_mooncakes_own_client(master: Master) -> None:
    """As in `deploy/kubernetes/mooncake`: the client beside the depot, with flags of the same names."""
    with contextlib.closing(Client(master, 256 << 20)):
        with contextlib.closing(DepotOfCluster(master, "segment=0")) as one:
            assert one.ask("store 1 16") == "16"
            one.settle()
        with contextlib.closing(DepotOfCluster(master, "segment=0")) as two:  # its pool is empty
            assert two.ask("lookup 1 16") == "16"
            assert two.ask("retrieve 1 16") == "16"


@needs_sdk
@pytest.mark.promise(77)
def test_an_engine_waits_for_what_an_engine_of_another_node_hands_over(master: Master) -> None:
    with (
        contextlib.closing(DepotOfCluster(master, "segment=256MiB")) as one,
        contextlib.closing(DepotOfCluster(master, "segment=0")) as two,
    ):
        for salt in range(3, 6):
            two.say(f"await {salt} 16")
            wait_until(lambda: two.depot.status().num_flights == 1, what="a lookup that waits")
            assert one.ask(f"hand_over {salt} 16") == "16"
            assert two.listen() == "16"
            assert two.ask(f"retrieve {salt} 16") == "16"
        assert two.depot.status().num_flights == 0
        assert two.ask("await 6 16") == "0", "it is answered at its deadline"


@needs_sdk
@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_a_depot_stops_in_time_and_leaves_no_child(master: Master, number: signal.Signals) -> None:
    with contextlib.closing(DepotOfCluster(master, "segment=256MiB")) as one:
        child_pid = one.child_pid()
        os.kill(child_pid, number)
        one.ask("store 1 16")
        assert one.depot.terminate() == 0
        wait_until(lambda: is_dead(child_pid), what="the end of the child")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mooncake://", "write mooncake://HOST:PORT"),
        ("mooncake://a:port", "write mooncake://HOST:PORT"),
        ("mooncake://a,b", "add ha=etcd"),
        ("mooncake://a?ha=redis", "only etcd"),
        ("mooncake://a?prefix=a.b", "letters, digits and _"),
        ("mooncake://a?replicas=0", "a number from 1 to"),
        ("mooncake://a?segment=much", "not a size"),
    ],
)
def test_a_url_that_cannot_work_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_options(TierUrl.parse(text))


def test_masters_and_etcd_are_named_as_the_sdk_wants_them() -> None:
    assert parse_options(TierUrl.parse("mooncake://one")).setup.master == "one:50051"
    assert parse_options(TierUrl.parse("mooncake://one:1,two?ha=etcd")).setup.master == "etcd://one:1;two:2379"
    assert parse_options(TierUrl.parse("mooncake://[::1]:5")).masters == (("::1", 5),)


def test_without_the_sdk_the_way_out_is_named(pool: TierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(_: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        open_any_tier(TierUrl.parse("mooncake://127.0.0.1:1?segment=0"), pool)


@needs_sdk
def test_an_option_that_nobody_knows_starts_nothing(pool: TierPool) -> None:
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        open_any_tier(TierUrl.parse("mooncake://127.0.0.1:1?colour=red"), pool)
