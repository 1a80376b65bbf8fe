"""Simulates a trace on several nodes: hit rate and time to first token for each routing and shared tier.

The engines of a node share its pool. Each request goes to one engine, waits for the requests before it, loads the
chunks that its node holds, loads more from a peer and the shared tier, and computes the rest. Pools and tier evict the
least recently used chunk, a prefix from its end. No bytes move, and decoding takes no time: the figures compare
arrangements and predict no latency.

With peers, a node reads from the node that has the longest continuation, as if the router always named it. A network
adapter moves one prefix at a time, and what would take longer than computing is not read.
"""

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Final

from msgspec import structs

from kvdepot.config import format_size, parse_size
from kvdepot.errors import ConfigError
from kvdepot.pool.extents import extent_size
from kvdepot_plan.plot import curves_as_svg
from kvdepot_plan.simulate import BYTES_PER_TOKEN, LADDER, Workload, as_table
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest

# Routings, each with the facts from which a router chooses an engine:
RANDOM: Final = "random"  # nothing
LEAST_LOADED: Final = "least-loaded"  # which engine of a few is free first
STICKY: Final = "sticky"  # the conversation, by the prompt's second block: the first is often a common system prompt
ENGINE_AWARE: Final = "engine-aware"  # the chunks that each engine stored, but not their evictions
KV_AWARE: Final = "kv-aware"  # the chunks that each node and the shared tier hold now, as a depot's events report them
ROUTINGS: Final = (RANDOM, LEAST_LOADED, STICKY, ENGINE_AWARE, KV_AWARE)

