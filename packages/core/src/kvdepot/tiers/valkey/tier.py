"""A tier in Valkey or Redis, for a few nodes that share short-lived entries.

An entry is a small string, its **head** (trailer and number of parts), and the payload in parts of at most 4 MiB,
because the server is slow with larger strings. All names begin with `kvdepot:TENANT:MODEL:` (hashes of names in hex),
so that a scan finds them. The head is written last. The server may evict single parts. An entry without all parts is a
miss.

The option `ttl` limits the lifetime of entries after their last use. The server chooses the entries to evict. With
`maxmemory-policy volatile-ttl`, it evicts the entries that expire next. Each chunk expires a little before its
predecessor, so prefixes lose their ends first. With `allkeys-lru`, the server counts uses in whole seconds, and evicts
the chunks of a prompt that was stored within one second in any order.

If a full server refuses a write, only that write fails. A batch of entries is one round trip on one connection. Cluster
mode is not supported: the probe fails.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Final
from urllib.parse import unquote, urlsplit

from kvdepot.config import parse_duration
from kvdepot.counting import CounterName, Counts, tier_counter
from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, NAME_HASH_BYTES, depth_of
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot.tiers.url import TierUrl
from kvdepot.tiers.valkey.connections import Connections, Server, TlsFiles
from kvdepot.tiers.valkey.resp import Command, Reply, ReplyError

_REFUSED: Final = tier_counter("refused", "Entries that the server refused for lack of memory")
_INCOMPLETE: Final = tier_counter("incomplete", "Entries removed because a part was missing")

PART_BYTES: Final = 4 << 20  # the server is slow with larger strings
_CHUNK_MS: Final = 20  # a chunk expires this long before its predecessor: engines compute 16 tokens in less

_PREFIX: Final = b"kvdepot:"
_HEAD_BYTES: Final = TRAILER_BYTES + 4  # and the number of parts
_MOST_PARTS: Final = 1024  # parts removed with an entry: 4 GiB, as much as an entry can have
_SCANNED_AT_ONCE: Final = b"1000"  # names per SCAN, during which the server answers nobody else
_PROBE: Final = b"kvdepot:probe"  # below the prefix, as a user of the server may be limited to it
_OTHER_SLOT: Final = b"kvdepot:probe2"  # in another slot of a cluster than `_PROBE`
_CLUSTER: Final = ("MOVED ", "ASK ", "CROSSSLOT ", "CLUSTERDOWN ")  # words of refusals of a server in cluster mode


def head_name(key: bytes) -> bytes:
    """Return the name of an entry's head."""
    hashes = key[:NAME_HASH_BYTES].hex(), key[NAME_HASH_BYTES : 2 * NAME_HASH_BYTES].hex()
    return _PREFIX + ":".join((*hashes, key[2 * NAME_HASH_BYTES : KEY_BYTES].hex())).encode()


def part_name(key: bytes, part: int) -> bytes:
    """Return the name of a part of an entry's payload."""
    return head_name(key) + b":%d" % part


