"""Where a depot listens for HTTP, and the process that answers (`kvdepot.ops.http_app`).

It is a process of its own, as its Python would make the depot's loop wait for the interpreter's lock: up to 12 ms while
metrics of very many tenants are written. It is started again if it ends; connections wait meanwhile.
"""

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvdepot.errors import ConfigError

logger = logging.getLogger(__name__)

_SHORTEST_TOKEN: Final = 16
_NEEDED: Final = ("uvicorn", "starlette", "prometheus_client")
_BACKLOG: Final = 128
_PAUSE_SECONDS: Final = 1.0  # before it is started again
_STOP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where to listen, and what a request has to know."""

    host: str
    port: int  # 0: any that is free
    token: str
    names: tuple[str, ...] = ()  # that the depot is known by, beside `host` and its addresses

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, address: str, token_file: Path | None = None, names: Sequence[str] = ()) -> "HttpSettings":
        """Return the settings of `HOST:PORT` and a file with a token; on loopback without one, with a new token.

        Raises:
            ConfigError: the address is none, the file is missing off loopback, cannot be read or has no token that is
                long enough.
        """
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--http {address!r}: give HOST:PORT, for example 127.0.0.1:9460")
        settings = cls(host.strip("[]") or "127.0.0.1", int(port), secrets.token_hex(32), tuple(names))
        if token_file is None:
            if not settings.is_loopback:
                raise ConfigError(
                    f"--http {settings.host}: off loopback those who ask need a token that you gave them:"
                    " give --http-token FILE, or listen on 127.0.0.1"
                )
            return settings
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--http-token {token_file}: {error}") from error
        if len(token) < _SHORTEST_TOKEN:
            raise ConfigError(
                f"--http-token {token_file}: a token of {len(token)} characters can be guessed, at least"
                f" {_SHORTEST_TOKEN}: openssl rand -hex 32 > {token_file}"
            )
        return replace(settings, token=token)

    def write_token(self, path: Path) -> None:
        """Leave the token in a file for this user alone, in place of an earlier server's.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.token + "\n")
        except OSError as error:
            raise ConfigError(f"the token for HTTP cannot be written: {error}; or give --http-token FILE") from error
        logger.info("HTTP takes the token in %s", path)


class HttpServer:
    """The listening socket, and the process behind it.

    Args:
        url: the depot that is asked.
        settings: where to listen.

    Raises:
        ConfigError: what it needs is not installed, or the address cannot be listened on.
    """

    def __init__(self, url: str, settings: HttpSettings) -> None:
        for name in _NEEDED:
            if find_spec(name) is None:
                raise ConfigError(f"--http needs {name}: pip install 'kvdepot[http]'")
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((settings.host, settings.port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--http {settings.host}:{settings.port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._start = msgspec.json.encode((url, settings)) + b"\n"
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()  # held while it is started, and to end it
        # The kernel kills the process when the thread ends that started it.
        self._thread = threading.Thread(target=self._keep, name="kvdepot-http", daemon=True)
        self._thread.start()
        logger.info("operations at http://%s:%d", settings.host, self.port)

    @property
    def pid(self) -> int:
        """The process that answers, 0 if there is none at the moment."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def close(self) -> None:
        """Stop. Twice is harmless."""
        self._closing.set()
        with self._changing:
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # what it is at, it ends
        self._thread.join(_STOP_SECONDS)
        if process is not None and self._thread.is_alive():
            process.kill()
            self._thread.join()
        self._socket.close()

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                status = self._run()
            except OSError as error:
                logger.error("the process for HTTP cannot be started: %s", error)
            else:
                if not self._closing.is_set():
                    logger.error("the process for HTTP ended with %d: another one is started", status)
            self._closing.wait(_PAUSE_SECONDS)

    def _run(self) -> int:
        """Have one process until it ends; return how it did."""
        listener = self._socket.fileno()
        command = [sys.executable, "-P", "-m", "kvdepot.ops.http_app", str(os.getpid()), str(listener)]
        with self._changing:
            if self._closing.is_set():
                return 0
            process = self._process = subprocess.Popen(
                command, pass_fds=[listener], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(self._start)
        with process:
            return process.wait()
