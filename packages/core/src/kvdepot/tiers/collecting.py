"""Removes the oldest objects of an object store while depots use it. Such stores do not evict by themselves.

Objects never change, and a missing object is a miss, so any object may be removed at any time. If a depot has its
chunks in the pool, it writes them again when they are used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import obstore
from obstore.store import ObjectStore

from kvdepot.tiers.keys import MARK_BYTES, NAME_HASH_BYTES, PLACE_BYTES, mark_of, name_hash
from kvdepot.tiers.object import NAME

if TYPE_CHECKING:
    from obstore import ObjectMeta

FORMATS: Final = {64: "runs", 94: "entries"}
"""Formats of objects by the length of the last part of their names. No depot reads "entries", the first one, now."""

# Within a name: after the hashes, two digits, three slashes and the place.
_PLACE_END: Final = 4 * NAME_HASH_BYTES + 5 + 2 * PLACE_BYTES
_MARK_IN_NAME: Final = slice(_PLACE_END - 2 * MARK_BYTES, _PLACE_END)
_LISTED_AT_ONCE: Final = 1000  # S3 returns this many per request
_DELETED_AT_ONCE: Final = 250  # Azure deletes up to 256 per request, S3 1,000


@dataclass(slots=True)
class Collected:
    """The numbers and bytes of the objects in a store, by format, and of the removed ones."""

    num_objects: Counter[str] = field(default_factory=Counter[str])
    num_bytes: Counter[str] = field(default_factory=Counter[str])
    num_removed: int = 0
    removed_bytes: int = 0


def collect(
    store: ObjectStore,
    now: float,
    *,
    capacity_bytes: int = 0,
    older_than_seconds: float = 0.0,
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
        format_name: remove all objects of this format; "" for none.
        model: remove this model's objects of all weights except `kept_generations`; "" for none.
        kept_generations: names as shown by `kvdepot status`.

    Raises:
        obstore.exceptions.BaseError: the store does not answer, or refuses to list or to delete.
    """
    collected, found = Collected(), list[tuple[float, int, str, str]]()
    pages: Iterable[Sequence[ObjectMeta]] = obstore.list(store, chunk_size=_LISTED_AT_ONCE)  # pyright: ignore[reportUnknownMemberType]
    for page in pages:
        for meta in page:
            if NAME.fullmatch(meta["path"]):
                kind = FORMATS[len(meta["path"].rpartition("/")[2])]
                collected.num_objects[kind] += 1
                collected.num_bytes[kind] += meta["size"]
                found.append((meta["last_modified"].timestamp(), meta["size"], meta["path"], kind))
    found.sort()
    folder, marks = f"/{name_hash(model).hex()}/", {mark_of(f" {name}").hex() for name in kept_generations}
    excess = collected.num_bytes.total() - capacity_bytes if capacity_bytes else 0
    doomed: list[tuple[int, str]] = []
    for written_at, size, path, kind in found:
        is_old = bool(older_than_seconds) and now - written_at > older_than_seconds
        is_outdated = bool(model) and folder in path and path[_MARK_IN_NAME] not in marks
        if kind == format_name or is_old or is_outdated or excess > 0:
            doomed.append((size, path))
            excess -= size
    for start in range(0, len(doomed), _DELETED_AT_ONCE):
        some = doomed[start : start + _DELETED_AT_ONCE]
        _delete(store, [path for _, path in some])
        collected.num_removed += len(some)
        collected.removed_bytes += sum(size for size, _ in some)
    return collected


def _delete(store: ObjectStore, paths: list[str]) -> None:
    try:
        obstore.delete(store, paths)
    except FileNotFoundError:  # only with files: another process removes objects, too
        for path in paths:
            try:
                obstore.delete(store, path)
            except FileNotFoundError:
                continue
