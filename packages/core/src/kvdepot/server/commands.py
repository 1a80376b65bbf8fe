"""Answers operations: each of `kvdepot.wire.operations` has one handler here, or in `kvdepot.server.app`.

No operation needs a session. Long ones take turns in the background, one after the other, and reply at the end. Their
changes do not outlive the server: the next one starts from its flags.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import Struct

from kvdepot.config import ServerConfig, format_size, plain_settings
from kvdepot.errors import ConfigError, ErrorCode, printable
from kvdepot.keys import num_digests
from kvdepot.pool.names import Label
from kvdepot.server.depot import Depot
from kvdepot.server.state import MAXIMUM_ROWS
from kvdepot.server.turns import Awaited, PendingReply, Refused, Steps, Wait, run
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering
from kvdepot.tiers.url import TierUrl, without_credentials
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.operation import OperatorRequest

logger = logging.getLogger(__name__)

MAXIMUM_TIERS: Final = 16  # since the start, including removed ones

_PATIENT_SECONDS: Final = 60.0  # the longest wait of `kvdepot warm` for tiers
_PACKAGE: Final = logging.getLogger("kvdepot")

Sender: TypeAlias = Callable[[], str]  # describes the sender of a request for the log
Handler: TypeAlias = Callable[[Depot, Any, Sender], frames.Reply | Steps]

_H = TypeVar("_H", bound=Handler)
HANDLERS: Final[dict[type, Handler]] = {}


def answers(operation: type[OperatorRequest]) -> Callable[[_H], _H]:
    """Register a function as the handler of an operation. It may raise `Refused` only if it has changed nothing."""

    def register(handler: _H) -> _H:
        HANDLERS[operation] = handler
        return handler

    return register


class Operators:
    """Passes operators' requests to their handlers.

    Args:
        depot: the depot to operate.
        of_server: the handlers of operations that need more than a depot.
    """

    def __init__(self, depot: Depot, of_server: Mapping[type, Handler]) -> None:
        self._depot = depot
        self._handlers = {**HANDLERS, **of_server}

    def answer(self, request: OperatorRequest, sender: Sender) -> frames.Reply | PendingReply:
        """Answer a request, now or later.

        Raises:
            Refused: nothing was changed; the text gives the reason.
        """
        if request.needs_entries and self._depot.state.is_restoring:
            raise Refused(ErrorCode.DRAINING, "the entries of an earlier server are being read: ask again")
        of_feature = self._depot.operations.get(type(request))
        if of_feature is not None:
            handled = of_feature(request)
        elif (handler := self._handlers.get(type(request))) is not None:
            handled = handler(self._depot, request, sender)
        else:
            text = f"this depot runs without the feature that answers {frames.operation_of(type(request))}"
            raise Refused(ErrorCode.UNKNOWN_OPERATION, text)
        return handled if isinstance(handled, Struct) else run(handled, self._depot.state.fail)


@answers(o.Find)
def find(depot: Depot, request: o.Find, _sender: Sender) -> Steps:
    """Find a prefix in the pool. The reply lists at most `MAXIMUM_ROWS` spaces, the longest prefix first.

    Raises:
        KeyFormatError: the bytes are not whole digests.
        Refused: very many commands wait.
    """
    num_digests(request.digests)  # raises if they are not whole
    index = depot.index
    most: list[tuple[int, int, o.FoundPrefix]] = []  # a heap: the shortest prefix first
    yield from depot.background.operators.first()
    for space in list(index.spaces):
        match = index.visibility.match(space, request.digests)
        if match.nodes:
            last = match.nodes[-1]
            tenant, model, _ = depot.labels.names[index.nodes.label[last]]
            prefix = o.FoundPrefix(
                num_chunks=match.num_chunks,
                num_tokens=match.num_chunks * space.spec.chunk_tokens,
                tenant=tenant,
                model=model,
                dtype=space.spec.dtype,
                format=space.spec.format,
                chunk_tokens=space.spec.chunk_tokens,
                idle_seconds=index.nodes.idle_seconds(last),
                is_held=bool(index.nodes.tree.holds[last]),
                num_children=index.nodes.tree.num_children[last],
            )
            heappush(most, (match.num_chunks, -space.number, prefix))
            if len(most) > MAXIMUM_ROWS:
                heappop(most)
        yield depot.background.operators.again
    return o.Found(depot.state.epoch, [prefix for _, _, prefix in sorted(most, reverse=True)])


def clear_pool(depot: Depot, tenant: str | None, model: str | None = None) -> Iterator[int]:
    """Remove the unused entries of a tenant and a model (None: of all). Yield the number removed in each step."""
    names = depot.labels.names
    return depot.index.evictor.clear(lambda label, _space: _is_of(names[label], tenant, model))


def _is_of(label: Label, tenant: str | None, model: str | None) -> bool:
    return tenant in (None, label.tenant) and model in (None, label.model)


def _note(depot: Depot, text: str) -> None:
    depot.state.note(text)
    logger.info("%s", text)


def _note_clear(depot: Depot, selected: str, count: int, sender: str) -> None:
    _note(depot, f"cleared {selected}: {count:,} entries removed, asked by {printable(sender)}")


@answers(o.Clear)
def clear(depot: Depot, request: o.Clear, sender: Sender) -> Steps:
    """Clear one prefix, or the pool and the tiers. The reply counts entries, and the log names the sender.

    If a tier cannot be cleared, the reply is an error, but the pool and the other tiers are cleared.

    Raises:
        KeyFormatError: the bytes are not whole digests.
        Refused: very many commands wait.
    """
    num_digests(request.digests)  # raises if they are not whole
    asker = sender()  # now: the sender may have disconnected before the end
    yield from depot.background.operators.first()
    if request.digests:
        removed = yield from _clear_prefix(depot, request)
        _note_clear(depot, "a prefix", removed, asker)
        return m.Done(depot.state.epoch, removed)
    tenant, model = request.tenant, request.model
    removed, problems = yield from _clear_owner(depot, tenant, model)
    selected = ", ".join(f"{kind} {name}" for kind, name in (("tenant", tenant), ("model", model)) if name is not None)
    _note_clear(depot, printable(selected) or "everything", removed, asker)
    if not problems:
        return m.Done(depot.state.epoch, removed)
    text = (
        f"{removed} entries were removed, but not in every tier: {'; '.join(problems)}."
        " What is still there is served again: clear again once 'kvdepot status' says that the tier is used"
    )
    logger.error("%s", text)
    return m.ErrorReply(depot.state.epoch, ErrorCode.TIER_UNAVAILABLE, text)


def _clear_owner(depot: Depot, tenant: str | None, model: str | None) -> Generator[Wait, bool, tuple[int, list[str]]]:
    """Remove the entries of a tenant and a model (None: of all) from the pool and the tiers.

    Return their number, and one text per tier that cannot be cleared.
    """
    turns, removed, problems = depot.background.operators, 0, list[str]()
    for is_again in (False, True):  # again, as entries may have been written or promoted until the tiers were clear
        tiering = depot.state.tiering
        if tiering is not None:
            stopped = Awaited[()]()
            for _ in tiering.stop(tenant, model, stopped.set):
                yield turns.again
            yield from stopped.wait()
        in_pool = yield from turns.total(clear_pool(depot, tenant, model))
        removed += in_pool
        tiering = depot.state.tiering  # a tier may have been added since
        if tiering is None or (is_again and not in_pool):
            break
        cleared = Awaited[int, list[str]]()
        tiering.clear(tenant, model, cleared.set)
        in_tiers, problems = yield from cleared.wait()
        removed += in_tiers
    return removed, problems


def _clear_prefix(depot: Depot, request: o.Clear) -> Generator[Wait, bool, int]:
    """Remove the chunks that only this prefix needs from every space of the pool. Return the number of entries."""
    index, turns, removed = depot.index, depot.background.operators, 0
    for space in list(index.spaces):
        yield turns.again
        nodes = index.visibility.match(space, request.digests).nodes
        if not nodes:
            continue
        tenant, model, _ = depot.labels.names[index.nodes.label[nodes[-1]]]
        if request.tenant in (None, tenant) and request.model in (None, model):
            if depot.state.tiering is not None:
                depot.state.tiering.let_go(space, request.digests)
            removed += yield from turns.total(index.evictor.clear_end(nodes[-1]))
    return removed


@answers(o.Warm)
def warm(depot: Depot, request: o.Warm, _sender: Sender) -> Steps:
    """Promote a prefix from the tiers, as far as they have it.

    The reply counts the chunks that are in the pool afterwards, in the space that has the most.

    Raises:
        KeyFormatError: the bytes are not whole digests.
        Refused: very many commands wait.
    """
    yield from depot.background.operators.first()
    yield from depot.tiers.bring_up(request.tenant, request.digests)
    most = 0
    for space in list(depot.index.spaces):
        yield depot.background.operators.again
        most = max(most, depot.index.visibility.match(space, request.digests).num_chunks)
    return m.Done(depot.state.epoch, most)


@answers(o.SetQuota)
def set_quota(depot: Depot, request: o.SetQuota, _sender: Sender) -> Steps:
    """Change a tenant's quota. The reply counts the chunks that moved to another share of the pool."""
    tenant, quota_bytes = request.tenant, request.quota_bytes
    yield from depot.background.operators.first()
    try:
        moved = yield from depot.background.operators.total(depot.index.evictor.set_quota(tenant, quota_bytes))
    except ConfigError as error:
        raise Refused(ErrorCode.OUT_OF_RANGE, str(error)) from error
    quota = format_size(quota_bytes) if quota_bytes else "none"
    _note(depot, f"the quota of tenant {printable(tenant)} is now {quota}")
    return m.Done(depot.state.epoch, moved)


