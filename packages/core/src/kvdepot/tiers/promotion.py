"""Promotes prefixes from tiers into the pool, for lookups that the pool can answer only in part.

`Promotion.run` promotes one prefix. It is a generator that submits jobs and pauses until their parts arrive. `Reading`,
its second half, reads the entries. `Promotions` resumes the generators whose parts have arrived.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.index.entries import PartPlace, Wanted
from kvdepot.index.visibility import Match, usable_prefix
from kvdepot.layout import GroupKind
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import MOST_CHUNKS_A_RUN
from kvdepot.tiers.names import by_run
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.reading import QUESTIONS_A_STEP, IsOver, Pause, Prefix, PromotionContext, Reading, log_decision
from kvdepot.tiers.splits import other_splits
from kvdepot.tiers.tier_state import TierState

_PROMOTIONS_NOT_WORTH_IT: Final = depot_counter(
    "promotions_not_worth_it", "Promotions skipped because the engine computes faster than the tier reads"
)
_PROMOTIONS_LATE: Final = depot_counter("promotions_late", "Lookups that the tiers did not answer in time")

MAXIMUM_QUESTIONS: Final = (
    4096  # keys per question: eight calls of `queue._QUESTIONS_A_CALL`, two for each of 4 threads
)
MAXIMUM_PROMOTIONS: Final = 4096  # at a time: each turn checks all deadlines


@dataclass(slots=True, eq=False)
class Waiter:
    """The lookup that waits for a promotion."""

    seconds: float  # the longest wait
    deadline: float
    on_answer: Callable[[], None] | None  # None once the lookup is answered

    def answer(self) -> None:
        """Answer the lookup, unless it was answered already."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()


