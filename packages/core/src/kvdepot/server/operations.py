"""What operators ask of a running depot, besides looking at it: find, quotas, draining, what is logged, its settings.

None of it waits and none of it needs a session. What takes long is done in the depot's steps between messages, and its
reply comes then. Nothing of it outlives the server: the next one starts from its flags again.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final

from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError, ErrorCode
from kvdepot.keys import DIGEST_BYTES
from kvdepot.server.depot import MAXIMUM_ROWS, Deferred, Depot, Refused
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering
from kvdepot.tiers.url import TierUrl
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

logger = logging.getLogger(__name__)

MAXIMUM_TIERS: Final = 16  # since the start, those that were removed included

_PACKAGE: Final = logging.getLogger("kvdepot")


def find(depot: Depot, digests: bytes) -> Deferred:
    """Find what the pool has of a prefix; the reply names the space with the most of it first, `MAXIMUM_ROWS` at most.

    Raises:
        Refused: the digests are none.
    """
    if len(digests) % DIGEST_BYTES:
        raise Refused(ErrorCode.BAD_KEY, f"{len(digests)} bytes of digests: each chunk has {DIGEST_BYTES}")
    index = depot.index

    def steps() -> Iterator[frames.Reply | None]:
        most: list[tuple[int, int, o.FoundPrefix]] = []  # a heap: what has the least of it first
        for space in list(index.spaces):
            num_chunks, nodes = index.longest_prefix(space, digests)
            if num_chunks:
                last = nodes[-1]
                tenant, model = depot.labels[index.label_of(last)]
                prefix = o.FoundPrefix(
                    num_chunks=num_chunks, num_tokens=num_chunks * space.spec.chunk_tokens, tenant=tenant,
                    model=model, dtype=space.spec.dtype, format=space.spec.format,
                    chunk_tokens=space.spec.chunk_tokens, idle_seconds=index.idle_seconds(last),
                    is_held=index.is_held(last), num_children=index.num_children(last),
                )  # fmt: skip
                heappush(most, (num_chunks, -space.number, prefix))
                if len(most) > MAXIMUM_ROWS:
                    heappop(most)
            yield None
        yield o.Found(depot.epoch, [prefix for _, _, prefix in sorted(most, reverse=True)])

    return depot.later(steps())


def clear_prefix(depot: Depot, request: o.Clear) -> Deferred:
    """Remove what only this prefix needs from the pool, in every space; the reply counts entries.

    Raises:
        Refused: the digests are none.
    """
    if len(request.digests) % DIGEST_BYTES:
        raise Refused(ErrorCode.BAD_KEY, f"{len(request.digests)} bytes of digests: each chunk has {DIGEST_BYTES}")

    def steps() -> Iterator[frames.Reply | None]:
        count = 0
        for space in list(depot.index.spaces):
            yield None
            num_chunks, nodes = depot.index.longest_prefix(space, request.digests)
            if not num_chunks:
                continue
            tenant, model = depot.labels[depot.index.label_of(nodes[-1])]
            if request.tenant in (None, tenant) and request.model in (None, model):
                for removed in depot.index.clear_end(nodes[-1]):
                    count += removed
                    yield None
        yield m.Done(depot.epoch, count)

    return depot.later(steps())


def unpin(depot: Depot, tenant: str | None) -> Deferred:
    """End the pins of a tenant (None: all); the reply counts them."""

    def steps() -> Iterator[frames.Reply | None]:
        count = 0
        for ended in depot.pins.end(tenant):
            count += ended
            yield None
        yield m.Done(depot.epoch, count)

    return depot.later(steps())


def set_quota(depot: Depot, tenant: str, quota_bytes: int) -> Deferred:
    """Change a tenant's quota; the reply counts the chunks that count against another share of the pool now."""

    def steps() -> Iterator[frames.Reply | None]:
        moved = 0
        try:
            for count in depot.index.set_quota(tenant, quota_bytes):
                moved += count
                yield None
        except ConfigError as error:
            yield m.ErrorReply(depot.epoch, ErrorCode.OUT_OF_RANGE, str(error))
            return
        depot.note(f"the quota of tenant {tenant} is {quota_bytes} bytes now")
        logger.info("the quota of tenant %s is %d bytes now", tenant, quota_bytes)
        yield m.Done(depot.epoch, moved)

    return depot.later(steps())


