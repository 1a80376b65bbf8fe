"""Removes objects of a store that nobody else collects, the oldest first, beside depots that use it.

Objects never change and depots take a missing one for a miss, so any of them may be removed at any time. A depot that
has its chunks in the pool writes them again when they are used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import obstore
from obstore.store import ObjectStore

from kvdepot.tiers.keys import LABEL_BYTES, MARK_BYTES, PLACE_BYTES, label_of, mark_of
from kvdepot.tiers.object import NAME

if TYPE_CHECKING:
    from obstore import ObjectMeta

FORMATS: Final = {64: "runs", 94: "entries"}
"""Formats of objects by the digits at the end of their names; "entries" are of the first version, read by none."""

_PLACE_END: Final = 4 * LABEL_BYTES + 5 + 2 * PLACE_BYTES  # of a name: labels, two digits, three slashes, the place
_MARK_IN_NAME: Final = slice(_PLACE_END - 2 * MARK_BYTES, _PLACE_END)
_LISTED_AT_ONCE: Final = 1000  # what S3 returns in one answer
_DELETED_AT_ONCE: Final = 250  # what Azure deletes in one request is 256, S3 1,000


@dataclass(slots=True)
class Collected:
    """The objects of a store, and those that were removed: number and bytes by format."""

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
    """Count a depot's objects, and remove some of them. Objects of others are neither counted nor removed.

    Args:
        store: with the prefix of the tier.
        now: seconds since 1970.
        capacity_bytes: the oldest objects are removed until the others have at most so many bytes; 0 for no limit.
        older_than_seconds: objects written longer ago are removed; 0 for none.
        format_name: all objects of this format are removed; "" for none.
        model: all of its objects are removed whose weights are none of `kept_generations`; "" for none.
        kept_generations: names, as `kvdepot status` shows them.

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
    folder, marks = f"/{label_of(model).hex()}/", {mark_of(f" {name}").hex() for name in kept_generations}
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
    except FileNotFoundError:  # files only: somebody else removes, too
        for path in paths:
            try:
                obstore.delete(store, path)
            except FileNotFoundError:
                continue