class Promotion:
    """The promotion of one prefix.

    Args:
        context: shared by all promotions.
        tiers: fastest first; the list may grow.
        prefix: the chunks to promote.
        found: the number of leading chunks that the pool has.
        waiter: the lookup. It is answered when `run` ends or its time is up.
        wake: called when `run` can continue.
    """

    def __init__(
        self,
        context: PromotionContext,
        tiers: Sequence[TierState],
        prefix: Prefix,
        found: int,
        waiter: Waiter,
        wake: "Callable[[Promotion], object]",
    ) -> None:
        self.prefix = prefix
        self.waiter = waiter
        self.steps = self.run()
        self._context = context
        self._index = context.index
        self._tiers = tiers
        self._found = found
        self._wake = wake
        self._is_stopped = False
        self._asked: TierQueue | None = None  # the tier with the current question
        self._reading: Reading | None = None
        self._num_bytes = 0  # of ended readings

    @property
    def has_landed(self) -> bool:
        """Whether a tier has delivered any entry."""
        return bool(self._num_bytes or (self._reading is not None and self._reading.num_bytes))

    @property
    def waits_for(self) -> TierQueue | None:
        """The tier that is processing its question or its reads."""
        return self._asked or (None if self._reading is None else self._reading.waits_for)

    def stop(self) -> None:
        """Begin no further reads, and seal no more entries."""
        self._is_stopped = True
        if self._reading is not None:
            self._reading.is_stopped = True

    def run(self) -> Generator[Pause, IsOver, None]:
        """Ask one tier after the other until the prefix is in the pool, the lookup is answered, or no tier is left.

        If a tier had all chunks of a question, or an engine of another size may have stored the chunks that follow, ask
        the tier again for those.
        """
        tiers, num_chunks, number, is_end = self._tiers, self.prefix.num_chunks, 0, False
        while number < len(tiers) and not self._is_stopped:
            before = self._found
            limit = yield from self._bring_from(tiers[number], is_end=is_end)
            if limit and (self._found == num_chunks or self.waiter.on_answer is None):
                return
            is_end = limit == num_chunks and self._found > before and bool(self._other_splits())
            if not limit or self._found == before or (limit == num_chunks and not is_end):
                number += 1

    def _bring_from(self, tier: TierState, *, is_end: bool) -> Generator[Pause, IsOver, int]:
        """Read from one tier. Return the number of leading chunks it was asked for, 0 if it read nothing.

        First ask only for the first missing chunk, so that a new prompt costs one small question, however long it is.
        If the tier lacks it, or is known to lack it (`is_end`), ask for it in the parts of engines of other sizes. If
        all groups have windows, no chunk needs the one before it, so both questions cover the whole prompt.
        """
        space = self.prefix.space
        if tier.queue.is_suspended:
            self._log(tier, "it is suspended")
            return 0
        entries = self._missing_of(self._found) if space.full_mask else []
        entries = [(chunk, place) for chunk, place in entries if space.full_mask & 1 << place.group]
        limit, is_first = self._found + 1, bool(entries)
        there: list[bool] | None = []
        if is_first:
            there = None if is_end else (yield from self._ask(tier, entries))
            if there is None or not all(there):
                if there is None and not is_end:
                    self._log(tier, "it did not answer in time")
                    return 0
                if not (yield from self._find_split(tier, entries)):
                    self._log(tier, "it does not have chunk %d", self._found)
                    return 0
                is_first, there = False, []
        elif is_end and space.full_mask:
            return 0
        prefix = self.prefix
        if not is_first or space.windows or limit < prefix.num_chunks:
            limit = min(prefix.num_chunks, self._found + max(1, MAXIMUM_QUESTIONS // len(prefix.places)))
            entries = yield from self._missing_before(limit)
            there = [False] * len(entries) if is_end and not space.full_mask else (yield from self._ask(tier, entries))
            if there is None:
                self._log(tier, "it did not answer in time")
                return 0
        length = yield from self._usable_prefix(limit, entries, there)
        if length <= self._found and not space.full_mask and (yield from self._find_split(tier, entries)):
            entries = yield from self._missing_before(limit)
            there = yield from self._ask(tier, entries)
            length = yield from self._usable_prefix(limit, entries, there or [False] * len(entries))
        if length <= self._found or self._is_stopped:
            self._log(tier, "it has no longer prefix, or the promotion was stopped")
            return 0
        wanted, num_bytes = yield from self._wanted(length)
        num_tokens = (length - self._found) * space.spec.chunk_tokens
        is_coming = not entries  # another promotion reads all of it: wait for that one
        if not is_coming and not tier.is_worth_reading(num_bytes, num_tokens * prefix.token_seconds):
            self._context.counters[_PROMOTIONS_NOT_WORTH_IT] += 1
            why = "declined: the engine computes %d tokens faster than %d bytes are read"
            self._log(tier, why, num_tokens, num_bytes)
            return 0
        if is_coming:
            self._log(tier, "waits for chunks %d to %d, which another promotion reads", self._found, length)
        else:
            self._log(tier, "reads chunks %d to %d, %d bytes", self._found, length, num_bytes)
        yield from self._read(tier, wanted)
        if self._found < length:
            self._log(tier, "brought no chunk from chunk %d on", self._found)
        return limit

    def _find_split(self, tier: TierState, missing: Sequence[Wanted]) -> Generator[Pause, IsOver, bool]:
        """Switch to the split in which the tier has the deepest of some missing chunks. Return False if it has none.

        One part stands for its whole split; the other parts are asked for with the chunks that follow. Of many chunks,
        a sample is asked for, so that this asks for no more keys than there are missing entries.
        """
        splits = self._other_splits()
        if not splits or not missing:
            return False
        group, chunks = missing[0][1].group, list(dict.fromkeys(chunk for chunk, _ in missing))
        firsts = [(split, next(place for place in split if place.group == group)) for split in splits]
        step = -(-len(splits) * len(chunks) // len(missing))
        asked = [(chunk, *first) for chunk in chunks[::-step] for first in firsts]
        there = yield from self._ask(tier, [(chunk, place) for chunk, _, place in asked])
        for (_, split, _), is_there in zip(asked, there or [], strict=False):
            if is_there:
                self.prefix = replace(self.prefix, places=split)
                return True
        return False

    def _other_splits(self) -> list[list[PartPlace]]:
        prefix = self.prefix
        return other_splits(prefix.space, prefix.places, self._context.splits_of(prefix.space))

    def _log(self, tier: TierState, decision: str, *numbers: int) -> None:
        log_decision(self.prefix, tier.queue, decision, *numbers)

    def _ask(self, tier: TierState, entries: Sequence[Wanted]) -> Generator[Pause, IsOver, list[bool] | None]:
        """Return which entries the tier claims to have. None if it is suspended or late."""
        prefix, there = self.prefix, [False] * len(entries)
        if not entries:
            return there
        # A run's entries can be found only with the entries before them, which may be in the pool already.
        before = [] if not tier.queue.keeps_runs else self._before(entries)
        asked = [*before, *entries]
        keys: list[bytes] = []
        for number, (chunk, place) in enumerate(asked, 1):
            keys.append(self._context.keys.key(prefix.label, prefix.space, place, prefix.digests, chunk))
            if number % QUESTIONS_A_STEP == 0:
                yield Pause.STEP
        order = by_run(keys)
        num_before = len(before)

        def on_part(part: JobPart) -> None:
            for number, is_there in zip(order[part.first :], part.outcomes, strict=False):
                if number >= num_before:
                    there[number - num_before] = is_there
            if part.is_last:
                self._wake(self)

        keys = [keys[number] for number in order]
        job = Job(JobKind.CONTAINS, keys, on_part=on_part, on_late=lambda: self._wake(self))
        if not tier.queue.submit(job):
            return None
        self._asked = tier.queue
        while job.num_left and not job.is_late:
            yield Pause.WAIT
        self._asked = None
        if job.is_late:
            self._is_stopped |= self.waiter.on_answer is None
            return None
        return there

    def _before(self, entries: Sequence[Wanted]) -> list[Wanted]:
        """Return the earlier entries of a question's runs that are not in the question."""
        full, asked = self.prefix.space.full_mask, {(chunk, id(place)) for chunk, place in entries}
        first = entries[0][0] - entries[0][0] % MOST_CHUNKS_A_RUN
        places = {id(place): place for _, place in entries}
        chain = itertools.product(range(first, entries[-1][0] + 1), places.values())
        return [each for each in chain if full & 1 << each[1].group and (each[0], id(each[1])) not in asked]

    # --- the choice -----------------------------------------------------------------------------------------------

    def _missing_of(self, chunk: int) -> list[Wanted]:
        """Return the entries of a chunk that the pool lacks and a longer prefix may need."""
        index, space = self._index, self.prefix.space
        node = index.nodes.find(space, self.prefix.digest(chunk), chunk)
        known = space.full_mask if chunk < self._found else 0
        return [
            (chunk, place)
            for place in self.prefix.places
            if not known & 1 << place.group and (node is None or not index.entries.has(node, place.group, place.part))
        ]

    def _missing_before(self, limit: int) -> Generator[Pause, IsOver, list[Wanted]]:
        windows = max((chunks for _, chunks in self.prefix.space.windows), default=0)
        first = max(0, self._found + 1 - windows) if windows else self._found
        chunks_a_step = max(1, QUESTIONS_A_STEP // len(self.prefix.places))
        entries: list[Wanted] = []
        for start in range(first, limit, chunks_a_step):
            if start > first:
                yield Pause.STEP
            for chunk in range(start, min(start + chunks_a_step, limit)):
                entries += self._missing_of(chunk)
        return entries

    def _usable_prefix(
        self, limit: int, entries: Sequence[Wanted], there: Sequence[bool]
    ) -> Generator[Pause, IsOver, int]:
        """Return how many leading chunks are usable once all entries in the tier or on their way have arrived."""
        index, prefix, space = self._index, self.prefix, self.prefix.space
        in_tier: set[tuple[int, int, int]] = set()
        for number, ((chunk, place), is_there) in enumerate(zip(entries, there, strict=True)):
            if number and number % QUESTIONS_A_STEP == 0:
                yield Pause.STEP
            if is_there:
                in_tier.add((chunk, place.group, place.part))
        by_group: dict[int, list[PartPlace]] = {}
        for place in prefix.places:
            by_group.setdefault(place.group, []).append(place)

        def has(chunk: int, group: int) -> bool:
            node = index.nodes.find(space, prefix.digest(chunk), chunk)
            for place in by_group[group]:
                if (chunk, group, place.part) in in_tier:
                    continue
                entry = None if node is None else index.entries.find(node, group, place.part)
                if entry is None:
                    if node is None or not index.entries.cover(node, place):
                        return False
                elif not (self._context.is_sealed(entry) or self._context.is_coming[entry]):
                    return False
            return True

        full = [group for group in by_group if space.full_mask & 1 << group]
        windows = [(group, space.chunks_needed[group]) for group in by_group if not space.full_mask & 1 << group]
        length = self._found if full else limit
        while length < limit:
            end = min(limit, length + QUESTIONS_A_STEP)
            length = usable_prefix(end, has, full, start=length)
            if length < end:
                break
            yield Pause.STEP
        return usable_prefix(length, has, windows=windows, start=self._found)

    def _wanted(self, length: int) -> Generator[Pause, IsOver, tuple[deque[Wanted], int]]:
        """Return the entries that a prefix of this length needs and the pool lacks, with their total payload bytes."""
        space, places = self.prefix.space, self.prefix.places
        first_of = [
            self._found if group.kind is GroupKind.FULL_ATTENTION else max(0, length - chunks)
            for group, chunks in zip(space.spec.groups, space.chunks_needed, strict=True)
        ]
        wanted: deque[Wanted] = deque()
        for chunk in range(min(first_of), length):
            if chunk and chunk % QUESTIONS_A_STEP == 0:
                yield Pause.STEP
            wanted.extend((chunk, place) for place in places if chunk >= first_of[place.group])
        return wanted, sum((length - first_of[place.group]) * place.num_bytes for place in places)

    def _read(self, tier: TierState, wanted: deque[Wanted]) -> Generator[Pause, IsOver, None]:
        """Read entries, then update the tier's speed and the length of the pool's prefix, and report its new chunks."""
        context, waiter, began = self._context, self.waiter, self._context.clock()
        self._reading = reading = Reading(context, self.prefix, tier, wanted, lambda: self._wake(self))
        reading.is_stopped = self._is_stopped
        yield from reading.run()
        self._reading = None
        self._num_bytes += reading.num_bytes
        if reading.num_bytes:
            now = context.clock()
            tier.was_read(reading.num_bytes, now - began)
            has_waited = now - waiter.deadline + waiter.seconds
            if waiter.on_answer is not None and has_waited <= context.patience_seconds:
                tier.queue.breaker.was_in_time()
        visibility, prefix, before = self._index.visibility, self.prefix, self._found
        self._found = max(before, visibility.match(prefix.space, prefix.digests).num_chunks)
        for start in range(before, self._found, QUESTIONS_A_STEP):
            if start > before:
                yield Pause.STEP
            visibility.promoted(prefix.space, prefix.digests, start, min(start + QUESTIONS_A_STEP, self._found))


class Promotions:
    """All promotions under way.

    Args:
        context: shared by all of them.
        tiers: fastest first; the list may grow.
    """

    def __init__(self, context: PromotionContext, tiers: Sequence[TierState]) -> None:
        self._context = context
        self._tiers = tiers
        self._pins: dict[Promotion, tuple[int, ...]] = {}  # of promotions that have not ended
        self._ready: dict[Promotion, None] = {}  # promotions that can continue, in order

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_coming(self) -> int:
        """Entries that are being read."""
        return self._context.num_coming

    @property
    def is_full(self) -> bool:
        """Whether the maximum number is reached."""
        return len(self._pins) >= MAXIMUM_PROMOTIONS

    def begin(self, prefix: Prefix, match: Match, waiter: Waiter) -> None:
        """Promote the chunks after the match, which stays pinned until the end."""
        self._context.index.evictor.pin(match.nodes)
        promotion = Promotion(self._context, self._tiers, prefix, match.num_chunks, waiter, self._wake)
        self._pins[promotion] = match.nodes
        self._resume(promotion, None)

    def stop(self, is_meant: Callable[[int], bool]) -> None:
        """Stop the promotions of the labels for which `is_meant` holds."""
        for promotion in self._pins:
            if is_meant(promotion.prefix.label):
                promotion.stop()

    def turn(self, is_over: IsOver) -> None:
        """Answer lookups whose time is up. Resume promotions that can continue, until `is_over` but at least one."""
        for promotion, waiter in self._late(self._context.clock()):
            self._context.counters[_PROMOTIONS_LATE] += 1
            queue = promotion.waits_for
            if queue is not None and not promotion.has_landed and waiter.seconds >= self._context.patience_seconds:
                queue.breaker.was_too_late(self._context.patience_seconds)
            log_decision(promotion.prefix, queue, "the lookup's time is up before the last chunk has arrived")
            waiter.answer()
            if is_over():
                break
        while self._ready:
            promotion = next(iter(self._ready))
            del self._ready[promotion]
            self._resume(promotion, is_over)
            if is_over():
                break

    def _late(self, now: float) -> list[tuple[Promotion, Waiter]]:
        return [(p, p.waiter) for p in self._pins if p.waiter.on_answer is not None and p.waiter.deadline <= now]

    def next_deadline(self) -> float | None:
        """Return the time by which `turn` must be called; None for never."""
        if self._ready:
            return self._context.clock()
        waiters = [promotion.waiter for promotion in self._pins]
        return min((waiter.deadline for waiter in waiters if waiter.on_answer is not None), default=None)

    def _wake(self, promotion: Promotion) -> None:
        if promotion in self._pins:
            self._ready[promotion] = None

    def _resume(self, promotion: Promotion, is_over: IsOver | None) -> None:
        try:
            pause = next(promotion.steps) if is_over is None else promotion.steps.send(is_over)
        except StopIteration:
            self._end(promotion)
        except Exception:  # a bug: answer the lookup with the chunks in the pool
            self._end(promotion)
            raise
        else:
            if pause is Pause.STEP:
                self._ready[promotion] = None

    def _end(self, promotion: Promotion) -> None:
        self._ready.pop(promotion, None)
        pins = self._pins.pop(promotion)
        promotion.waiter.answer()
        self._context.index.evictor.unpin(pins)
