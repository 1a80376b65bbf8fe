"""KV events: publish the blocks that the pool holds, so that routers can send prompts to the node with their prefix.

Schema and framing are vLLM's, so a subscriber of an engine can also subscribe to a depot. An XPUB socket sends `(topic,
sequence number, batch)`: the number as 8 bytes, big-endian, the batch as msgpack. Each topic has its own sequence,
which begins at the start time in microseconds: routers ignore numbers below the last one as old, even after a restart
of the depot. A ROUTER socket resends recent batches from a given number on, and ends with the number -1.

A new subscriber causes a snapshot: each topic publishes that all blocks are cleared, then all blocks that the pool
holds. All topics begin at the same time, because llm-d applies the event to the whole node. A new topic also causes a
snapshot, and so does a topic whose log lacks changes that were not published yet, and a subscriber that asks for
batches that are no longer kept. All subscribers receive it, as ZeroMQ cannot send to a single one. Everything runs on
the depot's loop, one batch per turn. Nothing is encoded until somebody subscribes. From then on all topics are
published, even if all subscribers leave: ZeroMQ does not tell who unsubscribes, so a stranger could unsubscribe for all
others.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from kvdepot.config import is_loopback
from kvdepot.counting import depot_counter
from kvdepot.errors import ConfigError
from kvdepot.features.routers.holdings import Event, Holdings, Reader
from kvdepot.features.routers.zeromq import BoundEndpoint, MessageReader

logger = logging.getLogger(__name__)

END: Final = (-1).to_bytes(8, "big", signed=True)

EVENT_BATCHES: Final = depot_counter("event_batches", "Batches of KV events published")
EVENT_FLOODS: Final = depot_counter(
    "event_floods", "Times that all subscribers of KV events were disconnected, as one subscribed to too much"
)
_KEPT_BATCHES: Final = 4095  # of all topics: a whole replay and its end fit into one queue of 4,096
KEPT_BYTES: Final = 32 << 20  # long prompts reach this limit with fewer batches
BATCH_TOKENS: Final = 8192  # 0.4 ms to encode
_QUEUED_MESSAGES: Final = _KEPT_BATCHES + 1  # per subscriber before messages are lost: a whole replay and its end
_MOST_QUESTIONS: Final = 16  # unread requests per subscriber, of which only the last is answered
_MOST_NOTICES: Final = 64  # subscriptions read per turn: the rest of a flood waits for the next one
# ZeroMQ keeps up to 48 bytes for each byte of each topic, without a bound: a million topics of 60 bytes, which somebody
# sent in 15 s, took 2.9 GB. Routers subscribe to one topic or two, so these are many times those of a fleet.
_MOST_TOPICS: Final = 4096
_HANDSHAKE_MILLISECONDS: Final = 2000  # then a silent connection is closed; until then, it takes a descriptor
_REPLAY_STEP: Final = 64  # batches per step; they are sent as they were encoded
_MOST_WAITING: Final = 1024  # subscribers waiting for a replay: many times the routers of a node
# Between the starts of two snapshots. Subscribers that connect at about the same time after a restart share one, and
# the blocks that it clears are published again within a second. Encoding a snapshot of a million tokens takes 50 ms.
_SNAPSHOT_SECONDS: Final = 0.25
_SUBSCRIBED: Final = b"\1"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in order. The rank is 0, because the blocks of a node serve all ranks of its engines."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@dataclass(slots=True, eq=False)
class _Stream:
    """One topic."""

    topic: bytes
    reader: Reader
    number: int  # sequence number of the next batch
    oldest: int  # sequence number of the first batch that is kept, or of the next batch


class EventPublisher:
    """Publishes events, and resends recent ones.

    Args:
        context: the ZeroMQ context. It closes the sockets.
        holdings: the chunks to report.
        endpoint: the endpoint of the XPUB socket.
        replay_endpoint: the endpoint of the ROUTER socket; None for no replays.
        clock: returns monotonic seconds.

    Attributes:
        has_work: whether `serve` would publish something now.
        due: when a snapshot that waits may begin, by `clock`; infinity if none waits.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        holdings: Holdings,
        endpoint: str,
        replay_endpoint: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_batches = 0
        self.has_work = False
        self.due = float("inf")
        self.holdings = holdings
        self._clock = clock
        self._seen_changes = -1
        self._streams: dict[str, _Stream] = {}
        self._wants_snapshot = False
        self._began_at = float("-inf")  # start of the last snapshot
        self._has_listeners = False  # whether anybody has subscribed so far
        self._kept = deque[tuple[_Stream, int, bytes]]()  # batches with their numbers, the oldest of all topics first
        self._kept_bytes = 0
        self._asked: dict[bytes, int] = {}  # first wanted batch, by subscriber waiting for a replay
        self._is_replaying = False
        self._encoder = msgspec.msgpack.Encoder()
        self.socket, heard = _listen(context, zmq.XPUB, endpoint, "--events")
        self.endpoint = heard.endpoint
        self._heard = heard
        self._topics = set[bytes]()  # in subscriptions since the last time that all connections were ended
        self.num_floods = 0
        self.listeners = [heard]
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if replay_endpoint is not None:
            self.replay, asked = _listen(context, zmq.ROUTER, replay_endpoint, "--events-replay")
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
        is_bound = self._heard.listen_again()
        replay = self._take_replay() if self.replay is not None else None
        self._publish()
        self.has_work |= (
            not is_bound or bool(self.socket.poll(0)) or (self.replay is not None and bool(self.replay.poll(0)))
        )
        return replay

    def _take_subscriptions(self) -> None:
        for _ in range(_MOST_NOTICES):
            try:
                notice = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if notice[:1] == _SUBSCRIBED:
                self._has_listeners = self._wants_snapshot = True
                self._topics.add(notice)
            if len(self._topics) > _MOST_TOPICS:
                logger.warning(
                    "%s has more than %d topics: all subscribers must connect again", self.endpoint, _MOST_TOPICS
                )
                self._topics.clear()
                self.num_floods += 1
                self._heard.end_connections()

    def _publish(self) -> None:
        """Publish one batch of each topic that has one, once somebody has subscribed."""
        self._seen_changes, self.has_work = self.holdings.num_changes, False
        for topic, shelf in self.holdings.shelves.items():
            if topic not in self._streams:
                number = time.time_ns() // 1000
                self._streams[topic] = _Stream(topic.encode(), Reader(self.holdings, shelf), number, number)
                self._wants_snapshot = True
        if not self._has_listeners:
            return
        self._wants_snapshot |= any(stream.reader.is_behind for stream in self._streams.values())
        is_beginning = self._wants_snapshot and self._may_begin()
        if is_beginning:
            self._wants_snapshot, self._began_at = False, self._clock()
        self.due = self._began_at + _SNAPSHOT_SECONDS if self._wants_snapshot else float("inf")
        for stream in self._streams.values():
            reader = stream.reader
            if is_beginning:
                reader.restart()
            elif reader.is_starting or reader.is_behind:
                continue  # a snapshot follows soon
            events = reader.take(BATCH_TOKENS) if reader.has_more else []
            if events:
                self._send(stream, events)
            self.has_work |= reader.has_more

    def _may_begin(self) -> bool:
        """Return whether a snapshot may begin.

        It waits for the end of the last one: if each new subscriber restarted the snapshot, nobody would receive all
        of it.
        """
        is_over = not any(stream.reader.is_scanning for stream in self._streams.values())
        return is_over and self._clock() >= self._began_at + _SNAPSHOT_SECONDS

    def _send(self, stream: _Stream, events: list[Event]) -> None:
        payload, number = self._encoder.encode(EventBatch(time.time(), events, 0)), stream.number
        stream.number += 1
        self.num_batches += 1
        _send(self.socket, (stream.topic, number.to_bytes(8, "big"), payload))
        self._kept.append((stream, number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            stream, number, payload = self._kept.popleft()
            self._kept_bytes -= len(payload)
            stream.oldest = number + 1

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
        """Resend the kept batches from a number on. If some are no longer kept, schedule a snapshot."""
        assert self.replay is not None
        is_gone = any(first < stream.oldest for stream in self._streams.values())
        if is_gone and self._clock() >= self._began_at + _SNAPSHOT_SECONDS:
            self._wants_snapshot = self.has_work = True
        wanted = [kept for kept in self._kept if kept[1] >= first]
        for count, (stream, number, payload) in enumerate(wanted, 1):
            _send(self.replay, (client, b"", stream.topic, number.to_bytes(8, "big"), payload))
            if count % _REPLAY_STEP == 0:
                yield 0
        _send(self.replay, (client, b"", b"", END, b""))
        yield 0


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


def _listen(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, flag: str
) -> "tuple[zmq.Socket[bytes], BoundEndpoint]":
    check_endpoint(endpoint, flag)
    bound = context.socket(kind)
    bound.setsockopt(zmq.LINGER, 0)
    bound.setsockopt(zmq.MAXMSGSIZE, 64)  # limits incoming messages
    bound.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
    bound.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    bound.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)  # before `bind`, as it applies only to later connections
    if kind == zmq.XPUB:
        bound.setsockopt(zmq.XPUB_VERBOSE, 1)  # report each subscriber, not only the first
    try:
        return bound, BoundEndpoint(bound, endpoint)
    except zmq.ZMQError as error:
        bound.close()
        raise ConfigError(f"{flag} {endpoint}: cannot listen there: {error}") from error


def _send(sender: "zmq.Socket[bytes]", frames: tuple[bytes, ...]) -> None:
    try:
        sender.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:
        return  # the subscriber has left or is too slow, which it notices by the sequence numbers
