"""URLs of tiers, `SCHEME://HOST/PATH?OPTION=VALUE&...`. Entry points of the group `kvdepot.tiers` open them."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, Self
from urllib.parse import parse_qsl, urlsplit

from kvdepot.config import parse_number, parse_size
from kvdepot.errors import ConfigError
from kvdepot.installing import install_line
from kvdepot.tiers.base import Tier, TierPool

ENTRY_POINT_GROUP: Final = "kvdepot.tiers"
KNOWN_TIERS: Final = {
    "disk": "disk", "memory": "disk", "mooncake": "mooncake",
    "s3": "object", "gs": "object", "az": "object", "file": "object",
    "valkey": "valkey", "redis": "valkey", "rediss": "valkey", "valkeys": "valkey",
}  # fmt: skip
"""Extras by scheme."""
DEADLINE_SECONDS: Final = 1.0  # the default: as long as a lookup waits for tiers (`--promote-seconds`)
DEFAULT_THREADS: Final = 4  # calls at one time, to hide round trips
_DISTANT_THREADS: Final = {"s3": 32, "gs": 32, "az": 32}  # where a round trip is long
PATIENCE: Final = 10  # a write or a step of a clear may take this many deadlines
_MOST_THREADS: Final = 256  # they are threads of the server and share its interpreter lock
_MOST: Final = 1_000_000.0  # seconds: fits into 32 bits in milliseconds
REQUEST_SHARE: Final = 0.75  # of the deadline, for one request


@dataclass(slots=True)
class TierUrl:
    """The parsed URL of a tier. The tier takes its options out. Remaining options are an error."""

    scheme: str
    location: str  # the URL as written, without options; may contain a password
    host: str
    path: str
    options: dict[str, str] = field(default_factory=dict[str, str])
    known: set[str] = field(default_factory=set[str])  # options that were asked for, given or not
    deadline_seconds: float = DEADLINE_SECONDS  # limit of a call that a lookup waits for; set before the tier is opened
    num_threads: int = DEFAULT_THREADS  # concurrent calls; set before the tier is opened
    takes_writes: bool = True  # whether the depot writes to the tier; set before the tier is opened

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL.

        Raises:
            ConfigError: this is not a URL.
        """
        try:
            parts = urlsplit(text)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            host = parts.hostname or ""
        except ValueError as error:
            raise ConfigError(f"--tier {_hide(text)}: {error}") from error
        if not parts.scheme or "://" not in text:
            raise ConfigError(
                f"--tier {_hide(text)}: write a URL, for example disk:///var/cache/kvdepot?capacity=200GiB"
            )
        return cls(parts.scheme, text.partition("?")[0], host, parts.path, options)

    @property
    def name(self) -> str:
        """The location without user and password, for logs and status."""
        return _hide(self.location)

    def take(self, option: str, default: str) -> str:
        """Take out an option."""
        text = self._take(option)
        return default if text is None else text

    def take_size(self, option: str, default: int) -> int:
        """Take out an option that is a size in bytes."""
        text = self._take(option)
        return default if text is None else parse_size(text)

    def take_number(self, option: str, default: float, least: float = 0.0, most: float = _MOST) -> float:
        """Take out an option that is a number from `least` to `most`.

        Raises:
            ConfigError: the value is not such a number.
        """
        text = self._take(option)
        if text is None:
            return default
        try:
            number = parse_number(text)
        except ConfigError:
            number = math.nan
        if not least <= number <= most:
            raise ConfigError(f"--tier {self.name}: {option}={text}: a number from {least:g} to {most:,.0f}")
        return number

    def take_timeout(self) -> float:
        """Take out `timeout`, the time limit of one request in seconds. It must be below the deadline.

        Raises:
            ConfigError: the timeout is not below the deadline.
        """
        timeout = self.take_number("timeout", REQUEST_SHARE * self.deadline_seconds, 0.001)
        if timeout >= self.deadline_seconds:
            raise ConfigError(
                f"--tier {self.name}: timeout={timeout:g} is not below the tier's deadline of"
                f" {self.deadline_seconds:g} s: lower it, or raise deadline"
            )
        return timeout

    def _take(self, option: str) -> str | None:
        self.known.add(option)
        return self.options.pop(option, None)

    def check_done(self) -> None:
        """Refuse remaining options, which are unknown.

        Raises:
            ConfigError: an option is left.
        """
        if self.options:
            unknown, known = ", ".join(map(repr, self.options)), ", ".join(sorted(self.known))
            raise ConfigError(f"--tier {self.name}: unknown option {unknown}; choose from {known}")


