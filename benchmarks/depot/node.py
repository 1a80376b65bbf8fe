"""Measures how much traffic of a node one depot holds: `python benchmarks/depot/node.py [--trace TRACE.jsonl]`.

Sixteen workers and their schedulers send the messages of vLLM's connector to a depot whose index is full: lookups that
announce and join, batches of stores with checksums, retrieves, releases. No byte of KV moves; an entry has 4 KiB of
pool. Prints the processor time of the server's thread for a chunk, the times of replies while requests arrive at
random, the memory of an entry, and the time of a restart. `--models` prints instead, for models and sizes of chunks,
how many requests of 8,000 tokens a second take 0.8 of a core. `--trace` needs `kvdepot-plan`.
"""

import argparse
import itertools
import math
import random
import select
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel
from kvdepot.client.transfer_protocol import STORE_BATCHES
from kvdepot.client.transfers import BATCH_BYTES
from kvdepot.features.routers.messages import MAXIMUM_DESCRIBED_CHUNKS, MAXIMUM_DESCRIBED_TOKENS, DescribeChunks
from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.bench import ENTRY_BYTES, describe_machine
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import GroupKind, Part, Plane
from kvdepot.wire import frames
from kvdepot.wire import messages as m

NUM_WORKERS: Final = 16
REQUEST_TOKENS: Final = 8_000
NUM_DOCUMENTS: Final = 32  # beginnings that requests share
AT_ONCE: Final = 4  # requests, while the processor time is measured
SHARE_OF_A_CORE: Final = 0.8  # above it, requests begin to wait for each other
_PATIENT_SECONDS: Final = 30.0
BLOCK_TOKENS: Final = 16  # of vLLM on GPUs
_SOME_TOKENS: Final = random.Random(0).randbytes(4 * MAXIMUM_DESCRIBED_TOKENS)
_ROOT: Final = bytes(DIGEST_BYTES)  # the first chunk has no parent


@dataclass(frozen=True, slots=True)
class Model:
    """A model as workers store it."""

    token_bytes: int  # of one worker
    num_ranks: int = 1
    num_parts: int = 1  # different ones; with latent attention all ranks hold the same


MODELS: Final = {
    "8B": Model(128 << 10),
    "70B, TP 8": Model(40 << 10, 8, 8),
    "latent attention, 61 layers, TP 8": Model(61 * 576 * 2, 8),
}

Step = list[tuple["Link", frames.Request]]
Flow = Generator[Step, list[frames.Reply]]  # a request: yields messages to send at once, gets their replies


class Link:
    """One connection to the depot, as a thread of an engine has it."""

    def __init__(self, connection: Connection) -> None:
        self.session = connection.wait_until_open(_PATIENT_SECONDS)
        self.context = self.session.context
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(self.session, self.socket)


