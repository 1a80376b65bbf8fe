"""Questions to the depot: one open question per request, its answer, and the announcement to other engines.

`SchedulerSide` opens a question when a request arrives, polls `answer` while vLLM schedules, drops the answer when the
load is decided or has ended, and closes the question when the request ends. Nothing here plans loads or stores.
If the depot dies, each question is answered with a miss.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import PendingLookup, SchedulerClient
from kvdepot.counting import Counts
from kvdepot.keys import KeyRun
from kvdepot.wire.messages import MAXIMUM_CHUNKS
from kvdepot_vllm.counting import engine_counter
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.hand_over import HandOver, asks_for_hand_over
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.stores import StoreProgress
from kvdepot_vllm.tracing import end_span, start_span

_LOOKUPS: Final = engine_counter("lookups", "Prefixes that were looked up")
_HAND_OVERS_MISSED: Final = engine_counter(
    "hand_overs_missed", "Hand-overs whose KV did not come in time: the prompt was computed here"
)

_FRESH_SECONDS: Final = 5.0  # an older answer is asked for again before it is used
_HAND_OVER_SECONDS: Final = 0.005  # between two questions for a prompt that a prefill engine has not begun
_IDLE_SECONDS: Final = 0.001  # to wait for an answer while nothing is computed; shorter than an empty step
# The same for an answer that waits for a tier or another engine. Empty steps, one after the other, would take most of a
# core, which on CPU the other engine computes with. A request that arrives in the meantime waits that long.
_LONG_IDLE_SECONDS: Final = 0.010
# A request waits for others at most so many times what its own engine would take, and a little: the depot answers it by
# the same rule (`kvdepot.server.flights`).
_PATIENCE: Final = 2.0
_SLACK_SECONDS: Final = 0.05


@dataclass(slots=True)
class Question:
    """How much of one request's prompt does the depot have?

    Attributes:
        request: vLLM's.
        progress: of the same request; a request that stores nothing announces nothing.
        hand_over: set while a prefill engine is expected to compute the prompt.
        lease: the last answer; the question owns it until it is dropped.

    The other fields belong to `Questions`.
    """

    request: EngineRequest
    progress: StoreProgress
    hand_over: HandOver | None
    lease: Lease | None = None
    lookup: PendingLookup | None = None
    asked_at: float = 0.0
    waits_until: float = 0.0  # for chunks that others are computing, in all; 0 before the first lookup
    began_at: float = 0.0  # when the first lookup was sent
    ask_at: float = 0.0  # when to ask again
    num_found: int = 0  # chunks of the last answer
    awaits: int = 0  # leading chunks that the last lookup expects of a prefill engine
    has_announced: bool = False  # that the engine computes or hands over chunks: withdrawn when the request ends
    span: Any = None  # of the lookup


class Questions:
    """All questions of one engine: their lookups, the leases of their answers, and their announcements.

    Args:
        chunk_tokens: tokens of one chunk.
        settings: the user's.
        client: asks the depot; not closed here.
        counters: counts, declared by `engine_counter`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        chunk_tokens: int,
        settings: Settings,
        client: SchedulerClient,
        counters: Counts,
        clock: Callable[[], float],
    ) -> None:
        self.may_idle = True  # the last step computed nothing, so that one answer may be waited for
        self._chunk_tokens = chunk_tokens
        self._settings = settings
        self._client = client
        self._counters = counters
        self._clock = clock
        self._open: dict[str, Question] = {}

    def open(self, question: Question, *, asks: bool) -> None:
        """Add the question of a request that arrived. If it `asks`, send its lookup at once."""
        self._open[question.request.request_id] = question
        if asks:
            self._ask(question)

    def wanted_tokens(self, question: Question) -> int:
        """Return the tokens worth loading: at least one is left to compute, as with vLLM's own prefix cache."""
        tokens = max(0, question.request.num_tokens - 1)
        return min(
            MAXIMUM_CHUNKS * self._chunk_tokens,
            min(tokens, question.progress.tail_end) or tokens - tokens % self._chunk_tokens,
        )

    def answer(self, question: Question) -> Lease | None:
        """Return a lease of the chunks that the depot has; None until it answers. An old answer is asked for again.

        Waits at most 10 ms, once for each idle step, however many requests wait.
        """
        if question.lease is not None and self._clock() - question.asked_at <= _FRESH_SECONDS:
            return question.lease
        if question.lookup is None:
            if self._clock() < question.ask_at:
                if self.may_idle:
                    self.may_idle = False
                    time.sleep(_IDLE_SECONDS)
                return None
            if question.lease is not None:  # too old: everything begins again
                question.waits_until = 0.0
            self.drop(question)
            self._ask(question)
        if question.lookup is None:
            return question.lease or MISS
        may_wait, self.may_idle = self.may_idle, False
        is_late = self._clock() - question.asked_at > _LONG_IDLE_SECONDS
        seconds = _LONG_IDLE_SECONDS if is_late else _IDLE_SECONDS
        if not (question.lookup.wait(seconds) if may_wait else question.lookup.query()):
            return None
        lease = self._take(question, question.lookup)
        if self._asks_again(question, lease):
            return None
        self._counters[_LOOKUPS] += 1
        return lease

    def settle(self, question: Question) -> int | None:
        """Drop a question that no load needs. Return how many chunks the depot has; None if unknown."""
        lookup = question.lookup
        num_chunks = self._take(question, lookup).num_chunks if lookup is not None and lookup.query() else None
        self.drop(question)
        return num_chunks

    def drop(self, question: Question) -> None:
        """Cancel the lookup under way, and release the last answer."""
        if question.lookup is not None:
            question.lookup.cancel()
            question.lookup = None
            end_span(question.span, cancelled=True)
            question.span = None
        if question.lease is not None:
            self._client.release(question.lease)
            question.lease = None

    def remember_miss(self, question: Question) -> None:
        """Replace the answer by a miss, which is used while it is fresh instead of asking again."""
        self.drop(question)
        question.lease = MISS

    def withdraw(self, request_id: str) -> None:
        """Withdraw the announcement of a request that will not be computed for now."""
        question = self._open.get(request_id)
        if question is not None and question.has_announced:
            question.has_announced = False
            self._client.end_request(request_id)

    def close(self, question: Question) -> bool:
        """Take out the question of a request that ends. Its lease stays until it is dropped.

        Returns:
            whether an announcement stands: `end` withdraws it, once the last store of the request has ended.
        """
        self._open.pop(question.request.request_id, None)
        return question.has_announced

    def end(self, request_id: str) -> None:
        """Withdraw the announcement of a closed question, unless a new request has its name by now."""
        if request_id not in self._open:
            self._client.end_request(request_id)

    def _wanted(self, question: Question) -> KeyRun:
        return question.progress.run_to(0, self.wanted_tokens(question))

    def _ask(self, question: Question) -> None:
        key, now = self._wanted(question), self._clock()
        if not key.num_chunks:
            return
        wait_seconds = None
        if not question.waits_until:
            question.began_at, question.waits_until = now, now + self._patience_seconds(question)
        elif question.hand_over is None:
            wait_seconds = max(0.0, question.waits_until - now)
        question.asked_at = now
        question.span = start_span("kvdepot lookup", question.request, wanted_tokens=self.wanted_tokens(question))
        joins = self._settings.wait_for_others
        announces = joins and question.progress.may_store and question.hand_over is None
        hand_over = question.hand_over
        end_tokens = question.progress.tail_end or question.request.num_prompt_tokens
        question.awaits = 0 if hand_over is None else hand_over.num_chunks(key, end_tokens, self._chunk_tokens)
        hands_over = question.progress.may_store and asks_for_hand_over(question.request.kv_transfer_params)
        question.has_announced |= announces or hands_over
        question.lookup = self._client.submit_lookup(
            question.request.request_id,
            key,
            joins=joins,
            announces=announces,
            ahead_tokens=self._ahead_tokens(question),
            awaits=question.awaits,
            hands_over=hands_over,
            wait_seconds=wait_seconds,
        )

    def _asks_again(self, question: Question, lease: Lease) -> bool:
        """Ask again if others bring more chunks; False if the answer is final."""
        now, hand_over = self._clock(), question.hand_over
        if hand_over is not None and lease.num_chunks > question.num_found:
            question.waits_until = now + self._patience_seconds(question)  # the prefill engine is at work
        question.num_found = lease.num_chunks
        if lease.num_pending and now < question.waits_until:
            question.ask_at = now
        elif hand_over is None or lease.num_chunks >= question.awaits:
            return False
        elif now < question.began_at + hand_over.wait_seconds:
            question.ask_at = now + _HAND_OVER_SECONDS
        else:
            question.hand_over, question.ask_at = None, now  # this lookup announces that the engine computes the rest
            self._counters[_HAND_OVERS_MISSED] += 1
        self.drop(question)
        if question.ask_at <= now:
            self._ask(question)
        return True

    def _patience_seconds(self, question: Question) -> float:
        """Return how long a request may wait for others in all: a deadline while the cost of a token is unknown."""
        own_seconds = question.request.num_tokens * self._client.token_seconds
        return _PATIENCE * own_seconds + _SLACK_SECONDS if own_seconds else self._settings.deadline_seconds

    def _ahead_tokens(self, question: Question) -> int:
        """Return the tokens of earlier prompts that are still to be computed, as far as that is known."""
        return sum(
            max(
                0,
                other.request.num_prompt_tokens - max(progress.num_computed, progress.num_stored * self._chunk_tokens),
            )
            for other in self._open.values()
            if other is not question and other.lookup is None and (progress := other.progress)
        )

    def _take(self, question: Question, lookup: PendingLookup) -> Lease:
        question.lease, question.lookup = lookup.result(), None
        end_span(question.span, found_tokens=question.lease.num_chunks * self._chunk_tokens)
        question.span = None
        return question.lease
