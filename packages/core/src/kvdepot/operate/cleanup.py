"""Removes leftovers of depots: pools of this machine (`kvdepot pools`), objects in a store (`kvdepot tier gc`).

Objects can be removed while depots use the store, which does not evict by itself: they never change, and a missing one
is a miss. If a depot has its chunks in the pool, it writes them again when they are used.
"""

import argparse
import contextlib
import os
import pwd
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.config import format_size, parse_duration, parse_size
from kvdepot.errors import ConfigError, PoolError, printable
from kvdepot.operate.commandline import ASKS_NO_DEPOT, as_argument, show
from kvdepot.pool.inventory import SHARED_MEMORY, FoundPool, find_pools, look_at, remove_pool
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.keys import MARK_BYTES, NAME_HASH_BYTES, PLACE_BYTES, mark_of, name_hash
from kvdepot.tiers.url import TierUrl, open_tier

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

# The longest time that a restarting depot is away: Kubernetes' back-off ends at 5 minutes, and a node that pulls a new
# image takes about as long. A pool that the user names is removed whatever its age.
_RESTART_SECONDS: Final = 600.0

_UNITS: Final = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))

_FORMATS: Final = {64: "runs", 94: "entries"}
"""Formats of objects by the length of the last part of their names. No depot reads "entries", the first one, now."""

# Within a name: after the hashes, two digits, three slashes and the place.
_PLACE_END: Final = 4 * NAME_HASH_BYTES + 5 + 2 * PLACE_BYTES
_PLACE_IN_NAME: Final = slice(_PLACE_END - 2 * PLACE_BYTES, _PLACE_END)
_MARK_IN_NAME: Final = slice(_PLACE_END - 2 * MARK_BYTES, _PLACE_END)
_MOST_SKEW_SECONDS: Final = 86_400.0  # by which clocks of machines may differ; one that is further ahead is wrong
_BEFORE_ALL_SECONDS: Final = 1e10  # more than any time since 1970
_LISTED_AT_ONCE: Final = 1000  # S3 returns this many per request
_DELETED_AT_ONCE: Final = 250  # Azure deletes up to 256 per request, S3 1,000
_ENOUGH: Final = 1.05  # share of the capacity at which the command ends: depots go on writing
_MOST_ROUNDS: Final = 8  # otherwise depots that write faster than the command removes would keep it running for ever


