"""The tier in object stores passes the suite on files and on a real S3 server, and survives its absence."""

import contextlib
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import obstore
import pytest
from obstore.store import S3Store

from kvdepot.errors import ConfigError
from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.testing.tier_traffic import content, make_key, make_pool
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.keys import digest_of, with_run
from kvdepot.tiers.object import ObjectTier
from kvdepot.tiers.runs import RunHead, make_head, name_of
from kvdepot.tiers.scatter import copy
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot.tiers.url import TierUrl, open_tier
from kvdepot.wire import messages as m
from support.peer import Peer, find, prompt
from support.tiers.direct import read_from, write_to
from support.tiers.kept import KEPT_KEY, KEPT_TRAILER
from support.tiers.servers import PuttingNothing, S3Server, is_written, listening
from support.tiers.shelf import Shelf, Shelve

KEPT_NAME = "86d97ba414bf826f/7fcccec0361f0442/00/616f187d46f5724f328844808b151a4100000000000000070000000000000000"
DIGESTS_416 = (bytes(DIGEST_BYTES), bytes.fromhex("0000000000000416").ljust(DIGEST_BYTES, b"\0"))
A_DATE = b"Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def open_url(text: str, pool: TierPool) -> ObjectTier:
    tier = open_tier(TierUrl.parse(text), pool)
    assert isinstance(tier, ObjectTier)
    return tier


def head_of(stored: bytes | bytearray) -> RunHead:
    head = RunHead.parse(bytes(stored))
    assert head is not None
    return head


class ObjectSuite(TierSuite):
    """The suite on the URL in `url`."""

    url: str

    def open_tier(self, pool: TierPool) -> Tier:
        return open_url(self.url, pool)

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        tier = open_url(self.url, make_pool())
        store = tier.store
        stored = bytearray(obstore.get(store, name_of(key)).bytes())
        if how is Damage.SWAPPED:  # the trailer and the bytes of another chunk under this key
            offset, size, trailer = head_of(stored).chunks[digest_of(key)]
            from_other = bytearray(obstore.get(store, name_of(other)).bytes())
            ((start, _, trailer),) = head_of(from_other).chunks.values()
            stored = bytearray(make_head([digest_of(key)], [size], [trailer])) + from_other[start:]
            assert len(stored) == offset + size
        elif how is Damage.FLIPPED:
            stored[-77] ^= 4
        elif how is Damage.TRUNCATED:
            del stored[-100:]
        obstore.put(store, name_of(key), bytes(stored))
        tier.close()


