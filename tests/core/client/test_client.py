"""A scheduler's client: a depot that is away, hung or new is a miss, and the client reconnects by itself."""

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot import SchedulerClient
from kvdepot.client.connection import SLOW_WAITS_TO_SUSPEND, Connection, open_session
from kvdepot.client.session import Channel, Session
from kvdepot.config import CONTROL_SOCKET
from kvdepot.errors import DepotUnavailable, ErrorCode, KVDepotError, RemoteError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import messages as m
from kvdepot.wire.frames import decode_reply, encode_frame
from support.commands import run_kvdepot
from support.peer import SPEC, Peer, prompt, registration
from support.stopped import stopped

DEADLINE = 0.5

MakeClient = Callable[[str], SchedulerClient]


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    made: list[SchedulerClient] = []

    def make(url: str) -> SchedulerClient:
        made.append(SchedulerClient(SPEC, "engine", url=url, deadline_seconds=DEADLINE))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(depot: DepotProcess, make_client: MakeClient) -> SchedulerClient:
    client = make_client(depot.url)
    client.wait_until_connected(5)
    peer = Peer(depot)
    peer.store(prompt(3))
    peer.close()
    return client


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


@pytest.mark.promise(46)
def test_a_hit_is_one_request_and_one_reply_however_long_the_prompt_is(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[str] = []

    def counted(kind: str, code: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            frames.append(kind)
            return code(*arguments)

        return count

    monkeypatch.setattr("kvdepot.wire.frames.encode_frame", counted("request", encode_frame))
    monkeypatch.setattr("kvdepot.wire.frames.decode_reply", counted("reply", decode_reply))
    for num_chunks in (3, 2048):
        frames.clear()
        assert client.lookup("r", prompt(num_chunks)).num_chunks == 3
        assert frames == ["request", "reply"]


@pytest.mark.promise(28)
def test_without_a_depot_a_lookup_is_a_miss_at_once(tmp_path: Path, make_client: MakeClient) -> None:
    client = make_client(str(tmp_path))
    assert client.lookup("r", prompt(3)).num_chunks == 0
    assert seconds_of(lambda: client.lookup("r", prompt(3))) < DEADLINE / 2
    with pytest.raises(DepotUnavailable, match="no depot in"):
        client.wait_until_connected(0.1)


@pytest.mark.promise(28)
def test_a_lookup_in_a_folder_that_no_socket_can_have_is_a_miss(tmp_path: Path, make_client: MakeClient) -> None:
    client = make_client(str(tmp_path / ("long" * 40)))
    assert client.lookup("r", prompt(3)).num_chunks == 0


@pytest.mark.promise(28)
def test_a_depot_that_appears_later_is_found(tmp_path: Path, make_client: MakeClient) -> None:
    client = make_client(str(tmp_path))
    assert not client.is_connected
    with DepotProcess(directory=tmp_path):
        client.wait_until_connected(5)
        assert client.is_connected


def test_one_outage_is_one_line_in_the_log(depot: DepotProcess, caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection(depot.url, "engine", registration(), maps_pool=False)
    connection.wait_until_open(5)
    depot.kill()
    wait_until(lambda: "refused" in connection.why_away, what="a try to connect")
    connection.close()
    (line,) = [record.getMessage() for record in caplog.records if "no depot in" in record.getMessage()]
    assert line == f"no depot in {depot.url} (the connection was lost): the engine runs without it until it is back"


def test_requests_that_end_while_the_depot_is_away_write_nothing_to_the_log(
    client: SchedulerClient, depot: DepotProcess, caplog: pytest.LogCaptureFixture
) -> None:
    lease = client.lookup("r", prompt(3))
    depot.kill()
    wait_until(lambda: "no depot in" in caplog.text)
    client.release(lease)
    client.end_request("r")
    assert not [record for record in caplog.records if record.name == "kvdepot.client.scheduler"]


@pytest.mark.promise(10)
def test_a_lookup_pins_until_the_request_ends(client: SchedulerClient, depot: DepotProcess) -> None:
    lease = client.lookup("r", prompt(5))
    assert lease.num_chunks == 3
    assert lease.lease_seconds > 0
    assert depot.status().num_leases == 1
    client.end_request("r")
    wait_until(lambda: depot.status().num_leases == 0, 1.0)


@pytest.mark.promise(11, 12)
def test_the_same_request_id_twice_is_two_leases(client: SchedulerClient, depot: DepotProcess) -> None:
    first, second = client.lookup("r", prompt(3)), client.lookup("r", prompt(3))
    client.release(first)
    client.release(first)
    wait_until(lambda: depot.status().num_leases == 1, 1.0)
    assert second.num_chunks == 3


def test_a_pending_lookup_is_polled_without_waiting(client: SchedulerClient) -> None:
    pending = client.submit_lookup("r", prompt(3))
    wait_until(pending.query, 1.0)
    assert pending.result().num_chunks == 3


@pytest.mark.promise(10)
@pytest.mark.parametrize("is_left_alone", [False, True])
def test_a_cancelled_lookup_leaves_no_lease(
    is_left_alone: bool, client: SchedulerClient, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the answer to a lookup past its deadline came before the answer to the ping."""
    before = depot.status().counters.get("lookups", 0)
    pending = client.submit_lookup("r", prompt(3))
    if is_left_alone:
        monkeypatch.setattr(Connection, "session", property(lambda _self: None))
    pending.cancel()
    wait_until(lambda: depot.status().counters.get("lookups", 0) > before)
    wait_until(lambda: depot.status().num_leases == 0, 2.0, "the lease to come back, with nothing else to do")


def test_a_lookup_that_does_not_start_at_the_beginning_is_refused(client: SchedulerClient) -> None:
    with pytest.raises(KVDepotError, match="chunk 0"):
        client.lookup("r", prompt(3).slice(1))


@pytest.mark.slow
@pytest.mark.promise(4, 23)
def test_a_killed_depot_costs_less_than_a_deadline_and_comes_back(client: SchedulerClient, depot: DepotProcess) -> None:
    epoch = depot.status().epoch
    depot.kill()
    assert seconds_of(lambda: client.lookup("r", prompt(3))) < DEADLINE
    assert client.lookup("r", prompt(3)).num_chunks == 0
    depot.start()
    client.wait_until_connected(5)
    assert depot.status().epoch != epoch
    wait_until(lambda: client.lookup("r", prompt(3)).num_chunks == 3, what="the sealed chunks to be found again")


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients not try to connect again by themselves."""
    monkeypatch.setattr("kvdepot.client.connection.FIRST_RETRY_SECONDS", 3600.0)


def restart(depot: DepotProcess, connection: Connection) -> None:
    """Kill a depot. Start it again once the client has failed to connect, and wait until it has its chunks."""
    depot.kill()
    wait_until(lambda: connection.why_away.startswith("[Errno"), what="a try to connect")
    depot.start()
    wait_until(lambda: not depot.status().recovering)


@pytest.mark.promise(4, 23)
@pytest.mark.usefixtures("no_retries")
def test_the_first_lookup_after_a_restart_waits_for_the_depot_and_is_a_hit(
    client: SchedulerClient, depot: DepotProcess
) -> None:
    restart(depot, client.connection)
    assert not client.is_connected
    assert client.lookup("r", prompt(3)).num_chunks == 3
    restart(depot, client.connection)
    cancelled, polled = client.submit_lookup("c", prompt(3)), client.submit_lookup("r", prompt(3))
    cancelled.cancel()
    assert polled.wait(5)
    assert (cancelled.result().num_chunks, polled.result().num_chunks) == (0, 3)
    assert depot.status().num_leases == 1


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A server in place of a depot, which answers nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / CONTROL_SOCKET))
        listener.listen()
        yield listener


@pytest.mark.promise(25)
@pytest.mark.usefixtures("listener")
def test_a_depot_that_hangs_when_it_comes_back_costs_one_deadline_in_all(
    tmp_path: Path, make_client: MakeClient
) -> None:
    client = make_client(str(tmp_path))
    assert DEADLINE * 0.9 < seconds_of(lambda: client.lookup("r", prompt(3))) < DEADLINE * 3
    assert seconds_of(lambda: [client.lookup("r", prompt(3)) for _ in range(100)]) < DEADLINE
    pending = client.submit_lookup("r", prompt(3))
    assert pending.query()


@pytest.mark.usefixtures("no_retries")
def test_a_lookup_waits_for_a_depot_no_longer_than_it_takes_to_fail(tmp_path: Path, listener: socket.socket) -> None:
    num_accepted, too_many = 0, threading.Event()

    def refuse() -> None:
        nonlocal num_accepted
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                num_accepted += 1
                if num_accepted > 20:
                    too_many.set()

    refusing = threading.Thread(target=refuse)
    refusing.start()
    with SchedulerClient(SPEC, "engine", url=str(tmp_path), deadline_seconds=3600.0) as client:
        assert client.lookup("r", prompt(3)).num_chunks == 0
        assert client.lookup("r", prompt(3)).num_chunks == 0
        assert not too_many.wait(0.1), "a lookup lets the client try once"
    listener.shutdown(socket.SHUT_RDWR)
    refusing.join()


@pytest.mark.promise(4)
def test_a_depot_that_restarts_while_one_connects_is_tried_again_at_once(
    depot: DepotProcess, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the new server did not know the session, and the client left it alone for ten seconds."""
    refusals = [RemoteError(ErrorCode.UNKNOWN_SESSION, "connect first")]

    def open_after_a_refusal(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return open_session(*arguments)

    monkeypatch.setattr("kvdepot.client.connection.open_session", open_after_a_refusal)
    make_client(depot.url).wait_until_connected(3)
    assert not refusals


def test_weights_that_change_while_the_client_connects_are_told_with_the_next_request(
    tmp_path: Path, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, call = make_client(str(tmp_path)), Channel.call

    def call_and_change(channel: Channel, request: Any, deadline_seconds: float) -> Any:
        reply = call(channel, request, deadline_seconds)
        if isinstance(request, m.RegisterScheduler):
            client.change_weights("lineage 8 def")  # the depot has the registration, the client has no session yet
        return reply

    monkeypatch.setattr(Channel, "call", call_and_change)
    with DepotProcess(directory=tmp_path) as depot:
        client.wait_until_connected(5)
        client.lookup("r", prompt(3))
        assert [context.weights for context in depot.status().contexts] == ["8 def"]


def test_a_session_that_cannot_be_used_is_lost_and_another_one_follows(
    depot: DepotProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvdepot.client.connection.REFUSED_RETRY_SECONDS", 0.01)
    opened: list[Session] = []

    def on_open(session: Session) -> None:
        opened.append(session)
        if len(opened) == 1:
            raise RuntimeError("can't start new thread")

    connection = Connection(depot.url, "engine", registration(), maps_pool=False, on_open=on_open)
    wait_until(lambda: len(opened) == 2)
    assert connection.wait_until_open(5) is opened[1]
    assert not opened[0].mark_lost.alive
    assert "can't start new thread" in caplog.text
    connection.close()


@pytest.mark.promise(85)
def test_a_child_that_is_forked_on_the_thread_of_a_connection_opens_no_session(depot: DepotProcess) -> None:
    """That thread goes on in the child, where it would connect again."""
    children: list[int] = []

    def fork(_session: Session) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python, for a process with threads
            child = os.fork()
        if child:
            children.append(child)
        else:
            signal.alarm(5)

    connection = Connection(depot.url, "engine", registration(), maps_pool=False, on_open=fork)
    wait_until(lambda: children)
    assert os.waitpid(children[0], 0)[1] == 0, "the child has ended with its only thread"
    assert depot.status().num_sessions == 1
    connection.close()


@pytest.mark.promise(25)
def test_a_hung_depot_costs_one_deadline_in_all(client: SchedulerClient, depot: DepotProcess) -> None:
    with stopped(depot):
        assert DEADLINE * 0.9 < seconds_of(lambda: client.lookup("r", prompt(3))) < DEADLINE * 3
        assert seconds_of(lambda: [client.lookup("r", prompt(3)) for _ in range(100)]) < DEADLINE
    wait_until(lambda: depot.status().num_leases == 0, what="the lease that was granted too late to come back")
    wait_until(lambda: client.lookup("again", prompt(3)).num_chunks == 3)


def test_a_hung_depot_gets_released_leases_when_it_resumes(client: SchedulerClient, depot: DepotProcess) -> None:
    leases = [client.lookup(name, prompt(3)) for name in ("released", "ended")]
    with stopped(depot):
        assert client.lookup("hung", prompt(3)).num_chunks == 0
        client.release(leases[0])
        client.end_request("ended")
    wait_until(lambda: depot.status().num_leases == 0, 2.0, "all leases to be gone")


def test_a_lookup_that_is_only_polled_ends_at_its_deadline_too(client: SchedulerClient, depot: DepotProcess) -> None:
    with stopped(depot):
        pending = client.submit_lookup("r", prompt(3))
        assert not pending.query()
        wait_until(pending.query, DEADLINE * 4)
        assert pending.result().num_chunks == 0


def test_a_depot_that_dies_is_a_miss_at_once_also_while_something_abandoned_is_to_be_taken_in(
    depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries, waits, wait = 0, threading.Event(), Channel.wait

    def connect_counted(*arguments: Any, reap_late_replies: Callable[[], bool], **options: Any) -> Connection:
        def counted() -> bool:
            nonlocal num_tries
            num_tries += 1
            return reap_late_replies()

        return Connection(*arguments, reap_late_replies=counted, **options)

    def wait_seen(channel: Channel, sequence: int, deadline_seconds: float) -> Any:
        waits.set()
        return wait(channel, sequence, deadline_seconds)

    monkeypatch.setattr("kvdepot.client.scheduler.Connection", connect_counted)
    with SchedulerClient(SPEC, "engine", url=depot.url, deadline_seconds=120.0) as client:
        client.wait_until_connected(5)
        monkeypatch.setattr(Channel, "wait", wait_seen)
        depot.signal(signal.SIGSTOP)
        client.submit_lookup("abandoned", prompt(3)).cancel()
        pending = client.submit_lookup("r", prompt(3))
        waiting = threading.Thread(target=pending.result, daemon=True)
        waiting.start()
        assert waits.wait(10)  # while it holds the client's lock
        before = num_tries
        wait_until(lambda: num_tries > before)
        depot.kill()
        waiting.join(30)
        assert not waiting.is_alive()
        assert pending.result().num_chunks == 0


def test_a_depot_that_is_slow_all_the_time_is_left_alone_until_it_is_not(
    client: SchedulerClient, depot: DepotProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def look_up_slowly() -> None:
        depot.signal(signal.SIGSTOP)
        resuming = threading.Timer(DEADLINE / 4, depot.signal, [signal.SIGCONT])
        resuming.start()
        client.lookup("r", prompt(3))
        resuming.join()

    for _ in range(2 * SLOW_WAITS_TO_SUSPEND):
        client.lookup("r", prompt(3))
    for _ in range(SLOW_WAITS_TO_SUSPEND - 1):
        look_up_slowly()
    assert client.is_connected and "is slow" not in caplog.text
    look_up_slowly()
    assert "is slow" in caplog.text
    wait_until(lambda: client.lookup("again", prompt(3)).num_chunks == 3)
    for request in ("r", "again"):
        client.end_request(request)
    wait_until(lambda: depot.status().num_leases == 0, what="the leases that were granted too late to come back")


def test_a_lookup_never_waits_to_ask_whether_a_depot_is_coming(tmp_path: Path, make_client: MakeClient) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(tmp_path / CONTROL_SOCKET))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:  # until its queue is full
                caller = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                caller.setblocking(False)
                caller.connect(listener.getsockname())
        assert make_client(str(tmp_path)).lookup("r", prompt(3)).num_chunks == 0


@pytest.mark.slow
@pytest.mark.promise(27)
def test_ten_restarts_leave_nothing_behind(client: SchedulerClient, depot: DepotProcess) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def restart() -> None:
        depot.kill()
        depot.start()
        client.wait_until_connected(5)
        wait_until(lambda: client.lookup("r", prompt(3)).num_chunks == 3)

    restart()
    before = count()
    for _ in range(10):
        restart()
    wait_until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))
    files = {path.name for path in depot.pool_directory.iterdir()}
    assert files == {"pool", "index", "names", "sessions"}


@pytest.mark.promise(20)
def test_a_depot_that_refuses_is_a_miss_with_the_reason(depot: DepotProcess) -> None:
    bad = m.CacheSpec(60, SPEC.groups, "bytes")
    client = SchedulerClient(bad, "engine", url=depot.url, deadline_seconds=DEADLINE)
    with pytest.raises(DepotUnavailable, match="bad_layout"):
        client.wait_until_connected(2.0)
    assert client.lookup("r", prompt(1)).num_chunks == 0
    client.close()


def test_a_second_server_in_the_same_directory_says_who_is_there(depot: DepotProcess) -> None:
    result = run_kvdepot("serve", "--dir", depot.url, "--pool-size", "1MiB")
    assert result.returncode == 1
    assert str(depot.pid) in result.stderr
    assert "--dir" in result.stderr


def test_sigterm_ends_the_server_and_keeps_the_cache(client: SchedulerClient, depot: DepotProcess) -> None:
    assert depot.terminate() == 0
    depot.start()
    client.wait_until_connected(5)
    wait_until(lambda: client.lookup("r", prompt(3)).num_chunks == 3)


@pytest.mark.promise(39)
def test_importing_the_client_loads_no_engine_and_no_server() -> None:
    import subprocess
    import sys

    code = "import sys, kvdepot as k; k.SchedulerClient; sys.exit(bool({'numpy', 'kvdepot.server'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
