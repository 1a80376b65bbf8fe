"""Operations over HTTP, against a real depot and a real HTTP server: health, metrics, and who may change what."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot import messages as m
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import ConfigError
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.testing.processes import DepotProcess, wait_until
from tests.core.test_protocol import Peer, prompt, registration

pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")
pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from kvdepot.http import OPERATIONS, create_app
from kvdepot.http_server import HttpServer, HttpSettings

TOKEN = "a token that nobody guesses"
_FRAMEWORKS = {"starlette", "uvicorn", "anyio", "prometheus_client"}


class Http:
    """An HTTP server in front of a depot, in this process: it is asked while the depot is stopped or dead."""

    def __init__(self, depot: DepotProcess, token: str = TOKEN) -> None:
        self.server = HttpServer(depot.url, HttpSettings("127.0.0.1", 0, token))

    def get(self, path: str, token: str = "") -> tuple[int, str]:
        return self.send("GET", path, None, token)

    def post(self, path: str, body: object = None, token: str = TOKEN) -> tuple[int, Any]:
        status, text = self.send("POST", path, json.dumps(body or {}).encode(), token)
        return status, json.loads(text)

    def send(self, method: str, path: str, body: bytes | None, token: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", body, method=method)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        status, text = self.get("/metrics")
        assert status == 200
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def http(depot: DepotProcess) -> Iterator[Http]:
    http = Http(depot)
    yield http
    http.server.close()


@pytest.fixture
def peer(depot: DepotProcess) -> Iterator[Peer]:
    peer = Peer(depot, registration(instance="engine"))
    yield peer
    peer.close()


@pytest.mark.promise(3)
def test_health_follows_the_request_loop(depot: DepotProcess, http: Http) -> None:
    assert http.get("/healthz")[0] == 200
    assert http.get("/readyz")[0] == 200
    depot.signal(signal.SIGSTOP)
    try:
        status, text = http.get("/healthz")
        assert status == 503
        assert "unhealthy" in text
        assert http.get("/readyz")[0] == 503
    finally:
        depot.signal(signal.SIGCONT)
    assert http.get("/healthz")[0] == 200
    depot.kill()
    assert http.get("/healthz")[0] == 503
    assert http.get("/status")[0] == 503
    depot.start()
    assert http.get("/healthz")[0] == 200


def test_metrics_count_what_happened(http: Http, peer: Peer) -> None:
    assert peer.store(prompt(3, "a")) == 3
    assert peer.find(prompt(3, "a")).num_chunks == 3
    metrics = http.metrics()
    assert metrics["kvdepot_entries"] == 3
    assert metrics["kvdepot_lookup_chunks_hit_total"] == 3
    assert metrics["kvdepot_pool_size_bytes"] == 64 << 20
    assert metrics["kvdepot_tenant_used_bytes[default]"] > 0
    assert metrics["kvdepot_leases"] == 1


def test_tiers_have_metrics_of_their_own() -> None:
    with DepotProcess("--tier", "memory://?capacity=1MiB") as depot:
        http = Http(depot)
        metrics = http.metrics()
        assert metrics["kvdepot_tier_capacity_bytes[memory://]"] == 1 << 20
        assert metrics["kvdepot_tier_breaker_open[memory://]"] == 0
        http.server.close()


def test_status_is_what_the_command_shows(http: Http, depot: DepotProcess) -> None:
    status, text = http.get("/status")
    assert status == 200
    assert json.loads(text)["pid"] == depot.pid
    assert json.loads(http.get("/tenants")[1]) == {}


def test_changes_take_the_token(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    for token in ("", "wrong", TOKEN + "x"):
        assert http.post("/cache/clear", token=token)[0] == 401
    assert depot.status().num_entries == 3
    assert http.post("/cache/clear", {"tenant": "nobody"}) == (200, {"count": 0})
    assert http.post("/cache/clear") == (200, {"count": 3})
    assert http.post("/cache/unpin") == (200, {"count": 0})


def test_what_is_warmed_is_pinned(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(2, "a"))
    digests = prompt(2, "a").digests
    body = {"digests": [digests[:32].hex(), digests[32:].hex()], "pin_seconds": 60}
    assert http.post("/cache/warm", body) == (200, {"count": 2})
    assert http.metrics()["kvdepot_pins"] == 1
    assert http.post("/cache/unpin") == (200, {"count": 1})


@pytest.mark.parametrize(
    "body", [b"nonsense", b'{"tenant": 3}', b'{"colour": "red"}', b'{"digests": ["zz"]}', b"[]", b'{"digests":"x"}']
)
def test_a_body_that_is_wrong_is_refused_and_changes_nothing(body: bytes, http: Http) -> None:
    status, text = http.send("POST", "/cache/warm", body, TOKEN)
    assert status == 400
    assert "error" in json.loads(text)


def test_without_a_token_nothing_can_be_changed(depot: DepotProcess) -> None:
    http = Http(depot, token="")
    assert http.get("/status")[0] == 200
    status, reply = http.post("/cache/clear", token="anything")
    assert status == 403
    assert "--http-token" in reply["error"]
    http.server.close()


def test_off_loopback_reading_takes_the_token_too(depot: DepotProcess) -> None:
    with pytest.raises(ConfigError, match="--http-token"):
        HttpSettings("0.0.0.0", 9460)
    server = HttpServer(depot.url, HttpSettings("127.0.0.1", 0, TOKEN))
    server.close()
    assert not HttpSettings("0.0.0.0", 0, TOKEN).is_loopback


@pytest.mark.parametrize(
    ("address", "words"), [("9460", "HOST:PORT"), ("127.0.0.1:x", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT")]
)
def test_an_address_that_is_none_says_what_one_is(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HttpSettings.parse(address)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(ConfigError, match="openssl rand"):
        HttpSettings.parse("127.0.0.1:0", tmp_path / "token")


def test_what_answers_is_started_again_when_it_ends(http: Http) -> None:
    assert http.get("/healthz")[0] == 200
    first = http.server.pid
    assert first
    os.kill(first, signal.SIGKILL)
    assert http.get("/healthz")[0] == 200, "who connects meanwhile waits"
    assert http.server.pid != first


def test_what_answers_ends_with_its_server(depot: DepotProcess) -> None:
    http = Http(depot)
    assert http.get("/healthz")[0] == 200
    pid = http.server.pid
    http.server.close()
    assert http.server.pid == 0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OSError, match="refused"):
        http.get("/healthz")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_answers_ends_with_its_depot(number: int) -> None:
    with DepotProcess("--http", "127.0.0.1:0") as depot:
        wait_until(lambda: len(children_of(depot.pid)) == 1)
        (child,) = children_of(depot.pid)
        os.kill(depot.pid, number)
        wait_until(lambda: not Path(f"/proc/{child}").exists())


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.promise(61)
def test_the_depots_process_runs_no_http(depot: DepotProcess) -> None:
    """Its Python would keep the loop waiting for the interpreter's lock."""
    command = f"""
import sys
from kvdepot.cli import HttpServer, HttpSettings
server = HttpServer({depot.url!r}, HttpSettings("127.0.0.1", 0))
print(sorted({_FRAMEWORKS!r} & sys.modules.keys()))
server.close()
"""
    shown = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_a_depot_serves_http_by_flag(tmp_path: Path) -> None:
    with DepotProcess("--http", "127.0.0.1:0", log_level="info") as depot:
        descriptors = Path(f"/proc/{depot.pid}/net/tcp").read_text().splitlines()[1:]
        inodes = {link.readlink().name for link in Path(f"/proc/{depot.pid}/fd").iterdir() if link.is_symlink()}
        (port,) = (
            int(line.split()[1].partition(":")[2], 16)
            for line in descriptors
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as reply:
            assert json.loads(reply.read())["status"] == "ok"
        scheduler = SchedulerClient(registration().spec, "engine", url=depot.url)
        scheduler.wait_until_connected(5)
        wait_until(lambda: depot.status().num_sessions == 1)
        scheduler.close()
        assert depot.terminate() == 0


def test_a_port_that_is_taken_says_so(tmp_path: Path) -> None:
    with DepotProcess() as depot:
        http = Http(depot)
        command = [
            sys.executable, "-m", "kvdepot", "serve", "--dir", str(tmp_path / "other"), "--pool-size", "1MiB",
            "--pool-dir", str(tmp_path / "pool"), "--ephemeral", "--http", f"127.0.0.1:{http.server.port}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 1
        assert "Address already in use" in done.stderr
        assert "Traceback" not in done.stderr
        http.server.close()


# --- operations -----------------------------------------------------------------------------------------------------


def hex_of(run: KeyRun) -> list[str]:
    return [run.digests[place : place + 32].hex() for place in range(0, len(run.digests), 32)]


def test_a_prefix_is_found_with_whose_it_is_and_who_holds_it(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    status, found = http.post("/cache/find", {"digests": hex_of(prompt(5, "a"))}, token="")
    assert status == 200
    (prefix,) = found
    assert (prefix["num_chunks"], prefix["num_tokens"], prefix["tenant"]) == (3, 192, "default")
    assert (prefix["model"], prefix["is_held"], prefix["num_children"]) == ("model", False, 0)
    peer.find(prompt(2, "a"))
    (prefix,) = http.post("/cache/find", {"digests": hex_of(prompt(2, "a"))})[1]
    assert (prefix["num_chunks"], prefix["is_held"], prefix["num_children"]) == (2, True, 1)
    assert http.post("/cache/find", {"digests": hex_of(prompt(2, "b"))}) == (200, [])


def test_one_prefix_is_cleared_up_to_what_another_needs(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(6, "a"))
    other = hash_prefix(Namespace("model", tenant_salt="a"), 64, [*range(128), *range(1000, 1128)])
    peer.store(other)
    assert http.post("/cache/clear", {"digests": hex_of(prompt(6, "a")), "tenant": "nobody"}) == (200, {"count": 0})
    assert http.post("/cache/clear", {"digests": hex_of(prompt(6, "a"))}) == (200, {"count": 4})
    assert peer.find(prompt(6, "a")).num_chunks == 2
    assert peer.find(other).num_chunks == 4
    assert http.post("/cache/clear", {"digests": hex_of(other)}) == (200, {"count": 0}), "a lease holds it"


def test_what_is_here_is_pinned_without_an_engine(http: Http, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(2, "a"))
    peer.close()
    wait_until(lambda: not depot.status().contexts)
    body = {"digests": hex_of(prompt(2, "a")), "pin_seconds": 60}
    assert http.post("/cache/warm", body) == (200, {"count": 2})
    assert http.post("/cache/clear") == (200, {"count": 0})


def test_a_quota_is_changed_at_runtime(http: Http, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    body = {"tenant": "default", "quota_bytes": 1 << 20}
    assert http.post("/tenants/quota", body) == (200, {"count": 3})
    assert json.loads(http.get("/tenants")[1])["default"]["quota_bytes"] == 1 << 20
    assert json.loads(http.get("/config")[1])["quotas"] == {"default": 1 << 20}
    assert http.metrics()["kvdepot_tenant_quota_bytes[default]"] == 1 << 20
    status, reply = http.post("/tenants/quota", {"tenant": "greedy", "quota_bytes": 64 << 20})
    assert status == 409
    assert f"leave {63 << 20} of the pool" in reply["error"]
    assert http.post("/tenants/quota", {"tenant": "default", "quota_bytes": 0}) == (200, {"count": 3})


def test_a_draining_depot_finds_and_takes_no_stores(http: Http, peer: Peer, depot: DepotProcess) -> None:
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


def test_the_log_level_is_changed_at_runtime(http: Http, depot: DepotProcess) -> None:
    assert json.loads(http.get("/loglevel")[1]) == {"level": "warning"}
    assert http.post("/loglevel", {"level": "debug"})[0] == 200
    assert json.loads(http.get("/loglevel")[1]) == {"level": "debug"}
    assert http.post("/loglevel", {"level": "loud"})[0] == 400


def test_the_settings_name_no_secrets() -> None:
    with DepotProcess("--tier", "memory://user:hunter2@host?capacity=1MiB") as depot:
        http = Http(depot)
        status, text = http.get("/config")
        http.server.close()
    assert status == 200
    assert "hunter2" not in text
    settings = json.loads(text)
    assert settings["tiers"] == ["memory://host"]
    assert settings["pool_size_bytes"] == 64 << 20


def test_every_change_takes_the_token(http: Http) -> None:
    for operation in OPERATIONS:
        if operation.changes:
            assert http.post(operation.path, token="wrong")[0] == 401, operation.path


def test_every_path_is_in_the_openapi_document_and_answers_what_it_says(http: Http) -> None:
    document = json.loads(http.get("/openapi.json")[1])
    app = create_app(lambda _request, _seconds: m.Done(1), HttpSettings("127.0.0.1", 0))
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert set(document["paths"]) == paths - {"/openapi.json", "/"}

    def resolve(schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    status = resolve(document["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"])
    assert set(json.loads(http.get("/status")[1])) == set(status["properties"])
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            changes = any(operation.changes for operation in OPERATIONS if operation.path == path)
            assert ("security" in described) == (changes and method == "post"), path
            for content in described["responses"]["200"]["content"].values():
                assert resolve(content["schema"]), path