def add_tier(
    depot: Depot, opener: TierOpener, make_tiering: Callable[[list[TierQueue]], Tiering], url: str
) -> Deferred:
    """Open a tier and use it below those that are there; the reply comes when it is in use, and counts tiers.

    Raises:
        Refused: it is no URL, another one is being opened, it is here already, or there were too many.
    """
    try:
        name = TierUrl.parse(url).name
    except ConfigError as error:
        raise Refused(ErrorCode.MALFORMED, str(error)) from error
    queues = depot.tiering.queues if depot.tiering is not None else []
    if opener.is_opening:
        raise Refused(ErrorCode.DRAINING, "another tier is being opened: ask again")
    if any(queue.name == name and not queue.is_retired for queue in queues):
        raise Refused(ErrorCode.OUT_OF_RANGE, f"tier {name} is in use already")
    if len(queues) >= MAXIMUM_TIERS:
        raise Refused(ErrorCode.OUT_OF_RANGE, f"{MAXIMUM_TIERS} tiers since the start: start the depot again")
    deferred = Deferred()

    def on_opened(result: TierQueue | ConfigError) -> None:
        if isinstance(result, ConfigError):
            deferred.send(m.ErrorReply(depot.epoch, ErrorCode.OUT_OF_RANGE, str(result)))
            return
        try:
            if depot.tiering is None:
                depot.tiering = make_tiering([])
            depot.tiering.add(result)
        except OSError as error:  # no memory for what is known of its entries
            result.close()
            text = f"tier {result.name} cannot be used: {error}"
            deferred.send(m.ErrorReply(depot.epoch, ErrorCode.OUT_OF_RANGE, text))
            return
        depot.note(f"tier {result.name} is in use")
        logger.info("tier %s is in use", result.name)
        deferred.send(m.Done(depot.epoch, depot.tiering.num_used))

    opener.begin(url, on_opened)
    return deferred


def remove_tier(depot: Depot, name: str) -> m.Done:
    """Stop using a tier; the reply counts those that are left.

    Raises:
        Refused: there is none of that name.
    """
    if depot.tiering is None or not depot.tiering.remove(name):
        raise Refused(ErrorCode.OUT_OF_RANGE, f"no tier {name}: 'kvdepot status' has their names")
    depot.note(f"tier {name} is not used any more")
    logger.info("tier %s is not used any more", name)
    return m.Done(depot.epoch, depot.tiering.num_used)


def drain(depot: Depot, is_draining: bool) -> m.Done:
    """Take no more stores, or take them again; the reply counts the stores that are under way."""
    if depot.is_draining != is_draining:
        text = "draining: stores are declined" if is_draining else "stores are taken again"
        depot.note(text)
        logger.info("%s", text)
    depot.is_draining = is_draining
    return m.Done(depot.epoch, len(depot.tickets))


def log_level() -> str:
    """Return what is logged from here on upwards."""
    return logging.getLevelName(_PACKAGE.getEffectiveLevel()).lower()


def set_log_level(depot: Depot, level: str) -> m.Done:
    """Log from this level on upwards."""
    _PACKAGE.setLevel(level.upper())
    return m.Done(depot.epoch, 1)


def settings_of(depot: Depot, config: ServerConfig) -> dict[str, Any]:
    """Return the settings as plain values, with the quotas of now; credentials in the URLs of tiers are left out."""
    settings = {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    settings["pool_directory"] = str(config.pool_path)
    settings["pool_size_bytes"] = depot.index.extents.capacity_bytes
    settings["max_entries"] = depot.index.table.num_records
    settings["quotas"] = depot.index.quotas.by_name()
    settings["tiers"] = [] if depot.tiering is None else [status.name for status in depot.tiering.status()]
    settings["log_level"] = log_level()
    return settings


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
