"""Operations on the server: its status and settings, its log, and the way to a stop."""

import argparse
import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from msgspec import field

from kvdepot.config import counted, exact_size, format_size, parse_number, plain_settings, read_secret
from kvdepot.errors import ConfigError, printable
from kvdepot.operate.commandline import ask
from kvdepot.tiers.url import TierUrl, without_credentials
from kvdepot.wire.messages import Done
from kvdepot.wire.operation import Argument, Command, Endpoint, Operation, Reply, Sender
from kvdepot.wire.status import DepotStatus, TenantStatus

if TYPE_CHECKING:
    from kvdepot.server.app import DepotServer

_PACKAGE: Final = logging.getLogger("kvdepot")
_POLL_SECONDS: Final = 0.2  # too short for a person to notice


class StatusReply(Reply, tag="status_reply", frozen=True):
    """The depot's state: see `DepotStatus`."""

    status: DepotStatus


class Status(Operation[StatusReply], tag="status", frozen=True):
    """Ask for the status."""

    endpoints = (
        Endpoint(
            "GET",
            "/status",
            "Everything that 'kvdepot status --json' shows",
            lambda _, reply: reply.status,
            DepotStatus,
        ),
        Endpoint(
            "GET",
            "/tenants",
            "Bytes of the pool and quotas by tenant",
            lambda _, reply: reply.status.tenants,
            dict[str, TenantStatus],
        ),
        Endpoint(
            "GET",
            "/loglevel",
            "Show the log level",
            lambda _, reply: {"level": reply.status.log_level},
            dict[str, str],
        ),
    )

    def answer(self, server: "DepotServer", sender: Sender) -> StatusReply:
        """See `Operation`."""
        from kvdepot.operate.report import status_of_server  # imports the whole server, which commands need not

        return StatusReply(server.epoch, status_of_server(server))


def _parse_wait(text: str) -> float:
    seconds = parse_number(text)
    if seconds < 0:
        raise ConfigError(f"{text} is in the past: give 0 or more seconds")
    return seconds


def _own_listener(options: argparse.Namespace) -> tuple[bytes, str]:
    """Return the secret of the peers, and the address at which they reach this depot.

    Raises:
        ConfigError: there is none.
    """
    from kvdepot.features.peers.hottest import Hottest

    if options.peer_token is None:
        raise ConfigError("--to needs --peer-token FILE, the secret that all peers share")
    token = read_secret(options.peer_token, "--peer-token").encode()
    address = ask(options, Hottest(0)).address
    if not address:
        raise ConfigError("this depot has no --peers, so no other one can read from it")
    return token, address


def _hand_over(options: argparse.Namespace, token: bytes, address: str, until: float) -> None:
    """Let another depot read the hottest prefixes. If that fails, say why: the drain goes on."""
    from kvdepot.features.peers.hottest import Hottest
    from kvdepot.features.peers.offering import Offering
    from kvdepot.features.peers.protocol import PeerError

    try:
        with contextlib.closing(Offering(options.to, token, address)) as offering:
            prefixes = ask(options, Hottest(offering.most_bytes)).prefixes
            count = offering.hand_over(prefixes, until)
    except (OSError, PeerError) as error:
        print(f"not handed over to {options.to}: {error}", file=sys.stderr)
    else:
        print(f"handed over to {options.to}: {count:,} of {len(prefixes):,} prefixes")


def _drain(options: argparse.Namespace) -> int:
    if not options.is_draining:
        ask(options, Drain(False))
        print("stores are accepted again")
        return 0
    own = _own_listener(options) if options.to else None  # before the drain, which a mistyped command must not begin
    ask(options, Drain())
    end = time.monotonic() + options.wait
    if own is not None:
        _hand_over(options, *own, end)
    while True:
        status = ask(options, Status()).status
        waiting = sum(tier.queued_write_bytes for tier in status.tiers)
        if not status.num_tickets and not status.num_unwritten and not waiting:
            print("drained: no store is in progress, nothing waits to be written")
            return 0
        if time.monotonic() >= end:
            print(
                f"not drained within {options.wait:g} s: {counted(status.num_tickets, 'store')} in progress,"
                f" {counted(status.num_unwritten, 'stored prompt')} and {format_size(waiting)} waiting to be written",
                file=sys.stderr,
            )
            return 1
        time.sleep(_POLL_SECONDS)