class TestFiles(ObjectSuite):
    @pytest.fixture(autouse=True)
    def storage(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/new folder".replace(" ", "%20")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


class TestS3(ObjectSuite):
    @pytest.fixture(autouse=True)
    def storage(self, server: S3Server) -> None:
        self.url = server.url(f"somewhere/{uuid4()}", "&deadline=20")


def test_the_format_of_objects_is_kept(tmp_path: Path, shelve: Shelve) -> None:
    """The first version with runs wrote objects with this name and these bytes."""
    digest, place = KEPT_KEY[-DIGEST_BYTES:], (5000).to_bytes(8, "little")
    head = b"KVDRUN\0\1" + (1).to_bytes(8, "little") + digest + (184).to_bytes(8, "little") + place + KEPT_TRAILER
    path, payload = tmp_path / KEPT_NAME, content(KEPT_KEY, 5000)
    path.parent.mkdir(parents=True)
    path.write_bytes(head + payload)
    shelf = shelve(f"file://{tmp_path}")
    assert read_from(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    assert shelf.pool.view[:5000] == payload
    assert shelf.clear() == 1
    assert write_to(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    assert path.read_bytes() == head + payload


def test_objects_of_others_below_the_prefix_stay(server: S3Server, shelve: Shelve) -> None:
    shelf = shelve(server.url("shared", "&deadline=20"))
    obstore.put(shelf.tier.store, "notes/of/others", b"words")
    shelf.put(1)
    assert shelf.clear() == 1
    assert obstore.head(shelf.tier.store, "notes/of/others")["size"] == 5


@pytest.mark.slow
def test_many_are_asked_for_and_cleared_at_once(server: S3Server, shelve: Shelve) -> None:
    shelf = shelve(server.url("many", "&deadline=20"))
    for key in map(make_key, range(0, 300, 2)):
        obstore.put(shelf.tier.store, name_of(key), make_head([digest_of(key)], [0], [bytes(TRAILER_BYTES)]))
    assert shelf.has(*range(300)) == [True, False] * 150
    assert shelf.clear() == 150
    assert not any(shelf.has(*range(300)))


@pytest.mark.slow
def test_a_server_that_is_killed_is_an_error_and_comes_back(shelve: Shelve) -> None:
    server = S3Server()
    try:
        shelf = shelve(server.url("", "&deadline=4"))
        assert shelf.put(1) == [True]
        server.kill()
        for call in (lambda: shelf.get(1), lambda: shelf.put(1), lambda: shelf.has(*range(100)), shelf.tier.probe):
            with pytest.raises(OSError, match="GenericError"):
                call()
        server.start()
        shelf.tier.probe()
        assert shelf.get(1) == [False], "moto forgets"
        assert shelf.put(1) == shelf.get(1) == [True]
    finally:
        server.kill()


def test_without_its_bucket_the_probe_fails(server: S3Server, shelve: Shelve) -> None:
    with pytest.raises(OSError, match="404 Not Found"):
        shelve(server.url().replace("//bucket", "//elsewhere")).tier.probe()


@pytest.mark.slow
@pytest.mark.parametrize("reads", [0, 1 << 16])
def test_a_put_that_times_out_leaves_the_pool_alone_when_it_returns(reads: int) -> None:
    """The server takes some bytes or none and never answers. Afterwards the pool's memory is not in use."""
    pool, key, is_over = make_pool(16 << 20), make_key(1), threading.Event()

    def take_some(connection: socket.socket) -> None:
        if reads:
            connection.recv(reads, socket.MSG_WAITALL)
        is_over.wait()

    with listening(take_some) as port:
        tier = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&deadline=0.4", pool)
        with pytest.raises(OSError, match="GenericError"):
            write_to(tier, pool, [key, make_key(2)], [(0, 8 << 20), (8 << 20, 4096)])
        with pytest.raises(OSError, match=r"no byte of an object for 0\.3 s"):
            read_from(tier, pool, [key], [(0, 8 << 20)])
        tier.close()
        is_over.set()
    pool.view.release()  # raises if a buffer of it exists


def test_one_request_that_fails_does_not_cost_the_others(tmp_path: Path, shelve: Shelve) -> None:
    shelf, numbers = shelve(f"file://{tmp_path}"), (1, 1 << 56)  # in different folders
    in_the_way = (tmp_path / name_of(make_key(1))).parent
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    assert shelf.put(*numbers) == [False, True]
    assert shelf.tier.usage().counters["request_errors"] == 1


def test_a_request_that_stalls_ends_before_the_deadline_and_costs_only_itself() -> None:
    stalled, is_over = name_of(make_key(1)).encode(), threading.Event()

    def answer_one(connection: socket.socket) -> None:
        while request := connection.recv(1 << 16):
            if stalled in request:
                is_over.wait()
                return
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with listening(answer_one) as port:
        url = TierUrl.parse(f"s3://bucket?endpoint=http://127.0.0.1:{port}&deadline=0.8")
        with Shelf(lambda pool: open_tier(url, pool)) as shelf:
            assert url.deadline_seconds == 0.8
            assert shelf.get(1, 2) == [False, False]
            assert shelf.tier.usage().counters["request_errors"] == 1
        is_over.set()


def test_a_store_that_refuses_ten_of_twenty_requests_is_overloaded_until_a_probe_succeeds() -> None:
    broken, slow = ([name_of(make_key(number)).encode() for number in range(each, each + 10)] for each in (0, 10))
    is_over = threading.Event()

    def answer(connection: socket.socket) -> None:
        while request := connection.recv(1 << 16):
            refused = not is_over.is_set() and any(name in request for name in slow)
            fails = any(name in request for name in broken)
            status = (
                b"503 Slow Down"
                if refused
                else b"500 Broken"
                if fails
                else b"200 OK"
                if b"list-type" in request
                else b"404 Not Found"
            )
            body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" if b"200" in status else b""
            connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    with listening(answer) as port:
        url = TierUrl.parse(f"s3://bucket?endpoint=http://127.0.0.1:{port}&deadline=20")
        with Shelf(lambda pool: open_tier(url, pool)) as shelf:
            for number in range(20):
                assert not shelf.tier.is_overloaded
                with contextlib.suppress(OSError):
                    shelf.get(number)
            assert shelf.tier.is_overloaded
            is_over.set()
            shelf.tier.probe()
            assert not shelf.tier.is_overloaded


@pytest.mark.parametrize("words", ["", "InvalidRange"])
def test_an_object_stays_if_the_store_fails_with_words_that_resemble_an_empty_object(words: str) -> None:
    """The URL in the client's error text ends in `0416`."""
    cut, start = bytes(DIGEST_BYTES), make_key(1)[:-DIGEST_BYTES]
    key, second = (with_run(start + digest, cut, cut, depth) for depth, digest in enumerate(DIGESTS_416))
    head = make_head([digest_of(key)], [0], [bytes(TRAILER_BYTES)])
    requests = list[bytes]()

    def answer(connection: socket.socket) -> None:
        while request := connection.recv(1 << 16):
            requests.append(request.partition(b" HTTP")[0])
            if request.startswith(b"HEAD"):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nLast-Modified: %s\r\n\r\n" % A_DATE)
            elif requests[-1].endswith(b"0416"):
                connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(words), words.encode()))
            else:
                place = b"bytes 0-%d/%d" % (len(head) - 1, len(head))
                connection.sendall(
                    b"HTTP/1.1 206 Partial\r\nContent-Range: %s\r\nContent-Length: %d\r\nLast-Modified: %s\r\n\r\n"
                    % (place, len(head), A_DATE)
                    + head
                )

    with listening(answer) as port:
        tier = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&deadline=8", make_pool())
        assert tier.contains([key]) == [True]
        with pytest.raises(OSError, match="503"):
            tier.contains([key, second])
        tier.close()
    assert requests[-1].endswith(b"0416")
    assert {request.split()[0] for request in requests} <= {b"GET", b"HEAD"}


def test_an_empty_object_does_not_block_its_name(tmp_path: Path, server: S3Server, shelve: Shelve) -> None:
    for url in (f"file://{tmp_path}", server.url(f"empty/{uuid4()}", "&deadline=20")):
        shelf = shelve(url)
        obstore.put(shelf.tier.store, name_of(make_key(1)), b"")
        assert shelf.get(1) == [False]
        obstore.put(shelf.tier.store, name_of(make_key(1)), b"")
        assert shelf.has(1) == [False]
        assert shelf.put(1) == shelf.get(1) == [True]


@pytest.mark.parametrize(
    ("options", "limits"),
    [("", ["750ms", "7s 500ms"]), ("&deadline=8", ["6s", "1m"]), ("&deadline=8&timeout=2", ["2s", "20s"])],
)
def test_requests_have_less_time_than_calls_and_background_requests_ten_times_as_much(
    options: str, limits: list[str], shelve: Shelve
) -> None:
    tier, found = shelve(f"s3://bucket?region=x{options}").tier, list[object]()
    for store in (tier.store, tier.patient):
        assert isinstance(store, S3Store)
        found.append((store.client_options or {}).get("timeout"))
    assert found == limits


def test_a_large_copy_lets_other_threads_run() -> None:
    """Another thread sees a part of it done, which is impossible while one call of C copies all."""
    num_bytes, before = 64 << 20, sys.getswitchinterval()
    target, source = memoryview(bytearray(num_bytes)), memoryview(bytes([1]) * num_bytes)
    seen, is_over = set[tuple[int, int]](), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            seen.add((target[num_bytes - 1], target[0]))  # the end is read first

    watching = threading.Thread(target=watch)
    sys.setswitchinterval(1e-5)
    try:
        watching.start()
        for _ in range(200):
            copy(source, target)
            if (0, 1) in seen:
                break
            target[:] = bytes(num_bytes)
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        watching.join()
    assert (0, 1) in seen
    assert target == source


def test_closing_waits_for_a_put_that_is_under_way_and_nothing_begins_afterwards() -> None:
    pool, go_on, began = make_pool(), threading.Event(), threading.Event()

    def answer_late(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        began.set()
        go_on.wait()
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')

    with listening(answer_late) as port:
        tier = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}", pool)
        outcomes: list[bool] = []
        writing = threading.Thread(target=lambda: outcomes.extend(write_to(tier, pool, [make_key(1)], [(0, 1)])))
        writing.start()
        wait_until(began.is_set)
        closing = threading.Thread(target=tier.close)
        closing.start()
        wait_until(lambda: tier.is_closed)
        go_on.set()
        closing.join()
        writing.join()
        assert outcomes == [True]
        with pytest.raises(OSError, match="closed"):
            tier.probe()


@pytest.mark.parametrize(("mode", "warns"), [(None, False), (0o700, False), (0o750, True), (0o1777, True)])
def test_a_folder_that_other_users_reach_is_named_and_a_new_one_is_private(
    tmp_path: Path, shelve: Shelve, caplog: pytest.LogCaptureFixture, mode: int | None, warns: bool
) -> None:
    folder = tmp_path / "tier"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    shelf = shelve(f"file://{folder}")
    assert (shelf.put(1), shelf.get(1)) == ([True], [True])
    assert folder.stat().st_mode & 0o7777 == (0o700 if mode is None else mode)
    said = [line for line in caplog.messages if f"--tier file://{folder}: the folder" in line]
    assert len(said) == warns
    assert all(f"has mode {mode:04o}" in line for line in said if mode is not None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3:///prefix", "write s3://BUCKET/PREFIX"),
        ("file://folder", "three slashes"),
        ("s3://bucket?endpoint=http://x&sign_payload=maybe", "yes or no"),
        ("s3://bucket?secret_access_key=x", "unknown option 'secret_access_key'"),
        ("s3://bucket?ca=/nowhere.pem", "No such file"),
        ("az://container/prefix", "account|Account"),
        ("gs://bucket?region=x", "unknown option 'region'"),
        ("s3://bucket?timeout=1", "timeout=1 is not below the tier's deadline of 1 s: lower it, or raise deadline"),
        ("s3://bucket?deadline=5&timeout=8", "not below the tier's deadline of 5 s"),
        ("s3://bucket?batch=4", "unknown option 'batch'"),
    ],
)
def test_a_url_that_cannot_work_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_tier(TierUrl.parse(text), make_pool())


