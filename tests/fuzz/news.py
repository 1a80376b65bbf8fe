"""A depot's answers to `AwaitNews` as a target: an engine that publishes events follows the chunks of all engines."""

import contextlib
import socket
import sys
import threading
from types import ModuleType
from typing import Any, Final, cast
from unittest.mock import patch

import msgspec

from fuzz.tiers import FOLDER
from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel, Session
from kvdepot.features.routers import feed as module
from kvdepot.features.routers import reader
from kvdepot.features.routers.feed import NewsFeed
from kvdepot.features.routers.messages import AwaitNews, News
from kvdepot.features.routers.reader import LOCAL, AllBlocksCleared, BlockRemoved, BlockStored
from kvdepot.features.routers.shelves import POOL, TIER
from kvdepot.wire import frames
from kvdepot.wire import messages as m


class _VLLM(ModuleType):
    """Stands for the modules of vLLM that the announcer imports. The classes of events have the schema of vLLM's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reader, name, None)


_NAMES: Final = ("", ".distributed", ".distributed.kv_events", ".v1", ".v1.core", ".v1.core.kv_cache_utils")
with patch.dict(sys.modules, {f"vllm{name}": _VLLM(f"vllm{name}") for name in (*_NAMES, ".v1.kv_cache_interface")}):
    from kvdepot_vllm.events import Announcer

_PATH: Final = FOLDER / "news.sock"
_NAMESPACE: Final = bytes(32)
_LIST: Final = [
    AllBlocksCleared(),
    BlockStored([1, 2], None, [7] * 8, 4, None, POOL, None, locality=LOCAL),
    BlockStored([3], 2, [8] * 4, 4, None, TIER, None, group_idx=1, locality=LOCAL),
]
_LISTED: Final = {(None, POOL): {1, 2}, (1, TIER): {3}}


class _Depot:
    """Answers a feed with the pieces of an input, and then with a whole list. Stands for the feed's `Connection`."""

    deadline_seconds = 10.0

    def __init__(self, pieces: list[Any]) -> None:
        self.announcer = Announcer()
        self.position = 0  # of the news that the feed has taken since it began to follow
        self.errors: list[BaseException] = []
        self.is_over = threading.Event()
        self.feed: NewsFeed | None = None
        self.has_feed = threading.Event()
        self.is_ending = False  # whether the last answer was sent
        self._pieces = pieces
        _PATH.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(_PATH))
        self.listener.listen()
        self.session = Session(frames.SessionOpened(1, bytes(16), 1, 1, "0.1"), _PATH, None)
        self.session.wants_tokens = True

    def wait_until_open(self, timeout_seconds: float) -> Session:
        del timeout_seconds
        return self.session

    def channel(self, session: Session) -> "_Channel":
        self.position = 0
        return _Channel(self, session)

    def answer(self, sequence: int) -> tuple[bytes, bool]:
        """Return the next bytes to send, and whether the depot dies then."""
        piece = self._pieces.pop(0) if self._pieces else None
        match piece:
            case bytes():
                return piece, True
            case [int(flags), events]:
                body = events if isinstance(events, bytes) else msgspec.msgpack.encode(events)
                news = News(1, flags >> 2, body, bool(flags & 1), bool(flags & 2))
            case None:
                assert self.has_feed.wait(10)
                assert self.feed is not None
                self.feed.close()  # it takes this answer, and ends
                self.is_ending = True
                news = News(1, 1, msgspec.msgpack.encode(_LIST), is_start=True)
            case _:
                return b"", True
        frame = frames.encode_frame(sequence, news)
        return frames.LENGTH.pack(len(frame)) + frame, False

    def run(self) -> None:
        """Serve a feed until the input is over."""
        with patch.object(module, "PAUSE_SECONDS", 0.0):
            connection = cast("Connection", self)
            self.feed = NewsFeed(connection, _NAMESPACE, self.announcer.on_news, self.lose, self.announcer.wants_all)
            self.has_feed.set()
            assert self.is_over.wait(10), "the feed has ended, or hangs"
        if self.errors:
            raise self.errors[0]

    def lose(self) -> None:
        self.errors.append(AssertionError("it was away for no time"))


class _Channel:
    """A real channel whose requests the depot reads at once."""

    def __init__(self, depot: _Depot, session: Session) -> None:
        self._depot = depot
        self._channel = Channel(session, socket.socket(socket.AF_UNIX))
        self._peer: socket.socket | None = None

    def call(self, request: AwaitNews, deadline_seconds: float) -> frames.Reply:
        depot = self._depot
        try:
            assert request.position == depot.position, "after an error, it must ask for everything"
            sequence = self._channel.submit(request)
            if self._peer is None:
                self._peer, _ = depot.listener.accept()
            data, dies = depot.answer(sequence)
            self._peer.sendall(data)
            if dies:
                self._peer.shutdown(socket.SHUT_WR)
        except BaseException as error:
            depot.errors.append(error)
            depot.is_over.set()
            raise
        reply = self._channel.wait(sequence, deadline_seconds)
        depot.position = reply.position if isinstance(reply, News) else 0
        return reply

    def close(self) -> None:
        self._channel.close()
        if self._peer is not None:
            self._peer.close()
        if self._depot.is_ending:
            self._depot.is_over.set()


def follow(data: bytes) -> None:
    """A list of answers: `[flags, events]`, or the bytes that a depot sends before it dies.

    Whatever they are, the feed asks on, and routers know the blocks of the next whole list, and no others.
    """
    try:
        pieces = msgspec.msgpack.decode(data, type=list[Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pieces = list[Any]([data])
    depot = _Depot(pieces[:16])
    with contextlib.closing(depot.listener):
        depot.run()
    depot.session.mark_lost()
    known: dict[tuple[int | None, str | None], set[int]] = {}
    for event in depot.announcer.take():
        ids = known.setdefault((event.group_idx, event.medium), set())
        if isinstance(event, BlockRemoved):
            ids.difference_update(event.block_hashes)
        else:
            ids.update(event.block_hashes)
    assert {place: ids for place, ids in known.items() if ids} == _LISTED


def seeds() -> list[bytes]:
    """Return lists in one and several answers, changes after them, and answers that break off."""
    stored = BlockStored([5], None, [1], 1, None, POOL, "poet", [("a", 1)], 2, "full_attention", 3, LOCAL)
    whole = bytes(frames.encode_frame(1, m.Done(1, 2)))
    answers: list[list[Any]] = [
        [],
        [[5, _LIST], [8, [BlockRemoved([1], POOL, locality=LOCAL)]], [12, []]],
        [[7, _LIST[:1]], [10, _LIST[1:]], [12, [stored]], [16, b""]],
        [[7, [stored]], [2, b"\xc1"], [5, [stored, stored]]],
        [[4, [stored]], [5, [BlockRemoved([5, 9], None, 2)]]],
        [[7, [stored]], frames.LENGTH.pack(len(whole)) + whole, [5, []]],
        [b"", frames.LENGTH.pack(1 << 31), frames.LENGTH.pack(40) + b"short"],
        [[-4, [stored]], [(1 << 62) + 1, [{"type": "BlockStored"}]], [5, [{"type": "Other"}, 5, None]], 7],
    ]
    return [msgspec.msgpack.encode(each) for each in answers]
