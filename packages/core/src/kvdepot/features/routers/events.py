"""KV events: publish the blocks that the pool holds, so that routers can send prompts to the node with their prefix.

Schema and framing are vLLM's, so a subscriber of an engine can also subscribe to a depot. An XPUB socket sends `(topic,
sequence number, batch)`: the number as 8 bytes, big-endian, the batch as msgpack. All topics of an endpoint share one
sequence of `numbers`, as llm-d accepts a replay only if its numbers are contiguous. A ROUTER socket resends recent
batches from a given number on, and ends with the number -1.

A subscriber learns what the pool holds already by a **snapshot**: all blocks are cleared, then all blocks that the pool
holds are stored. It gets an empty batch when it comes, sees by the number that it lacks batches, and asks the ROUTER
socket for them. If they are no longer kept, the answer is a snapshot for this subscriber alone, in batches with the
numbers just below the next live one. Empty batches also follow the last batch, so that a subscriber that lost it on an
idle node asks.

Two kinds of subscribers get the snapshot as live batches instead, so that all others see their view cleared for a
moment: those of an endpoint without a ROUTER socket, and those of the empty topic, because vllm-router 0.1.17 accepts
only replays that begin with number 0. Everything runs on the depot's loop, in steps. Nothing is encoded until somebody
subscribes. From then on all topics are published, even if all subscribers leave: ZeroMQ does not tell who unsubscribes,
so a stranger could unsubscribe for all others.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import zmq

from kvdepot.config import is_loopback
from kvdepot.counting import depot_counter
from kvdepot.errors import ConfigError
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.numbers import Numbers
from kvdepot.features.routers.reader import Event, Reader
from kvdepot.features.routers.zeromq import BoundEndpoint, MessageReader

logger = logging.getLogger(__name__)

T = TypeVar("T")

END: Final = (-1).to_bytes(8, "big", signed=True)

EVENT_BATCHES: Final = depot_counter("event_batches", "Batches of KV events published")
EVENT_FLOODS: Final = depot_counter(
    "event_floods", "Times that all subscribers of KV events were disconnected, as one subscribed to too much"
)
_KEPT_BATCHES: Final = 4095  # of all topics: a whole replay and its end fit into one queue of 4,096
KEPT_BYTES: Final = 32 << 20  # long prompts reach this limit with fewer batches
BATCH_TOKENS: Final = 16_384  # 0.4 ms to encode
_QUEUED_MESSAGES: Final = _KEPT_BATCHES + 1  # per subscriber before messages are lost: a whole replay and its end
_MOST_QUESTIONS: Final = 16  # unread requests per subscriber, of which only the last is answered
_MOST_NOTICES: Final = 64  # subscriptions read per turn: the rest of a flood waits for the next one
# ZeroMQ keeps up to 48 bytes for each byte of each topic, without a bound: a million topics of 60 bytes, which somebody
# sent in 15 s, took 2.9 GB. Routers subscribe to one topic or two, so these are many times those of a fleet.
_MOST_TOPICS: Final = 4096
_HANDSHAKE_MILLISECONDS: Final = 2000  # then a silent connection is closed; until then, it takes a descriptor
_REPLAY_STEP: Final = 64  # batches per step; they are sent as they were encoded
SNAPSHOT_TOKENS: Final = 16_384  # per batch: the most tokens that a depot keeps fit into a queue of 4,096 batches
# Pauses before the empty batches after the last one. A lost batch is noticed after a second, or four seconds later if
# that one is lost, too. The last pause keeps an idle hour from pushing many batches out of the kept ones.
_FIRST_BEAT_SECONDS: Final = 1.0
_LAST_BEAT_SECONDS: Final = 64.0
_MOST_WAITING: Final = 1024  # subscribers waiting for a replay: many times the routers of a node
# Between the starts of two snapshots. Subscribers that connect at about the same time after a restart share one, and
# the blocks that it clears are published again within a second. Encoding a snapshot of a million tokens takes 50 ms.
_SNAPSHOT_SECONDS: Final = 0.25
_SUBSCRIBED: Final = b"\1"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in order. The rank is 0, because the blocks of a node serve all ranks of its engines."""

    ts: float
    events: Sequence[Event | msgspec.Raw]
    data_parallel_rank: int | None = None


@dataclass(slots=True, eq=False)
class _Stream:
    """One topic."""

    topic: bytes
    reader: Reader