UNLIMITED: Final = 1 << 62  # bytes of a shared tier that evicts nothing
PREFILL_TOKENS_PER_SECOND: Final = 10_000.0  # an 8B model on one H100, rounded
_POOL_BYTES_PER_SECOND: Final = 52e9  # from host memory to one GPU over PCIe 5 x16
_NETWORK_BYTES_PER_SECOND: Final = 10e9  # a network of 100 Gbit/s
WARM_UP: Final = 0.2  # share of the requests that fill the pools and are not counted
_SAMPLE: Final = 4  # engines drawn to compare their loads: enough to avoid the busiest
_SPREAD_MS: Final = (
    600_000.0  # copies of a trace begin at random times within ten minutes, so that no requests coincide
)
_SEED: Final = 1  # fixed, so that tables can be compared; other seeds change the hits of 64 nodes by up to a point


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes and their traffic."""

    num_nodes: int
    engines_per_node: int = 1
    copies: int = 1  # how often the trace is replayed, each time with other content after the common first block
    bytes_per_token: float = BYTES_PER_TOKEN
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND

    def __post_init__(self) -> None:
        for number, what in (
            (self.num_nodes, "nodes"),
            (self.engines_per_node, "engines a node"),
            (self.copies, "copies of the trace"),
            (self.bytes_per_token, "bytes a token"),
            (self.prefill_tokens_per_second, "tokens a second"),
        ):
            if number <= 0:
                raise ConfigError(f"{number} {what}: give a number above 0")

    @property
    def num_engines(self) -> int:
        """Engines of all nodes."""
        return self.num_nodes * self.engines_per_node

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one block of the trace takes in a pool."""
        return extent_size(max(1, round(BLOCK_TOKENS * self.bytes_per_token)))

    def seconds(self, num_tokens: int, pool_tokens: int, network_tokens: int) -> float:
        """Return the seconds for a prompt: pool tokens first, then tokens of a peer or the tier, the rest computed."""
        return (
            (num_tokens - pool_tokens - network_tokens) / self.prefill_tokens_per_second
            + pool_tokens * self.bytes_per_token / _POOL_BYTES_PER_SECOND
            + self.network_seconds(network_tokens)
        )

    def network_seconds(self, num_tokens: int) -> float:
        """Return the seconds in which an adapter moves the KV of tokens."""
        return num_tokens * self.bytes_per_token / _NETWORK_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was served, with its chunks."""

    num_chunks: int
    in_pool: int  # leading chunks, with those of a peer
    from_tier: int  # chunks after them
    written: int  # to the tier, the last ones that may be written


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One routing with one size of the pools and of the shared tier."""

    routing: str
    pool_bytes: int  # of one node
    shared_bytes: int  # of the tier that all nodes share; 0: there is none
    has_peers: bool  # whether nodes read from each other's pools
    hit_rate: float  # share of the prompt tokens, from pool, peers and tier
    tier_hit_rate: float  # share of the prompt tokens, from the tier
    peer_hit_rate: float  # share of the prompt tokens, from peers
    mean_seconds: float  # to the first token, with the wait for an engine
    p99_seconds: float

    @property
    def name(self) -> str:
        """Routing and sizes in a few words."""
        pools = f"pools of {format_size(self.pool_bytes)}" + (" and peers" if self.has_peers else "")
        return f"{self.routing}, {pools}, shared tier {_shared_name(self.shared_bytes)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, for JSON."""
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ClusterTable:
    """Hit rates and times for each routing, pool size and shared tier, to plan a fleet."""

    fleet: Cluster
    num_requests: int
    rows: tuple[ClusterRow, ...]

    def row(self, routing: str, pool_bytes: int, shared_bytes: int = 0, *, has_peers: bool = False) -> ClusterRow:
        """Return one row; raise KeyError if there is none."""
        wanted = routing, pool_bytes, shared_bytes, has_peers
        for row in self.rows:
            if (row.routing, row.pool_bytes, row.shared_bytes, row.has_peers) == wanted:
                return row
        raise KeyError(wanted)

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain values, for JSON."""
        return {
            "num_requests": self.num_requests,
            "num_nodes": self.fleet.num_nodes,
            "engines_per_node": self.fleet.engines_per_node,
            "rows": [row.as_dict() for row in self.rows],
        }

    def describe(self) -> str:
        """Return the table as text."""
        head = ("routing", "pool a node", "shared tier", "hits", "of the tier", "of peers", "mean", "p99")
        cells = [head] + [
            (
                row.routing,
                format_size(row.pool_bytes),
                _shared_name(row.shared_bytes),
                f"{row.hit_rate:.1%}",
                f"{row.tier_hit_rate:.1%}",
                f"{row.peer_hit_rate:.1%}" if row.has_peers else "no peers",
                f"{row.mean_seconds:.2f} s",
                f"{row.p99_seconds:.2f} s",
            )
            for row in self.rows
        ]
        return (
            f"{self.num_requests:,} requests on {self.fleet.num_nodes} nodes with"
            f" {self.fleet.num_engines:,} engines, the first {WARM_UP:.0%} not counted\n"
            "hits: share of the prompt tokens; mean and p99: time to the first token at"
            f" {self.fleet.prefill_tokens_per_second:,.0f} computed tokens a second\n\n" + as_table(cells)
        )

    def plot(self) -> str:
        """Return an SVG of the mean time to the first token against the pool of a node.

        Not of the hit rate: a router that keeps conversations on busy nodes finds most, and serves them late.
        """
        kinds = dict.fromkeys((row.routing, row.has_peers, row.shared_bytes) for row in self.rows)
        curves = [
            (
                " + ".join([routing, *(["peers"] if has_peers else []), *([_shared_name(shared)] if shared else [])]),
                sorted(
                    (row.pool_bytes, row.mean_seconds)
                    for row in self.rows
                    if (row.routing, row.has_peers, row.shared_bytes) == (routing, has_peers, shared)
                ),
            )
            for routing, has_peers, shared in kinds
        ]
        title = f"{self.num_requests:,} requests on {self.fleet.num_nodes} nodes: mean time to the first token"
        return curves_as_svg(title, curves, "pool of one node", height_text="{:.1f} s".format)


def parse_routings(text: str) -> Sequence[str]:
    """Return the routings in a list like "sticky,kv-aware".

    Raises:
        ConfigError: a part of the list is not a routing.
    """
    routings = tuple(dict.fromkeys(text.split(",")))
    if unknown := [routing for routing in routings if routing not in ROUTINGS]:
        raise ConfigError(f"no routing {unknown[0]!r}: there are {', '.join(ROUTINGS)}")
    return routings


def parse_shared_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of shared tiers in a list like "0,4TiB,unlimited"; 0 is no tier.

    Raises:
        ConfigError: a part of the list is not a size.
    """
    return tuple(dict.fromkeys(UNLIMITED if part == "unlimited" else parse_size(part) for part in text.split(",")))