def add_pools(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `pools` to the subparsers of `kvdepot`; `common` has `--dir`, `json_output` has `--json`."""
    pools = commands.add_parser(
        "pools",
        parents=[common, json_output],
        help="list the pools on this machine and free their memory",
        description="List the pools on this machine: their memory, their depot, and whether it is running. A pool"
        " outlives its depot, so that the next one finds the cache; 'kvdepot pools --remove' gives the memory back."
        " Other users' pools are removed only by name.",
    )
    pools.set_defaults(run=_pools)
    pools.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="only these (default: all of /dev/shm, or with --dir that of one depot)",
    )
    pools.add_argument("--remove", action="store_true", help="remove the pools at PATH; a running depot keeps its own")
    pools.add_argument(
        "--stopped",
        action="store_true",
        help="only pools whose depot is not running; --remove without PATH keeps those used in the last"
        f" {_RESTART_SECONDS // 60:.0f} minutes, as their depot may be restarting",
    )


def _pools(options: argparse.Namespace) -> int:
    if options.remove and not (options.paths or options.stopped):
        raise PoolError("--remove needs the PATH of a pool, or --stopped for all that no depot serves")
    found = [look_at(path) for path in options.paths] or find_pools()
    if "directory" in options:
        server = f"the depot of --dir {options.directory.absolute()} "
        owner = _owner_of(options.directory)  # anybody can make a pool that names this depot
        found = [pool for pool in found if pool.server.startswith(server) and pool.uid == owner]
    if options.stopped:
        found = [pool for pool in found if not pool.is_served]
    if options.remove:
        if not options.paths:
            found = _without_recent(_without_foreign(found), time.time())
        return _remove_pools(found)
    nothing = f"no pools{' without a depot' if options.stopped else ''} in {SHARED_MEMORY}"
    described = "\n".join(_describe(pool, time.time()) for pool in found)
    show(options, [_as_dict(pool) for pool in found], lambda: described or nothing)
    return 0


def _owner_of(directory: Path) -> int:
    try:
        return directory.stat().st_uid
    except OSError:
        return os.geteuid()


def _without_foreign(pools: list[FoundPool]) -> list[FoundPool]:
    """Return the pools that only this user and root can have written. Print the others."""
    for pool in pools:
        if not pool.is_own:
            print(
                printable(f"kept {pool.directory}: it is another user's, or others may write to it; name it to remove")
            )
    return [pool for pool in pools if pool.is_own]


def _without_recent(pools: list[FoundPool], now: float) -> list[FoundPool]:
    """Return the pools that were unused for longer than a restart takes. Print the others."""
    recent = [pool for pool in pools if now - pool.used_at < _RESTART_SECONDS]
    for pool in recent:
        age = _ago(now - pool.used_at)
        print(
            printable(f"kept {pool.directory}: last used {age} ago, so its depot may be restarting; name it to remove")
        )
    return [pool for pool in pools if pool not in recent]


def _remove_pools(pools: list[FoundPool]) -> int:
    freed = failed = 0
    for pool in pools:
        try:
            freed += remove_pool(pool.directory)
        except (PoolError, OSError) as error:
            print(printable(f"kvdepot: {error}"), file=sys.stderr)
            failed += 1
        else:
            print(printable(f"removed {pool.directory}"))
    print(f"{format_size(freed)} freed")
    return 1 if failed else 0


def _describe(pool: FoundPool, now: float) -> str:
    """Describe one pool in two lines."""
    try:
        owner = pwd.getpwuid(pool.uid).pw_name
    except KeyError:
        owner = str(pool.uid)
    state = "served by" if pool.is_served else f"stopped, last used {_ago(now - pool.used_at)} ago, by"
    if not pool.is_own:
        owner, state = f"{owner}, not yours", f"says: {state}"
    title = f"{pool.directory}: {format_size(pool.allocated_bytes)} of {owner}"
    return f"{printable(title)}\n  {printable(f'{state} {pool.server}')}"


def _ago(seconds: float) -> str:
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= 2 * length), (1, "seconds"))
    return f"{max(seconds, 0) // length:.0f} {unit}"


def _as_dict(pool: FoundPool) -> dict[str, Any]:
    return {
        "path": str(pool.directory),
        "allocated_bytes": pool.allocated_bytes,
        "uid": pool.uid,
        "used_at": pool.used_at,
        "server": pool.server,
        "is_served": pool.is_served,
    }


def add_tier_gc(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `gc` to the subparsers of `kvdepot tier`; `common` has `--log-level` and `--dir`."""
    parser = commands.add_parser(
        "gc",
        parents=[common],
        help="remove old objects from an object store",
        description=(
            "Remove objects from the store of a tier (s3, gs, az, file), the oldest first, and print what is there by"
            " format. It is safe beside depots that use the store: they see misses. Without an option it only counts."
        ),
        epilog=ASKS_NO_DEPOT,
    )
    parser.add_argument("url", help="the tier, as in serve --tier")
    parser.add_argument(
        "--capacity",
        type=as_argument(_some_size),
        default=0,
        metavar="SIZE",
        help="remove the oldest objects beyond this size",
    )
    parser.add_argument(
        "--older-than",
        type=as_argument(_some_time),
        default=0.0,
        metavar="TIME",
        help="remove objects that were written longer ago than this, e.g. 7d",
    )
    parser.add_argument(
        "--unwritten-for",
        type=as_argument(_some_time),
        default=0.0,
        metavar="TIME",
        help=(
            "remove the objects of each layout of a cache, and of each of a model's weights, to which nothing was"
            " written for this long, e.g. 3d: upgrades of engines and updates of weights leave the old ones behind"
        ),
    )
    parser.add_argument(
        "--format",
        choices=tuple(_FORMATS.values()),
        default="",
        help="remove all objects of this format, which no depot reads any more",
    )
    parser.add_argument(
        "--model",
        default="",
        help="with --keep: remove this model's objects of all other weights; a name as in 'kvdepot status'",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="WEIGHTS",
        help="weights that a trainer wrote and engines still use, as 'kvdepot status' names them; repeatable",
    )
    parser.set_defaults(run=_tier_gc)


def _some_size(text: str) -> int:
    """Parse a size above 0, which would mean no limit."""
    if size := parse_size(text):
        return size
    raise ConfigError(f"{text!r} would remove nothing: give more than 0, or use --older-than")


def _some_time(text: str) -> float:
    """Parse a time above 0, which would mean no limit."""
    if seconds := parse_duration(text):
        return seconds
    raise ConfigError(f"{text!r} would remove nothing: give more than 0, for example 1s")


def _tier_gc(options: argparse.Namespace) -> int:
    url = TierUrl.parse(options.url)
    if url.scheme not in ("s3", "gs", "az", "file"):
        raise ConfigError(
            f"{url.name}: only tiers in object stores and shared files need this; other tiers evict by themselves"
        )
    if bool(options.model) != bool(options.keep) or "" in options.keep:
        raise ConfigError(
            "--model and --keep go together: the first names the model whose objects are removed, the"
            " second the weights to keep"
        )
    # To open a tier makes its folder. Without this, a mistyped one would appear, and the command would report success.
    if url.scheme == "file" and not url.host and not Path(url.path).is_dir():
        raise ConfigError(f"{url.name}: there is no such folder")
    url.options.setdefault("deadline", "60")
    tier: Any = open_tier(url, TierPool(-1, memoryview(bytearray())))
    from kvdepot.tiers.object import in_one_line  # needs an extra, as `open_tier` has said

    def once() -> "Collected":
        return collect(
            tier.patient,
            time.time(),
            capacity_bytes=options.capacity,
            older_than_seconds=options.older_than,
            unwritten_seconds=options.unwritten_for,
            format_name=options.format,
            model=options.model,
            kept_generations=options.keep,
        )

    try:
        done = last = once()
        for _ in range(_MOST_ROUNDS - 1):
            if not options.capacity or last.num_bytes.total() <= _ENOUGH * options.capacity:
                break
            last = once()  # depots wrote while objects were removed
            done.num_removed += last.num_removed
            done.removed_bytes += last.removed_bytes
    except ConfigError as error:
        raise ConfigError(f"{url.name}: {error}") from error
    except Exception as error:  # a store's answer, which may be pages of XML
        raise ConfigError(f"{url.name}: {in_one_line(error)}") from error
    finally:
        tier.close()
    for name in sorted(done.num_objects):
        print(f"{name}: {done.num_objects[name]:,} objects, {format_size(done.num_bytes[name])}")
    print(f"removed: {done.num_removed:,} objects, {format_size(done.removed_bytes)}")
    return 0


@dataclass(slots=True)
class Collected:
    """The numbers and bytes of the objects in a store, by format, and of the removed ones."""

    num_objects: Counter[str] = field(default_factory=Counter[str])
    num_bytes: Counter[str] = field(default_factory=Counter[str])
    num_removed: int = 0
    removed_bytes: int = 0


def collect(
    store: "ObjectStore",
    now: float,
    *,
    capacity_bytes: int = 0,
    older_than_seconds: float = 0.0,
    unwritten_seconds: float = 0.0,
    format_name: str = "",
    model: str = "",
    kept_generations: Collection[str] = (),
) -> Collected:
    """Count the objects of depots in a store, and remove some. Other objects are neither counted nor removed.

    This lists the store twice: to find the age that the capacity allows, and to remove. So its memory is bounded.

    Args:
        store: the store, with the prefix of the tier.
        now: Unix time.
        capacity_bytes: remove the oldest objects, to the minute, until the rest has at most this size; 0 for no limit.
        older_than_seconds: remove objects that were written longer ago; 0 for none.
        unwritten_seconds: remove all objects of each place (`kvdepot.tiers.keys`) without an object written since; 0
            for none.
        format_name: remove all objects of this format; "" for none.
        model: remove this model's objects of all weights except `kept_generations`; "" for none.
        kept_generations: names as shown by `kvdepot status`.

    Objects with times more than a day after now count as the oldest: a clock ran ahead when they were written. As the
    newest, they would stay for ever.

    Raises:
        ConfigError: by their times all objects were written later, and age decides. This machine's clock is behind.
        obstore.exceptions.BaseError: the store does not answer, or refuses to list or to delete.
    """
    collected, doomed = Collected(), list[_Object]()
    # By minute, and by place the newest object's time: the objects themselves, 200 bytes each, may be 100 million.
    ages, written_at = Counter[int](), dict[str, float]()
    for each in _objects(store, now):
        collected.num_objects[each.kind] += 1
        collected.num_bytes[each.kind] += each.num_bytes
        ages[each.minute] += each.num_bytes
        written_at[each.place] = max(each.written_at, written_at.get(each.place, each.written_at))
    if written_at and max(written_at.values()) < 0 and (older_than_seconds or unwritten_seconds):
        count = collected.num_objects.total()
        raise ConfigError(f"all {count:,} objects are from the future: this machine's clock is behind, so set it")
    excess = collected.num_bytes.total() - capacity_bytes if capacity_bytes else 0
    last_minute, excess = _last_minute(ages, excess)
    if last_minute is None and not (older_than_seconds or unwritten_seconds or format_name or model):
        return collected
    folder, marks = f"/{name_hash(model).hex()}/", {mark_of(f" {name}").hex() for name in kept_generations}
    for each in _objects(store, now):
        is_old = bool(older_than_seconds) and now - each.written_at > older_than_seconds
        newest = written_at.get(each.place, now)  # or it was written since
        is_old |= bool(unwritten_seconds) and now - newest > unwritten_seconds
        is_outdated = bool(model) and folder in each.path and each.path[_MARK_IN_NAME] not in marks
        is_beyond = last_minute is not None and each.minute < last_minute
        if not is_beyond and each.minute == last_minute and excess > 0:
            excess -= each.num_bytes
            is_beyond = True
        if each.kind == format_name or is_old or is_outdated or is_beyond:
            doomed.append(each)
        if len(doomed) == _DELETED_AT_ONCE:
            _delete(store, doomed, collected)
    _delete(store, doomed, collected)
    return collected


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of depots."""

    path: str
    num_bytes: int
    written_at: float  # below 0 if the clock that wrote it ran ahead

    @property
    def kind(self) -> str:
        """Its format."""
        return _FORMATS[len(self.path.rpartition("/")[2])]

    @property
    def place(self) -> str:
        """The place of its entries."""
        return self.path[_PLACE_IN_NAME]

    @property
    def minute(self) -> int:
        """The minute in which it was written."""
        return int(self.written_at // 60)


def _objects(store: "ObjectStore", now: float) -> "Iterator[_Object]":
    """List the objects of depots."""
    import obstore  # an extra; `open_tier` says how to get it

    from kvdepot.tiers.object import NAME

    pages: Iterable[Sequence[ObjectMeta]] = obstore.list(store, chunk_size=_LISTED_AT_ONCE)  # pyright: ignore[reportUnknownMemberType]
    for page in pages:
        for meta in page:
            if NAME.fullmatch(meta["path"]):
                at = meta["last_modified"].timestamp()
                is_ahead = at > now + _MOST_SKEW_SECONDS
                yield _Object(meta["path"], meta["size"], at - _BEFORE_ALL_SECONDS * is_ahead)


def _last_minute(ages: Counter[int], excess: int) -> tuple[int | None, int]:
    """Return the last minute of which objects exceed a capacity, and the bytes to remove of it.

    Objects of the minutes before are removed as a whole. None if there is no excess.
    """
    for minute in sorted(ages):
        if 0 < excess <= ages[minute]:
            return minute, excess
        excess -= ages[minute]
    return None, 0


def _delete(store: "ObjectStore", doomed: list[_Object], collected: Collected) -> None:
    """Remove objects, and empty the list."""
    import obstore

    paths = [each.path for each in doomed]
    try:
        if paths:
            obstore.delete(store, paths)
    except FileNotFoundError:  # only with files: another process removes objects, too
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(store, path)
    collected.num_removed += len(doomed)
    collected.removed_bytes += sum(each.num_bytes for each in doomed)
    doomed.clear()
