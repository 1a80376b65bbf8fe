"""`kvdepot serve`: reads the settings, and runs the server's process with its log and HTTP."""

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kvdepot.config import HTTP_TOKEN, ServerConfig, plain_settings, setting
from kvdepot.errors import ConfigError
from kvdepot.ops.http_process import HttpServer, HttpSettings
from kvdepot.ops.settings import add_settings, read_settings
from kvdepot.processes.logs import set_up_logs

logger = logging.getLogger(__name__)


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
    from kvdepot.processes.descriptors import raise_descriptor_limit
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