def test_stores_of_other_clouds_open_without_asking_them(monkeypatch: pytest.MonkeyPatch, shelve: Shelve) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c29tZXRoaW5n")
    for text in ("az://container/prefix?account=someone", "gs://bucket/prefix"):
        shelve(text)


@pytest.mark.parametrize(("option", "has_sessions"), [("&express=yes", True), ("", False)])
def test_a_bucket_of_s3_express_is_used_by_sessions(option: str, has_sessions: bool, shelve: Shelve) -> None:
    tier = shelve(f"s3://name--use1-az4--x-s3/kv?region=us-east-1{option}").tier
    for store in (tier.store, tier.patient):
        assert isinstance(store, S3Store)
        assert store.config.get("s3_express") == str(has_sessions).lower()


@pytest.mark.slow
@pytest.mark.promise(77)
def test_a_lookup_waits_for_what_another_depot_writes_to_shared_files(tmp_path: Path) -> None:
    with (
        DepotProcess("--tier", f"file://{tmp_path}") as one,
        DepotProcess("--tier", f"file://{tmp_path}") as two,
        contextlib.closing(Peer(one)) as prefill,
        contextlib.closing(Peer(two)) as decode,
    ):
        for salt in ("first", "second"):
            run = prompt(16, salt)
            lookup = m.Lookup(decode.context, "r", run.digests, run.tenant, 30.0, joins=True, awaits=16)
            sequence = decode.channel.submit(lookup)
            wait_until(lambda: two.status().num_flights == 1, what="a lookup that waits")
            prefill.ask(m.Lookup(prefill.context, "r", run.digests, run.tenant, hands_over=True))
            assert prefill.store(run.slice(0, 8)) == 8
            assert prefill.store(run.slice(8)) == 8
            reply = decode.channel.wait(sequence, 20.0)
            assert isinstance(reply, m.LookupReply)
            assert (reply.num_chunks, reply.num_pending) == (16, 0)
            assert two.status().num_flights == 0


