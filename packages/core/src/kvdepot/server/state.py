"""The state that the parts of one depot share: index, leases, names, background work and counters."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeAlias

from kvdepot.counting import Counts, depot_counter
from kvdepot.errors import ErrorCode, KeyFormatError
from kvdepot.index.index import ChunkIndex
from kvdepot.index.leases import LeaseTable
from kvdepot.index.tree import Space
from kvdepot.movers.table import MoverTable
from kvdepot.pool.names import Label, Names
from kvdepot.server.turns import Background, Refused
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.tiering import Tiering
from kvdepot.timers import Timers
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import Histogram

logger = logging.getLogger(__name__)

MAXIMUM_SPACES: Final = 4096  # kept as long as the pool: 17 MiB in its file of names if each has the longest spec
MAXIMUM_LABELS: Final = 65_536  # kept as long as the pool: 64 models or weights for each of 1,024 tenants
# Beyond that, new generations share the label without weights, and their chunks are evicted by last use.
MOST_WITH_WEIGHTS: Final = MAXIMUM_LABELS // 2

SaveNames: TypeAlias = Callable[[Names], None]
"""Adds names to those that were saved, all or nothing. If it raises, it is called again."""

_REQUESTS_REFUSED: Final = depot_counter("requests_refused", "Requests answered with an error")
_REQUESTS_FAILED: Final = depot_counter("requests_failed", "Requests that failed because of a bug")
ENDS_CUT: Final = depot_counter(
    "ends_cut", "Ends and uses of long prefixes applied only to the last chunks, because too many were waiting"
)

_MAXIMUM_EVENTS: Final = 20  # recent events in the status, which fit on a screen
MAXIMUM_ROWS: Final = 1024  # names that have their own counters
OTHERS: Final = "(others)"


def save_nothing(_names: Names) -> None:
    """Save no names: a `SaveNames` for a depot that no server will restore."""


class LabelTable:
    """Numbers names, and saves them before any record refers to them.

    The names are those of caches (spaces), and of tenants with their models and weights (labels).
    """

    def __init__(self, index: ChunkIndex, save: SaveNames) -> None:
        self.names: list[Label] = []  # by number
        self._index = index
        self._save_names = save
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._num_saved_spaces = self._num_saved_labels = 0
        self._is_full = False  # whether the last name found no room

    def restore(self, names: list[Label]) -> None:
        """Take over the labels of an earlier server. The spaces of the index count as saved."""
        for name in names:
            self._add(name)
        self._num_saved_spaces, self._num_saved_labels = len(self._index.spaces), len(self.names)

    def number_of(self, tenant: str, model: str, weights: str = "") -> int:
        """Return the label of a tenant, a model and its weights.

        Raises:
            Refused: there are too many, or a new name cannot be saved.
        """
        number = self._numbers.get((tenant, model, weights))
        if number is None:
            if weights and len(self.names) >= MOST_WITH_WEIGHTS:
                return self.number_of(tenant, model)
            if len(self.names) >= MAXIMUM_LABELS:
                text = f"the depot has {MAXIMUM_LABELS} tenants and models already: no room for {tenant!r}"
                raise self._refusal(ErrorCode.MALFORMED, text)
            number = self._add(Label(tenant, model, weights))
        if number >= self._num_saved_labels:
            self._save()
        return number

    def _add(self, name: Label) -> int:
        number = self._numbers[name] = len(self.names)
        self.names.append(name)
        self._index.quotas.add_label(number, name.tenant)
        return number

    def space_of(self, spec: m.CacheSpec) -> Space:
        """Return the space of a cache.

        Raises:
            Refused: there are too many, or a new one cannot be saved.
        """
        spaces = self._index.spaces
        if len(spaces) >= MAXIMUM_SPACES and all(space.spec != spec for space in spaces):
            raise Refused(ErrorCode.BAD_LAYOUT, f"more than {MAXIMUM_SPACES} different caches: start the depot --fresh")
        space = self._index.space(spec)
        if space.number >= self._num_saved_spaces:
            self._save()
        return space

    def _refusal(self, code: ErrorCode, text: str) -> Refused:
        """Return the refusal of a name, and log the first one: each request that needs the name is refused."""
        if not self._is_full:
            logger.warning("%s; stores that need it are declined", text)
        self._is_full = True
        return Refused(code, text)

    def _save(self) -> None:
        new_spaces = [space.spec for space in self._index.spaces[self._num_saved_spaces :]]
        try:
            self._save_names(Names(new_spaces, self.names[self._num_saved_labels :]))
        except OSError as error:
            text = f"no room for the name of a new tenant, model or cache beside the pool ({error}): free memory there"
            raise self._refusal(ErrorCode.OUT_OF_RANGE, text) from error
        self._is_full = False
        self._num_saved_spaces, self._num_saved_labels = len(self._index.spaces), len(self.names)


class CounterRows(dict[str, list[int]]):
    """Counters by names that clients chose. Beyond `MAXIMUM_ROWS` names, further ones share a row."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self._num_columns = num_columns

    def __missing__(self, name: str) -> list[int]:
        return self.setdefault(name if len(self) < MAXIMUM_ROWS else OTHERS, [0] * self._num_columns)


class Usage:
    """Counts the bytes and tokens that engines store, retrieve and look up."""

    def __init__(self) -> None:
        self.store_seconds = Histogram(0.0001)  # from plan to commit
        self.moved_bytes = CounterRows(2)  # [stored, retrieved], by kind of device
        self.tenant_tokens = CounterRows(3)  # [asked for, found in the pool, found in tiers]
        self.saved_seconds = 0.0  # time to compute the retrieved chunks


@dataclass(slots=True)
class DepotState:
    """The state that the handlers of one depot share.

    `tiering` is None until there is a tier or a peer, `movers` and `opener` only in tests. `watched` has functions by
    descriptor, to be called when it is readable. The loop knows those that are there when it starts.
    """

    index: ChunkIndex
    epoch: int
    clock: Callable[[], float]
    verify: m.Verify
    leases: LeaseTable
    labels: LabelTable
    usage: Usage = field(default_factory=Usage)
    counters: Counts = field(default_factory=Counts)
    background: Background = field(init=False)
    timers: Timers = field(default_factory=Timers)  # deadlines that must be met sooner than the sweep of the loop
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MAXIMUM_EVENTS))
    watched: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    numbers: "count[int]" = field(default_factory=lambda: count(1))  # for contexts and tickets
    tiering: Tiering | None = None
    opener: TierOpener | None = None
    movers: MoverTable | None = None
    accepts_stores: bool = True  # False while restoring and while stopping
    is_restoring: bool = False  # while an earlier server's table is being read
    is_draining: bool = False  # an operator asked for it

    def __post_init__(self) -> None:
        self.background = Background(self.counters)

    def fail(self, error: Exception) -> m.ErrorReply:
        """Count an exception of a request, and return the error reply."""
        if isinstance(error, (Refused, frames.FrameError, KeyFormatError)):
            self.counters[_REQUESTS_REFUSED] += 1
            code = ErrorCode.BAD_KEY if isinstance(error, KeyFormatError) else error.code
            return m.ErrorReply(self.epoch, code, str(error))
        logger.error("a request failed", exc_info=error)
        self.counters[_REQUESTS_FAILED] += 1
        return m.ErrorReply(self.epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    def revoke_later(self, rest: Iterator[int]) -> None:
        """Revoke the end of the rest of a long prefix that was used, unless too many wait."""
        if not self.background.ends.add(rest):
            self.counters[ENDS_CUT] += 1

    def note(self, event: str) -> None:
        """Add an event to the status."""
        self.events.append((self.clock(), event))
