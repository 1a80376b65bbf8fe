"""`kvdepot serve`: reads the settings, and runs the server's process with its log and HTTP.

A child process answers HTTP (`kvdepot.ops.http_app`), off the interpreter lock of the depot's loop. In one process, the
loop waited up to 12 ms while the metrics of very many tenants were written. If the child exits, another one is started,
and connections wait.
"""

import argparse
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvdepot.config import HTTP_TOKEN, ServerConfig, is_loopback, plain_settings, setting
from kvdepot.errors import ConfigError, reason_of
from kvdepot.logs import set_up_logs
from kvdepot.ops.settings import add_settings, read_settings

logger = logging.getLogger(__name__)

_SHORTEST_TOKEN: Final = 16  # characters: 64 bits in hexadecimal, too many to guess
_NEEDED: Final = ("uvicorn", "starlette", "prometheus_client")
BACKLOG: Final = 128  # HTTP connections waiting to be accepted: half of those that are served at one time
_PAUSE_SECONDS: Final = 1.0  # before another child is started, so that one that fails at once costs little
_STOP_SECONDS: Final = 10.0  # twice the child's own limit, `http_app._STOP_SECONDS`


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address to listen on, and the token that requests need."""

    host: str
    port: int  # 0: any free port
    token: str
    names: tuple[str, ...] = ()  # host names of the depot, besides `host` and addresses

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @classmethod
    def parse(cls, address: str, token_file: Path | None = None, names: Sequence[str] = ()) -> "HttpSettings":
        """Return the settings for `HOST:PORT` and a token file; without a file, on loopback, make a new token.

        Raises:
            ConfigError: the address is malformed, or the token file is missing off loopback, unreadable or too short.
        """
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--http {address!r}: give HOST:PORT, for example 127.0.0.1:9460")
        settings = cls(host.strip("[]") or "127.0.0.1", int(port), secrets.token_hex(32), tuple(names))
        if token_file is None:
            if not settings.is_loopback:
                raise ConfigError(
                    f"--http {settings.host}: off loopback, clients need a token from you:"
                    " give --http-token FILE, or listen on 127.0.0.1"
                )
            return settings
        try:
            token = token_file.read_text().strip()
            if token_file.stat().st_mode & 0o044:
                logger.warning("--http-token %s: other users can read the token; chmod 600 it", token_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--http-token {token_file}: {reason_of(error)}") from error
        if len(token) < _SHORTEST_TOKEN:
            raise ConfigError(
                f"--http-token {token_file}: a token of {len(token)} characters can be guessed; give at least"
                f" {_SHORTEST_TOKEN}: openssl rand -hex 32 > {token_file}"
            )
        return replace(settings, token=token)

    def write_token(self, path: Path) -> None:
        """Write the token to a file that only this user can read. Replace the file of an earlier server.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.token + "\n")
        except OSError as error:
            raise ConfigError(f"the token for HTTP cannot be written: {error}; or give --http-token FILE") from error
        logger.info("HTTP clients find the token in %s", path)


class HttpServer:
    """The listening socket, and the process that answers on it.

    Args:
        url: the URL of the depot.
        settings: the address and the token.

    Raises:
        ConfigError: a required package is missing, or the address cannot be used.
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
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--http {settings.host}:{settings.port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._start = msgspec.json.encode((url, settings)) + b"\n"
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()  # held while the process is started or told to exit
        # This thread lives as long as the process: the kernel kills a child when its starting thread ends.
        self._thread = threading.Thread(target=self._keep, name="kvdepot-http", daemon=True)
        self._thread.start()
        logger.info("operations at http://%s:%d", settings.host, self.port)

    @property
    def pid(self) -> int:
        """The id of the process that serves, 0 while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def close(self) -> None:
        """Stop the process. Idempotent."""
        self._closing.set()
        with self._changing:
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # tells it to finish its requests and exit
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
                logger.error("cannot start the HTTP process: %s", error)
            else:
                if not self._closing.is_set():
                    logger.error("the HTTP process exited with %d; starting another", status)
            self._closing.wait(_PAUSE_SECONDS)

    def _run(self) -> int:
        """Run one process until it exits, and return its exit status."""
        listener = self._socket.fileno()
        command = [sys.executable, "-P", "-m", "kvdepot.ops.http_app", str(os.getpid()), str(listener)]
        with self._changing:
            if self._closing.is_set():
                return 0
            process = self._process = subprocess.Popen(
                command, pass_fds=[listener], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has exited
                process.stdin.write(self._start)
        with process:
            return process.wait()


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """The settings of `kvdepot serve` that concern its process only, not the server."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "lowest level to log to standard error (default {default})"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "log one line or one JSON object per message (default {default})"
    )
    http: str | None = setting(
        None,
        "serve health, metrics and operations over HTTP; only health, and metrics without tenants, need no token",
        metavar="HOST:PORT",
    )
    http_token: Path | None = setting(
        None,
        f"file with the bearer token (default, on loopback: a new token at each start, in DIR/{HTTP_TOKEN})",
        metavar="FILE",
    )
    http_host: tuple[str, ...] = setting(
        (), "host name that HTTP requests may use, besides addresses, localhost and HOST; repeatable", metavar="NAME"
    )

    def http_settings(self) -> HttpSettings | None:
        """Return the address and token of HTTP, None if HTTP is off.

        Raises:
            ConfigError: the address or the token is wrong.
        """
        if self.http:
            return HttpSettings.parse(self.http, self.http_token, self.http_host)
        if self.http_token or self.http_host:
            raise ConfigError("--http-token and --http-host need --http HOST:PORT")
        return None


def add_serve(commands: Any) -> None:
    """Add `serve` to the subparsers of `kvdepot`."""
    serve = commands.add_parser(
        "serve",
        help="run a depot",
        allow_abbrev=False,
        description='Run a depot. Every flag can also be set in the file given by --config (pool_size = "8GiB") and in'
        " the environment (KVDEPOT_POOL_SIZE=8GiB). Flags override the environment, which overrides the file.",
    )
    serve.set_defaults(run=run_serve)
    serve.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="read settings from this TOML file"
    )
    add_settings(serve, ProcessConfig)
    add_settings(serve, ServerConfig)


def read_configs(flags: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[ProcessConfig, ServerConfig]:
    """Return the settings that flags, environment and file give.

    Raises:
        ConfigError: a setting is wrong.
    """
    given = read_settings(flags, (ProcessConfig, ServerConfig), environment)
    process = ProcessConfig(**{each.name: given.pop(each.name) for each in fields(ProcessConfig) if each.name in given})
    return process, ServerConfig(**given)


def run_serve(options: argparse.Namespace) -> int:
    """Run a depot until it is told to stop."""
    process, config = read_configs(vars(options), os.environ)
    set_up_logs(process.log_level, process.log_format)
    from kvdepot.processes import raise_descriptor_limit
    from kvdepot.server.app import DepotServer

    raise_descriptor_limit()
    http_settings = process.http_settings()
    server = DepotServer(config, plain_settings(process))
    server.stop_on_signals()
    http = None
    try:
        if http_settings is not None:
            if process.http_token is None:
                http_settings.write_token(config.directory / HTTP_TOKEN)
            http = HttpServer(str(config.directory), http_settings)
    except ConfigError:
        server.close()
        raise
    try:
        server.run()
    except OSError:
        logger.exception("the depot failed")
        raise
    finally:
        if http is not None:
            http.close()
    if config.tiers:
        # Libraries of tiers run threads that may hang in a call; only os._exit ends them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0
