"""`kvdepot tier gc`: removes objects from the store of a tier while depots use it. The store does not evict by itself.

Objects never change, and a missing object is a miss, so any object may be removed at any time. If a depot has its
chunks in the pool, it writes them again when they are used.
"""

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvdepot.config import format_size, parse_duration
from kvdepot.errors import ConfigError, reason_of
from kvdepot.ops.settings import ASKS_NO_DEPOT, as_argument, size_argument
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.keys import MARK_BYTES, NAME_HASH_BYTES, PLACE_BYTES, mark_of, name_hash
from kvdepot.tiers.url import TierUrl, open_tier

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_FORMATS: Final = {64: "runs", 94: "entries"}
"""Formats of objects by the length of the last part of their names. No depot reads "entries", the first one, now."""

# Within a name: after the hashes, two digits, three slashes and the place.
_PLACE_END: Final = 4 * NAME_HASH_BYTES + 5 + 2 * PLACE_BYTES
_PLACE_IN_NAME: Final = slice(_PLACE_END - 2 * PLACE_BYTES, _PLACE_END)
_MARK_IN_NAME: Final = slice(_PLACE_END - 2 * MARK_BYTES, _PLACE_END)
_LISTED_AT_ONCE: Final = 1000  # S3 returns this many per request
_DELETED_AT_ONCE: Final = 250  # Azure deletes up to 256 per request, S3 1,000
_ENOUGH: Final = 1.05  # share of the capacity at which the command ends: depots go on writing
_MOST_ROUNDS: Final = 8  # otherwise depots that write faster than the command removes would keep it running for ever


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
        "--capacity", type=size_argument, default=0, metavar="SIZE", help="remove the oldest objects beyond this size"
    )
    parser.add_argument(
        "--older-than",
        type=as_argument(parse_duration),
        default=0.0,
        metavar="TIME",
        help="remove objects that were written longer ago than this, e.g. 7d",
    )
    parser.add_argument(
        "--unwritten-for",
        type=as_argument(parse_duration),
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
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
    url.options.setdefault("deadline", "60")
    tier: Any = open_tier(url, TierPool(-1, memoryview(bytearray())))

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
    except Exception as error:
        raise ConfigError(f"{url.name}: {reason_of(error)}") from error
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

    Args:
        store: the store, with the prefix of the tier.
        now: Unix time.
        capacity_bytes: remove the oldest objects until the rest has at most this size; 0 for no limit.
        older_than_seconds: remove objects that were written longer ago; 0 for none.
        unwritten_seconds: remove all objects of each place (`kvdepot.tiers.keys`) without an object written since; 0
            for none.
        format_name: remove all objects of this format; "" for none.
        model: remove this model's objects of all weights except `kept_generations`; "" for none.
        kept_generations: names as shown by `kvdepot status`.

    Raises:
        obstore.exceptions.BaseError: the store does not answer, or refuses to list or to delete.
    """
    import obstore  # an extra; `open_tier` says how to get it

    from kvdepot.tiers.object import NAME

    collected, found = Collected(), list[tuple[float, int, str, str]]()
    pages: Iterable[Sequence[ObjectMeta]] = obstore.list(store, chunk_size=_LISTED_AT_ONCE)  # pyright: ignore[reportUnknownMemberType]
    for page in pages:
        for meta in page:
            if NAME.fullmatch(meta["path"]):
                kind = _FORMATS[len(meta["path"].rpartition("/")[2])]
                collected.num_objects[kind] += 1
                collected.num_bytes[kind] += meta["size"]
                found.append((meta["last_modified"].timestamp(), meta["size"], meta["path"], kind))
    found.sort()
    written_at = {path[_PLACE_IN_NAME]: at for at, _, path, _ in found}  # the newest object's
    folder, marks = f"/{name_hash(model).hex()}/", {mark_of(f" {name}").hex() for name in kept_generations}
    excess = collected.num_bytes.total() - capacity_bytes if capacity_bytes else 0
    doomed: list[tuple[int, str]] = []
    for at, size, path, kind in found:
        is_old = bool(older_than_seconds) and now - at > older_than_seconds
        is_old |= bool(unwritten_seconds) and now - written_at[path[_PLACE_IN_NAME]] > unwritten_seconds
        is_outdated = bool(model) and folder in path and path[_MARK_IN_NAME] not in marks
        if kind == format_name or is_old or is_outdated or excess > 0:
            doomed.append((size, path))
            excess -= size
    for start in range(0, len(doomed), _DELETED_AT_ONCE):
        some = doomed[start : start + _DELETED_AT_ONCE]
        paths = [path for _, path in some]
        try:
            obstore.delete(store, paths)
        except FileNotFoundError:  # only with files: another process removes objects, too
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(store, path)
        collected.num_removed += len(some)
        collected.removed_bytes += sum(size for size, _ in some)
    return collected
