"""Operations over HTTP with a real depot and a real HTTP server: health, metrics, and permissions."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import ConfigError
from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import messages as m
from support.peer import Peer, prompt, registration

pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")
pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

import uvicorn
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from kvdepot.operate.http_app import HttpConnection, create_app
from kvdepot.operate.serve import HttpSettings
from support.commands import run_kvdepot
from support.http import TOKEN, Http, status_of_app
from support.stopped import stopped

_FRAMEWORKS = {"starlette", "uvicorn", "anyio", "prometheus_client"}


@pytest.fixture
def http(depot: DepotProcess) -> Iterator[Http]:
    http = Http(depot)
    yield http
    http.server.close()


@pytest.fixture(scope="module")
def shared_http(shared_depot: DepotProcess) -> Iterator[Http]:
    """A shared server, for requests that change nothing."""
    http = Http(shared_depot)
    yield http
    http.server.close()


@pytest.mark.slow
@pytest.mark.promise(3)
def test_health_follows_the_request_loop(depot: DepotProcess, http: Http) -> None:
    assert http.get("/healthz", token="")[0] == 200
    assert http.get("/readyz", token="")[0] == 200
    with stopped(depot):
        status, text = http.get("/healthz")
        assert status == 503
        assert "unhealthy" in text
        assert http.get("/readyz")[0] == 503
    assert http.get("/healthz")[0] == 200
    depot.kill()
    assert http.get("/healthz")[0] == 503
    assert http.get("/status")[0] == 503
    depot.start()
    assert http.get("/healthz")[0] == 200


@pytest.mark.slow
def test_metrics_count_what_happened(http: Http, peer: Peer) -> None:
    assert peer.store(prompt(3, "a")) == 3
    assert peer.find(prompt(3, "a")).num_chunks == 3
    metrics = http.metrics()
    assert metrics["kvdepot_entries"] == 3
    assert metrics["kvdepot_lookup_chunks_hit_total"] == 3
    assert metrics["kvdepot_pool_size_bytes"] == 64 << 20
    assert metrics["kvdepot_tenant_used_bytes[default]"] > 0
    assert metrics["kvdepot_leases"] == 1


@pytest.mark.slow
def test_status_is_what_the_command_shows(http: Http, depot: DepotProcess) -> None:
    status, text = http.get("/status")
    assert status == 200
    assert json.loads(text)["pid"] == depot.pid
    assert json.loads(http.get("/tenants")[1]) == {}


@pytest.mark.slow
def test_changes_take_the_token(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    for token in ("", "wrong", TOKEN + "x"):
        assert http.post("/cache/clear", token=token)[0] == 401
    assert depot.status().num_entries == 3
    assert http.post("/cache/clear", {"tenant": "nobody"}) == (200, {"count": 0})
    assert http.post("/cache/clear")[0] == 400, "everything goes only on request"
    assert http.post("/cache/clear", {"all": True}) == (200, {"count": 3})
    assert depot.status().events[-1][1].startswith("cleared everything: 3 entries removed, asked by process ")


@pytest.mark.slow
def test_a_session_is_kept_and_forgotten_by_its_name(http: Http, peer: Peer) -> None:
    peer.store(prompt(2, "a"))
    peer.ask(Hint(peer.context, "default", prompt(2, "a").digests, session="agent"))
    assert http.post("/sessions/retain", {"session": "agent", "retain_seconds": 60}) == (200, {"count": 2})
    assert http.metrics()["kvdepot_pins"] == http.metrics()["kvdepot_agent_sessions"] == 1
    assert http.post("/cache/clear", {"all": True}) == (200, {"count": 0})
    assert http.post("/sessions/prefetch", {"session": "agent"}) == (200, {"count": 2})
    assert http.post("/sessions/demote", {"session": "agent"})[0] == 409, "there is no tier"
    status, reply = http.post("/sessions/forget", {"session": "agent", "tenant": "another"})
    assert status == 409
    assert "tenant another has no session agent" in reply["error"]
    assert http.post("/sessions/forget", {"session": "agent", "at_once": True}) == (200, {"count": 2})
    assert http.metrics()["kvdepot_pins"] == http.metrics()["kvdepot_agent_sessions"] == 0
    assert http.post("/sessions/forget", {"session": "agent"})[0] == 409


@pytest.mark.slow
def test_a_prefix_in_the_pool_is_warm_without_an_engine(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(2, "a"))
    peer.close()
    wait_until(lambda: not depot.status().contexts)
    assert http.post("/cache/warm", {"digests": hex_of(prompt(2, "a"))}) == (200, {"count": 2})


@pytest.mark.parametrize(
    "body", [b"nonsense", b'{"tenant": 3}', b'{"colour": "red"}', b'{"digests": ["zz"]}', b"[]", b'{"digests":"x"}']
)
def test_a_body_that_is_wrong_is_refused_and_changes_nothing(body: bytes, shared_http: Http) -> None:
    status, text = shared_http.send("POST", "/cache/warm", body, TOKEN)
    assert status == 400
    assert "error" in json.loads(text)


@pytest.mark.slow
@pytest.mark.promise(62)
def test_without_the_token_nobody_learns_who_has_what(http: Http, peer: Peer) -> None:
    """Asks every path of the application by every method, so new paths are covered."""
    secret = "a tenant of whom nobody should know"
    peer.store(hash_prefix(Namespace("model", tenant=secret), 64, range(192)))
    assert secret in http.get("/tenants")[1]
    body = json.dumps({"digests": hex_of(hash_prefix(Namespace("model", tenant=secret), 64, range(192)))}).encode()
    assert secret in http.send("POST", "/cache/find", body, TOKEN)[1]
    told: set[str] = set()
    for path in paths_of_the_application():
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            for token in ("", "wrong"):
                status, text = http.send(method, path, body if method == "POST" else None, token)
                assert secret not in text
                assert status in (200, 401, 405), path
                if status == 200:
                    told.add(path)
    assert told == {"/", "/openapi.json", "/healthz", "/readyz", "/metrics"}


def test_metrics_without_the_token_have_all_tenants_as_one(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    peer.store(hash_prefix(Namespace("model", tenant="acme"), 64, range(128)))
    peer.find(prompt(4, "a"))
    of_tenants, of_all = http.metrics(), http.metrics(token="")
    assert "kvdepot_tenant_used_bytes[acme]" in of_tenants
    assert not [name for name in of_all if "acme" in name or "default" in name]
    used = [value for name, value in of_tenants.items() if name.startswith("kvdepot_tenant_used_bytes[")]
    assert of_all["kvdepot_tenant_used_bytes[(all)]"] == sum(used)
    assert of_all["kvdepot_lookup_hit_tokens_total[pool][(all)]"] == 192
    assert http.get("/metrics", token="wrong")[0] == 401


def test_off_loopback_metrics_take_the_token(depot: DepotProcess) -> None:
    with pytest.raises(ConfigError, match="--http-token"):
        HttpSettings.parse("0.0.0.0:9460")

    def ask(request: Any, seconds: float) -> Any:
        return ask_depot(request, depot.url, seconds)

    app = create_app(ask, HttpSettings("0.0.0.0", 9460, TOKEN))
    for path, expected in (("/healthz", 200), ("/readyz", 200), ("/metrics", 401), ("/status", 401)):
        assert status_of_app(app, path) == expected, path


def status_of(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9460", "127.0.0.1.evil.example", "[", "a@127.0.0.1", "::1"]
)
def test_a_page_that_bound_its_name_to_the_depot_s_address_is_not_answered(shared_http: Http, host: str) -> None:
    for path in ("/", "/healthz", "/metrics", "/status"):
        assert shared_http.send("GET", path, None, TOKEN, host)[0] == 421, path


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:9460", "10.1.2.3:9460", "GPU-7.example"]
)
def test_a_depot_is_asked_by_its_addresses_and_names(shared_http: Http, host: str) -> None:
    assert shared_http.send("GET", "/status", None, TOKEN, host)[0] == 200


# --- connections ----------------------------------------------------------------------------------------------------

SILENT = b""
HALF_A_HEADER = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "
HALF_A_BODY = b"POST /cache/find HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n" + (
    f"Authorization: Bearer {TOKEN}\r\n\r\n{{".encode()
)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [SILENT, HALF_A_HEADER, HALF_A_BODY], ids=["silent", "header", "body"])
@pytest.mark.promise(63)
def test_health_is_answered_whoever_holds_connections(http: Http, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(600):
            connection = stack.enter_context(http.connect())
            connection.sendall(sent)
            if not number % 50:
                assert http.get("/healthz", token="")[0] == 200
        assert http.get("/healthz", token="")[0] == 200
        assert http.get("/readyz", token="")[0] == 200


@pytest.mark.slow
@pytest.mark.promise(63)
def test_health_is_answered_while_others_wait_for_the_depot(http: Http, depot: DepotProcess) -> None:
    """They are more than the threads and connections, and each waits for a stopped depot."""
    assert http.get("/healthz", token="")[0] == 200
    with stopped(depot), contextlib.ExitStack() as stack:
        for path in ("/metrics", "/status") * 200:
            connection = stack.enter_context(http.connect())
            connection.sendall(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
        began = time.monotonic()
        assert "unhealthy" in http.get("/healthz", token="")[1]
        assert time.monotonic() - began < 3


def test_requests_without_the_token_take_one_thread_however_many_they_are(http: Http, depot: DepotProcess) -> None:
    assert http.get("/healthz", token="")[0] == 200
    with stopped(depot), contextlib.ExitStack() as stack:
        for path in ("/metrics", "/healthz", "/readyz") * 20:
            connection = stack.enter_context(http.connect())
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert "unhealthy" in http.get("/healthz", token="")[1]
        names = [(task / "comm").read_text() for task in Path(f"/proc/{http.server.pid}/task").iterdir()]
        assert len(names) < 20, names


@pytest.mark.slow
@pytest.mark.promise(63)
def test_health_is_answered_with_few_descriptors(http: Http, capfd: pytest.CaptureFixture[str]) -> None:
    assert http.get("/healthz", token="")[0] == 200
    resource.prlimit(http.server.pid, resource.RLIMIT_NOFILE, (80, 80))
    pid = http.server.pid
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(http.connect())
        assert http.get("/healthz", token="")[0] == 200
    assert http.server.pid == pid, "the same process"
    assert not capfd.readouterr().err


@pytest.mark.parametrize("sent", [SILENT, HALF_A_HEADER, HALF_A_BODY], ids=["silent", "header", "body"])
def test_a_request_that_does_not_come_ends_its_connection(sent: bytes) -> None:
    asyncio.run(wait_for_the_end(sent, request_seconds=0.05))


def test_an_answer_that_nobody_takes_ends_its_connection() -> None:
    request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    asyncio.run(wait_for_the_end(request, answer_seconds=0.05))


async def wait_for_the_end(sent: bytes, request_seconds: float = 600.0, answer_seconds: float = 600.0) -> None:
    """Serve one connection that sends `sent` and reads nothing, until the server ends it."""
    ended = asyncio.Event()

    class Hasty(HttpConnection):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    Hasty.request_seconds, Hasty.answer_seconds = request_seconds, answer_seconds

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20)})  # more than sockets hold

    config = uvicorn.Config(app, http=Hasty, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hasty(config, ServerState(), {}), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as connection:
        connection.sendall(sent)
        await asyncio.wait_for(ended.wait(), 30)
    server.close()


@pytest.mark.parametrize(
    ("address", "words"), [("9460", "HOST:PORT"), ("127.0.0.1:x", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT")]
)
def test_a_malformed_address_says_what_one_is(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HttpSettings.parse(address)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(ConfigError, match="openssl rand"):
        HttpSettings.parse("127.0.0.1:0", tmp_path / "token")


@pytest.mark.slow
def test_the_http_process_is_started_again_when_it_ends(http: Http) -> None:
    assert http.get("/healthz")[0] == 200
    first = http.server.pid
    assert first
    os.kill(first, signal.SIGKILL)
    assert http.get("/healthz")[0] == 200, "who connects meanwhile waits"
    assert http.server.pid != first


def test_the_http_process_ends_with_its_server(depot: DepotProcess) -> None:
    http = Http(depot)
    assert http.get("/healthz")[0] == 200
    pid = http.server.pid
    http.server.close()
    assert http.server.pid == 0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OSError, match="refused"):
        http.get("/healthz")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_http_process_ends_with_its_depot(number: int) -> None:
    with DepotProcess("--http", "127.0.0.1:0") as depot:
        wait_until(lambda: len(children_of(depot.pid)) == 1)
        (child,) = children_of(depot.pid)
        os.kill(depot.pid, number)
        wait_until(lambda: not Path(f"/proc/{child}").exists())


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.promise(61)
def test_the_depots_process_runs_no_http(depot: DepotProcess) -> None:
    """HTTP's Python code there would make the loop wait for the interpreter's lock."""
    command = f"""
