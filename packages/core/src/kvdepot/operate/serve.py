"""`kvdepot serve`: reads the settings, and runs the server's process with its log and HTTP.

A flag overrides the environment (`KVDEPOT_POOL_SIZE`), which overrides the file (`pool_size = "8GiB"`), which overrides
the default. Lists are replaced as a whole. Each place is checked by the setting's one declaration
(`kvdepot.config.setting`), and an error names the place of the wrong value.

A child process answers HTTP (`kvdepot.operate.http_app`), off the interpreter lock of the depot's loop. In one
process, the loop waited up to 12 ms while the metrics of very many tenants were written. If the child exits, another
one is started, and connections wait.
"""

import argparse
import contextlib
import difflib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from kvdepot.config import (
    HTTP_TOKEN,
    ServerConfig,
    Setting,
    is_loopback,
    parse_address,
    plain_settings,
    read_secret,
    setting,
    settings_in,
)
from kvdepot.errors import ConfigError, KVDepotError, reason_of
from kvdepot.logs import set_up_logs
from kvdepot.operate.commandline import add_settings

logger = logging.getLogger(__name__)

_PREFIX: Final = "KVDEPOT_"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})

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
        host, port = parse_address(address, "--http")
        settings = cls(host, port, secrets.token_hex(32), tuple(names))
        if token_file is None:
            if not settings.is_loopback:
                raise ConfigError(
                    f"--http {settings.host}: off loopback, clients need a token from you:"
                    " give --http-token FILE, or listen on 127.0.0.1"
                )
            return settings
        return replace(settings, token=read_secret(token_file, "--http-token"))

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
        command = [sys.executable, "-P", "-m", "kvdepot.operate.http_app", str(os.getpid()), str(listener)]
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
    given = _read_settings(flags, (ProcessConfig, ServerConfig), environment)
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
                token = config.directory / HTTP_TOKEN
                http_settings.write_token(token)
                server.folder.keep(token, partial(http_settings.write_token, token))
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
    if config.tiers or config.peer_token:
        # Libraries of tiers run threads that may hang in a call; only os._exit ends them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _read_settings(
    flags: Mapping[str, Any], kinds: Sequence[type[Any]], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings that flags, environment and file give, by field.

    Args:
        flags: values of flags by field, and the file's path as "config".
        kinds: the dataclasses of settings.
        environment: the environment of the process.

    Raises:
        ConfigError: the file cannot be read or names an unknown setting, or a value is wrong.
    """
    declared = {name: each for kind in kinds for name, each in settings_in(kind).items()}
    path = flags.get("config") or environment.get(_PREFIX + "CONFIG")
    given = _from_environment(declared, environment, flags)
    given = (_from_file(path, declared, {*flags, *given}) if path else {}) | given
    for name, each in declared.items():
        if name in flags:
            given[name] = flags[name] if each.collect is None else each.collect(flags[name])
    return given


def _from_environment(
    declared: Mapping[str, Setting], environment: Mapping[str, str], hidden: Collection[str]
) -> dict[str, Any]:
    """Read all settings except the `hidden` ones. Split lists at spaces. Warn of variables that look like settings."""
    variables = {_PREFIX + setting.name.upper(): name for name, setting in declared.items()}
    given: dict[str, Any] = {}
    for variable in sorted(environment):
        name = variables.get(variable)
        if name is not None and name not in hidden:
            text = environment[variable]
            value = text if declared[name].collect is None else text.split()
            given[name] = _read(declared[name], value, variable)
        elif variable.startswith(_PREFIX) and name is None and variable != _PREFIX + "CONFIG":
            close = difflib.get_close_matches(variable, variables, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            logger.warning("ignoring the unknown variable %s%s", variable, meant)
    return given


def _from_file(path: Path | str, declared: Mapping[str, Setting], hidden: Collection[str]) -> dict[str, Any]:
    """Read all settings except the `hidden` ones."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {reason_of(error)}") from error
    fields = {setting.name: name for name, setting in declared.items()}
    given: dict[str, Any] = {}
    for key, value in values.items():
        key = key.replace("-", "_")
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            raise ConfigError(f"{path}: no setting {key!r}" + (f"; {close[0]!r} is one" if close else ""))
        if fields[key] not in hidden:
            given[fields[key]] = _read(declared[fields[key]], value, f"{path}: {key}")
    return given


def _read(setting: Setting, value: object, source: str) -> Any:
    """Convert a value from the environment or the file to the field's type."""
    if setting.is_switch:
        text = str(value).lower()
        if not isinstance(value, bool | str) or text not in _TRUE | _FALSE:
            raise ConfigError(f"{source}: {value!r} is neither true nor false")
        return text in _TRUE
    if setting.collect is None:
        return _read_one(setting, value, source)
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, item in cast("dict[str, object]", value).items()]
    if not isinstance(value, list):
        raise ConfigError(f"{source}: {value!r} is not a list")
    return setting.collect([_read_one(setting, item, source) for item in cast("list[object]", value)])


def _read_one(setting: Setting, value: object, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{source}: {value!r} is neither a text nor a number")
    try:
        return setting.parse(str(value))
    except KVDepotError as error:
        raise ConfigError(f"{source}: {error}") from error