class EventPublisher:
    """Publishes events, and resends recent ones.

    Args:
        context: the ZeroMQ context. It closes the sockets.
        holdings: the chunks to report.
        endpoint: the endpoint of the XPUB socket.
        replay_endpoint: the endpoint of the ROUTER socket; None for no replays.
        numbers: the sequence numbers to use.
        connects: whether to connect to the endpoint, on which a subscriber listens, instead of listening there.
        clock: returns monotonic seconds.

    Attributes:
        has_work: whether `serve` would publish something now.
        due: when `serve` has to be called next, by `clock`; infinity if nothing waits.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        holdings: Holdings,
        endpoint: str,
        replay_endpoint: str | None,
        numbers: Numbers,
        *,
        connects: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_batches = 0
        self.has_work = False
        self.due = float("inf")
        self.holdings = holdings
        self._clock = clock
        self._numbers = numbers
        self._number = numbers.first  # of the next batch
        self._broadcasts = replay_endpoint is None or not holdings.topic
        self._streams: dict[str, _Stream] = {}  # by topic
        self._others: set[str] = set()  # models that are not published, as another one has their topic
        self._wants_snapshot = False  # as live batches
        self._greets = False  # whether to send an empty batch of each topic
        self._beat_at, self._beat_pause = float("inf"), _FIRST_BEAT_SECONDS
        self._began_at = float("-inf")  # start of the last snapshot
        self._has_listeners = False  # whether anybody has subscribed so far
        self._has_streams = False  # whether models that come from now on have a subscriber from their first chunk on
        self._kept = deque[tuple[bytes, int, bytes]]()  # topics, numbers and batches, the oldest first
        self._kept_bytes = 0
        self._asked: dict[bytes, int] = {}  # first wanted batch, by subscriber waiting for a replay
        self._is_replaying = False
        self._encoder = msgspec.msgpack.Encoder()
        self.socket, self._heard = _open(context, zmq.XPUB, endpoint, "--events", connects=connects)
        self.endpoint = endpoint if self._heard is None else self._heard.endpoint
        self._topics = set[bytes]()  # in subscriptions since the last time that all connections were ended
        self.num_floods = 0
        self.listeners = [] if self._heard is None else [self._heard]
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if replay_endpoint is not None:
            self.replay, asked = _open(context, zmq.ROUTER, replay_endpoint, "--events-replay")
            assert asked is not None
            self.replay_endpoint = asked.endpoint
            self.listeners.append(asked)
            self._questions = MessageReader(self.replay, most_frames=3)

    def filenos(self) -> list[int]:
        """Return the sockets' descriptors.

        ZeroMQ makes them edge-triggered: they signal new data for `serve` only once.
        """
        sockets = [self.socket] if self.replay is None else [self.socket, self.replay]
        return [int(each.getsockopt(zmq.FD)) for each in sockets]

    def serve(self) -> Iterator[int] | None:
        """Read subscriptions and one replay request, and publish a batch of each topic. Never wait.

        Returns:
            the steps that answer the request and later ones; None without a request, or while such steps run.
        """
        self._take_subscriptions()
        is_bound = self._heard is None or self._heard.listen_again()
        replay = self._take_replay() if self.replay is not None and _has_input(self.replay) else None
        self._publish()
        self.has_work |= (
            not is_bound or _has_input(self.socket) or (self.replay is not None and _has_input(self.replay))
        )
        return replay

    def _take_subscriptions(self) -> None:
        for _ in range(_MOST_NOTICES):
            if not _has_input(self.socket):
                return
            notice = self.socket.recv(zmq.NOBLOCK)
            if notice[:1] == _SUBSCRIBED:
                self._has_listeners = self._greets = True
                self._wants_snapshot = self._broadcasts
                self._topics.add(notice)
            if len(self._topics) > _MOST_TOPICS and self._heard is not None:
                logger.warning(
                    "%s has more than %d topics: all subscribers must connect again", self.endpoint, _MOST_TOPICS
                )
                self._topics.clear()
                self.num_floods += 1
                self._heard.end_connections()

    def _publish(self) -> None:
        """Publish one batch of each topic that has one, once somebody has subscribed."""
        self.has_work = False
        if not self._has_listeners:
            return
        self._add_streams()
        if any(stream.reader.is_behind for stream in self._streams.values()):
            self._lose_track()
        is_beginning = self._wants_snapshot and self._may_begin()
        if is_beginning:
            self._wants_snapshot, self._began_at = False, self._clock()
        for stream in self._streams.values():
            reader = stream.reader
            if is_beginning:
                reader.restart()
            elif reader.is_starting:
                continue  # a snapshot follows soon
            events = reader.take(BATCH_TOKENS) if reader.has_more else []
            if events:
                self._send(stream.topic, events)
                self._beat_pause, self._beat_at = _FIRST_BEAT_SECONDS, self._clock() + _FIRST_BEAT_SECONDS
            self.has_work |= reader.has_more
        self._greet()
        self.due = min(self._beat_at, self._began_at + _SNAPSHOT_SECONDS if self._wants_snapshot else float("inf"))

    def _add_streams(self) -> None:
        for model, shelf in self.holdings.shelves.items():
            stream = self._streams.get(shelf.topic)
            if stream is None:
                self._streams[shelf.topic] = stream = _Stream(shelf.topic.encode(), Reader(self.holdings, shelf))
                if self._broadcasts:
                    self._wants_snapshot = True
                else:  # snapshots have what was there before the first subscriber
                    stream.reader.skip(None if self._has_streams else stream.reader.shelf.end)
                self._greets = True
            elif stream.reader.shelf is not shelf and model not in self._others:
                self._others.add(model)
                text = "blocks of the model %r are not published, as the topic %r has another's: name {model} in it"
                logger.warning(text, model, shelf.topic)
        if not self._has_streams:
            self._has_streams, self._beat_at = True, self._clock() + _FIRST_BEAT_SECONDS

    def _lose_track(self) -> None:
        """Give up the changes that a log no longer has. Subscribers ask for a snapshot, or get one."""
        if self._broadcasts:
            self._wants_snapshot = True
            for stream in self._streams.values():
                if stream.reader.is_behind:
                    stream.reader.restart()
            return
        for stream in self._streams.values():
            stream.reader.skip(stream.reader.shelf.end)
        self._kept.clear()
        self._kept_bytes = 0
        self._number += _KEPT_BATCHES  # so that all subscribers see a gap with room for a snapshot
        self._greets = True

    def _greet(self) -> None:
        """Send empty batches to new subscribers, and as long as nothing else is published."""
        if self._clock() >= self._beat_at:
            self._beat_pause = min(_LAST_BEAT_SECONDS, self._beat_pause * 4)
            self._beat_at = self._clock() + self._beat_pause
            self._greets = True
        if self._greets and not self._wants_snapshot:
            self._greets = False
            for stream in self._streams.values():
                if not stream.reader.is_starting and not stream.reader.is_scanning:
                    self._send(stream.topic, [])

    def _may_begin(self) -> bool:
        """Return whether a snapshot may begin.

        It waits for the end of the last one: if each new subscriber restarted the snapshot, nobody would receive all
        of it.
        """
        is_over = not any(stream.reader.is_scanning for stream in self._streams.values())
        return is_over and self._clock() >= self._began_at + _SNAPSHOT_SECONDS

    def _send(self, topic: bytes, events: list[Event]) -> None:
        payload, number = self._encode(events), self._number
        self._numbers.use(number)
        self._number += 1
        self.num_batches += 1
        _send(self.socket, (topic, number.to_bytes(8, "big"), payload))
        self._kept.append((topic, number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _encode(self, events: Sequence[Event | msgspec.Raw]) -> bytes:
        return self._encoder.encode(EventBatch(time.time(), events, 0))

    # --- replays --------------------------------------------------------------------------------------------------

    def _take_replay(self) -> Iterator[int] | None:
        """Read one replay request.

        If a subscriber asks again before its turn, only its last request is answered. Malformed requests are dropped,
        as are requests of new subscribers while too many wait.
        """
        try:
            frames = self._questions.take()
        except zmq.Again:
            return None
        if frames is None or len(frames) != 3 or len(frames[2]) != 8:
            return None
        if frames[0] in self._asked or len(self._asked) < _MOST_WAITING:
            self._asked[frames[0]] = int.from_bytes(frames[2], "big")
        if self._is_replaying:
            return None
        self._is_replaying = True
        return self._replay_all()

    def _replay_all(self) -> Iterator[int]:
        try:
            while self._asked:
                client = next(iter(self._asked))
                yield from self._replay_from(client, self._asked.pop(client))
        finally:
            self._is_replaying = False

    def _replay_from(self, client: bytes, first: int) -> Iterator[int]:
        """Resend the kept batches from a number on. If some are no longer kept, send or schedule a snapshot."""
        assert self.replay is not None
        oldest = self._kept[0][1] if self._kept else self._number
        if first < oldest and not self._broadcasts:
            self._has_listeners = True  # its subscription may still be on its way
            yield from self._send_snapshot(client, first)
        else:
            if first < oldest and self._clock() >= self._began_at + _SNAPSHOT_SECONDS:
                self._wants_snapshot = self.has_work = True
            wanted = [kept for kept in self._kept if kept[1] >= first]
            for count, (topic, number, payload) in enumerate(wanted, 1):
                _send(self.replay, (client, b"", topic, number.to_bytes(8, "big"), payload))
                if count % _REPLAY_STEP == 0:
                    yield 0
        _send(self.replay, (client, b"", b"", END, b""))
        yield 0

    def _send_snapshot(self, client: bytes, wanted: int) -> Iterator[int]:
        """Send all blocks that were published to one subscriber, which wants the batches from a number on.

        The batches have the numbers up to that of the last live one.
        """
        assert self.replay is not None
        self._publish()
        readers = [(stream, Reader(self.holdings, stream.reader.shelf)) for stream in self._streams.values()]
        batches: list[tuple[bytes, list[msgspec.Raw]]] = []

        def take(stream: _Stream, reader: Reader, until: int | None = None) -> None:
            events = [msgspec.Raw(self._encoder.encode(event)) for event in reader.take(SNAPSHOT_TOKENS, until)]
            if events:
                batches.append((stream.topic, events))

        for stream, reader in readers:  # llm-d clears all topics of a node at once, so these come first
            take(stream, reader)
        for stream, reader in readers:
            while reader.is_scanning:
                take(stream, reader)
                yield 0
        # The scans have seen changes that are not published yet: wait for these, then take those published meanwhile.
        while True:
            if any(reader.is_behind for _, reader in readers):
                return  # it lasted too long: the subscriber asks again at the next batch
            for stream, reader in readers:
                if reader.position < stream.reader.position:
                    take(stream, reader, stream.reader.position)
            # In this step: on a busy node, another batch is published between any two.
            if all(stream.reader.position == reader.position for stream, reader in readers):
                break
            yield 0
        batches = _joined(batches, max(1, self._number - wanted))
        for number, (topic, events) in enumerate(batches, self._number - len(batches)):
            _send(self.replay, (client, b"", topic, number.to_bytes(8, "big"), self._encode(events)))


def _joined(batches: list[tuple[bytes, list[T]]], most: int) -> list[tuple[bytes, list[T]]]:
    """Join neighbouring batches of a topic, so that at most `most` are left, or one a topic."""
    # A subscriber ignores numbers below the last one that it knows, so more batches than it lacks would not be read.
    size = -(-len(batches) // most)
    joined: list[tuple[bytes, list[T]]] = []
    num_joined = 0
    for topic, events in batches:
        if joined and joined[-1][0] == topic and num_joined < size:
            joined[-1][1].extend(events)
            num_joined += 1
        else:
            joined.append((topic, [*events]))
            num_joined = 1
    return joined


def check_endpoint(endpoint: str, flag: str) -> bool:
    """Check an endpoint. Return whether only this machine can reach it.

    Raises:
        ConfigError: it is malformed.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return True
    if not endpoint.startswith("tcp://") or not endpoint.rpartition(":")[2].isdigit():
        raise ConfigError(f"{flag} {endpoint}: give tcp://HOST:PORT or ipc://PATH, for example tcp://127.0.0.1:5557")
    return is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"))


def _open(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, flag: str, *, connects: bool = False
) -> "tuple[zmq.Socket[bytes], BoundEndpoint | None]":
    check_endpoint(endpoint, flag)
    opened = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.MAXMSGSIZE, 64)  # limits incoming messages
    opened.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
    opened.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    opened.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)  # before `bind`, as it applies only to later connections
    if kind == zmq.XPUB:
        opened.setsockopt(zmq.XPUB_VERBOSE, 1)  # report each subscriber, not only the first
    try:
        if not connects:
            return opened, BoundEndpoint(opened, endpoint)
        opened.connect(endpoint)
    except zmq.ZMQError as error:
        opened.close()
        raise ConfigError(f"{flag} {endpoint}: cannot use it: {error}") from error
    return opened, None


def _has_input(receiver: "zmq.Socket[bytes]") -> bool:
    return bool(int(receiver.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))  # `poll` takes several times as long


def _send(sender: "zmq.Socket[bytes]", frames: tuple[bytes, ...]) -> None:
    try:
        sender.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:
        return  # the subscriber has left or is too slow, which it notices by the sequence numbers