import sys
from kvdepot.operate.serve import HttpServer, HttpSettings
server = HttpServer({depot.url!r}, HttpSettings("127.0.0.1", 0, "token"))
print(sorted({_FRAMEWORKS!r} & sys.modules.keys()))
server.close()
"""
    shown = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_depot_serves_http_by_flag() -> None:
    with DepotProcess("--http", "127.0.0.1:0", log_level="info") as depot:
        url = f"http://127.0.0.1:{port_of(depot)}"
        with urllib.request.urlopen(f"{url}/healthz", timeout=10) as reply:
            assert json.loads(reply.read())["status"] == "ok"
        token = (depot.directory / "http.token").read_text().strip()
        request = urllib.request.Request(f"{url}/cache/clear", b'{"all": true}', {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert json.loads(reply.read()) == {"count": 0}
        assert depot.status().events[-1][1].endswith("asked by a client over HTTP")
        scheduler = SchedulerClient(registration().spec, "engine", url=depot.url)
        scheduler.wait_until_connected(5)
        wait_until(lambda: depot.status().num_sessions == 1)
        scheduler.close()
        assert depot.terminate() == 0


@pytest.mark.slow
def test_a_client_that_leaves_while_it_sends_puts_nothing_into_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess("--http", "127.0.0.1:0") as depot:
        port = port_of(depot)
        token = (depot.directory / "http.token").read_text().strip()
        lines = ("POST /cache/clear HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", "Content-Length: 9")
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall("\r\n".join((*lines, "", "{")).encode())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as reply:
            assert reply.status == 200
        assert depot.terminate() == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.promise(62)
def test_a_depot_makes_a_token_for_its_user_alone() -> None:
    with DepotProcess("--http", "127.0.0.1:0") as depot:
        path = depot.directory / "http.token"
        first = path.read_text().strip()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        url = f"http://127.0.0.1:{port_of(depot)}"
        assert (status_of(f"{url}/tenants"), status_of(f"{url}/tenants", first)) == (401, 200)
        depot.kill()
        depot.start()
        wait_until(lambda: path.read_text().strip() not in ("", first))
        url = f"http://127.0.0.1:{port_of(depot)}"
        assert status_of(f"{url}/tenants", first) == 401
        assert status_of(f"{url}/tenants", path.read_text().strip()) == 200


def port_of(depot: DepotProcess) -> int:
    """Return a depot's HTTP port. The depot may answer on its socket earlier than on this port."""
    ports: list[int] = []

    def find() -> list[int]:
        lines = [line.split() for line in Path(f"/proc/{depot.pid}/net/tcp").read_text().splitlines()[1:]]
        with contextlib.suppress(FileNotFoundError):
            opened = {str(link.readlink()) for link in Path(f"/proc/{depot.pid}/fd").iterdir()}
            ports[:] = [
                int(line[1].partition(":")[2], 16)
                for line in lines
                if line[3] == "0A" and f"socket:[{line[9]}]" in opened
            ]
        return ports

    wait_until(find)
    (port,) = ports
    return port


