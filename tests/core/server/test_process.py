"""A depot's process has no device, no engine and no network, and runs no code from a peer or a file."""

import ast
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import kvdepot
from kvdepot import SchedulerClient
from kvdepot.client.connection import open_session
from kvdepot.config import CONTROL_SOCKET, ServerConfig
from kvdepot.errors import ErrorCode
from kvdepot.index.eviction import AdaptiveReplacement
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.pool.folder import NAMES_FILE, TABLE_FILE
from kvdepot.pool.names import Label, Names, NamesFile
from kvdepot.pool.table import CRC_OFFSET, HEADER_PAGE_BYTES, RECORD_BYTES, Entry, IndexTable
from kvdepot.server.app import DepotServer
from kvdepot.wire import messages as m
from support.commands import run_kvdepot
from support.peer import SPEC, Peer, RawSocket, prompt

HEAVY = ("torch", "numpy", "vllm", "habana", "libcuda", "libcudart", "libze_loader", "libhl")


@pytest.fixture
def busy(depot: DepotProcess) -> Iterator[DepotProcess]:
    """A depot after a store and a lookup."""
    peer = Peer(depot)
    peer.store(prompt(3))
    assert peer.find(prompt(3)).num_chunks == 3
    yield depot
    peer.close()


def open_files(pid: int | str) -> list[str]:
    return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.lexists(entry.path)]


@pytest.mark.slow
@pytest.mark.promise(35)
def test_the_server_opens_no_device_and_loads_no_engine(busy: DepotProcess) -> None:
    devices = [path for path in open_files(busy.pid) if path.startswith("/dev/")]
    assert [path for path in devices if not path.startswith(("/dev/null", "/dev/shm/"))] == []
    mapped = Path(f"/proc/{busy.pid}/maps").read_text()
    assert [name for name in HEAVY if name in mapped] == []
    code = "import sys, kvdepot.server.loop, kvdepot.operate.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "numpy", "vllm", "habana_frameworks"} & set(loaded) == set()


@pytest.mark.promise(41)
def test_neither_server_nor_client_has_a_socket_that_leaves_the_machine(busy: DepotProcess) -> None:
    with SchedulerClient(SPEC, "engine", url=busy.url) as client:
        client.wait_until_connected(5)
        assert client.lookup("r", prompt(3)).num_chunks == 3
        network = {
            line.split()[column]
            for name, column in (
                ("tcp", 9),
                ("tcp6", 9),
                ("udp", 9),
                ("udp6", 9),
                ("raw", 9),
                ("raw6", 9),
                ("packet", 8),
            )
            if (table := Path("/proc/net", name)).exists()
            for line in table.read_text().splitlines()[1:]
        }
        for pid in (busy.pid, os.getpid()):
            sockets = {path[8:-1] for path in open_files(pid) if path.startswith("socket:[")}
            assert sockets
            assert sockets & network == set()


@pytest.mark.slow
@pytest.mark.promise(66)
@pytest.mark.parametrize("same_directory", [False, True])
def test_a_second_depot_on_a_living_depot_s_pool_says_who_has_it(
    same_directory: bool, depot: DepotProcess, tmp_path: Path
) -> None:
    """Also with the same directory, if the lock was removed a moment ago or the two are in different containers."""
    directory = depot.directory if same_directory else tmp_path
    depot.signal(signal.SIGSTOP)  # otherwise it makes its lock again
    (depot.directory / "lock").unlink(missing_ok=same_directory)
    pool = str(depot.pool_directory)
    result = run_kvdepot("serve", "--dir", str(directory), "--pool-dir", pool, "--pool-size", "64MiB")
    depot.signal(signal.SIGCONT)
    assert result.returncode == 1
    assert f"--dir {depot.directory}" in result.stderr
    assert "--pool-dir" in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert "Traceback" not in result.stderr
    peer = Peer(depot)
    assert peer.store(prompt(2)) == 2
    peer.close()


# --- no foreign code ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(5)
def test_no_module_unpickles_or_evaluates_anything() -> None:
    forbidden = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec", "compile", "yaml"}
    paths = list(Path(kvdepot.__file__).parent.rglob("*.py"))
    assert len(paths) > 20
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used = {node.func.id}
            assert not used & forbidden, f"{path}, line {getattr(node, 'lineno', 0)}"