def simulate_cluster(
    requests: Iterable[TraceRequest],
    fleet: Cluster,
    pool_sizes: Sequence[int] = (),
    routings: Sequence[str] = ROUTINGS,
    shared_sizes: Sequence[int] = (0,),
    peers: Sequence[bool] = (False,),
    on_row: Callable[[ClusterRow], None] | None = None,
) -> ClusterTable:
    """Replay a trace on a fleet with each routing, pool size and shared tier.

    Takes about 10 microseconds for each chunk and row.

    Args:
        requests: the trace, with the traffic of all nodes together unless `fleet.copies` says otherwise.
        fleet: the nodes.
        pool_sizes: of one node, in bytes; if empty, all nodes together hold the shares `LADDER` of the trace's chunks.
        routings: some of `ROUTINGS`.
        shared_sizes: bytes of the tier that all nodes share; 0 is none.
        peers: whether nodes read from each other's pools.
        on_row: called with each finished row.

    Raises:
        ConfigError: a pool is smaller than one chunk.
        TraceError: there is nothing to replay, or `requests` raised it.
    """
    arrivals = copied(list(requests), fleet.copies)
    workload = Workload.of(arrivals)
    if not workload.digests:
        raise TraceError("the trace has no requests with blocks")
    times = [request.timestamp_ms / 1000 for request in arrivals]
    chunk_bytes = fleet.chunk_bytes
    unique = len(workload.digests)
    sizes = sorted(set(pool_sizes)) or [max(1, int(share * unique / fleet.num_nodes)) * chunk_bytes for share in LADDER]
    if sizes[0] < chunk_bytes:
        raise ConfigError(f"a pool of {sizes[0]} bytes: one chunk takes {format_size(chunk_bytes)}")
    rows: list[ClusterRow] = []
    for routing in routings:
        for has_peers, shared, size in itertools.product(peers, shared_sizes, sizes):
            cluster = ClusterReplay(
                fleet, workload, size // chunk_bytes, shared // chunk_bytes, routing, has_peers=has_peers
            )
            rows.append(cluster.replay(times, size, shared))
            if on_row is not None:
                on_row(rows[-1])
    return ClusterTable(fleet, len(times), tuple(rows))


def copied(requests: list[TraceRequest], copies: int) -> list[TraceRequest]:
    """Return `copies` copies of the trace, merged by time. They share only the block that begins most prompts."""
    draw = random.Random(_SEED)
    arrivals = list(requests)
    first_blocks = Counter(request.hash_ids[0] for request in requests if request.hash_ids)
    common = first_blocks.most_common(1)[0][0] if first_blocks else 0
    stride = 1 + max((hash_id for request in requests for hash_id in request.hash_ids), default=0)
    for copy in range(1, copies):
        later = draw.uniform(0, _SPREAD_MS)
        arrivals += [
            structs.replace(
                request,
                timestamp_ms=request.timestamp_ms + later,
                hash_ids=tuple(
                    hash_id if hash_id == common else hash_id + copy * stride for hash_id in request.hash_ids
                ),
            )
            for request in requests
        ]
    return sorted(arrivals, key=attrgetter("timestamp_ms"))