@pytest.mark.slow
def test_a_port_that_is_taken_says_so_and_leaves_no_pool(tmp_path: Path) -> None:
    with DepotProcess() as depot:
        http = Http(depot)
        flags = ("--dir", str(tmp_path / "other"), "--pool-size", "1MiB", "--pool-dir", str(tmp_path / "pool"))
        done = run_kvdepot("serve", *flags, "--http", f"127.0.0.1:{http.server.port}")
        assert done.returncode == 1
        assert not (tmp_path / "pool").exists(), "a start that fails leaves no pool"
        assert "Address already in use" in done.stderr
        assert "Traceback" not in done.stderr
        http.server.close()


# --- operations -----------------------------------------------------------------------------------------------------


def hex_of(run: KeyRun) -> list[str]:
    return [run.digests[place : place + 32].hex() for place in range(0, len(run.digests), 32)]


@pytest.mark.slow
def test_find_reports_the_owner_of_a_prefix_and_whether_it_is_held(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    status, found = http.post("/cache/find", {"digests": hex_of(prompt(5, "a"))})
    assert status == 200
    (prefix,) = found
    assert (prefix["num_chunks"], prefix["num_tokens"], prefix["tenant"]) == (3, 192, "default")
    assert (prefix["model"], prefix["is_held"], prefix["num_children"]) == ("model", False, 0)
    peer.find(prompt(2, "a"))
    (prefix,) = http.post("/cache/find", {"digests": hex_of(prompt(2, "a"))})[1]
    assert (prefix["num_chunks"], prefix["is_held"], prefix["num_children"]) == (2, True, 1)
    assert http.post("/cache/find", {"digests": hex_of(prompt(2, "b"))}) == (200, [])


@pytest.mark.slow
def test_one_prefix_is_cleared_up_to_what_another_needs(http: Http, peer: Peer) -> None:
    peer.store(prompt(6, "a"))
    other = hash_prefix(Namespace("model", tenant_salt="a"), 64, [*range(128), *range(1000, 1128)])
    peer.store(other)
    assert http.post("/cache/clear", {"digests": hex_of(prompt(6, "a")), "tenant": "nobody"}) == (200, {"count": 0})
    assert http.post("/cache/clear", {"digests": hex_of(prompt(6, "a"))}) == (200, {"count": 4})
    assert peer.find(prompt(6, "a")).num_chunks == 2
    assert peer.find(other).num_chunks == 4
    assert http.post("/cache/clear", {"digests": hex_of(other)}) == (200, {"count": 0}), "a lease holds it"


@pytest.mark.slow
def test_a_quota_is_changed_at_runtime(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    body = {"tenant": "default", "quota_bytes": 1 << 20}
    assert http.post("/tenants/quota", body) == (200, {"count": 3})
    assert json.loads(http.get("/tenants")[1])["default"]["quota_bytes"] == 1 << 20
    assert json.loads(http.get("/config")[1])["quota"] == {"default": 1 << 20}
    assert http.metrics()["kvdepot_tenant_quota_bytes[default]"] == 1 << 20
    status, reply = http.post("/tenants/quota", {"tenant": "greedy", "quota_bytes": 64 << 20})
    assert status == 409
    assert "leave 63.0 MiB of the pool" in reply["error"]
    assert http.post("/tenants/quota", {"tenant": "default", "quota_bytes": 0}) == (200, {"count": 3})


@pytest.mark.slow
def test_a_draining_depot_finds_and_takes_no_stores(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    ticket = peer.prepare(prompt(2, "b")).ticket
    assert http.post("/drain") == (200, {"count": 1})
    assert http.get("/readyz")[0] == 503
    assert http.get("/healthz")[0] == 200
    assert peer.prepare(prompt(3, "c")).num_declined == 3
    assert isinstance(peer.ask(m.CommitStore(peer.context, ticket)), m.Done)
    assert peer.find(prompt(2, "b")).num_chunks == 2
    assert http.post("/drain", {"draining": False}) == (200, {"count": 0})
    assert http.get("/readyz")[0] == 200
    assert peer.store(prompt(3, "c")) == 3


@pytest.mark.slow
def test_the_log_level_is_changed_at_runtime(http: Http) -> None:
    assert json.loads(http.get("/loglevel")[1]) == {"level": "warning"}
    assert http.post("/loglevel", {"level": "debug"}) == (200, {"level": "debug"})
    assert json.loads(http.get("/loglevel")[1]) == {"level": "debug"}
    assert http.post("/loglevel", {"level": "loud"})[0] == 400


def paths_of_the_application() -> set[str]:
    def ask(_request: Any, _seconds: float) -> Any:
        return m.Done(1)

    app = create_app(ask, HttpSettings("127.0.0.1", 0, TOKEN))
    return {route.path for route in app.routes if isinstance(route, Route)}


@pytest.mark.slow
def test_the_settings_name_no_secrets_and_tiers_have_metrics_of_their_own() -> None:
    with DepotProcess("--tier", "memory://user:hunter2@host?capacity=1MiB") as depot:
        http = Http(depot)
        status, text = http.get("/config")
        metrics = http.metrics()
        http.server.close()
    assert status == 200
    assert "hunter2" not in text
    settings = json.loads(text)
    assert settings["tier"] == ["memory://host?capacity=1MiB"]
    assert settings["pool_size"] == 64 << 20
    assert metrics["kvdepot_tier_capacity_bytes[memory://host]"] == 1 << 20
    assert metrics["kvdepot_tier_breaker_open[memory://host]"] == 0


@pytest.mark.slow
def test_every_path_is_in_the_openapi_document_and_answers_what_it_says(http: Http) -> None:
    document = json.loads(http.get("/openapi.json")[1])
    assert set(document["paths"]) == paths_of_the_application() - {"/openapi.json", "/"}

    def resolve(schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    status = resolve(document["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"])
    assert set(json.loads(http.get("/status")[1])) == set(status["properties"])
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert ("security" in described) == (path not in ("/healthz", "/readyz", "/metrics")), (path, method)
            for content in described["responses"]["200"]["content"].values():
                assert resolve(content["schema"]), path