@pytest.fixture
def putting_nothing(server: S3Server, answers: int | str) -> Iterator[PuttingNothing]:
    with PuttingNothing(server.endpoint, answers) as front:
        yield front
        front.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (501, "the store refuses to put an object with If-None-Match: * (GenericError"),
        (403, "the store refuses to put an object with If-None-Match: * (PermissionDeniedError"),
        (409, "the store refuses to put an object that does not exist with If-None-Match: *"),
        ("overwrites", "the store does not support If-None-Match: *, so depots would overwrite"),
    ],
)
def test_a_store_that_cannot_create_objects_is_read_and_nothing_is_written(
    words: str, server: S3Server, putting_nothing: PuttingNothing, capfd: pytest.CaptureFixture[str]
) -> None:
    prefix = uuid4().hex
    urls = server.url(prefix, "&deadline=20"), f"s3://bucket/{prefix}?endpoint={putting_nothing.endpoint}&deadline=20"
    seconds = "--promote-seconds", "20"
    with DepotProcess("--tier", urls[1], *seconds) as reading, contextlib.closing(Peer(reading)) as reader:
        for number in range(8):
            reader.store(prompt(2, f"{number}"))
        wait_until(lambda: reading.status().tiers[0].counters.get("writes_stopped") == 1, what="the end of the check")
        with DepotProcess("--tier", urls[0], *seconds) as writing, contextlib.closing(Peer(writing)) as writer:
            writer.store(prompt(4, "shared"))
            wait_until(lambda: is_written(writing) and is_written(reading), what="the end of writes")
        assert find(reader, prompt(4, "shared")) == 4
        (tier,) = reading.status().tiers
        assert (tier.state, tier.counters.get("breaker_opened", 0)) == ("closed", 0)
        assert tier.counters.get("written_entries", 0) == 0
        assert putting_nothing.put_bytes < 64, "the object of the check, perhaps twice"
    logged = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line or "ERROR" in line]
    assert len(logged) == 1
    assert words in logged[0]
    assert "writing nothing, still reading" in logged[0]