class ClusterReplay:
    """Nodes, their router and the shared tier during one replay.

    Args:
        fleet: the nodes.
        workload: the traffic of all nodes together.
        pool_chunks: of one node.
        tier_chunks: of the shared tier.
        routing: one of `ROUTINGS`.
        has_peers: whether nodes read from each other's pools.
        waits_for_reuse: whether a chunk is written to the tier when a prompt finds it again, not when it is stored.
    """

    def __init__(
        self,
        fleet: Cluster,
        workload: Workload,
        pool_chunks: int,
        tier_chunks: int,
        routing: str,
        *,
        has_peers: bool = False,
        waits_for_reuse: bool = False,
    ) -> None:
        self._fleet = fleet
        self._workload = workload
        self._routing = routing
        self._draw = random.Random(_SEED)
        self._free_at = [0.0] * fleet.num_engines  # seconds
        self._pools = [_Chunks(pool_chunks) for _ in range(fleet.num_nodes)]
        self._tier = _Chunks(tier_chunks)
        self._has_peers = has_peers
        self._waits_for_reuse = waits_for_reuse
        self._network_free_at = [0.0] * fleet.num_nodes
        self._holders: list[set[int]] = [set() for _ in workload.digests]  # by chunk: the nodes that hold it
        # By chunk: the engines that stored it, whether or not it was evicted, for engine-aware routing.
        self._writers: list[set[int]] = [set() for _ in workload.digests] if routing == ENGINE_AWARE else []

    def replay(
        self,
        times: Sequence[float],
        pool_bytes: int,
        shared_bytes: int,
        on_prompt: Callable[[Prompt], None] | None = None,
    ) -> ClusterRow:
        """Serve all requests, which arrive at `times` in seconds; return the cluster's hit rates and times.

        Call `on_prompt` after each prompt that is counted.
        """
        fleet, holders = self._fleet, self._holders
        num_cold = int(len(times) * WARM_UP)
        num_tokens = pool_tokens = tier_tokens = peer_tokens = 0
        waits: list[float] = []
        for number, (now, length, path) in enumerate(
            zip(times, self._workload.lengths, self._workload.paths, strict=True)
        ):
            most = (length - 1) // BLOCK_TOKENS  # an engine computes at least the last token
            engine = self._choose(now, length, path, most)
            node = engine // fleet.engines_per_node
            from_pool = min(self._pools[node].num_leading(path), most)
            start = max(now, self._free_at[engine])
            from_peer, begins = (
                self._read_from_peer(start, node, path, from_pool, most) if self._has_peers else (0, start)
            )
            found = from_pool + from_peer
            from_tier = max(0, min(self._tier.num_leading(path), most) - found) if self._tier.capacity else 0
            from_network = (from_peer + from_tier) * BLOCK_TOKENS
            self._free_at[engine] = begins + fleet.seconds(length, from_pool * BLOCK_TOKENS, from_network)
            if number >= num_cold:
                num_tokens += length
                pool_tokens += from_pool * BLOCK_TOKENS
                tier_tokens += from_tier * BLOCK_TOKENS
                peer_tokens += from_peer * BLOCK_TOKENS
                waits.append(self._free_at[engine] - now)
            stored, evicted = self._pools[node].use(path)
            for chunk in stored:
                holders[chunk].add(node)
                if self._writers:
                    self._writers[chunk].add(engine)
            for chunk in evicted:
                holders[chunk].discard(node)
            written: Sequence[int] = ()
            if self._tier.capacity:
                written, _ = self._tier.use(path[: found + from_tier] if self._waits_for_reuse else path)
            if number >= num_cold and on_prompt is not None:
                on_prompt(Prompt(len(path), found, from_tier, len(written)))
        waits.sort()
        return ClusterRow(
            self._routing,
            pool_bytes,
            shared_bytes,
            self._has_peers,
            (pool_tokens + peer_tokens + tier_tokens) / num_tokens if num_tokens else 0.0,
            tier_tokens / num_tokens if num_tokens else 0.0,
            peer_tokens / num_tokens if num_tokens else 0.0,
            sum(waits) / len(waits) if waits else 0.0,
            waits[int(len(waits) * 0.99)] if waits else 0.0,
        )

    def _read_from_peer(
        self, start: float, node: int, path: Sequence[int], in_pool: int, most: int
    ) -> tuple[int, float]:
        """Return how many chunks a peer brings behind the pool's, and when they begin to move.

        Return none if computing them takes no longer.
        """
        sources, end = set[int](), in_pool
        while end < most:
            others = self._holders[path[end]] - {node}
            others = others if end == in_pool else sources & others
            if not others:
                break
            sources, end = others, end + 1
        if not sources:
            return 0, start
        free_at, tokens = self._network_free_at, (end - in_pool) * BLOCK_TOKENS
        source = min(sources, key=free_at.__getitem__)
        begins = max(start, free_at[source], free_at[node])
        ends = begins + self._fleet.network_seconds(tokens)
        if ends - start > tokens / self._fleet.prefill_tokens_per_second:
            return 0, start
        free_at[source] = free_at[node] = ends
        return end - in_pool, begins

    def _choose(self, now: float, length: int, path: Sequence[int], most: int) -> int:
        """Return the engine that the router chooses for a prompt."""
        num_engines = self._fleet.num_engines
        if self._routing == RANDOM:
            return self._draw.randrange(num_engines)
        if self._routing == STICKY:
            return random.Random(path[min(1, len(path) - 1)] if path else 0).randrange(num_engines)
        some = self._draw.sample(range(num_engines), min(num_engines, _SAMPLE))
        if self._routing == LEAST_LOADED:
            return min(some, key=self._free_at.__getitem__)
        held = self._held(path)
        # Of equal engines, `min` takes the one with the lowest number. vllm-router chooses by position, too
        # (`max_by_key` in src/policies/kv_aware.rs).
        held |= {engine: 0 for engine in some if engine not in held}
        in_tier = min(self._tier.num_leading(path), most) if self._routing == KV_AWARE else 0

        def done_at(engine: int) -> float:
            in_pool = min(held[engine], most)
            found = in_pool * BLOCK_TOKENS, max(0, in_tier - in_pool) * BLOCK_TOKENS
            return max(now, self._free_at[engine]) + self._fleet.seconds(length, *found)

        return min(held, key=done_at)

    def _held(self, path: Sequence[int]) -> dict[int, int]:
        """Return for each engine the leading chunks of a prompt that the router expects there, without zeros."""
        holders: set[int] | None = None
        depths: dict[int, int] = {}
        known = self._writers or self._holders
        for depth, chunk in enumerate(path, 1):
            holders = known[chunk] if holders is None else holders & known[chunk]
            if not holders:
                break
            depths.update(dict.fromkeys(holders, depth))
        if self._routing == ENGINE_AWARE:
            return depths
        width = self._fleet.engines_per_node
        return {engine: depth for node, depth in depths.items() for engine in range(node * width, (node + 1) * width)}


class _Chunks:
    """The chunks of a pool or a tier, the least recently used first. A use touches a prefix from end to root."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def num_leading(self, path: Sequence[int]) -> int:
        """Return how many of the first chunks are here."""
        count = 0
        for chunk in path:
            if chunk not in self._chunks:
                break
            count += 1
        return count

    def use(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Use or store all chunks of a prompt; return the new chunks and the evicted ones."""
        chunks = self._chunks
        stored: list[int] = []
        for chunk in reversed(path):
            if chunk in chunks:
                chunks.move_to_end(chunk)
            else:
                chunks[chunk] = None
                stored.append(chunk)
        return stored, [chunks.popitem(last=False)[0] for _ in range(len(chunks) - self.capacity)]


def _shared_name(num_bytes: int) -> str:
    if num_bytes == 0:
        return "none"
    return "unlimited" if num_bytes == UNLIMITED else format_size(num_bytes)
