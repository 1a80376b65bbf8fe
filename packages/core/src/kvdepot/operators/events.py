"""KV events: publish which chunks the pool holds, for routers that send a prompt to the node with its prefix.

Schema and framing are vLLM's, so a subscriber of an engine can subscribe to a depot. A PUB socket sends `(topic,
sequence number, batch)`: the number as 8 bytes, big-endian, counted from 0 by each server, the batch as msgpack. A
ROUTER socket resends batches from a given number on, and ends with the number -1. Hashes are the depot's chunk keys (32
bytes). The depot does not know tokens, so their list is empty.

Everything runs on the depot's loop. The index reports each chunk that becomes visible or hidden, and each turn of the
loop publishes its reports as one batch. A subscriber that is too slow misses batches, notices it by the numbers and
asks again. A chunk removed from the middle of a prefix, because its bytes were damaged, is reported alone: the chunks
after it are hidden too, until it is stored again.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import zmq

from kvdepot.config import is_loopback
from kvdepot.counting import depot_counter
from kvdepot.errors import ConfigError
from kvdepot.index.eviction import NO_NODE
from kvdepot.index.index import ChunkIndex
from kvdepot.operators.zeromq import Listener, MessageReader

MEDIUM: Final = "CPU"  # vLLM's word for host memory
END: Final = (-1).to_bytes(8, "big", signed=True)

EVENT_BATCHES: Final = depot_counter("event_batches", "Batches of KV events published")
_KEPT_BATCHES: Final = 10_000
_KEPT_BYTES: Final = 32 << 20
_LARGEST_BATCH: Final = 4096  # chunks
_QUEUED_MESSAGES: Final = _KEPT_BATCHES + 1  # per subscriber before it misses some: a whole replay and its end
_MOST_QUESTIONS: Final = 16  # unread requests of one subscriber
_HANDSHAKE_MILLISECONDS: Final = 2000
_REPLAY_STEP: Final = 64
_MOST_WAITING: Final = 1024  # subscribers waiting for a replay


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """A run of chunks became visible."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Chunks became hidden."""

    block_hashes: list[bytes]
    medium: str | None


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one turn of the loop, in order."""

    ts: float
    events: list[Any]


class EventPublisher:
    """Publishes events, and resends recent ones.

    Args:
        context: closes the sockets.
        index: reports here.
        endpoint: of the PUB socket.
        replay_endpoint: of the ROUTER socket, None for no replays.
        topic: the first frame of each message; subscribers choose by it.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        index: ChunkIndex,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str = "",
    ) -> None:
        self.num_batches = 0
        self._index = index
        self._topic = topic.encode()
        self.pending: list[BlockStored | BlockRemoved] = []
        self._num_pending = 0
        self._last_space = -1
        self.kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._asked: dict[bytes, int] = {}  # first batch wanted, by subscriber waiting for a replay
        self._is_replaying = False
        self._encoder = msgspec.msgpack.Encoder()
        self._publisher, heard = _listen(context, zmq.PUB, endpoint, "--events")
        self.endpoint = heard.endpoint
        self.listeners = [heard]
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if replay_endpoint is not None:
            self.replay, asked = _listen(context, zmq.ROUTER, replay_endpoint, "--events-replay")
            self.replay_endpoint = asked.endpoint
            self.listeners.append(asked)
            self._questions = MessageReader(self.replay, most_frames=3)
        index.on_shown, index.on_hidden = self._on_shown, self._on_hidden

    def _on_shown(self, node: int) -> None:
        index = self._index
        space, key, parent = index.nodes.space_of(node), index.nodes.key_of(node), index.nodes.parent_of(node)
        before = index.nodes.key_of(parent) if parent != NO_NODE else None
        last = self.pending[-1] if self.pending else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == before and self._last_space == space.number:
            last.block_hashes.append(key)
        else:
            self.pending.append(BlockStored([key], before, [], space.spec.chunk_tokens, None, MEDIUM, None))
            self._last_space = space.number
        self._count()

    def _on_hidden(self, node: int) -> None:
        last = self.pending[-1] if self.pending else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(self._index.nodes.key_of(node))
        else:
            self.pending.append(BlockRemoved([self._index.nodes.key_of(node)], MEDIUM))
        self._count()

    def _count(self) -> None:
        self._num_pending += 1
        if self._num_pending >= _LARGEST_BATCH:
            self.flush()

    def flush(self) -> None:
        """Publish the pending events. Never waits."""
        if not self.pending:
            return
        payload = self._encoder.encode(EventBatch(time.time(), self.pending))
        number = self.num_batches
        self.num_batches += 1
        self.pending, self._num_pending = [], 0
        _send(self._publisher, (self._topic, number.to_bytes(8, "big"), payload))
        self.kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self.kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self.kept.popleft()[1])

    def take_replay(self) -> Iterator[int] | None:
        """Take one request. Return the steps that answer it and later ones, None if such steps are already running.

        If a subscriber asks again before its turn, only its last request is answered. Malformed requests are dropped,
        and so are new subscribers while very many wait.
        """
        assert self.replay is not None
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
        assert self.replay is not None
        for count, (number, payload) in enumerate([kept for kept in self.kept if kept[0] >= first], 1):
            _send(self.replay, (client, b"", self._topic, number.to_bytes(8, "big"), payload))
            if count % _REPLAY_STEP == 0:
                yield 0
        _send(self.replay, (client, b"", b"", END, b""))
        yield 0


def check_endpoint(endpoint: str, flag: str) -> bool:
    """Return whether only this machine can reach an endpoint.

    Raises:
        ConfigError: it is malformed.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return True
    if not endpoint.startswith("tcp://") or not endpoint.rpartition(":")[2].isdigit():
        raise ConfigError(f"{flag} {endpoint}: give tcp://HOST:PORT or ipc://PATH, for example tcp://127.0.0.1:5557")
    return is_loopback(endpoint)


def _listen(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, flag: str
) -> "tuple[zmq.Socket[bytes], Listener]":
    check_endpoint(endpoint, flag)
    bound = context.socket(kind)
    bound.setsockopt(zmq.LINGER, 0)
    bound.setsockopt(zmq.MAXMSGSIZE, 64)  # of incoming messages
    bound.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
    bound.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    bound.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)  # applies to later connections: before `bind`
    try:
        return bound, Listener(bound, endpoint)
    except zmq.ZMQError as error:
        bound.close()
        raise ConfigError(f"{flag} {endpoint}: cannot listen there: {error}") from error


def _send(sender: "zmq.Socket[bytes]", frames: tuple[bytes, ...]) -> None:
    try:
        sender.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:
        return  # the subscriber left or is too slow; it notices by the numbers
