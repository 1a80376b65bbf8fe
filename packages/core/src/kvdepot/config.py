"""Settings: parsed once at the edge, then passed in. Only this module and `cli` look at the environment."""

import enum
import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvdepot.errors import ConfigError

CONTROL_SOCKET = "control.sock"  # Unix stream: requests and replies
SESSION_SOCKET = "session.sock"  # Unix stream: descriptors, and news of death
HTTP_TOKEN = "http.token"  # file: the bearer token where none was given

MAXIMUM_NUMBER = 1e9  # of what is no size: seconds that no clock or timer can hold are larger

_SIZE = re.compile(r"^\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `text` names: "4GiB", "512M", "1.5G", "4096".

    K, M, G and T are powers of 1024 with or without the "i".

    Raises:
        ConfigError: it is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write for example 512MiB or 4GiB")
    whole, _, rest = match[1].partition(".")
    return int(whole + rest) * 1024 ** " kmgt".index(match[2].lower() or " ") // 10 ** len(rest)


def parse_number(text: str) -> float:
    """Return the number that `text` names: seconds, for example.

    Raises:
        ConfigError: it is none, infinite, or beyond `MAXIMUM_NUMBER`.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAXIMUM_NUMBER:
        raise ConfigError(f"{text!r} is not a number of at most {MAXIMUM_NUMBER:,.0f}")
    return number


def format_size(num_bytes: float) -> str:
    """Return `num_bytes` for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def default_directory() -> Path:
    """Return where a depot's sockets are when nothing is said: below `$XDG_RUNTIME_DIR`, else `/tmp/kvdepot-$UID`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvdepot" if runtime else Path(f"/tmp/kvdepot-{os.getuid()}")


def default_pool_directory(directory: Path) -> Path:
    """Return where the pool of the depot in `directory` lies: one folder of /dev/shm for each directory.

    It follows from the directory alone, so that a server started again finds the cache of the one before.
    """
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]
    return Path("/dev/shm") / f"kvdepot-{os.getuid()}-{digest}"


def directory_of_url(url: str | None) -> Path:
    """Return the directory of the depot that `url` names: None (the default), a path, or `ipc://PATH`.

    Raises:
        ConfigError: the URL has another scheme; bytes are shared through memory, so the depot is on this machine.
    """
    if url is None:
        return default_directory()
    if url.startswith("ipc://"):
        path = Path(url.removeprefix("ipc://"))
        return path.parent if path.name == CONTROL_SOCKET else path
    if "://" in url:
        raise ConfigError(
            f"{url!r}: engines attach by ipc:// or by the depot's directory (the pool is shared memory);"
            " tcp:// is for operators' commands"
        )
    return Path(url)


def is_tcp(url: str | None) -> bool:
    """Return whether a depot is named by its TCP endpoint rather than by its directory."""
    return url is not None and url.startswith("tcp://")


def is_loopback(endpoint: str) -> bool:
    """Return whether the endpoint `tcp://HOST:PORT` is an address that only this machine reaches."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


class Demotion(enum.StrEnum):
    """When an entry is written to the tiers."""

    STORE = "store"  # as soon as it is in the pool
    REUSE = "reuse"  # when it is used for the first time after that
    EVICT = "evict"  # when it is about to leave the pool


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything a server is told; `kvdepot.pool.room` fills in what was left to it."""

    directory: Path = field(default_factory=default_directory)
    pool_directory: Path | None = None  # None: default_pool_directory
    pool_size_bytes: int | None = None  # None: a share of the free memory
    max_entries: int | None = None  # None: one for each 64 KiB of pool, at least 65,536
    listen: tuple[str, ...] = ()  # further control endpoints
    curve_secret: Path | None = None  # the depot's own keys; needed to listen on TCP
    curve_clients: Path | None = None  # public keys of those who may speak over TCP
    events: str | None = None  # endpoint that tells which chunks can be found
    events_replay: str | None = None  # endpoint that tells again what was missed
    socket_group: str | None = None  # members of this group may connect, too; None: this user alone
    policy: str = "lru"
    lease_seconds: float = 300.0
    ephemeral: bool = False  # remove the pool's files at the end
    verify: str = "off"  # checksums of the pool's entries: off, sample or all
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])  # bytes that a tenant can keep against others
    fresh: bool = False  # forget what an earlier server left
    tiers: tuple[str, ...] = ()  # URLs of the storage below the pool, fastest first
    demotion: Demotion = Demotion.STORE
    demotion_least_tokens: int = 0  # shorter prefixes are not
    promotion_seconds: float = 1.0  # the most that a lookup waits for tiers
    promotion_least_tokens: int = 0  # tiers are not asked for fewer
    mover_start_seconds: float = 30.0  # until a mover has opened its worker's memory
    move_seconds: float = 5.0  # for one copy of a mover

    def __post_init__(self) -> None:
        for endpoint in self.listen:
            if not endpoint.startswith(("ipc://", "tcp://")):
                raise ConfigError(f"--listen {endpoint}: give ipc://PATH or tcp://HOST:PORT")
            if endpoint.startswith(("ipc://@", "ipc://*")) or endpoint == "ipc://":
                raise ConfigError(f"--listen {endpoint}: give ipc://PATH, as access is by the modes of a file")
            if is_tcp(endpoint) and (self.curve_secret is None or self.curve_clients is None):
                who = "any user of this machine" if is_loopback(endpoint) else "it is no loopback address, so anybody"
                raise ConfigError(
                    f"--listen {endpoint} needs --curve-secret and --curve-clients ({who} could connect):"
                    " make keys with 'kvdepot keys generate DIR', or leave --listen out, as engines do not need it"
                )
        for flag, seconds in (
            ("--lease-seconds", self.lease_seconds),
            ("--promote-seconds", self.promotion_seconds),
            ("--mover-start-seconds", self.mover_start_seconds),
            ("--move-seconds", self.move_seconds),
        ):
            if not 0 < seconds <= MAXIMUM_NUMBER:
                raise ConfigError(f"{flag} {seconds:g}: above 0, at most {MAXIMUM_NUMBER:,.0f}")
        if self.events_replay and not self.events:
            raise ConfigError("--events-replay needs --events tcp://HOST:PORT")
        if (self.curve_secret or self.curve_clients) and not self.tcp_endpoints:
            raise ConfigError("--curve-secret and --curve-clients are for TCP: add --listen tcp://HOST:PORT")

    @property
    def tcp_endpoints(self) -> tuple[str, ...]:
        """Those of `listen` that are reached with CURVE keys only."""
        return tuple(filter(is_tcp, self.listen))

    @property
    def pool_path(self) -> Path:
        """The folder that holds the pool and its index table."""
        return self.pool_directory or default_pool_directory(self.directory)