def add_tier(
    depot: Depot, opener: TierOpener, make_tiering: Callable[[list[TierQueue]], Tiering], request: o.AddTier
) -> Steps:
    """Open a tier and use it below the present ones. The reply comes when it is in use, and counts the tiers.

    Raises:
        Refused: the URL is malformed, another tier is being opened, this one is in use, or there were too many.
    """
    try:
        name = TierUrl.parse(request.url).name
    except ConfigError as error:
        raise Refused(ErrorCode.MALFORMED, str(error)) from error
    queues = depot.state.tiering.queues if depot.state.tiering is not None else []
    if opener.is_opening:
        raise Refused(ErrorCode.DRAINING, "another tier is being opened: ask again")
    if any(queue.name == name and not queue.is_retired for queue in queues):
        raise Refused(ErrorCode.OUT_OF_RANGE, f"tier {name} is already in use: nothing was changed")
    if len(queues) >= MAXIMUM_TIERS:
        raise Refused(ErrorCode.OUT_OF_RANGE, f"{MAXIMUM_TIERS} tiers since the start: start the depot again")
    opened = Awaited[TierQueue | ConfigError]()
    opener.begin(request.url, opened.set)
    (result,) = yield from opened.wait()
    if isinstance(result, ConfigError):
        raise Refused(ErrorCode.OUT_OF_RANGE, str(result))
    try:
        if depot.state.tiering is None:
            depot.state.tiering = make_tiering([])
        depot.state.tiering.add(result)
    except OSError as error:  # no memory for the table of its entries
        result.close()
        raise Refused(ErrorCode.OUT_OF_RANGE, f"tier {result.name} cannot be used: {error}") from error
    _note(depot, f"tier {result.name} is in use")
    return m.Done(depot.state.epoch, depot.state.tiering.num_used)


