"""The registered caches and schedulers of each session: their checks, and the workers that share a cache."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.index.entries import PartPlace
from kvdepot.index.tree import Space, digest_of
from kvdepot.keys import num_digests
from kvdepot.layout import MAXIMUM_CELLS, GroupKind, Part, Plane, blocks_per_chunk, mask_of
from kvdepot.pool.table import MAXIMUM_ENTRY_BYTES, OWNER_BYTES, Writer
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Refused, Task
from kvdepot.tiers.splits import other_splits
from kvdepot.wire import messages as m
from kvdepot.wire.status import ContextStatus

logger = logging.getLogger(__name__)

_ENTRIES_UNREADABLE: Final = depot_counter(
    "entries_unreadable", "Entries removed because a new engine with an equal cache spec has other page sizes"
)
_WORKERS_FALLEN_BACK: Final = depot_counter("workers_fallen_back", "Workers that fell back to copying by themselves")

WorkerKey = tuple[Writer, bytes]  # a process, and the owner field of one of its workers

MAXIMUM_CONTEXTS: Final = 64  # per session: an engine's process has one or two, a worker and a scheduler
# Requests that another node waits for, as many as lookups may wait. Stores of further ones are written to tiers in the
# usual order.
_MAXIMUM_HAND_OVERS: Final = 4096


@dataclass(slots=True)
class Context:
    """One registered worker or scheduler, on any device."""

    number: int
    session: int
    writer: Writer
    instance: str
    model: str
    space: Space
    registration: m.RegisterKVCache | None = None  # None: a scheduler
    groups: tuple[PartPlace, ...] = ()  # of a worker: the place of its entries in each layer group
    token_seconds: float = 0.0  # time to compute a token, as the scheduler reported last
    writing_bytes: int = 0  # of its stores that are neither committed nor aborted
    remark: str = ""  # of a scheduler: a line for operators
    served_model: str = ""  # of a scheduler: the model's name in requests
    weights: str = ""  # of a scheduler: the weights that its engine computes with
    wants_tokens: bool = False  # of a scheduler: whether it should report the tokens of chunks
    status: ContextStatus | None = None  # cached
    owner: bytes = field(init=False)  # identifies the worker within its process
    device: str = field(init=False)  # the kind of device that holds its blocks
    has_mover: bool = field(init=False)  # whether a mover copies for it, since it offered its memory

    def __post_init__(self) -> None:
        registration = self.registration
        self.owner = digest_of((self.instance, registration.rank if registration else -1))[:OWNER_BYTES]
        self.device = registration.device.partition(":")[0] if registration else ""
        self.has_mover = registration is not None and registration.offer is not None

    @property
    def worker_key(self) -> WorkerKey:
        """Identifies a worker across sessions. Registering again implies that its earlier copies have ended."""
        return self.writer, self.owner


class Workers:
    """The workers of one space. `check` refuses workers that share a layer of a group but differ in its page sizes."""

    def __init__(self, space: Space) -> None:
        self.by_instance: dict[str, dict[int, Context]] = {}
        self._space = space
        # The workers by group and layers of their part.
        self._alike: dict[tuple[int, int], dict[int, Context]] = {}
        self._places: dict[str, tuple[PartPlace, ...]] = {}  # by instance; a cache
        # A cache, by places: each new prompt asks for them, and 40 functions compute them.
        self._other_splits: dict[tuple[PartPlace, ...], list[tuple[PartPlace, ...]]] = {}

    def __iter__(self) -> Iterator[Context]:
        return (worker for mates in self.by_instance.values() for worker in mates.values())

    def add(self, context: Context) -> None:
        """Add a worker that has registered."""
        self.by_instance.setdefault(context.instance, {})[context.number] = context
        for place in context.groups:
            self._alike.setdefault((place.group, place.part >> 16), {})[context.number] = context
        self._places.clear()
        self._other_splits.clear()

    def remove(self, context: Context) -> None:
        """Remove a worker."""
        mates = self.by_instance[context.instance]
        del mates[context.number]
        if not mates:
            del self.by_instance[context.instance]
        for place in context.groups:
            alike = self._alike[place.group, place.part >> 16]
            del alike[context.number]
            if not alike:
                del self._alike[place.group, place.part >> 16]
        self._places.clear()
        self._other_splits.clear()

    def places(self, instance: str) -> tuple[PartPlace, ...]:
        """Return the parts of an engine, or another engine's if its workers lack a cell.

        Empty if all lack one.
        """
        for each in (instance, *self.by_instance):
            if places := self.own_places(each):
                return places
        return ()

    def own_places(self, instance: str) -> tuple[PartPlace, ...]:
        """Return the parts of an engine; empty if its workers lack a cell."""
        mates = self.by_instance.get(instance)
        if mates is None:
            return ()
        if instance not in self._places:
            self._places[instance] = self._places_of(mates)
        return self._places[instance]

    def other_splits(self, places: tuple[PartPlace, ...]) -> list[tuple[PartPlace, ...]]:
        """See `tiers.splits.other_splits`."""
        if places not in self._other_splits:
            attached = filter(None, map(self.own_places, self.by_instance))
            self._other_splits[places] = other_splits(self._space, places, list(dict.fromkeys(attached)))
        return self._other_splits[places]

    def _places_of(self, mates: dict[int, Context]) -> tuple[PartPlace, ...]:
        found = {(place.group, place.part): place for mate in mates.values() for place in mate.groups}
        missing = self._space.cells.copy()
        if sum(place.num_cells for place in found.values()) < sum(map(int.bit_length, missing)):
            return ()
        for group, part in found:
            missing[group] &= ~mask_of(part, self._space.heads[group])
        return () if any(missing) else tuple(place for _, place in sorted(found.items()))

    def first_of(self, instance: str) -> Context:
        """Return a worker of this instance, or of another instance if it has none."""
        mates = self.by_instance.get(instance) or next(iter(self.by_instance.values()))
        return next(iter(mates.values()))

    def check(self, groups: tuple[PartPlace, ...]) -> None:
        """Refuse a worker whose bytes for the same cells would differ from a registered worker's bytes.

        Raises:
            Refused: the text names the other worker's instance.
        """
        for (group, layers), alike in self._alike.items():
            mine, other = groups[group], next(iter(alike.values()))
            theirs = other.groups[group]
            if mine.differs(layers << 16, theirs.check):
                raise Refused(
                    ErrorCode.BAD_LAYOUT,
                    f"group {mine.group}, {Part.of(mine.part)}: {mine.num_bytes} bytes a chunk, but {other.instance}"
                    f" registered {theirs.num_bytes} with other pages under the same spec: tell the two apart by"
                    " CacheSpec.format",
                )


class ContextTable:
    """All contexts."""

    def __init__(self, state: DepotState) -> None:
        self.by_number: dict[int, Context] = {}
        self.chunk_bytes: dict[int, int] = {}  # bytes of a chunk in all cells and groups, by space
        self.token_seconds: dict[str, float] = {}  # by instance, as its scheduler reports
        self.handing_over: set[tuple[str, str]] = set()  # (instance, request) whose chunks another engine waits for
        self._state = state
        self._counts: Counter[int] = Counter()  # by session
        self._workers: dict[int, Workers] = {}  # by space
        # The weights that the schedulers of an instance named, the latest last. There are several if an engine opened a
        # new session before the end of the old one was noticed.
        self._weights: dict[str, list[str]] = {}

    def weights_of(self, instance: str) -> str:
        """Return the weights of an engine; "" if it named none or its scheduler is not attached."""
        named = self._weights.get(instance)
        return named[-1] if named else ""

    def add_worker(self, session: int, writer: Writer, request: m.RegisterKVCache) -> Context:
        """Register a worker.

        Raises:
            Refused: its session has too many contexts, or the registration contradicts itself.
        """
        self._check_room(session)
        groups = _check_worker(request)
        space = self._state.labels.space_of(request.spec)
        workers = self._workers.setdefault(space.number, Workers(space))
        workers.check(groups)
        self.chunk_bytes[space.number] = sum(
            place.num_bytes // place.num_cells * shape.layers * shape.heads
            for place, shape in zip(groups, request.spec.groups, strict=True)
        )
        number = next(self._state.numbers)
        context = Context(number, session, writer, request.instance, request.model, space, request, groups)
        self._add(context)
        workers.add(context)
        # The entries of an earlier server are not known yet: `restored` does it.
        if not self._state.is_restoring:
            self._remove_unreadable(context)
        logger.info(
            "registered %s rank %d of %d on %s (%s, model %s) as context %d",
            request.instance,
            request.rank,
            request.world_size,
            request.device,
            request.transfer_mode,
            request.model,
            number,
        )
        self._state.note(
            f"{request.instance} rank {request.rank} of {request.world_size} on {request.device} registered"
        )
        if request.fallback:
            self._state.counters[_WORKERS_FALLEN_BACK] += 1
        return context

    def add_scheduler(self, session: int, writer: Writer, request: m.RegisterScheduler) -> Context:
        """Register a scheduler.

        Raises:
            Refused: its session has too many contexts, or the registration contradicts itself.
        """
        self._check_room(session)
        check_version(request.protocol_version)
        _check_spec(request.spec)
        space = self._state.labels.space_of(request.spec)
        context = Context(
            next(self._state.numbers),
            session,
            writer,
            request.instance,
            request.model,
            space,
            remark=request.remark,
            served_model=request.served_model,
            weights=request.weights,
        )
        self._add(context)
        self._name_weights(context)
        logger.info(
            "registered scheduler of %s (model %s) as context %d", request.instance, request.model, context.number
        )
        return context

    def restored(self) -> None:
        """Note that the entries of an earlier server are known now."""
        for context in self.by_number.values():
            if context.registration is not None:
                self._remove_unreadable(context)

    def _remove_unreadable(self, worker: Context) -> None:
        self._state.background.unreadable.add(self._removing(worker))

    def _removing(self, worker: Context) -> Task:
        removed = 0
        for count in self._state.index.remove_unreadable(worker.space, worker.groups):
            removed += count
            self._state.counters[_ENTRIES_UNREADABLE] += count
            yield
        if removed:
            logger.warning(
                "removed %d entries that an earlier engine had written with other pages than %s under the same spec:"
                " tell the two apart by CacheSpec.format",
                removed,
                worker.instance,
            )

    def _add(self, context: Context) -> None:
        self.by_number[context.number] = context
        self._counts[context.session] += 1

    def _check_room(self, session: int) -> None:
        if self._counts[session] >= MAXIMUM_CONTEXTS:
            raise Refused(ErrorCode.OUT_OF_RANGE, f"a session has {MAXIMUM_CONTEXTS} contexts at most: unregister one")

    def remove(self, context: Context) -> Writer | None:
        """Remove a context, and end its leases and its mover. Return the mover if it may still be running."""
        del self.by_number[context.number]
        self._counts[context.session] -= 1
        if not self._counts[context.session]:
            del self._counts[context.session]
        if context.registration is None:
            self.token_seconds.pop(context.instance, None)
            self._forget_weights(context)
            self.handing_over = {each for each in self.handing_over if each[0] != context.instance}
        else:
            self._workers[context.space.number].remove(context)
        state = self._state
        count = state.leases.count_of(context.number)
        state.background.add_urgent(state.leases.end_context(context.number), count)
        return None if state.movers is None else state.movers.end(context.number)

    def change_weights(self, context: Context, request: m.ChangeWeights) -> m.Done:
        """Note that the engine of a scheduler has changed its weights.

        Raises:
            Refused: the context is a worker's.
        """
        if context.registration is not None:
            raise Refused(
                ErrorCode.UNKNOWN_CONTEXT, f"context {context.number} is a worker: only a scheduler names weights"
            )
        before = context.weights
        if before != request.weights:
            self._forget_weights(context)
            context.weights, context.status = request.weights, None
            self._name_weights(context)
        return m.Done(self._state.epoch, int(before != request.weights))

    def _name_weights(self, scheduler: Context) -> None:
        if scheduler.weights:
            self._weights.setdefault(scheduler.instance, []).append(scheduler.weights)

    def _forget_weights(self, scheduler: Context) -> None:
        if scheduler.weights:
            named = self._weights[scheduler.instance]
            named.remove(scheduler.weights)
            if not named:
                del self._weights[scheduler.instance]

    def begin_hand_over(self, instance: str, request_id: str) -> None:
        """Note that another engine waits for the chunks of a request. Beyond `_MAXIMUM_HAND_OVERS` it is ignored."""
        if len(self.handing_over) < _MAXIMUM_HAND_OVERS:
            self.handing_over.add((instance, request_id))

    def of_session(self, session: int) -> list[Context]:
        """Return all contexts of a session."""
        return [context for context in self.by_number.values() if context.session == session]

    def places(self, space: Space, instance: str = "") -> tuple[tuple[PartPlace, ...], str]:
        """Return the parts whose entries tiers keep for a space, and the model.

        The parts are those of `instance`, or of another engine. Empty while no engine has a worker for each cell.
        """
        workers = self._workers.get(space.number)
        places = () if workers is None else workers.places(instance)
        return (places, workers.first_of(instance).model) if workers is not None and places else ((), "")

    def other_splits(self, space: Space, places: tuple[PartPlace, ...]) -> list[tuple[PartPlace, ...]]:
        """Return the other ways in which engines may divide the layers and heads of a space; none without workers."""
        workers = self._workers.get(space.number)
        return [] if workers is None else workers.other_splits(places)

    def can_store(self, space: Space, instance: str) -> bool:
        """Return whether an engine has a worker for each layer and head of a space."""
        workers = self._workers.get(space.number)
        return workers is not None and bool(workers.own_places(instance))

    def owners(self, space: Space) -> list[tuple[str, str]]:
        """Return the models, each with its weights, whose workers share a space.

        In tiers, each model with its weights has its own keys.
        """
        workers = self._workers.get(space.number, ())
        return list(dict.fromkeys((worker.model, self.weights_of(worker.instance)) for worker in workers))


def check_run(context: Context, digests: bytes, covered: tuple[int, ...], most_entries: int) -> int:
    """Return the number of chunks of a run that a worker stores or retrieves, the last `covered[g]` in group `g`.

    Raises:
        KeyFormatError: the bytes are not whole digests.
        Refused: the context is not a worker's, or the counts do not fit.
    """
    num_chunks = num_digests(digests)
    if context.registration is None:
        raise Refused(
            ErrorCode.UNKNOWN_CONTEXT, f"context {context.number} is a scheduler: only a worker has blocks to move"
        )
    if len(covered) != len(context.groups) or max(covered) > num_chunks:
        raise Refused(ErrorCode.BAD_LAYOUT, f"{covered} of {num_chunks} chunks for {len(context.groups)} layer groups")
    if sum(covered) > max(most_entries, len(covered)):
        raise Refused(
            ErrorCode.OUT_OF_RANGE,
            f"{sum(covered)} entries at once: ask for at most {most_entries}, in several requests",
        )
    return num_chunks


def check_version(version: int) -> None:
    """Refuse a protocol version that this server does not support.

    Raises:
        Refused: the text names the supported version.
    """
    reason = m.check_protocol_version(version)
    if reason:
        logger.warning("%s", reason)
        raise Refused(ErrorCode.VERSION_MISMATCH, reason)


def _check_spec(spec: m.CacheSpec) -> None:
    """Refuse a cache whose chunks are not whole rows, or whose windows do not fit its groups.

    Raises:
        Refused: the text names the first wrong group.
    """
    for number, group in enumerate(spec.groups):
        if group.kind is not GroupKind.RECURRENT:
            _check_blocks(number, spec.chunk_tokens, group.row_tokens)
        if group.layers * group.heads > MAXIMUM_CELLS:
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {group.layers} layers of {group.heads} heads")
        if (group.kind is GroupKind.SLIDING_WINDOW) != (group.window_tokens > 0):
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {group.kind} with a window of {group.window_tokens}")


def _check_worker(request: m.RegisterKVCache) -> tuple[PartPlace, ...]:
    """Return the place of a worker's entries in each layer group.

    Raises:
        Refused: the version, spec, details, rank or offer is invalid.
    """
    check_version(request.protocol_version)
    _check_spec(request.spec)
    groups = _groups_of(request)
    if request.rank >= request.world_size:
        raise Refused(ErrorCode.BAD_LAYOUT, f"rank {request.rank} of {request.world_size}")
    _check_offer(request)
    return groups


def _groups_of(request: m.RegisterKVCache) -> tuple[PartPlace, ...]:
    spec = request.spec
    if len(request.details) != len(spec.groups):
        raise Refused(ErrorCode.BAD_LAYOUT, f"{len(request.details)} details for {len(spec.groups)} layer groups")
    groups: list[PartPlace] = []
    for number, (shape, detail) in enumerate(zip(spec.groups, request.details, strict=True)):
        part, plane = Part.of(detail.part), Plane(shape.layers, shape.heads)
        if not part.is_in(plane):
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {part} of {plane}")
        block_tokens = shape.row_tokens * detail.rows
        if shape.kind is not GroupKind.RECURRENT:
            _check_blocks(number, spec.chunk_tokens, block_tokens)
        blocks = blocks_per_chunk(shape.kind, block_tokens, shape.window_tokens, spec.chunk_tokens)
        size = blocks * sum(detail.page_sizes_bytes)
        if size > MAXIMUM_ENTRY_BYTES:
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: a chunk has {size} bytes")
        # Independent of the number of rows per block. Without the rows, entries of recurrent states of two sizes would
        # pass for each other: every lookup would find them, and no retrieve could use them.
        cell = blocks * detail.rows, _sizes_of_cell(number, part, detail)
        check = int.from_bytes(digest_of(cell)[:4], "little")
        groups.append(PartPlace(number, detail.part, size, check))
    return tuple(groups)


def _check_blocks(number: int, chunk_tokens: int, block_tokens: int) -> None:
    """Refuse chunks that do not consist of whole blocks."""
    if chunk_tokens % block_tokens:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"group {number}: chunks of {chunk_tokens} tokens are not whole blocks of {block_tokens}",
        )


def _sizes_of_cell(number: int, part: Part, detail: m.GroupDetail) -> tuple[int, ...]:
    """Return the bytes that one row of each page has of one cell. They locate a cell in entries of other parts."""
    sizes = detail.page_sizes_bytes
    of_layer = sizes[: len(sizes) // part.num_layers]
    if of_layer * part.num_layers != sizes or any(size % (part.num_heads * detail.rows) for size in of_layer):
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"group {number}: {len(sizes)} pages of {sorted(set(sizes))[:9]} bytes are not {detail.rows} rows of each"
            f" cell of {part}",
        )
    return tuple(size // (part.num_heads * detail.rows) for size in of_layer)


def _check_offer(request: m.RegisterKVCache) -> None:
    """Refuse an offer that contradicts the registration. The mover checks it against the device."""
    offer = request.offer
    if offer is None:
        return
    if [len(pages) for pages in offer.pages] != [len(detail.page_sizes_bytes) for detail in request.details]:
        raise Refused(ErrorCode.BAD_LAYOUT, "the pages of an offer do not match the layer groups")
    if len(set(offer.allocations)) != len(offer.allocations):
        raise Refused(ErrorCode.BAD_LAYOUT, "an offer that names an allocation twice")
    for pages, detail in zip(offer.pages, request.details, strict=True):
        for page, size in zip(pages, detail.page_sizes_bytes, strict=True):
            if page.allocation >= len(offer.allocations) or page.stride_bytes < size:
                raise Refused(
                    ErrorCode.BAD_LAYOUT,
                    f"an offer with pages of {size} bytes, {page.stride_bytes} apart, in allocation"
                    f" {page.allocation} of {len(offer.allocations)}",
                )