@pytest.mark.promise(5)
def test_a_pickle_that_would_run_code_is_just_a_malformed_frame(depot: DepotProcess, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    # protocol 0: call os.mkdir with the path
    payload = f"cos\nmkdir\n(V{marker}\ntR.".encode()
    raw = RawSocket(depot)
    for data in (payload, bytes(8) + payload, bytes(8) + b"\xc4" + bytes([len(payload)]) + payload):
        assert raw.error(data).code is ErrorCode.MALFORMED
    raw.close()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(depot.directory / CONTROL_SOCKET))
        connection.sendall(len(payload).to_bytes(4, "little") + payload)
        assert connection.recv(4096) == b""
    assert not marker.exists()


# --- files of an earlier server -------------------------------------------------------------------------------------


def change_record(table: bytearray, place: int, value: int) -> None:
    """Change four bytes of the first record and correct its checksum."""
    base = HEADER_PAGE_BYTES
    table[base + place : base + place + 4] = value.to_bytes(4, "little")
    crc = IndexTable(table, 1).crc_of(Entry(0))
    table[base + CRC_OFFSET : base + CRC_OFFSET + 4] = crc.to_bytes(4, "little")


@pytest.mark.slow
@pytest.mark.promise(60)
@pytest.mark.parametrize(
    ("place", "value"),
    [(96, 0xFFFFFFFF), (80, 5), (8, 9)],
    ids=["a writer whose number no process has", "a tenant without a name", "a space without a layout"],
)
def test_a_record_that_no_server_wrote_stops_no_server(place: int, value: int, depot: DepotProcess) -> None:
    """Regression: the first record ended the new server, and the second one made every status fail."""
    peer = Peer(depot)
    peer.prepare(prompt(1))
    depot.kill()
    peer.close()
    path = depot.pool_directory / TABLE_FILE
    content = bytearray(path.read_bytes())
    small = content[: HEADER_PAGE_BYTES + RECORD_BYTES]
    change_record(small, place, value)
    with path.open("r+b") as file:
        file.write(small)
    depot.start()
    wait_until(lambda: not depot.status().recovering)
    peer = Peer(depot)  # its writer is back, so none of its extents stays in quarantine
    wait_until(lambda: depot.status().pool_used_bytes == 0)
    assert peer.store(prompt(2)) == 2
    peer.close()


def of_tenant(name: str) -> KeyRun:
    return replace(prompt(2, salt=name), tenant=name)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def frame_of(spaces: list[m.CacheSpec], labels: list[Label]) -> bytes:
    return frame(msgspec.msgpack.encode(Names(spaces, labels)))


def names_in(path: Path) -> Names:
    file = NamesFile.open(path)
    file.close()
    return file.found


@pytest.mark.slow
@pytest.mark.promise(60)
@pytest.mark.parametrize(
    "raw",
    [
        NamesFile.MAGIC + frame(b"\x92\x90\x91\x92\xa1\xff\xa0"),
        NamesFile.MAGIC + frame(b"\x92" + b"\x91" * 5000),
        NamesFile.MAGIC + frame(b"\x81\x00"),
        NamesFile.MAGIC + frame(b""),
        b"KVDEPOTN\x02" + NamesFile.MAGIC[9:],
        NamesFile.MAGIC + frame_of([SPEC], [Label("default", "model")])[:-1] + b"m",
        NamesFile.MAGIC + frame_of([SPEC], [Label("default", "model")]) + frame_of([SPEC], []),
        NamesFile.MAGIC + frame_of([SPEC], [Label("a", "m"), Label("default", "model"), Label("a", "m")]),
    ],
    ids=[
        "text that is none",
        "nested too deeply",
        "a map",
        "an empty frame",
        "of a later release",
        "a wrong byte",
        "a cache twice",
        "a tenant twice",
    ],
)
def test_names_that_no_server_wrote_are_a_cold_start(raw: bytes, depot: DepotProcess) -> None:
    """Regression: the first two files ended the new server."""
    peer = Peer(depot)
    peer.store(prompt(2))
    peer.close()
    depot.kill()
    path = depot.pool_directory / NAMES_FILE
    assert names_in(path) == Names([SPEC], [Label("default", "model")])
    path.write_bytes(raw)
    depot.start()
    wait_until(lambda: not depot.status().recovering)
    assert depot.status().num_entries == 0


