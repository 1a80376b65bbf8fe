"""Routers that nobody runs here, by the rules of their decoders of KV events.

- llm-d-router (read 2026-11: event_dedup_filter.go, zmq_subscriber.go) counts how often a block was announced, and
  drops it when the count is back at zero. It has one sequence for each endpoint. Its first message, and each gap, make
  it ask for a replay, which must be contiguous. A replay that ends without a batch makes it forget the node.
- Dynamo's worker publisher (dedup.rs) counts in the same way. Its replay need not be contiguous.
- SMG and AIBrix look at no medium: a block that was removed is gone. They ask for no replay.
"""

from collections import Counter
from typing import Any

import zmq

from kvdepot.features.routers.events import END
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess
from support.events import Context, events_of, ids_of, kept


class Blind:
    """A router that looks at no medium and asks for no replay."""

    FLAGS: tuple[str, ...] = ("--events", "tcp://127.0.0.1:0", "--events-media", "union")

    def __init__(self, depot: DepotProcess, context: Context) -> None:
        self.held = set[int]()
        self.context = context
        endpoint, self.replay_endpoint = depot.status().event_endpoints
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        kept.append(self.socket)

    def take_all(self) -> None:
        while self.socket.poll(0):
            _, number, payload = self.socket.recv_multipart()
            self.got(int.from_bytes(number, "big"), payload)

    def got(self, number: int, payload: bytes) -> None:
        del number
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                self.clear()
            else:
                self.take(event, event["block_hashes"])

    def clear(self) -> None:
        self.held.clear()

    def take(self, event: dict[str, Any], ids: list[int]) -> None:
        if event["type"] == "BlockStored":
            self.held.update(ids)
        else:
            self.held.difference_update(ids)

    def known(self, run: KeyRun) -> int:
        """Return how many leading chunks of a prompt it credits the node with."""
        self.take_all()
        return next((n for n, each in enumerate(ids_of(run)) if each not in self.held), run.num_chunks)


class Counting(Blind):
    """A router that counts announcements, and asks for the batches that it lacks."""

    FLAGS = ("--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0")
    needs_contiguous = False

    def __init__(self, depot: DepotProcess, context: Context) -> None:
        super().__init__(depot, context)
        self.counts = Counter[tuple[str, int]]()
        self.last: int | None = None
        self.num_resets = 0

    def clear(self) -> None:
        self.counts.clear()
        self.held.clear()

    def take(self, event: dict[str, Any], ids: list[int]) -> None:
        for each in ids:
            name = event["medium"], each
            if event["type"] == "BlockStored":
                self.counts[name] += 1
            elif self.counts[name] > 0:
                self.counts[name] -= 1
        self.held = {each for (_, each), count in self.counts.items() if count}

    def got(self, number: int, payload: bytes) -> None:
        if self.last is not None and number <= self.last:
            return
        if self.last is None or number > self.last + 1:
            self.ask(0 if self.last is None else self.last + 1)
            if self.last is not None and number <= self.last:
                return
            assert not self.needs_contiguous or self.last is None or number == self.last + 1
        self.apply(payload)
        self.last = number

    def ask(self, first: int) -> None:
        asking = self.context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(self.replay_endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        expected: int | None = None
        while True:
            assert asking.poll(10_000)
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                break
            got = int.from_bytes(number, "big")
            if expected is None and got > first and self.needs_contiguous:
                self.clear()
            assert expected in (None, got) or not self.needs_contiguous
            self.apply(payload)
            self.last, expected = got, got + 1
        asking.close()
        if expected is None and self.needs_contiguous and first:
            self.num_resets += 1
            self.clear()
            self.last = None


class LlmD(Counting):
    """llm-d-router."""

    needs_contiguous = True


class DynamoPublisher(Counting):
    """Dynamo's worker publisher."""
