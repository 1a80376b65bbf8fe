"""The settings of a depot, each declared once, and the parsers of their units, paths and endpoints.

`setting` gives a field its flag, help and check. Names in `kvdepot.toml` and in the environment are derived from the
flag (`kvdepot.operate.serve`). Only this module and `kvdepot.operate` read the environment.
"""

import dataclasses
import enum
import hashlib
import ipaddress
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from kvdepot.errors import ConfigError, reason_of

logger = logging.getLogger(__name__)

CONTROL_SOCKET: Final = "control.sock"  # Unix stream: requests and replies
HTTP_TOKEN: Final = "http.token"  # file with the bearer token, if none was given

DEFAULT_TOPIC: Final = "kv@{node}@{model}"  # as llm-d expects it
_PLACEHOLDER: Final = re.compile(r"{\w*}")

# The most that a hung depot costs an engine, once. Three quarters of it, the time that lookups may wait for tiers, hold
# `--promote-seconds` (1 s). For machines that stall, docs/operating.md has a longer one.
DEADLINE_SECONDS: Final = 2.0

_LAST_PORT: Final = 65_535
_SHORTEST_TOKEN: Final = 16  # characters: 64 bits in hexadecimal, too many to guess
LONGEST_TENANT: Final = 256  # characters of a tenant's name: the depot refuses requests with a longer one

MAXIMUM_NUMBER: Final = 1e9  # bound for plain numbers, e.g. seconds; larger ones overflow timers