class Drain(Operation[Done], tag="drain", frozen=True):
    """Decline stores, or accept them again. Entries in the pool can still be found."""

    command = Command(
        "drain",
        "decline new stores before a stop",
        "Decline new stores; cached prefixes are still found. Exits with 0 once no store is in progress and all waiting"
        " entries are written to the tiers, with 1 if that takes longer than --wait.",
        run=_drain,
        options=(
            ("wait", Argument("longest time to wait (default 60)", "SECONDS", read=_parse_wait, default=60.0)),
            (
                "to",
                Argument(
                    "let the depot with this --peers read what was used last, up to a quarter of its pool",
                    "HOST:PORT",
                    default="",
                ),
            ),
            (
                "peer_token",
                Argument("file with the secret that all peers share", "FILE", "--peer-token", Path, default=None),
            ),
        ),
    )
    endpoints = (
        Endpoint(
            "POST", "/drain", "Decline new stores, or accept them again; returns the number of stores in progress"
        ),
    )

    is_draining: Annotated[bool, Argument("accept stores again", flag="--resume")] = field(
        default=True, name="draining"
    )

    def answer(self, server: "DepotServer", sender: Sender) -> Done:
        """Decline stores, or accept them again. The reply counts the stores under way."""
        depot, is_draining = server.depot, self.is_draining
        if depot.state.is_draining != is_draining:
            depot.note("draining: stores are declined" if is_draining else "stores are accepted again")
        depot.state.is_draining = is_draining
        if depot.state.tiering is not None:
            depot.state.tiering.gather(waits=not is_draining)
        return Done(depot.state.epoch, len(depot.stores.tickets))


def log_level() -> str:
    """Return the lowest level that is logged."""
    return logging.getLevelName(_PACKAGE.getEffectiveLevel()).lower()


class SetLogLevel(Operation[Done], tag="set_log_level", frozen=True):
    """Change the log level until the server ends."""

    command = Command(
        "loglevel",
        "change the log level of a running depot",
        "Change the log level of a running depot, until it stops. Use serve --log-level to keep it.",
        lambda request, _: f"the depot's log level is now {request.level}",
    )
    endpoints = (
        Endpoint(
            "POST",
            "/loglevel",
            "Change the log level, until the server stops",
            lambda request, _: {"level": request.level},
            dict[str, str],
        ),
    )

    level: Annotated[Literal["debug", "info", "warning", "error"], Argument()]

    def answer(self, server: "DepotServer", sender: Sender) -> Done:
        """Log this level and above."""
        _PACKAGE.setLevel(self.level.upper())
        return Done(server.epoch, 1)


class ConfigurationReply(Reply, tag="configuration_reply", frozen=True):
    """The server's settings by flag. Secrets stay in the files that settings name."""

    settings: dict[str, Any]


def _config(options: argparse.Namespace) -> int:
    settings = ask(options, Configuration()).settings
    if options.json:
        print(json.dumps(settings, indent=2))
        return 0
    print("# For 'kvdepot serve --config FILE'. Credentials of tiers are left out.")
    for name, value in settings.items():
        if value is not None:
            print(printable(_describe_setting(name, value)))
    return 0


def _describe_setting(name: str, value: Any) -> str:
    """Return a line of `kvdepot.toml`."""
    match name, value:
        case "pool_size", int():
            value = exact_size(value)
        case "quota", dict():
            quotas = cast("dict[str, int]", value)
            pairs = (f"{_quoted(tenant)} = {_quoted(exact_size(size))}" for tenant, size in quotas.items())
            return f"quota = {{{', '.join(pairs)}}}"
        case _:
            pass
    return f"{name} = {_quoted(value)}"


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # which TOML reads, too


class Configuration(Operation[ConfigurationReply], tag="configuration", frozen=True):
    """Ask for the server's settings."""

    command = Command(
        "config",
        "show a running depot's settings",
        "Show the settings of a running depot as a file for 'kvdepot serve --config'.",
        run=_config,
        has_json=True,
    )
    endpoints = (Endpoint("GET", "/config", "The server's settings", lambda _, reply: reply.settings, dict[str, Any]),)

    def answer(self, server: "DepotServer", sender: Sender) -> ConfigurationReply:
        """Answer with plain values under their names in `kvdepot.toml`, and the present quotas and tiers.

        Credentials in the URLs of tiers are left out, as are the options of tiers that operators added.
        """
        depot, config = server.depot, server.config
        settings = plain_settings(config)
        settings["pool_dir"] = str(config.pool_path)
        settings["pool_size"] = depot.index.extents.capacity_bytes
        settings["max_entries"] = depot.index.table.num_records
        settings["quota"] = depot.index.quotas.by_name()
        urls = {TierUrl.parse(url).name: without_credentials(url) for url in config.tiers}
        tiers = [] if depot.state.tiering is None else depot.state.tiering.status()
        settings["tier"] = [urls.get(tier.name, tier.name) for tier in tiers]
        settings["log_level"] = log_level()
        return ConfigurationReply(server.epoch, {**server.further_settings, **settings})