@answers(o.RemoveTier)
def remove_tier(depot: Depot, request: o.RemoveTier, _sender: Sender) -> m.Done:
    """Stop using a tier. The reply counts the tiers in use.

    Raises:
        Refused: no tier in use has that name.
    """
    name = request.name
    if depot.state.tiering is None or not depot.state.tiering.remove(name):
        raise Refused(ErrorCode.OUT_OF_RANGE, f"no tier {name}: 'kvdepot status' has their names")
    _note(depot, f"tier {name} is not used any more")
    return m.Done(depot.state.epoch, depot.state.tiering.num_used)


@answers(o.Drain)
def drain(depot: Depot, request: o.Drain, _sender: Sender) -> m.Done:
    """Decline stores, or accept them again. The reply counts the stores under way."""
    is_draining = request.is_draining
    if depot.state.is_draining != is_draining:
        _note(depot, "draining: stores are declined" if is_draining else "stores are accepted again")
    depot.state.is_draining = is_draining
    if depot.state.tiering is not None:
        depot.state.tiering.gather(waits=not is_draining)
    return m.Done(depot.state.epoch, len(depot.stores.tickets))


def log_level() -> str:
    """Return the lowest level that is logged."""
    return logging.getLevelName(_PACKAGE.getEffectiveLevel()).lower()


@answers(o.SetLogLevel)
def set_log_level(depot: Depot, request: o.SetLogLevel, _sender: Sender) -> m.Done:
    """Log this level and above."""
    _PACKAGE.setLevel(request.level.upper())
    return m.Done(depot.state.epoch, 1)


def settings_of(depot: Depot, config: ServerConfig) -> dict[str, Any]:
    """Return the settings as plain values under their names in `kvdepot.toml`, with the present quotas and tiers.

    Credentials in the URLs of tiers are left out, as are the options of tiers that operators added.
    """
    settings = plain_settings(config)
    settings["pool_dir"] = str(config.pool_path)
    settings["pool_size"] = depot.index.extents.capacity_bytes
    settings["max_entries"] = depot.index.table.num_records
    settings["quota"] = depot.index.quotas.by_name()
    urls = {TierUrl.parse(url).name: without_credentials(url) for url in config.tiers}
    tiers = [] if depot.state.tiering is None else depot.state.tiering.status()
    settings["tier"] = [urls.get(tier.name, tier.name) for tier in tiers]
    settings["log_level"] = log_level()
    return settings