@pytest.mark.slow
@pytest.mark.promise(23)
@pytest.mark.parametrize("tail", [b"\x05", frame(b"\x92\x90\x90")[:-1], b"\x00\x01\x00\x00" + bytes(40)])
def test_a_name_that_was_not_written_to_its_end_is_cut_off(tail: bytes, depot: DepotProcess) -> None:
    peer = Peer(depot)
    assert peer.store(of_tenant("a")) == 2
    peer.close()
    depot.kill()
    path = depot.pool_directory / NAMES_FILE
    with path.open("ab") as file:
        file.write(tail)
    depot.start()
    wait_until(lambda: not depot.status().recovering)
    peer = Peer(depot)
    assert peer.store(of_tenant("b")) == 2
    assert peer.find(of_tenant("a")).num_chunks == 2
    peer.close()
    depot.kill()
    assert names_in(path) == Names([SPEC], [Label("a", "model"), Label("b", "model")])
    depot.start()
    wait_until(lambda: not depot.status().recovering)
    assert depot.status().num_entries == 4
    assert {name: usage.used_bytes > 0 for name, usage in depot.status().tenants.items()} == {"a": True, "b": True}


# --- silence --------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], DepotServer]]:
    """Runs a server in a thread of this process."""
    running: list[tuple[DepotServer, threading.Thread]] = []

    def start() -> DepotServer:
        server = DepotServer(ServerConfig(tmp_path, tmp_path / "pool", pool_size_bytes=1 << 20, ephemeral=True))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.stop()
        thread.join(10)


def test_a_failure_in_the_deadlines_of_single_flight_does_not_end_the_server(
    serve: Callable[[], DepotServer], tmp_path: Path
) -> None:
    server = serve()
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("planted")

    server.depot.state.timers.call_at(0.0, fail)
    with SchedulerClient(SPEC, "engine", url=str(tmp_path)) as client:
        client.wait_until_connected(5)
        assert failed.wait(5)
        wait_until(lambda: server.depot.counters["chores_failed"] == 1)
        client.wait_until_connected(5)


@pytest.mark.promise(1)
def test_a_store_that_meets_a_bug_of_the_eviction_policy_is_an_error_and_the_server_lives(
    serve: Callable[[], DepotServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    peer = Peer(SimpleNamespace(url=str(tmp_path)))  # type: ignore[arg-type]
    full = [prompt(32, str(salt)) for salt in range(8)]  # together they fill the pool
    other = prompt(1, "other")
    assert [peer.store(run) for run in full] == [32] * 8

    def fail(_policy: AdaptiveReplacement) -> int | None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(AdaptiveReplacement, "victim", fail)
        store = m.PrepareStore(peer.context, "r", other.tenant, other.digests, 0, other.parent, (1,))
        assert peer.refusal(store) is ErrorCode.INTERNAL
        assert server.depot.counters["requests_failed"] == 1
        assert peer.find(full[-1]).num_chunks == 32
        peer.ask(m.EndRequest(peer.context, "r"))
    assert peer.store(other) == 1
    assert peer.find(other).num_chunks == 1
    peer.close()


@pytest.mark.promise(26)
def test_a_session_that_says_nothing_for_an_hour_is_still_open(
    serve: Callable[[], DepotServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    with SchedulerClient(SPEC, "engine", url=str(tmp_path)) as client, socket.socket(socket.AF_UNIX) as connection:
        client.wait_until_connected(5)
        connection.settimeout(5.0)
        opened, _ = open_session(connection, tmp_path / CONTROL_SOCKET, "test", False, m.PROTOCOL_VERSION)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
        swept = threading.Event()
        sweep = server.sockets.connections.sweep

        def sweep_and_say_so(is_over: Callable[[], bool]) -> None:
            sweep(is_over)
            swept.set()

        monkeypatch.setattr("kvdepot.server.connections.time", later)
        monkeypatch.setattr(server.sockets.connections, "sweep", sweep_and_say_so)
        assert swept.wait(5)
        connection.sendall(b"p")
        assert connection.recv(1) == b"p"
        assert opened.epoch == server.epoch
        assert client.is_connected
        assert client.lookup("r", prompt(1)).num_chunks == 0
        assert server.depot.counters["lookups"] == 1
