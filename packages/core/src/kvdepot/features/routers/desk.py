"""Serves descriptions of chunks, and tells attached schedulers which described chunks appeared or left."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode, KeyFormatError
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import AwaitNews, DescribeChunks, News
from kvdepot.features.routers.reader import Reader
from kvdepot.features.routers.shelves import Run
from kvdepot.features.routers.tokens import TokensFile
from kvdepot.index.tree import Space
from kvdepot.keys import digest_at, num_digests, slice_digests
from kvdepot.server.contexts import Context
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Refused, Steps, Turns
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_decoder: Final = msgspec.msgpack.Decoder(tuple[m.Count, str, DescribeChunks])

_CHUNKS_DESCRIBED: Final = depot_counter("chunks_described", "Chunks that engines described for routers")
_DESCRIPTIONS_DECLINED: Final = depot_counter(
    "descriptions_declined", "Chunks not announced to routers, because there was no room for their tokens"
)

MOST_EARLY_BYTES: Final = 16 << 20  # of descriptions that wait for their chunks, 4 million tokens of running prompts
_CHUNKS_AT_ONCE: Final = 32  # as one store has at most
_LARGE_FILE_BYTES: Final = 64 << 20  # a smaller file is not worth rewriting
_MOST_WASTE: Final = 3  # times the bytes of the chunks in the pool: rewriting then removes at least two thirds of it
_COALESCE_SECONDS: Final = 0.02  # changes within this time after the first are reported together
_NEWS_TOKENS: Final = 4096  # per reply: 0.2 ms to encode


@dataclass(slots=True, eq=False)
class _Early:
    """A description of chunks that are not all stored yet."""

    space: Space
    model: str
    request: DescribeChunks
    text: Run  # the same chunks
    count: int = field(init=False)  # of the chunks
    num_bytes: int = field(init=False)  # about how many it takes
    first: int = 0  # the first of its chunks that waits
    is_kept: bool = False  # whether the file has it

    def __post_init__(self) -> None:
        self.count = num_digests(self.request.digests)
        size = len(self.request.digests) + self.text.num_bytes
        self.num_bytes = size + 200 * len(self.request.extra_keys) + 500


@dataclass(slots=True, eq=False)
class _Listener:
    """A scheduler that follows the chunks of its namespace."""

    reader: Reader
    position: int = 0  # of the last reply
    resume: Callable[[], None] | None = None  # resumes the waiting request
    timer: int = 0  # ends the wait


class NewsDesk:
    """Serves descriptions, and schedulers that wait for news.

    Args:
        state: the depot's state.
        holdings: the described chunks.
        turns: queue for reading and rewriting the file of tokens.
    """

    def __init__(self, state: DepotState, holdings: Holdings, turns: Turns) -> None:
        self._state = state
        self._holdings = holdings
        self._turns = turns
        self._listeners: dict[int, _Listener] = {}  # by context
        self._encoder = msgspec.msgpack.Encoder()
        self._timer = 0  # answers all waiting requests
        self._file: TokensFile | None = None
        # Descriptions of chunks that are not stored yet, by the space and the digest of the first one. Oldest first.
        self._early: dict[tuple[int, bytes], _Early] = {}
        self._num_early_bytes = 0

    def describe(self, context: Context, request: DescribeChunks) -> m.Done:
        """Take the tokens of chunks. The reply counts the chunks that were not described before.

        Raises:
            Refused: the message contradicts itself.
        """
        space, model = context.space, context.served_model
        try:
            text = self._holdings.read(space, model, request)
        except ValueError as error:
            raise Refused(ErrorCode.MALFORMED, str(error)) from error
        num_new = 0 if text is None else self._go_on(_Early(space, model, request, text))
        return m.Done(self._state.epoch, num_new)

    def stored(self, space: Space, digests: bytes) -> None:
        """Note that a store of these chunks was committed. Describe each whose description came before."""
        chunk, num_stored = 0, num_digests(digests)
        while self._early and chunk < num_stored:
            early = self._take_early((space.number, digest_at(digests, chunk)))
            if early is None:
                chunk += 1
            else:
                first = early.first
                self._go_on(early)
                chunk += max(1, early.first - first)

    def _go_on(self, early: _Early) -> int:
        """Describe the next chunks that lookups find, and wait for the others. Return the number of new ones."""
        holdings, digests, num_new = self._holdings, early.request.digests, 0
        num_declined, is_going = holdings.num_declined, True
        while is_going:
            # In pieces: a long prompt is stored by many commits, and each would look for all of its chunks.
            stop = min(early.count, early.first + _CHUNKS_AT_ONCE)
            above, nodes = self._find(early.space, early.request, early.first, stop)
            num_new += holdings.describe(early.text, digests, above, nodes, early.first)
            early.first += len(nodes)
            is_going = early.first == stop < early.count
        if num_new and not early.is_kept:
            early.is_kept = True
            self._keep(early)
        if early.first < early.count:
            self._wait_for(early)
        self._state.counters[_CHUNKS_DESCRIBED] += num_new
        self._state.counters[_DESCRIPTIONS_DECLINED] += holdings.num_declined - num_declined
        return num_new

    def _wait_for(self, early: _Early) -> None:
        """Keep a description until the next of its chunks is stored."""
        name = early.space.number, digest_at(early.request.digests, early.first)
        self._take_early(name)
        self._early[name] = early
        self._num_early_bytes += early.num_bytes
        while self._num_early_bytes > MOST_EARLY_BYTES:
            self._take_early(next(iter(self._early)))

    def _take_early(self, name: tuple[int, bytes]) -> _Early | None:
        early = self._early.pop(name, None)
        if early is not None:
            self._num_early_bytes -= early.num_bytes
        return early

    def keep_in(self, file: TokensFile) -> None:
        """Keep descriptions in a file from now on."""
        self._file = file

    def restore(self) -> None:
        """Read the descriptions of an earlier server. Call this once the index is restored."""
        if self._file is not None:
            self._turns.add(self._file.rewrite(self._is_wanted))

    def _keep(self, early: _Early) -> None:
        file = self._file
        if file is None:
            return
        file.append(self._encoder.encode((early.space.number, early.model, early.request)))
        if file.size_bytes > _LARGE_FILE_BYTES + _MOST_WASTE * self._holdings.num_bytes:
            self._turns.add(file.rewrite(self._is_wanted))

    def _find(self, space: Space, request: DescribeChunks, first: int, stop: int) -> tuple[int, list[int]]:
        digests = slice_digests(request.digests, first, stop)
        return self._state.index.visibility.find_run(space, digests, request.first_chunk + first)

    def _is_wanted(self, body: bytes) -> bool | None:
        """Describe the chunks in a kept message again; return whether some of them are still here, None if not yet."""
        holdings = self._holdings
        try:
            number, model, request = _decoder.decode(body)
            space = self._state.index.spaces[number]
            text = holdings.read(space, model, request)
            if text is None:
                return False
            if not holdings.may_show(text.family):
                return None
            above, nodes = self._find(space, request, 0, num_digests(request.digests))
            holdings.describe(text, request.digests, above, nodes)
        except (msgspec.MsgspecError, RecursionError, LookupError, ValueError, KeyFormatError) as error:
            logger.warning("ignoring tokens of an earlier server: %s", error)
            return False
        return any(map(holdings.is_described, nodes))

    def await_news(self, context: Context, request: AwaitNews) -> News | Steps:
        """Answer with news, now or as soon as there are any."""
        holdings = self._holdings
        shelf = holdings.shelf_of(context.served_model)
        if shelf is None:
            return News(self._state.epoch, 0, b"")
        listener = self._listeners.get(context.number)
        if listener is None or listener.reader.namespace != request.namespace:
            self.end_context(context.number)
            listener = self._listeners[context.number] = _Listener(Reader(holdings, shelf, request.namespace))
        # The scheduler no longer reads the reply to its earlier request. Answer that one before the restart, which then
        # lists the events of the lost reply again.
        self._resume(listener)
        if request.position != listener.position or not request.position:
            listener.reader.restart()
        return self._news(listener) if listener.reader.has_more else self._awaiting(listener, request.wait_seconds)

    def _awaiting(self, listener: _Listener, wait_seconds: float) -> Steps:
        yield partial(self._wait, listener, wait_seconds)
        return self._news(listener)

    def _wait(self, listener: _Listener, wait_seconds: float, resume: Callable[[], None]) -> bool:
        timers, until = self._state.timers, self._state.clock() + wait_seconds
        listener.resume, listener.timer = resume, timers.call_at(until, lambda: self._resume(listener))
        listener.reader.holdings.await_change(self._tell_soon)
        return True

    def end_context(self, number: int) -> None:
        """Forget a detached scheduler."""
        listener = self._listeners.pop(number, None)
        if listener is not None:
            self._resume(listener)

    def _tell_soon(self) -> None:
        if not self._timer:
            self._timer = self._state.timers.call_at(self._state.clock() + _COALESCE_SECONDS, self._tell)

    def _tell(self) -> None:
        self._timer = 0
        for listener in list(self._listeners.values()):
            if listener.reader.has_more:
                self._resume(listener)
            elif listener.resume is not None:
                listener.reader.holdings.await_change(self._tell_soon)

    def _resume(self, listener: _Listener) -> None:
        if listener.resume is not None:
            resume, listener.resume = listener.resume, None
            self._state.timers.cancel(listener.timer)
            resume()

    def _news(self, listener: _Listener) -> News:
        reader = listener.reader
        is_start, listener.position = reader.is_starting, listener.position + 1
        events = self._encoder.encode(reader.take(_NEWS_TOKENS))
        return News(self._state.epoch, listener.position, events, is_start, reader.has_more)