class ValkeyTier(Tier):
    """Entries as strings of a Valkey or Redis server.

    Args:
        pool: contains the extents.
        server: the server's address and credentials.
        ttl_seconds: the lifetime of entries after their last use; 0 for no limit.
    """

    batch_entries = 256
    gathers_stores = True
    wants_places = True

    def __init__(self, pool: TierPool, server: Server, ttl_seconds: float = 0.0) -> None:
        self._pool = pool
        self.connections = Connections(server)
        self._ttl_ms = math.ceil(1000 * ttl_seconds)
        self._counters = Counts()
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [reply == 1 for reply in self._call([[b"EXISTS", head_name(key)] for key in keys])]

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`. An entry exists if all of its parts do."""
        names = [
            [head_name(key), *(part_name(key, part) for part in range(-(-size // PART_BYTES)))]
            for key, size in zip(keys, sizes, strict=True)
        ]
        if not self._ttl_ms:
            replies = self._call([[b"TOUCH", *each] for each in names])
            return [reply == len(each) for reply, each in zip(replies, names, strict=True)]
        lifetimes = map(self._milliseconds, keys)
        commands = [[b"PEXPIRE", name, time] for each, time in zip(names, lifetimes, strict=True) for name in each]
        replies = iter(self._call(commands))
        return [[next(replies) for _ in each] == [1] * len(each) for each in names]

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        commands: list[Command] = []
        lengths: list[int] = []
        for key, trailer, payload in zip(keys, trailers, self._payloads(extents), strict=True):
            parts = list(_parts(payload))
            head = trailer + len(parts).to_bytes(4, "little")
            lifetime = self._lifetime(key)
            commands += ([b"SET", part_name(key, place), part, *lifetime] for place, part in enumerate(parts))
            commands.append([b"SET", head_name(key), head, *lifetime])
            lengths.append(len(parts) + 1)
        replies = iter(self._call(commands, may_be_full=True))
        outcomes = [[next(replies) for _ in range(length)] == [b"OK"] * length for length in lengths]
        refused = [(place, keys[place], lengths[place]) for place, ok in enumerate(outcomes) if not ok]
        self._count(_REFUSED, len(refused))
        # The server may have stored only some parts, or may have had all of them before.
        names = [[head_name(key), *(part_name(key, part) for part in range(length - 1))] for _, key, length in refused]
        hollow: list[bytes] = []
        found = self._call([[b"EXISTS", *each] for each in names])
        for (place, _, length), each, number in zip(refused, names, found, strict=True):
            outcomes[place] = number == length
            if number != length:
                hollow.append(each[0])
        if hollow:  # their heads would refer to missing parts
            self._call([[b"UNLINK", *hollow]])
        return outcomes

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        cut = [list(_parts(payload)) for payload in self._payloads(extents)]
        commands: list[Command] = []
        targets: list[memoryview | None] = []
        for key, parts in zip(keys, cut, strict=True):
            get, lifetime = b"GETEX" if self._ttl_ms else b"GET", self._lifetime(key)
            names = [head_name(key), *(part_name(key, place) for place in range(len(parts)))]
            commands += ([get, name, *lifetime] for name in names)
            targets += [None, *parts]
        replies = iter(self._call(commands, targets))
        trailers: list[bytes | None] = []
        incomplete: list[bytes] = []
        for key, parts in zip(keys, cut, strict=True):
            head, found = next(replies), [next(replies) for _ in parts]
            if not isinstance(head, bytes):
                trailers.append(None)
            elif len(head) == _HEAD_BYTES and None in found:
                trailers.append(None)
                incomplete.append(key)
            else:
                is_whole = head[TRAILER_BYTES:] == len(parts).to_bytes(4, "little") and all(map(is_, found, parts))
                trailers.append(head[:TRAILER_BYTES] if is_whole else b"")
        self._count(_INCOMPLETE, len(incomplete))
        self.remove(incomplete)
        return trailers

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`.

        The head has the number of parts. A damaged head may leave parts behind, which the server evicts.
        """
        names: list[bytes] = []
        for key, head in zip(keys, self._call([[b"GET", head_name(key)] for key in keys]), strict=True):
            num_parts = int.from_bytes(head[TRAILER_BYTES:_HEAD_BYTES], "little") if isinstance(head, bytes) else 0
            names += [head_name(key), *(part_name(key, part) for part in range(min(max(1, num_parts), _MOST_PARTS)))]
        if names:
            self._call([[b"UNLINK", *names]])

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. Scans all names in the database."""
        any_hash = b"?" * (2 * NAME_HASH_BYTES)
        hashes = [any_hash if each is None else each.hex().encode() for each in (tenant, model)]
        pattern = _PREFIX + b":".join(hashes) + b":*"
        length_of_head, cursor = len(pattern) - 1 + 2 * 48, b"0"
        while True:
            (reply,) = self._call([[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCANNED_AT_ONCE]])
            match reply:
                case [bytes() as cursor, list() as found]:
                    names = [name for name in found if isinstance(name, bytes)]
                case _:
                    raise ConnectionAbortedError("not the reply of a scan")
            if names:
                self._call([[b"UNLINK", *names]])
            yield sum(len(name) == length_of_head for name in names)
            if cursor == b"0":
                return

    def probe(self) -> None:
        """See `Tier`. Writes, because a read-only replica would answer everything else. A full server passes, too.

        A server in cluster mode refuses each command with keys of two slots. Without this question, it would pass if it
        has the slot of the probe, and then refuse the commands of most entries.
        """
        self._call([[b"EXISTS", _PROBE, _OTHER_SLOT], [b"SET", _PROBE, b"", b"PX", b"1000"]], may_be_full=True)

    def usage(self) -> TierUsage:
        """See `Tier`. The contents of the server are unknown."""
        with self._lock:
            return TierUsage(counters=dict(self._counters))

    def close(self) -> None:
        """See `Tier`."""
        self.connections.close()

    def _milliseconds(self, key: bytes) -> bytes:
        """Return how long an entry stays if it is used now."""
        return b"%d" % max(1, self._ttl_ms - min(depth_of(key) * _CHUNK_MS, self._ttl_ms // 2))

    def _lifetime(self, key: bytes) -> Command:
        """Return the arguments for a command that writes or reads an entry."""
        return [b"PX", self._milliseconds(key)] if self._ttl_ms else []

    def _payloads(self, extents: Extents) -> list[memoryview]:
        return [self._pool.view[offset : offset + num_bytes] for offset, num_bytes in extents]

    def _count(self, name: CounterName, number: int) -> None:
        with self._lock:
            self._counters[name] += number

    def _call(
        self, commands: Sequence[Command], targets: Sequence[memoryview | None] = (), *, may_be_full: bool = False
    ) -> list[Reply]:
        """Run commands in one round trip.

        Raises:
            OSError: the server does not answer, or refuses a command. With `may_be_full`, a lack of memory is no error.
        """
        if not commands:
            return []
        with self.connections.lend() as connection:
            replies = connection.call(commands, targets)
        for reply in replies:
            if isinstance(reply, ReplyError) and not (may_be_full and reply.text.startswith("OOM ")):
                is_cluster = reply.text.startswith(_CLUSTER)
                hint = "cluster mode is not supported, so give kvdepot a server without it; " if is_cluster else ""
                raise OSError(f"{hint}the server says: {reply.text}")
        return replies


def _parts(payload: memoryview) -> Iterator[memoryview]:
    for first in range(0, payload.nbytes, PART_BYTES):
        yield payload[first : first + PART_BYTES]


def open_tier(url: TierUrl, pool: TierPool) -> ValkeyTier:
    """Open `valkey://USER:PASSWORD@HOST:PORT/DATABASE` or `valkey:///PATH/OF/SOCKET`; `valkeys` with TLS.

    Options: `ttl` (0: none; 90s, 1h, 7d), `timeout` in seconds (by default three quarters of the tier's deadline, and
    below it), `password_file` (a password in the URL is visible in the process list); with TLS `ca`, `cert` and `key`
    (PEM files); with a socket `database`.
    """
    timeout = url.take_timeout()
    ttl = url.take("ttl", "0")
    ttl_seconds = parse_duration(ttl) if ttl != "0" else 0.0
    try:
        parts = urlsplit(url.location)
        port = parts.port or 6379
        database = int(url.take("database", "0") if not url.host else url.path.strip("/") or "0")
    except ValueError as error:
        raise ConfigError(f"--tier {url.name}: write {url.scheme}://HOST:PORT/DATABASE") from error
    if not url.host and len(url.path) < 2:
        raise ConfigError(f"--tier {url.name}: write {url.scheme}://HOST:PORT/DATABASE or {url.scheme}:///SOCKET")
    tls = None
    if url.scheme in ("valkeys", "rediss"):
        tls = TlsFiles(url.take("ca", ""), url.take("cert", ""), url.take("key", ""))
        try:
            tls.read()
        except OSError as error:
            raise ConfigError(f"--tier {url.name}: its certificates: {error}") from error
    server = Server(
        host=url.host,
        port=port,
        unix_path="" if url.host else url.path,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        password_file=url.take("password_file", ""),
        database=database,
        tls=tls,
        timeout_seconds=timeout,
    )
    try:
        server.read_password()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tier {url.name}: password_file: {error}") from error
    return ValkeyTier(pool, server, ttl_seconds)
