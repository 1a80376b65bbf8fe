"""Promotes prefixes from tiers into the pool, for lookups that the pool can answer only in part.

`Promotion.run` promotes one prefix. It is a move (`moves`) that submits jobs and waits until their parts arrive.
`Reading`, its second half, reads the entries.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Final, TypeAlias

from kvdepot.counting import depot_counter
from kvdepot.index.entries import PartPlace, Wanted
from kvdepot.index.visibility import Match, usable_prefix
from kvdepot.keys import digest_at, num_digests
from kvdepot.layout import GroupKind
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.moves import Moves, Pause, Steps
from kvdepot.tiers.names import by_run, chunks_of_run
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.reading import QUESTIONS_A_STEP, Prefix, PromotionContext, Reading, log_decision
from kvdepot.tiers.tier_state import TierState
from kvdepot.timers import Timers

logger = logging.getLogger(__name__)

_PROMOTIONS_NOT_WORTH_IT: Final = depot_counter(
    "promotions_not_worth_it", "Promotions skipped because the engine computes faster than the tier reads"
)
_PROMOTIONS_LATE: Final = depot_counter("promotions_late", "Lookups that the tiers did not answer in time")

MAXIMUM_QUESTIONS: Final = (
    4096  # keys per question: eight calls of `queue._QUESTIONS_A_CALL`, two for each of 4 threads
)
_RUNS_A_REQUEST: Final = 8  # in such a question, an object store asks for one run in so many (`object._SAMPLED`)
MAXIMUM_PROMOTIONS: Final = 4096  # at a time: each keeps its prefix in memory, 32 bytes a chunk

_Claims: TypeAlias = set[tuple[int, int, int]]  # entries that a tier claims to have: chunk, group, part


def _claim(wanted: Wanted) -> tuple[int, int, int]:
    chunk, place = wanted
    return chunk, place.group, place.part


class Promotion:
    """The promotion of one prefix, and the lookup that waits for it.

    Args:
        context: shared by all promotions.
        tiers: fastest first; the list may grow.
        prefix: the chunks to promote.
        found: the number of leading chunks that the pool has.
        wait_seconds: the longest wait of the lookup.
        on_answer: answers the lookup.
        wake: called when `run` can continue.
    """

    def __init__(
        self,
        context: PromotionContext,
        tiers: Sequence[TierState],
        prefix: Prefix,
        found: int,
        wait_seconds: float,
        on_answer: Callable[[], None],
        wake: "Callable[[Promotion], None]",
    ) -> None:
        self.prefix = prefix
        self.wait_seconds = wait_seconds
        self.began = context.clock()
        self.pins: tuple[int, ...] = ()
        self.timer = 0  # ends the lookup's wait
        self.on_answer: Callable[[], None] | None = on_answer  # None once the lookup is answered
        self._context = context
        self._index = context.index
        self._tiers = tiers
        self._found = found
        self._wake = partial(wake, self)
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

    def answer(self) -> None:
        """Answer the lookup, unless it was answered already."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()

    def stop(self) -> None:
        """Begin no further reads, and seal no more entries."""
        self._is_stopped = True
        if self._reading is not None:
            self._reading.is_stopped = True

    def run(self) -> Steps[None]:
        """Ask one tier after the other until the prefix is in the pool, the lookup is answered, or no tier is left."""
        number, num_chunks = 0, num_digests(self.prefix.digests)
        while number < len(self._tiers) and not self._is_stopped:
            before = self._found
            limit = yield from self._bring_from(self._tiers[number])
            # Once the lookup is answered, nobody waits: a read from a further tier would only take room in the pool.
            if limit and (self._found == num_chunks or self.on_answer is None):
                return
            # It may have more: chunks after those it was asked for, or the next ones in the parts of an engine of
            # another size. Without asking again, a long prompt would end at the limit of one question.
            if self._found == before or (limit == num_chunks and not self._other_splits()):
                number += 1

    def _bring_from(self, tier: TierState) -> Steps[int]:
        """Read from one tier. Return the number of leading chunks it was asked for, 0 if it read nothing."""
        prefix, space = self.prefix, self.prefix.space
        if tier.queue.is_suspended:
            self._log(tier, "it is suspended")
            return 0
        if space.full_mask:
            # A new prompt costs one small question, however long it is. Asked for all its chunks at once, a tier that
            # has none of them would be busy with thousands of keys.
            first = self._missing_of(self._found, space.full_mask)
            last = self._last_run(tier) if tier.queue.keeps_runs else []
            claims = yield from self._ask(tier, [*first, *last])
            has_all = claims is not None and len(claims) == len(first) + len(last)
            is_there = has_all or (claims is not None and bool(last) and claims.issuperset(map(_claim, first)))
            is_whole = bool(last) and claims is not None and claims.issuperset(map(_claim, last))
        else:
            # No chunk needs the one before it, so a tier without the first one may still have the end.
            first, is_whole = (yield from self._missing_before(self._limit(tier))), False
            claims = yield from self._ask(tier, first)
            is_there = claims is not None and (yield from self._usable_prefix(self._limit(tier), claims)) > self._found
        if claims is None:
            self._log(tier, "it did not answer in time")
            return 0
        if not is_there:
            if not (yield from self._find_split(tier, first)):
                self._log(tier, "it does not have chunk %d", self._found)
                return 0
            first, is_whole = [], False  # these were of another split
        limit = self._limit(tier)
        missing = yield from self._missing_before(limit)
        # If nothing else is missing, the first question has the answer. Without this, a prompt that lacks one chunk
        # would be asked for twice.
        if is_whole:
            # A run is written after the runs before it, so the tier has, or had, all of them.
            claims.update(map(_claim, missing))
        elif len(missing) > len(first):
            claims = yield from self._ask(tier, missing)
            if claims is None:
                self._log(tier, "it did not answer in time")
                return 0
        length = yield from self._usable_prefix(limit, claims)
        if length <= self._found or self._is_stopped:
            self._log(tier, "it has no longer prefix, or the promotion was stopped")
            return 0
        wanted, num_bytes = yield from self._wanted(length)
        num_tokens = (length - self._found) * space.spec.chunk_tokens
        if not missing:
            # Another promotion reads all of it already: to decline would save no read.
            self._log(tier, "waits for chunks %d to %d, which another promotion reads", self._found, length)
        elif tier.is_worth_reading(num_bytes, num_tokens * prefix.token_seconds):
            self._log(tier, "reads chunks %d to %d, %d bytes", self._found, length, num_bytes)
        else:
            self._context.counters[_PROMOTIONS_NOT_WORTH_IT] += 1
            why = "declined: the engine computes %d tokens faster than %d bytes are read"
            self._log(tier, why, num_tokens, num_bytes)
            return 0
        yield from self._read(tier, wanted)
        if self._found < length:
            self._log(tier, "brought no chunk from chunk %d on", self._found)
        return limit

    @cached_property
    def _run_chunks(self) -> int:
        """The chunks of the longest runs."""
        prefix = self.prefix
        return max(chunks_of_run(prefix.space, each.group, each.num_bytes) for each in prefix.places)

    def _last_run(self, tier: TierState) -> list[Wanted]:
        """Return the missing entries of the prefix's last run in a tier of runs, unless it is the first one.

        Asked for with the first chunk, it saves a whole prefix the round trip of a second question.
        """
        if self.prefix.space.window_mask:
            return []
        limit = self._limit(tier)
        start = (limit - 1) // self._run_chunks * self._run_chunks
        return (
            [each for chunk in range(start, limit) for each in self._missing_of(chunk)] if start > self._found else []
        )

    def _limit(self, tier: TierState) -> int:
        """Return the number of leading chunks of which one question can ask for all entries that are not found."""
        prefix, most = self.prefix, MAXIMUM_QUESTIONS * (_RUNS_A_REQUEST if tier.queue.keeps_runs else 1)
        return min(num_digests(prefix.digests), self._found + max(1, most // len(prefix.places)))

    def _find_split(self, tier: TierState, missing: Sequence[Wanted]) -> Steps[bool]:
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
        claims = yield from self._ask(tier, [(chunk, place) for chunk, _, place in asked])
        for chunk, split, place in asked:
            if claims and (chunk, place.group, place.part) in claims:
                self.prefix = replace(self.prefix, places=split)
                return True
        return False

    def _other_splits(self) -> Sequence[tuple[PartPlace, ...]]:
        return self._context.other_splits(self.prefix.space, self.prefix.places)

    def _log(self, tier: TierState, decision: str, *numbers: int) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            log_decision(self.prefix, tier.queue, decision, *numbers)

    def _ask(self, tier: TierState, entries: Sequence[Wanted]) -> Steps[_Claims | None]:
        """Return the entries that the tier claims to have. None if it is suspended or late."""
        prefix, claims = self.prefix, _Claims()
        if not entries:
            return claims
        # A run's entries can be found only with the entries before them, which may be in the pool already.
        before = [] if not tier.queue.keeps_runs else self._before(entries)
        asked = [*before, *entries]
        keys: list[bytes] = []
        for number, (chunk, place) in enumerate(asked, 1):
            keys.append(self._context.keys.key(prefix.label, prefix.space, place, prefix.digests, chunk))
            if number % QUESTIONS_A_STEP == 0:
                yield Pause.STEP
        there = tier.queue.ask_now(keys)
        if there is not None:
            # The depot answers a new prompt within the turn. By a job, it would answer after the next one.
            claimed = itertools.compress(asked, there)
            return {(chunk, place.group, place.part) for chunk, place in claimed}
        order = by_run(keys)
        num_before = len(before)

        def on_part(part: JobPart) -> None:
            for number, is_there in zip(order[part.first :], part.outcomes, strict=False):
                if is_there and number >= num_before:
                    chunk, place = asked[number]
                    claims.add((chunk, place.group, place.part))
            if part.is_last:
                self._wake()

        keys = [keys[number] for number in order]
        job = Job(JobKind.CONTAINS, keys, on_part=on_part, on_late=self._wake)
        if not tier.queue.submit(job):
            return None
        self._asked = tier.queue
        while job.num_left and not job.is_late:
            yield Pause.WAIT
        self._asked = None
        if job.is_late:
            # Nobody waits for the promotion any more: the next tier would be asked in vain.
            self._is_stopped |= self.on_answer is None
            return None
        return claims

    def _before(self, entries: Sequence[Wanted]) -> list[Wanted]:
        """Return the earlier entries of a question's runs that are not in the question."""
        full, asked = self.prefix.space.full_mask, {(chunk, id(place)) for chunk, place in entries}
        ends = {chunk // self._run_chunks: chunk + 1 for chunk, _ in entries}  # by run: the chunk after its last entry
        chunks = itertools.chain.from_iterable(range(run * self._run_chunks, end) for run, end in ends.items())
        places = {id(place): place for _, place in entries}
        chain = itertools.product(chunks, places.values())
        return [each for each in chain if full & 1 << each[1].group and (each[0], id(each[1])) not in asked]

    # --- the choice -----------------------------------------------------------------------------------------------

    def _missing_of(self, chunk: int, groups: int = -1) -> list[Wanted]:
        """Return the entries of a chunk that the pool lacks and a longer prefix may need. `groups`: only of these."""
        index, space, key = self._index, self.prefix.space, digest_at(self.prefix.digests, chunk)
        node = index.nodes.find(space, key, chunk)
        return [
            (chunk, place)
            for place in self.prefix.places
            if groups & 1 << place.group and (node is None or not index.entries.has(node, place.group, place.part))
        ]

    def _missing_before(self, limit: int) -> Steps[list[Wanted]]:
        """Return the entries that the pool lacks of the chunks after the found ones, up to `limit`.

        Found chunks end in whole windows. The windows of a longer prefix reach no further back.
        """
        chunks_a_step = max(1, QUESTIONS_A_STEP // len(self.prefix.places))
        entries: list[Wanted] = []
        for start in range(self._found, limit, chunks_a_step):
            if start > self._found:
                yield Pause.STEP
            for chunk in range(start, min(start + chunks_a_step, limit)):
                entries += self._missing_of(chunk)
        return entries

    def _usable_prefix(self, limit: int, in_tier: _Claims) -> Steps[int]:
        """Return how many leading chunks are usable once all entries in the tier or on their way have arrived."""
        index, prefix, space = self._index, self.prefix, self.prefix.space
        by_group: dict[int, list[PartPlace]] = {}
        for place in prefix.places:
            by_group.setdefault(place.group, []).append(place)

        def has(chunk: int, group: int) -> bool:
            node = index.nodes.find(space, digest_at(prefix.digests, chunk), chunk)
            for place in by_group[group]:
                if (chunk, group, place.part) in in_tier:
                    continue
                entry = None if node is None else index.entries.find(node, group, place.part)
                if entry is None:
                    if node is None or not index.entries.cover(node, place):
                        return False
                # An engine that writes it may abort: the chunks after it would be read in vain.
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

    def _wanted(self, length: int) -> Steps[tuple[deque[Wanted], int]]:
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

    def _read(self, tier: TierState, wanted: deque[Wanted]) -> Steps[None]:
        """Read entries, then update the tier's speed and the length of the pool's prefix, and report its new chunks."""
        context, began = self._context, self._context.clock()
        self._reading = reading = Reading(context, self.prefix, tier, wanted, self._wake)
        reading.is_stopped = self._is_stopped
        yield from reading.run()
        self._reading = None
        self._num_bytes += reading.num_bytes
        if reading.num_bytes:
            now = context.clock()
            tier.was_read(reading.num_bytes, now - began)
            # Bytes that came too late for the lookup say nothing good. If they counted, a tier that is too slow for
            # every lookup would never be suspended.
            if self.on_answer is not None and now - self.began <= context.patience_seconds:
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
        timers: end the waits of lookups.
    """

    def __init__(self, context: PromotionContext, tiers: Sequence[TierState], timers: Timers) -> None:
        self._context = context
        self._tiers = tiers
        self._timers = timers
        self._moves = Moves[Promotion](self._end)

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def num_coming(self) -> int:
        """Entries that are being read."""
        return self._context.num_coming

    @property
    def is_full(self) -> bool:
        """Whether the maximum number is reached."""
        return len(self._moves) >= MAXIMUM_PROMOTIONS

    def begin(
        self,
        prefix: Prefix,
        match: Match,
        wait_seconds: float,
        on_answer: Callable[[], None],
        guests: Sequence[TierState] = (),
    ) -> None:
        """Promote the chunks after the match, which stays pinned until the end. `guests`: only from these."""
        promotion = Promotion(
            self._context, guests or self._tiers, prefix, match.num_chunks, wait_seconds, on_answer, self._moves.wake
        )
        if self._moves.step(promotion, promotion.run()):
            # Stores must not evict the chunks before those that arrive. Most new prompts have ended by now, unpinned.
            promotion.pins = match.nodes
            self._context.index.evictor.pin(match.nodes)
            due = promotion.began + wait_seconds
            promotion.timer = self._timers.call_at(due, partial(self._is_late, promotion))

    def stop(self, is_meant: Callable[[int], bool]) -> None:
        """Stop the promotions of the labels for which `is_meant` holds."""
        for promotion in self._moves:
            if is_meant(promotion.prefix.label):
                promotion.stop()

    @property
    def has_work(self) -> bool:
        """Whether `turn` has work to do now."""
        return bool(self._moves.ready)

    def turn(self, is_over: Callable[[], bool]) -> None:
        """Resume promotions that can continue, until `is_over` but at least one."""
        self._context.is_over = is_over
        self._moves.turn(is_over)

    def _is_late(self, promotion: Promotion) -> None:
        """Answer a lookup whose time is up. Its promotion goes on, for the next one."""
        if promotion.on_answer is None:
            return
        context, queue = self._context, promotion.waits_for
        context.counters[_PROMOTIONS_LATE] += 1
        # Lookups that wait less than the operator allows say nothing about the tier.
        if queue is not None and not promotion.has_landed and promotion.wait_seconds >= context.patience_seconds:
            queue.breaker.was_too_late(context.patience_seconds)
        log_decision(promotion.prefix, queue, "the lookup's time is up before the last chunk has arrived")
        promotion.answer()

    def _end(self, promotion: Promotion) -> None:
        promotion.answer()
        if promotion.timer:
            self._timers.cancel(promotion.timer)
            self._context.index.evictor.unpin(promotion.pins)
