"""Serves descriptions of chunks, and tells attached schedulers which described chunks appeared or left."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import structs

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode, KeyFormatError
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import AwaitNews, DescribeChunks, News
from kvdepot.features.routers.reader import Reader
from kvdepot.features.routers.shelves import ID_BYTES
from kvdepot.features.routers.tokens import TokensFile
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.keys import digest_at, num_digests, slice_digests
from kvdepot.server.contexts import Context
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Refused, Steps, Turns
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

T = TypeVar("T", bytes, tuple[object, ...])

_decoder: Final = msgspec.msgpack.Decoder(tuple[m.Count, str, DescribeChunks])

_CHUNKS_DESCRIBED: Final = depot_counter("chunks_described", "Chunks that engines described for routers")
_DESCRIPTIONS_DECLINED: Final = depot_counter(
    "descriptions_declined", "Chunks not announced to routers, because there was no room for their tokens"
)

MOST_EARLY_BYTES: Final = 16 << 20  # of descriptions that wait for their chunks, 4 million tokens of running prompts
_LARGE_FILE_BYTES: Final = 64 << 20  # a smaller file is not worth rewriting
_MOST_WASTE: Final = 3  # times the bytes of the chunks in the pool: rewriting then removes at least two thirds of it
_COALESCE_SECONDS: Final = 0.02  # changes within this time after the first are reported together
_NEWS_TOKENS: Final = 4096  # per reply: 0.2 ms to encode


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
        self._early: dict[tuple[int, bytes], tuple[str, DescribeChunks]] = {}
        self._num_early_bytes = 0

    def describe(self, context: Context, request: DescribeChunks) -> m.Done:
        """Take the tokens of chunks. The reply counts the chunks that were not described before.

        Raises:
            Refused: the message contradicts itself.
        """
        try:
            num_new = self._describe(context.space, context.served_model, request)
        except ValueError as error:
            raise Refused(ErrorCode.MALFORMED, str(error)) from error
        return m.Done(self._state.epoch, num_new)

    def stored(self, space: Space, digests: bytes) -> None:
        """Note that a store of these chunks was committed. Describe each whose description came before."""
        if self._early:
            chunk, num_stored = 0, num_digests(digests)
            while chunk < num_stored:
                early = self._take_early((space.number, digest_at(digests, chunk)))
                if early is None:
                    chunk += 1
                    continue
                model, request = early
                count, most = num_digests(request.digests), num_stored - chunk
                # Only these: a long prompt is stored by many commits, and each would look for all of its chunks.
                if count > most:
                    self._wait_for(space, model, _part(request, most, count))
                    request = _part(request, 0, most)
                self._describe(space, model, request)
                chunk += min(count, most)

    def _describe(self, space: Space, model: str, request: DescribeChunks) -> int:
        holdings, count = self._holdings, num_digests(request.digests)
        if not count:
            return 0
        num_declined = holdings.num_declined
        # An engine describes a prompt before it stores it, so mostly none is here, and the first one tells.
        is_early = self._state.index.visibility.find(space, digest_at(request.digests, 0), request.first_chunk) is None
        above, nodes = (NO_NODE, list[int]()) if is_early else self._find(space, request)
        num_new, num_here = holdings.describe(space, model, request, above, nodes), len(nodes)
        if num_new:
            self._keep(space, model, request if num_here == count else _part(request, 0, num_here))
        if num_here < count:
            self._wait_for(space, model, _part(request, num_here, count))
        self._state.counters[_CHUNKS_DESCRIBED] += num_new
        self._state.counters[_DESCRIPTIONS_DECLINED] += holdings.num_declined - num_declined
        return num_new

    def _wait_for(self, space: Space, model: str, request: DescribeChunks) -> None:
        """Keep the description of chunks until the first of them is stored."""
        name = space.number, digest_at(request.digests, 0)
        self._take_early(name)
        self._early[name] = model, request
        self._num_early_bytes += _bytes_of(request)
        while self._num_early_bytes > MOST_EARLY_BYTES:
            self._take_early(next(iter(self._early)))

    def _take_early(self, name: tuple[int, bytes]) -> tuple[str, DescribeChunks] | None:
        early = self._early.pop(name, None)
        if early is not None:
            self._num_early_bytes -= _bytes_of(early[1])
        return early

    def keep_in(self, file: TokensFile) -> None:
        """Keep descriptions in a file from now on."""
        self._file = file

    def restore(self) -> None:
        """Read the descriptions of an earlier server. Call this once the index is restored."""
        if self._file is not None:
            self._turns.add(self._file.rewrite(self._is_wanted))

    def _keep(self, space: Space, model: str, request: DescribeChunks) -> None:
        file = self._file
        if file is None:
            return
        file.append(self._encoder.encode((space.number, model, request)))
        if file.size_bytes > _LARGE_FILE_BYTES + _MOST_WASTE * self._holdings.num_bytes:
            self._turns.add(file.rewrite(self._is_wanted))

    def _find(self, space: Space, request: DescribeChunks) -> tuple[int, list[int]]:
        return self._state.index.visibility.find_run(space, request.digests, request.first_chunk)

    def _is_wanted(self, body: bytes) -> bool:
        """Describe the chunks in a kept message again; return whether some of them are still here."""
        holdings = self._holdings
        try:
            number, model, request = _decoder.decode(body)
            space = self._state.index.spaces[number]
            above, nodes = self._find(space, request)
            holdings.describe(space, model, request, above, nodes)
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


def _part(request: DescribeChunks, first: int, stop: int) -> DescribeChunks:
    """Return the description of some of the chunks."""
    count = num_digests(request.digests)

    def cut(data: T, parts: slice = slice(first, stop)) -> T:
        size = len(data) // count
        return data[parts.start * size : parts.stop * size]

    before = cut(request.block_ids, slice(0, first))[-ID_BYTES:] if first else request.parent_id
    return structs.replace(
        request,
        digests=slice_digests(request.digests, first, stop),
        first_chunk=request.first_chunk + first,
        tokens=cut(request.tokens),
        block_ids=cut(request.block_ids),
        parent_id=before,
        extra_keys=cut(request.extra_keys),
    )


def _bytes_of(request: DescribeChunks) -> int:
    """Return about how many bytes a description takes."""
    return len(request.digests) + len(request.tokens) + len(request.block_ids) + 200 * len(request.extra_keys) + 500