def open_tier(url: TierUrl, pool: TierPool) -> Tier:
    """Open the tier of a URL. First take out the options `deadline` and `threads`.

    Raises:
        ConfigError: there is no such tier, a library is missing, or the URL is invalid. The text gives the remedy.
    """
    entry = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}.get(url.scheme)
    if entry is None and url.scheme in KNOWN_TIERS:
        raise ConfigError(f"--tier {url.name} needs a package: {install_line(KNOWN_TIERS[url.scheme])}")
    if entry is None:
        known = ", ".join(sorted({*KNOWN_TIERS, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))}))
        raise ConfigError(f"--tier {url.name}: no tier {url.scheme!r}; there are {known}")
    try:
        opener: Callable[[TierUrl, TierPool], Tier] = entry.load()
        import_module("xxhash")  # needed for the trailers of all tiers
    except ImportError as error:
        extra = KNOWN_TIERS.get(url.scheme)
        way_out = f"pip install 'kvdepot[{extra}]'" if extra else "install its library"
        raise ConfigError(f"--tier {url.name} needs {error.name or 'a library'}: {way_out}") from error
    url.deadline_seconds = url.take_number("deadline", DEADLINE_SECONDS, 0.01)
    default_threads = _DISTANT_THREADS.get(url.scheme, DEFAULT_THREADS)
    url.num_threads = int(url.take_number("threads", default_threads, 2, _MOST_THREADS))
    tier = opener(url, pool)
    try:
        check_shape(tier, url.name)
        url.check_done()
    except ConfigError:
        with contextlib.suppress(Exception):  # `close` may be missing
            tier.close()
        raise
    return tier


def check_shape(tier: object, name: str) -> None:
    """Check that a tier has all calls and attributes of the contract.

    Raises:
        ConfigError: something is missing; the text lists it.
    """
    calls = ("contains", "write", "read", "remove", "clear", "probe", "usage", "close")
    # The empty bodies of `Tier`.
    inherited = [each for each in calls if getattr(type(tier), each, None) is getattr(Tier, each)]
    missing = [f"{each}()" for each in calls if each in inherited or not callable(getattr(tier, each, None))]
    missing += [f"{each}()" for each in ("touch", "outdate") if not callable(getattr(tier, each, None))]
    values = (
        "batch_entries",
        "reads_apart",
        "ends_stalled_reads",
        "most_writes",
        "writer_pid",
        "keeps_runs",
        "gathers_stores",
        "contains_is_instant",
        "wants_places",
        "declines_writes",
        "is_overloaded",
    )
    missing += [each for each in values if not isinstance(getattr(tier, each, None), int)]
    if missing:
        raise ConfigError(
            f"--tier {name}: the class {type(tier).__name__} does not define {', '.join(missing)}, as a"
            " kvdepot.tiers.Tier must"
        )


def without_credentials(text: str) -> str:
    """Return a tier's URL without user and password. Keep the options of kvdepot's own tiers, which are not secret."""
    _, mark, options = text.partition("?")
    return _hide(text) + (mark + options if text.partition("://")[0] in KNOWN_TIERS else "")


def _hide(text: str) -> str:
    """Remove possible secrets: user, password and options."""
    text = text.partition("?")[0]
    scheme, separator, rest = text.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