_SIZE: Final = re.compile(r"^\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)

_DURATION: Final = re.compile(r"(\d{1,10}(?:\.\d{1,10})?)(ms|s|m|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

# --- units ----------------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Parse a size like "4GiB", "512M", "1.5G" or "4096". Return it in bytes.

    K, M, G and T are powers of 1024 with or without the "i".

    Raises:
        ConfigError: `text` is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write for example 512MiB or 4GiB")
    whole, _, rest = match[1].partition(".")
    if rest and not match[2]:
        raise ConfigError(f"{text!r} is not a whole number of bytes: write for example {text}GiB")
    return int(whole + rest) * 1024 ** " kmgt".index(match[2].lower() or " ") // 10 ** len(rest)


def parse_number(text: str) -> float:
    """Parse a number, for example of seconds.

    Raises:
        ConfigError: `text` is not a number, or above `MAXIMUM_NUMBER`.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAXIMUM_NUMBER:
        raise ConfigError(f"{text!r} is not a number of at most {MAXIMUM_NUMBER:,.0f}")
    return number


def parse_count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`.

    Raises:
        ConfigError: `text` is not such a number.
    """
    if not text.isdecimal() or not least <= int(text) <= MAXIMUM_NUMBER:
        raise ConfigError(f"{text!r} is not a whole number from {least} to {MAXIMUM_NUMBER:,.0f}")
    return int(text)


def parse_duration(text: str) -> float:
    """Return a time as seconds, for example of 500ms, 90s, 1.5h or 7d.

    Raises:
        ConfigError: it has another form.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a time: write for example 90s, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_tenant(text: str) -> str:
    """Return the name of a tenant.

    Raises:
        ConfigError: it is empty, or longer than a depot accepts.
    """
    if not 1 <= len(text) <= LONGEST_TENANT:
        raise ConfigError(f"{len(text)} characters: a tenant's name has 1 to {LONGEST_TENANT}")
    return text


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, with brackets around an IPv6 address. Return both.

    Raises:
        ConfigError: `text` is malformed; the error names `flag`.
    """
    host, separator, port = text.removeprefix("tcp://").rpartition(":")
    if not separator or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ConfigError(f"{flag} {text!r}: give HOST:PORT, for example 127.0.0.1:9461")
    return host.strip("[]") or "127.0.0.1", int(port)


def parse_peer(text: str) -> tuple[str, str]:
    """Parse `NAME=HOST:PORT`. Return the name and the address.

    Raises:
        ConfigError: `text` is malformed.
    """
    name, _, address = text.partition("=")
    if not name or len(name) > LONGEST_TENANT:
        raise ConfigError(f"{text!r}: give NAME=HOST:PORT")
    parse_address(address, "the peer")
    return name, address


def parse_hint(text: str) -> str:
    """Return a pattern of peers that requests may name: HOST:PORT, where `*` stands for characters but `.` and `:`.

    Raises:
        ConfigError: it has another form, and would match no peer.
    """
    pattern = text.removeprefix("tcp://")
    host, _, port = pattern.rpartition(":")
    if not host or not (port.isdecimal() or port == "*"):
        raise ConfigError(f"{text!r}: give HOST:PORT, for example 10.0.*.*:9461 or depot-*:9461")
    return pattern


def is_hinted(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern of `parse_hint` matches a peer's HOST:PORT.

    A `*` stops at a dot, as those of certificates do: `node-*:9461` must not match a name in a stranger's domain.
    """
    address = name.removeprefix("tcp://")
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", "[^.:]+"), address) for pattern in patterns)


def read_secret(path: Path, flag: str) -> str:
    """Read a token from a file.

    Raises:
        ConfigError: the file cannot be read, or the token is so short that it can be guessed.
    """
    try:
        token = path.read_text().strip()
        if path.stat().st_mode & 0o044:
            logger.warning("%s %s: other users can read the token; chmod 600 it", flag, path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {reason_of(error)}") from error
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"{flag} {path}: a token of {len(token)} characters can be guessed; give at least {_SHORTEST_TOKEN}:"
            f" openssl rand -hex 32 > {path}"
        )
    return token


def parse_quota(text: str) -> tuple[str, int]:
    """Parse `TENANT=SIZE`. Return the tenant and the size in bytes.

    Raises:
        ConfigError: `text` is malformed.
    """
    tenant, _, size = text.rpartition("=")
    if not tenant:
        raise ConfigError(f"{text!r}: give TENANT=SIZE")
    return parse_tenant(tenant), parse_size(size)


def format_size(num_bytes: float) -> str:
    """Format a size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def exact_size(num_bytes: int) -> str:
    """Format a size exactly, for `parse_size`: "64MiB", "1000"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def counted(number: int, noun: str) -> str:
    """Format a count for people: "1 tier", "2,000 tiers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# --- paths and endpoints --------------------------------------------------------------------------------------------


def default_directory() -> Path:
    """Return the default directory of a depot's sockets: below `$XDG_RUNTIME_DIR`, or `/tmp/kvdepot-$UID`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvdepot" if runtime else Path(f"/tmp/kvdepot-{os.getuid()}")


def default_pool_directory(directory: Path) -> Path:
    """Return the default pool folder of the depot in `directory`, below /dev/shm.

    It depends only on the directory, so a restarted server finds its pool again.
    """
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]
    return Path("/dev/shm") / f"kvdepot-{os.getuid()}-{digest}"


def directory_of_url(url: str | None) -> Path:
    """Return the directory of a depot, given as None (the default), a path, or `ipc://PATH`.

    Raises:
        ConfigError: the URL is empty or has another scheme. Engines share memory with the depot, so it must be on this
            machine.
    """
    if url is None:
        return default_directory()
    if not url:
        raise ConfigError("the depot's directory has no name: give a path, or leave the option out")
    if url.startswith("ipc://"):
        path = Path(url.removeprefix("ipc://"))
        return path.parent if path.name == CONTROL_SOCKET else path
    if "://" in url:
        raise ConfigError(
            f"{url!r}: name a depot of this machine by its directory (the pool is shared memory); from another machine"
            " ask its HTTP port (kvdepot serve --http)"
        )
    return Path(url)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


# --- declaring settings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting. `settings_in` derives from the field everything that `setting` left out.

    A setting of tuple or mapping type may be given several times. A bool is a switch without a value.
    """

    help: str
    flag: str
    metavar: str | None
    parse: Callable[[str], Any]  # reads one value; raises ConfigError
    most: float | None  # if set, the value is a number above 0 and at most this
    collect: Callable[[Iterable[Any]], Any] | None = None  # for repeatable settings: combines the values
    is_switch: bool = False

    @property
    def name(self) -> str:
        """The name in `kvdepot.toml`. The environment variable is `KVDEPOT_` and the name in capitals."""
        return self.flag.removeprefix("--").replace("-", "_")


def setting(
    default: Any,
    text: str,
    flag: str = "",
    metavar: str | None = None,
    *,
    parse: Callable[[str], Any] = str,
    most: float | None = None,
) -> Any:
    """Return a dataclass field that is a setting.

    Args:
        default: the default value, or a function that returns it.
        text: the help text. {default} stands for the default.
        flag: by default derived from the field's name.
        metavar: stands for the value in the help.
        parse: by default chosen by the field's type.
        most: the largest allowed number. Numbers must be above 0.
    """
    metadata = {"setting": Setting(text, flag, metavar, parse, most)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_in(kind: type[Any]) -> dict[str, Setting]:
    """Return the settings of a dataclass by field."""
    hints = get_type_hints(kind)
    return {each.name: _complete(each, hints[each.name]) for each in dataclasses.fields(kind)}


def plain_settings(values: object) -> dict[str, Any]:
    """Return the settings that a dataclass holds as plain values, under their names in `kvdepot.toml`."""
    kind: type[Any] = type(values)
    named = {each.name: getattr(values, field) for field, each in settings_in(kind).items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in named.items()}


def _complete(of: "dataclasses.Field[Any]", kind: Any) -> Setting:
    declared: Setting = of.metadata["setting"]
    if type(None) in get_args(kind):  # `Path | None` is parsed as a Path
        kind = get_args(kind)[0]
    default = of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
    text = f"{default:g}" if isinstance(default, float) else str(default)
    choices = get_args(kind) if get_origin(kind) is Literal else tuple(Demotion) if kind is Demotion else ()
    parse = declared.parse if declared.parse is not str else _PARSERS.get(kind, str)
    return dataclasses.replace(
        declared,
        help=declared.help.replace("{default}", text),
        flag=declared.flag or "--" + of.name.replace("_", "-"),
        metavar=f"{{{','.join(choices)}}}" if choices else declared.metavar,
        parse=_one_of(choices) if choices else parse,
        collect=_COLLECTORS.get(get_origin(kind)),
        is_switch=kind is bool,
    )


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ConfigError(f"{text!r}: give one of {', '.join(choices)}")
        return choices[choices.index(text)]

    return parse


_COLLECTORS: Final[dict[Any, Callable[[Iterable[Any]], Any]]] = {tuple: tuple, Mapping: dict}
_PARSERS: Final[dict[Any, Callable[[str], Any]]] = {int: partial(parse_count, least=0), float: parse_number, Path: Path}


# --- the server's settings ------------------------------------------------------------------------------------------


class Demotion(enum.StrEnum):
    """The time at which an entry is written to the tiers."""

    STORE = "store"  # as soon as it is in the pool
    REUSE = "reuse"  # at its first use after that
    EVICT = "evict"  # when it is about to be evicted


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of a server. `kvdepot.pool.size.resolve_pool_size` chooses a pool size if none is given."""

    directory: Path = setting(
        default_directory,
        "directory of the depot's sockets (default {default})",
        "--dir",
        "DIR",
        parse=lambda text: directory_of_url(text),
    )
    pool_directory: Path | None = setting(
        None, "directory of the pool, on tmpfs (default: below /dev/shm, derived from --dir)", "--pool-dir", "DIR"
    )
    pool_size_bytes: int | None = setting(
        None,
        "memory for KV caches (default: the pool that is there, else a quarter of the free memory)",
        "--pool-size",
        "SIZE",
        parse=parse_size,
    )
    max_entries: int | None = setting(
        None,
        "capacity of the index (default: one entry per 64 KiB of pool, at least 65,536)",
        metavar="N",
        parse=parse_count,
    )
    socket_group: str | None = setting(
        None, "let members of this group connect as well (default: only this user and root)", metavar="GROUP"
    )
    tiers: tuple[str, ...] = setting(
        (),
        "storage below the pool, e.g. 'disk:///var/cache/kvdepot?capacity=200GiB'; repeatable, fastest first",
        "--tier",
        "URL",
    )
    demotion: Demotion = setting(
        Demotion.STORE,
        "write an entry to the tiers when it is stored, first used again, or about to be evicted (default {default})",
        "--demote",
    )
    demotion_least_tokens: int = setting(
        0, "keep prefixes of fewer tokens out of the tiers (default {default})", "--demote-min-tokens", "N"
    )
    promotion_least_tokens: int = setting(
        0,
        "do not ask the tiers for fewer tokens than this; computing so few is faster (default {default})",
        "--promote-min-tokens",
        "N",
    )
    promotion_seconds: float = setting(
        1.0, "longest time a lookup waits for the tiers (default {default})", "--promote-seconds", "SECONDS", most=60.0
    )
    peers: str | None = setting(
        None, "let the depots of other nodes read chunks from this one's pool; needs --peer-token", metavar="HOST:PORT"
    )
    peer_addresses: Mapping[str, str] = setting(
        dict,
        "a depot to ask for missing chunks, by the HOST:PORT of its --peers; repeatable, asked in this order",
        "--peer",
        "NAME=HOST:PORT",
        parse=parse_peer,
    )
    peer_hints: tuple[str, ...] = setting(
        (),
        "depots that a request may name besides those of --peer; * stands for characters but . and :, for example"
        " 10.0.*.*:9461; repeatable",
        metavar="HOST:PORT",
        parse=parse_hint,
    )
    peer_token: Path | None = setting(None, "file with the secret that all peers share", metavar="FILE")
    events: str | None = setting(
        None,
        "publish which blocks can be loaded and their tokens, in vLLM's format; for example tcp://127.0.0.1:5557",
        metavar="URL",
    )
    events_topic: str = setting(
        DEFAULT_TOPIC,
        "topic of the events; {node} is this machine's name, {model} a model's; vllm-router needs '' (default"
        " {default})",
        metavar="TOPIC",
    )
    events_replay: str | None = setting(None, "resend past events to subscribers that missed some", metavar="URL")
    events_connect: str | None = setting(
        None, "connect to a router that listens for events, besides or instead of --events", metavar="URL"
    )
    events_media: Literal["apart", "union"] = setting(
        "apart",
        "tell blocks in the pool and in tiers apart, or, for routers that look at no medium, announce a block as long"
        " as one of them has it (default {default})",
    )
    policy: Literal["arc", "auto", "lru"] = setting(
        "auto", "eviction policy: lru, arc, or auto, which uses whichever has more hits (default {default})"
    )
    lease_seconds: float = setting(
        300.0, "longest life of a lease (default {default})", metavar="SECONDS", most=MAXIMUM_NUMBER
    )
    quotas: Mapping[str, int] = setting(
        dict,
        "share of the pool reserved for a tenant; others may borrow it while it is idle; repeatable",
        "--quota",
        "TENANT=SIZE",
        parse=parse_quota,
    )
    verify: Literal["off", "sample", "all"] = setting(
        "sample", "compare checksums of retrieved entries: none, one chunk in 16, or all (default {default})"
    )
    mover_start_seconds: float = setting(
        30.0,
        "time for a mover (a process that copies for a worker) to open the worker's memory (default {default})",
        metavar="SECONDS",
        most=MAXIMUM_NUMBER,
    )
    move_seconds: float = setting(
        5.0, "time for one copy by a mover (default {default})", metavar="SECONDS", most=MAXIMUM_NUMBER
    )
    without: tuple[str, ...] = setting(
        (), "leave out these features, of those that 'kvdepot status' lists; separated by commas", metavar="NAMES"
    )
    ephemeral: bool = setting(False, "remove the pool at exit instead of keeping it for the next server")
    fresh: bool = setting(False, "discard the entries of an earlier server")

    def __post_init__(self) -> None:
        for name, each in settings_in(ServerConfig).items():
            if each.most is not None and not 0 < getattr(self, name) <= each.most:
                raise ConfigError(
                    f"{each.flag} {getattr(self, name):g}: give a number above 0, at most {each.most:,.0f}"
                )
        if (self.peers or self.peer_addresses or self.peer_hints) and not self.peer_token:
            raise ConfigError(
                "--peers, --peer and --peer-hints need --peer-token FILE, the secret that all peers share"
            )
        if self.events_replay and not self.events:
            raise ConfigError("--events-replay needs --events tcp://HOST:PORT")
        if not self.events_topic.isprintable():
            raise ConfigError(f"--events-topic {self.events_topic!r} has characters that cannot be printed")
        unknown = [name for name in _PLACEHOLDER.findall(self.events_topic) if name not in ("{node}", "{model}")]
        if unknown:
            raise ConfigError(f"--events-topic {self.events_topic}: {unknown[0]} is neither {{node}} nor {{model}}")
        if self.events_topic != DEFAULT_TOPIC and not (self.events or self.events_connect):
            raise ConfigError("--events-topic needs --events tcp://HOST:PORT")

    @property
    def topic(self) -> str:
        """The topic of events with the node's name; {model} is filled in per event."""
        return self.events_topic.replace("{node}", platform.node())

    @property
    def pool_path(self) -> Path:
        """The folder of the pool and its index table."""
        return self.pool_directory or default_pool_directory(self.directory)
