"""A router's view of events, engines that describe their stores, and prompts with ids and tokens."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from kvdepot.features.routers.events import END
from kvdepot.features.routers.feed import Description
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess
from kvdepot.wire import messages as m
from support.peer import Peer, registration

Context = zmq.Context[zmq.Socket[bytes]]
Batch = tuple[int, list[dict[str, Any]]]
NAMESPACE: Final = bytes(range(32))
MODEL: Final = "served"
kept: list[object] = []
FLAGS: Final = ("--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0")


def plain(events: Sequence[object]) -> list[dict[str, Any]]:
    """Return events as subscribers decode them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Decode a batch as plain values: `[ts, events, rank]`."""
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    return events


def anonymous_bytes(pid: int) -> int:
    """Return the resident bytes of a process that belong to no file."""
    (found,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found) * 1024


def block_id(digest: bytes) -> int:
    """Return the id that the tests' engines give to a block. Each chunk is one block."""
    return int.from_bytes(digest[-8:], "big")


def ids_of(run: KeyRun) -> list[int]:
    return [block_id(run.digests[start : start + 32]) for start in range(0, len(run.digests), 32)]


def tokens_of(run: KeyRun, chunk_tokens: int) -> list[int]:
    """Return tokens that are derived from the chunks' keys."""
    return [token for each in ids_of(run) for token in random.Random(each).choices(range(100_000), k=chunk_tokens)]


def description(run: KeyRun, chunk_tokens: int = 64, **more: Any) -> Description:
    parent = block_id(run.parent) if run.first_chunk else None
    return Description(NAMESPACE, tokens_of(run, chunk_tokens), ids_of(run), parent, **more)


class View:
    """A router's view of one depot. Checks that the parent of each block is known.

    With `is_exact`, it also checks that each block is announced once and removed once, as some routers count.
    """

    retracts_unknown = False  # whether blocks may be removed that were not announced, which routers ignore

    def __init__(self, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self.counted: set[tuple[str, int | None, int]] = set()  # medium, group and id
        self.found: set[int] = set()
        self.in_tier: set[int] = set()  # only in tiers
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.next = 0
        self.num_clears = 0
        self.events: list[dict[str, Any]] = []  # all that came

    def apply(self, batches: list[Batch]) -> None:
        for number, events in batches:
            if number < self.next:
                continue  # known from a replay
            self.next = number + 1
            for event in events:
                self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.found.clear()
            self.in_tier.clear()
            self.counted.clear()
            self.num_clears += 1
            return
        assert event["locality"] == "LOCAL"
        ids, size = event["block_hashes"], event.get("block_size", 0)
        here = {"CPU": self.found, "STORAGE": self.in_tier}[event["medium"]]
        names = {(event["medium"], event.get("group_idx"), each) for each in ids}
        is_exact = self.is_exact and self.num_clears > 0
        if event["type"] == "BlockRemoved":
            assert not is_exact or self.retracts_unknown or self.counted.issuperset(names)
            self.counted -= names
            here.difference_update(ids)
            return
        assert not is_exact or self.counted.isdisjoint(names)
        self.counted |= names
        before = event["parent_block_hash"]
        assert before is None or before in self.found | self.in_tier
        assert len(event["token_ids"]) == size * len(ids)
        for place, each in enumerate(ids):
            self.tokens[each] = tuple(event["token_ids"][place * size : (place + 1) * size])
            self.parents[each], before = before, each
        here.update(ids)

    def reached(self) -> set[int]:
        """Return the blocks whose whole prefix is in the pool."""

        def is_reached(block: int | None) -> bool:
            return block is None or (block in self.found and is_reached(self.parents[block]))

        return set(filter(is_reached, self.found))


class Router(View):
    """A subscriber of a depot or of an engine, which asks for the batches that it lacks.

    `kept` holds its socket until the context closes it.
    """

    def __init__(
        self, source: DepotProcess | str, context: Context, topic: bytes = b"", *, is_exact: bool = True
    ) -> None:
        super().__init__(is_exact=is_exact)
        endpoints = [source, ""] if isinstance(source, str) else source.status().event_endpoints
        events, self.replay_endpoint = endpoints
        self.context = context
        self.topics: set[bytes] = set()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(events)
        kept.append(self.socket)

    def take_all(self) -> list[Batch]:
        batches: list[Batch] = []
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            first = int.from_bytes(number, "big")
            new = self.ask_again(self.next) if self.replay_endpoint and first > self.next else []
            new.append((first, events_of(payload)))
            self.apply(new)
            batches += new
        return batches

    def knows(self, run: KeyRun) -> bool:
        self.take_all()
        return set(ids_of(run)) <= self.found

    def ask_again(self, first: int) -> list[Batch]:
        asking = self.context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(self.replay_endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[Batch] = []
        while True:
            assert asking.poll(10_000)
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                asking.close()
                return batches
            batches.append((int.from_bytes(number, "big"), events_of(payload)))


class Listener(Router):
    """A subscriber of an engine that takes only the events about its depot."""

    retracts_unknown = True  # after the engine has cleared its cache, for routers that did not hear of it

    def take(self, event: dict[str, Any]) -> None:
        if event.get("medium") in ("CPU", "STORAGE") or event["type"] == "AllBlocksCleared":
            super().take(event)

    def holds(self, depot: Router) -> bool:
        """Return whether the engine has published the same as its depot."""
        self.take_all()
        depot.take_all()
        return self.reached() == depot.reached() and all(self.tokens[each] == depot.tokens[each] for each in self.found)

    def num_found(self) -> int:
        self.take_all()
        return len(self.found)


class Engine:
    """A worker that copies nothing, and a scheduler that describes what it stored."""

    def __init__(self, depot: DepotProcess, name: str = "engine", model: str = MODEL) -> None:
        request = registration(instance=name)
        self.worker = Peer(depot, request)
        scheduler = m.RegisterScheduler(m.PROTOCOL_VERSION, name, "", request.spec, served_model=model)
        self.scheduler = Peer(depot, scheduler)
        self.chunk_tokens = request.spec.chunk_tokens

    def store(self, run: KeyRun) -> int:
        """Store the chunks that the depot lacks. Return the number of described chunks."""
        plan = self.worker.prepare(run)
        if plan.ticket:
            self.worker.ask(m.CommitStore(self.worker.context, plan.ticket))
        return self.describe(run)

    def holds(self, run: KeyRun) -> int:
        """Return how many chunks of a prompt a lookup finds. As engines do, describe them if the depot asks."""
        reply = self.scheduler.find(run)
        if reply.wants_tokens:
            self.describe(run.slice(0, reply.num_chunks))
        return reply.num_chunks

    def describe(self, run: KeyRun, **more: Any) -> int:
        count = 0
        for request in description(run, self.chunk_tokens, **more).requests(self.scheduler.context, run):
            reply = self.scheduler.ask(request)
            assert isinstance(reply, m.Done)
            count += reply.count
        return count

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
