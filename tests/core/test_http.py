"""Operations over HTTP, against a real depot and a real HTTP server: health, metrics, and who may change what."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import ConfigError
from kvdepot.testing.processes import DepotProcess, wait_until
from tests.core.test_protocol import Peer, prompt, registration

pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")
pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

from prometheus_client.parser import text_string_to_metric_families

from kvdepot.http import HttpServer, HttpSettings

TOKEN = "a token that nobody guesses"


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