class Engine:
    """The scheduler and the workers of one engine, which send messages in place of vLLM's connector.

    Args:
        name: the engine's name.
        url: the depot's URL.
        model: its model.
        chunk_tokens: tokens of a chunk.
        stack: closes the connections.
        served_model: the name under which routers know the model. If given, the chunks are described to them.
    """

    def __init__(
        self, name: str, url: str, model: Model, chunk_tokens: int, stack: ExitStack, served_model: str = ""
    ) -> None:
        plane = Plane(1, model.num_parts)
        shape = m.GroupShape(GroupKind.FULL_ATTENTION, chunk_tokens, heads=plane.heads)
        spec = m.CacheSpec(chunk_tokens, (shape,), "bfloat16", "node")

        def connect(registration: m.RegisterScheduler | m.RegisterKVCache) -> Connection:
            connection = Connection(url, name, registration, maps_pool=False, deadline_seconds=_PATIENT_SECONDS)
            stack.callback(connection.close)
            return connection

        scheduler = m.RegisterScheduler(m.PROTOCOL_VERSION, name, "node", spec, served_model=served_model)
        self.scheduler = Link(connect(scheduler))
        self._described_tokens = chunk_tokens if served_model else 0
        self.stores: list[Link] = []
        self.retrieves: list[Link] = []
        for rank in range(model.num_ranks):
            part = Part(0, 1, rank % model.num_parts, 1)
            detail = m.GroupDetail((ENTRY_BYTES,), 1, part.number, is_mla=model.num_parts < model.num_ranks)
            worker = connect(
                m.RegisterKVCache(
                    m.PROTOCOL_VERSION, name, rank, model.num_ranks, "none", "none", "node", spec, (detail,)
                )
            )
            self.stores.append(Link(worker))
            self.retrieves.append(Link(worker))
        in_batch = max(1, BATCH_BYTES // (model.token_bytes * chunk_tokens))
        self._store_chunks = min(STORE_BATCHES * in_batch, m.MAXIMUM_STORE_ENTRIES)
        self._retrieve_chunks = min(in_batch, m.MAXIMUM_RETRIEVE_ENTRIES)

    @property
    def links(self) -> list[Link]:
        """All connections of the engine."""
        return [self.scheduler, *self.stores, *self.retrieves]

    def request(self, name: str, digests: bytes, counts: "Counts") -> Flow:
        """Load the chunks that the depot has, and store the others."""
        context, total = self.scheduler.context, len(digests) // DIGEST_BYTES
        lookup = m.Lookup(context, name, digests, "default", 1.5, 0.00004, announces=True, joins=True)
        (reply,) = yield [(self.scheduler, lookup)]
        assert isinstance(reply, m.LookupReply)
        found = reply.num_chunks
        if self._described_tokens:
            self._describe(digests, found)
        for start in range(0, found, self._retrieve_chunks):
            stop = min(start + self._retrieve_chunks, found)
            batch = digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]
            plans = yield [
                (link, m.PrepareRetrieve(link.context, name, batch, start, (stop - start,))) for link in self.retrieves
            ]
            for link, plan in zip(self.retrieves, plans, strict=True):
                assert isinstance(plan, m.RetrievePlan)
                link.channel.post(m.Release(link.context, (plan.lease,)))
        for start in range(found, total, self._store_chunks):
            stop = min(start + self._store_chunks, total)
            batch = digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]
            parent = digests[(start - 1) * DIGEST_BYTES : start * DIGEST_BYTES] if start else _ROOT
            plans = yield [
                (link, m.PrepareStore(link.context, name, "default", batch, start, parent, (stop - start,)))
                for link in self.stores
            ]
            commits: Step = []
            for link, plan in zip(self.stores, plans, strict=True):
                assert isinstance(plan, m.StorePlan)
                if plan.ticket:
                    sums = bytes([1]) * (m.CHECKSUM_BYTES * len(plan.extents) // m.EXTENT.size)
                    commits.append((link, m.CommitStore(link.context, plan.ticket, sums)))
            if commits:
                yield commits
        yield [(self.scheduler, m.EndRequest(context, name))]
        counts.requests += 1
        counts.chunks += total
        counts.found += found

    def _describe(self, digests: bytes, first: int) -> None:
        """Send the tokens of the chunks that will be stored, and ids of their blocks."""
        tokens, blocks = self._described_tokens, max(1, self._described_tokens // BLOCK_TOKENS)
        ids = [digests[start + 8 : start + 16] for start in range(0, len(digests), DIGEST_BYTES) for _ in range(blocks)]
        most = max(1, min(MAXIMUM_DESCRIBED_CHUNKS, MAXIMUM_DESCRIBED_TOKENS // tokens))
        for start in range(first, len(digests) // DIGEST_BYTES, most):
            batch = digests[start * DIGEST_BYTES : (start + most) * DIGEST_BYTES]
            num_tokens = len(batch) // DIGEST_BYTES * tokens
            before = ids[start * blocks - 1] if start else b""
            message = DescribeChunks(
                self.scheduler.context,
                _ROOT,
                batch,
                start,
                _SOME_TOKENS[: 4 * num_tokens],
                b"".join(ids[start * blocks : (start + most) * blocks]),
                before,
            )
            self.scheduler.channel.post(message)


@dataclass(slots=True)
class Counts:
    """Requests that have ended, and their chunks."""

    requests: int = 0
    chunks: int = 0
    found: int = 0
    seconds: float = 0.0  # of the server's thread


class Node:
    """All engines of a node, which one thread runs.

    Args:
        depot: the depot that they use.
        model: the model of all engines.
        chunk_tokens: tokens of a chunk.
        stack: closes the connections.
        served_model: as in `Engine`.
    """

    def __init__(
        self, depot: DepotProcess, model: Model, chunk_tokens: int, stack: ExitStack, served_model: str = ""
    ) -> None:
        names = [f"engine-{number}" for number in range(NUM_WORKERS // model.num_ranks)]
        engines = [Engine(name, depot.url, model, chunk_tokens, stack, served_model) for name in names]
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)  # until the reply, by kind of message
        self._depot = depot
        self.engines = engines
        self._next = itertools.cycle(engines)
        self._links: dict[int, Link] = {}
        self._poller = select.epoll()
        for link in itertools.chain.from_iterable(engine.links for engine in engines):
            link.channel.call(m.Release(link.context, ()), _PATIENT_SECONDS)  # connects
            self._links[link.socket.fileno()] = link
            self._poller.register(link.socket, select.EPOLLIN)
        self._waiting: defaultdict[int, dict[int, tuple[_Running, int, float, str]]] = defaultdict(dict)
        self.num_open = 0

    def start(self, number: int, digests: bytes, counts: Counts) -> None:
        """Start a request at the next engine."""
        running = _Running(next(self._next).request(f"request-{number}", digests, counts))
        self.num_open += 1
        self._send(running, next(running.flow))

    def poll(self, timeout_seconds: float) -> None:
        """Handle the replies that are there. Wait for the first one."""
        for fd, _ in self._poller.poll(timeout_seconds):
            channel, waiting = self._links[fd].channel, self._waiting[fd]
            channel.drain()
            now = time.perf_counter()
            for sequence in list(waiting):
                reply = channel.poll(sequence) if channel.num_kept else None
                if reply is None:
                    break  # replies come in order
                running, place, began, kind = waiting.pop(sequence)
                self.seconds[kind].append(now - began)
                if running.accept(place, reply):
                    try:
                        self._send(running, running.flow.send(running.replies))
                    except StopIteration:
                        self.num_open -= 1

    def _send(self, running: "_Running", step: Step) -> None:
        running.expect(len(step))
        for place, (link, message) in enumerate(step):
            sequence = link.channel.submit(message)
            kind = frames.operation_of(type(message))
            self._waiting[link.socket.fileno()][sequence] = running, place, time.perf_counter(), kind

    def run(self, prompts: Iterable[bytes]) -> Counts:
        """Send requests, `AT_ONCE` at a time, and return what they took."""
        counts, before = Counts(), self.server_seconds()
        for number, digests in enumerate(prompts):
            self.start(number, digests, counts)
            while self.num_open >= AT_ONCE:
                self.poll(1)
        while self.num_open:
            self.poll(1)
        counts.seconds = self.server_seconds() - before
        return counts

    def play(self, prompts: Iterator[bytes], rate: float, seconds: float) -> Counts:
        """Send requests at random moments, `rate` a second, whether earlier ones have ended or not."""
        counts, rng, before = Counts(), random.Random(1), self.server_seconds()
        begin = at = time.perf_counter()
        for number in itertools.count():
            at += rng.expovariate(rate)
            if at > begin + seconds:
                break
            while (rest := at - time.perf_counter()) > 0:
                self.poll(rest)
            self.start(number, next(prompts), counts)
        while self.num_open:
            self.poll(1)
        counts.seconds = self.server_seconds() - before
        return counts

    def server_seconds(self) -> float:
        """Return the processor time of the server's thread."""
        pid = self._depot.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


class _Running:
    """A request under way, and the replies to its last messages."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._replies: dict[int, frames.Reply] = {}
        self._num_expected = 0

    def expect(self, number: int) -> None:
        """Expect the replies to that many messages."""
        self._replies, self._num_expected = {}, number

    def accept(self, place: int, reply: frames.Reply) -> bool:
        """Keep the reply to message `place`. Return whether all are here."""
        self._replies[place] = reply
        return len(self._replies) == self._num_expected

    @property
    def replies(self) -> list[frames.Reply]:
        """The replies, in the order of the messages."""
        return [self._replies[place] for place in range(self._num_expected)]


# --- traffic ----------------------------------------------------------------------------------------------------------


def new_prompts(rng: random.Random, num_chunks: int) -> Iterator[bytes]:
    """Yield the digests of prompts that share nothing."""
    while True:
        yield rng.randbytes(num_chunks * DIGEST_BYTES)


def num_documents(num_chunks: int, room: int) -> int:
    """Return the number of documents of half a prompt that take at most a quarter of `room` chunks."""
    return max(1, min(NUM_DOCUMENTS, room // num_chunks // 2))


def half_known(rng: random.Random, num_chunks: int, room: int) -> Iterator[bytes]:
    """Yield the digests of prompts whose first half is one of `num_documents` documents."""
    size = num_chunks // 2 * DIGEST_BYTES
    documents = [rng.randbytes(size) for _ in range(num_documents(num_chunks, room))]
    for document in itertools.cycle(documents):
        yield document + rng.randbytes(num_chunks * DIGEST_BYTES - size)


def of_trace(path: Path, chunk_tokens: int) -> Iterator[bytes]:
    """Yield the digests of the prompts of a trace, again and again."""
    from kvdepot_plan.trace import BLOCK_TOKENS, read_trace

    size = DIGEST_BYTES * BLOCK_TOKENS // chunk_tokens
    for request in itertools.cycle(read_trace(path)):
        digests = b"".join(random.Random(each).randbytes(size) for each in request.hash_ids)
        if whole := digests[: request.input_length // chunk_tokens * DIGEST_BYTES]:
            yield whole


# --- figures ----------------------------------------------------------------------------------------------------------


def depot_for(num_entries: int, *flags: str) -> DepotProcess:
    """Start a depot with room for that many entries, and wait until its pool is ready."""
    depot = DepotProcess("--max-entries", str(num_entries), *flags, pool_size=str(num_entries * ENTRY_BYTES))
    wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
    return depot


def resident_bytes(pid: int) -> int:
    """Return the memory of a process, without the pool."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def quantile_ms(seconds: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))] * 1e3


def measure(num_entries: int, chunk_tokens: int, rate: float, seconds: float, trace: Path | None) -> None:
    """Print the figures of an 8B model on one depot."""
    num_chunks = REQUEST_TOKENS // chunk_tokens
    rng, fraction = random.Random(0), num_entries // num_chunks

    def some(prompts: Iterator[bytes], share: float) -> list[bytes]:
        return list(itertools.islice(prompts, max(1, math.ceil(share * fraction))))

    with depot_for(num_entries) as depot, ExitStack() as stack:
        node = Node(depot, MODELS["8B"], chunk_tokens, stack)
        new, before = new_prompts(rng, num_chunks), resident_bytes(depot.pid)
        filling = node.run(some(new, 0.8))
        memory = (resident_bytes(depot.pid) - before) / depot.status().num_entries
        node.run(some(new, 0.4))
        last = some(new, 0.2)
        evicting, found = node.run(last), node.run(last[-max(1, len(last) // 2) :])
        assert not evicting.found
        assert found.found == found.chunks, "chunks that were just stored are gone"
        print(
            f"{depot.status().num_entries:,} entries, chunks of {chunk_tokens} tokens, a chunk stored without eviction"
            f" {_us(filling):.1f} us, with it {_us(evicting):.1f} us, retrieved {_us(found):.1f} us of the server",
            flush=True,
        )
        prompts = half_known(rng, num_chunks, num_entries)
        if trace is not None:
            prompts = of_trace(trace, chunk_tokens)
        node.run(itertools.islice(prompts, 2 * num_documents(num_chunks, num_entries)))
        node.seconds.clear()
        began = time.perf_counter()
        counts = node.play(prompts, rate, seconds)
        took = time.perf_counter() - began
        replies = "; ".join(
            f"{kind} {quantile_ms(node.seconds[kind], 0.5):.2f}, {quantile_ms(node.seconds[kind], 0.99):.2f}"
            for kind in ("lookup", "prepare_retrieve", "prepare_store", "commit_store")
            if kind in node.seconds
        )
        print(
            f"{counts.requests / took:.0f} requests a second of {counts.chunks / counts.requests:.0f} chunks,"
            f" {counts.found / counts.chunks:.2f} of them found: {counts.seconds / took:.2f} of a core,"
            f" {counts.seconds / counts.requests * 1e3:.2f} ms a request; p50, p99 in ms: {replies}; the loop's longest"
            f" turn {depot.status().loop_longest_seconds * 1e3:.1f} ms"
        )
        entries = depot.status().num_entries
        stack.close()
        depot.kill()
        depot.start()
        began = time.perf_counter()
        while depot.status().recovering:
            time.sleep(0.1)  # the server's thread also builds the status
        restored = time.perf_counter() - began
        assert depot.status().num_entries == entries
        million, worked = 1e6 / entries, node.server_seconds()
        print(
            f"{memory:.0f} bytes of memory an entry; after a kill, a new server has a million entries"
            f" {restored * million:.1f} s after its first answer, and {worked * million:.1f} s of processor time"
            f" (measured with {entries:,})"
        )


def _us(counts: Counts) -> float:
    return counts.seconds / counts.chunks * 1e6


def measure_models(names: list[str], num_entries: int, num_requests: int) -> None:
    """Print the requests a second that one depot holds, by model and chunk, as the median of three rounds."""
    print("| model | " + " | ".join(f"chunks of {size}" for size in (16, 64, 256)) + " |\n|---|---|---|---|")
    for name in names:
        model = MODELS[name]
        cells = list[str]()
        for chunk_tokens in (16, 64, 256):
            num_chunks = REQUEST_TOKENS // chunk_tokens
            with depot_for(num_entries) as depot, ExitStack() as stack:
                node, rng = Node(depot, model, chunk_tokens, stack), random.Random(0)
                to_fill = math.ceil(1.2 * num_entries / model.num_parts / num_chunks)
                node.run(itertools.islice(new_prompts(rng, num_chunks), to_fill))
                room = num_entries // model.num_parts
                prompts = half_known(rng, num_chunks, room)
                node.run(itertools.islice(prompts, 2 * num_documents(num_chunks, room)))
                rounds = [node.run(itertools.islice(prompts, num_requests)) for _ in range(3)]
            assert all(abs(each.found / each.chunks - 0.5) < 0.05 for each in rounds), "the documents were evicted"
            each = statistics.median(counts.seconds / counts.requests for counts in rounds)
            cells.append(f"{SHARE_OF_A_CORE / each:,.0f} ({each * 1e3:.2f} ms)")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=300_000)
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--trace", type=Path, help="in Mooncake's format, instead of requests of 8,000 tokens")
    parser.add_argument("--models", nargs="*", choices=MODELS, metavar="MODEL", help="of: " + "; ".join(MODELS))
    parser.add_argument("--requests", type=int, default=64, help="in each round of --models (%(default)s)")
    options = parser.parse_args()
    print(describe_machine())
    if options.models is None:
        measure(options.entries, options.chunk_tokens, options.rate, options.seconds, options.trace)
    else:
        measure_models(options.models or list(MODELS), options.entries, options.requests)


if __name__ == "__main__":
    main()