@pytest.mark.parametrize("answers", [""])
def test_writes_stop_when_a_permission_is_taken_and_go_on_when_it_is_given(
    putting_nothing: PuttingNothing, shelve: Shelve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.tiers.object.RECHECK_SECONDS", math.inf)
    shelf = shelve(f"s3://bucket/{uuid4().hex}?endpoint={putting_nothing.endpoint}&deadline=20")
    shelf.tier.probe()
    assert (shelf.put(1), shelf.tier.declines_writes) == ([True], False)
    putting_nothing.answers = 403
    monkeypatch.setattr("kvdepot.tiers.object.RECHECK_SECONDS", 0.0)
    assert shelf.put(2) == [False]
    assert shelf.get(1) == [True]
    before = putting_nothing.put_bytes
    assert shelf.put(3) == [False]
    assert putting_nothing.put_bytes - before < 64, "a check, and not the entry"
    monkeypatch.setattr("kvdepot.tiers.object.RECHECK_SECONDS", math.inf)
    assert shelf.put(3) == [False]
    assert shelf.tier.declines_writes
    before = putting_nothing.put_bytes
    assert shelf.put(3) == [False]
    shelf.tier.probe()
    assert putting_nothing.put_bytes == before, "it is not time for another check"


@pytest.mark.parametrize("answers", [403])
def test_writes_go_on_once_a_check_succeeds(
    putting_nothing: PuttingNothing, shelve: Shelve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.tiers.object.RECHECK_SECONDS", 0.0)
    shelf = shelve(f"s3://bucket/{uuid4().hex}?endpoint={putting_nothing.endpoint}&deadline=20")
    shelf.tier.probe()
    assert shelf.put(1) == [False]
    putting_nothing.answers = ""
    assert shelf.put(1) == shelf.get(1) == [True]
    assert shelf.tier.usage().counters["writes_stopped"] == 1


@pytest.mark.parametrize("answers", [403])
def test_a_tier_that_is_only_read_is_not_checked(putting_nothing: PuttingNothing) -> None:
    url = TierUrl.parse(f"s3://bucket?endpoint={putting_nothing.endpoint}")
    url.takes_writes = False
    tier = open_tier(url, make_pool())
    tier.probe()
    tier.close()
    assert putting_nothing.put_bytes == 0


def test_a_share_that_is_mounted_read_only_is_read_and_nothing_is_written(tmp_path: Path, shelve: Shelve) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.decode().strip()}")
    try:
        shelf = shelve(f"file://{tmp_path}")
        assert shelf.put(1) == [True]
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        shelf.tier.probe()
        assert shelf.put(2) == [False]
        assert shelf.tier.declines_writes
        assert shelf.get(1) == [True]
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
