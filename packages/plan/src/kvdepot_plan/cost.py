"""Estimates the requests, bytes and dollars of a day that a trace's traffic costs in a shared object store.

The nodes are simulated as in `kvdepot_plan.cluster`, with a tier that evicts nothing. For each prompt, the requests are
those of `kvdepot.tiers.object`: with R objects in a part of a prefix,

- questions for the first and the last object of the chunks that the pool lacks. To read R objects, R requests, and
  unless the tier has the last one, R questions, or one in eight from eight on,
- R questions for chunks that are used from the pool, as tiers forget, and R before new chunks are written,
- a put for each object with new chunks.

Generated tokens, whose blocks a trace does not name, are not counted.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvdepot.config import format_size, parse_number
from kvdepot.errors import ConfigError
from kvdepot.tiers.keys import chunks_a_run
from kvdepot.tiers.url import TierUrl
from kvdepot_plan.cluster import UNLIMITED, WARM_UP, Cluster, ClusterReplay, ClusterRow, Prompt, copied
from kvdepot_plan.simulate import Workload, as_table
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest

_DAY: Final = 86_400.0  # seconds
_DAYS_A_MONTH: Final = 30
_SAMPLED: Final = 8  # of so many consecutive objects, a question of a lookup asks for one


@dataclass(frozen=True, slots=True)
class Prices:
    """The dollars that a store charges."""

    put: float = 0.0  # for 1,000
    get: float = 0.0  # for 1,000
    read: float = 0.0  # for a GiB
    month: float = 0.0  # for a GiB that is kept for a month


# List prices of 2025 in the first region of the United States, of the standard or hot class, within the region.
PRICES: Final = {
    "s3": Prices(put=0.005, get=0.0004, month=0.023),
    "gs": Prices(put=0.005, get=0.0004, month=0.020),
    "az": Prices(put=0.0065, get=0.0005, month=0.018),
}


def prices_of(url: str, given: str = "") -> Prices:
    """Return the prices of a tier: the cloud's, none for a store of one's own, or as `given`.

    Args:
        url: as for `serve --tier`.
        given: for example "put=0.01,month=0.1".

    Raises:
        ConfigError: the tier is no object store, or a price is unknown or no number.
    """
    tier = TierUrl.parse(url)
    if tier.scheme not in (*PRICES, "file"):
        raise ConfigError(f"tier cost {tier.name}: only object stores have prices: s3://, gs://, az:// or file://")
    prices = PRICES.get(tier.scheme, Prices()) if not tier.take("endpoint", "") else Prices()
    for part in filter(None, given.split(",")):
        name, _, text = part.partition("=")
        if name not in asdict(prices) or (number := parse_number(text)) < 0:
            raise ConfigError(f"--prices {part}: write {', '.join(f'{each}=DOLLARS' for each in asdict(prices))}")
        prices = replace(prices, **{name: number})
    return prices


@dataclass(frozen=True, slots=True)
class Bill:
    """A day of all nodes with one `--demote`."""

    demote: str
    hit_rate: float  # share of the prompt tokens, from pool and tier
    tier_hit_rate: float  # share of the prompt tokens, from the tier
    gets: float
    puts: float
    read_bytes: float
    written_bytes: float
    request_dollars: float  # with those for bytes that are read
    storage_dollars: float  # if objects are kept for a day

    @property
    def dollars(self) -> float:
        """Dollars of requests and storage."""
        return self.request_dollars + self.storage_dollars


class _Count:
    """Counts the requests of prompts.

    Args:
        run_tokens: the tokens of an object.
        asks_stored: whether the depot asks for new chunks and writes them, not those that are found again.
    """

    def __init__(self, run_tokens: int, *, asks_stored: bool) -> None:
        self.gets = self.puts = self.read_blocks = self.written_blocks = 0
        self._run_tokens = run_tokens
        self._asks_stored = asks_stored

    def note(self, prompt: Prompt) -> None:
        """Add the requests of a prompt."""
        found = prompt.in_pool + prompt.from_tier
        self.gets += self._objects(0, prompt.in_pool)
        if prompt.in_pool < prompt.num_chunks - 1:  # otherwise the engine computes the last token only
            self.gets += min(2, self._objects(prompt.in_pool, prompt.num_chunks))
        if prompt.from_tier:
            objects = self._objects(prompt.in_pool, found)
            is_whole = found >= prompt.num_chunks - 1
            is_sampled = objects >= _SAMPLED
            samples = len(range(_SAMPLED - 1, objects - 1, _SAMPLED)) + 1
            self.gets += objects + (0 if is_whole else samples if is_sampled else objects)
        end = found
        if self._asks_stored:
            end = prompt.num_chunks
            self.gets += self._objects(found, end)
        self.puts += self._objects(end - prompt.written, end)
        self.read_blocks += prompt.from_tier
        self.written_blocks += prompt.written

    def _objects(self, first: int, last: int) -> int:
        """Return the number of objects with some blocks of a prefix."""
        return (
            -(-last * BLOCK_TOKENS // self._run_tokens) - first * BLOCK_TOKENS // self._run_tokens
            if last > first
            else 0
        )


def simulate_cost(
    requests: Iterable[TraceRequest], fleet: Cluster, pool_bytes: int, routing: str, prices: Prices, chunk_tokens: int
) -> tuple[Bill, Bill]:
    """Return the bills with `--demote store` and `reuse`.

    Args:
        requests: the trace, with the traffic of all nodes together unless `fleet.copies` says otherwise.
        fleet: the nodes.
        pool_bytes: of one node.
        routing: one of `kvdepot_plan.cluster.ROUTINGS`.
        prices: of the store.
        chunk_tokens: of a chunk of the depots.

    Raises:
        ConfigError: the pool is smaller than one block of the trace.
        TraceError: the trace has no blocks or takes no time, or `requests` raised it.
    """
    arrivals = copied(list(requests), fleet.copies)
    workload = Workload.of(arrivals)
    times = [request.timestamp_ms / 1000 for request in arrivals]
    seconds = times[-1] - times[int(len(times) * WARM_UP)] if times else 0.0
    if not workload.digests or seconds <= 0:
        raise TraceError("the trace has no requests with blocks, or all at one time")
    if pool_bytes < fleet.chunk_bytes:
        raise ConfigError(f"a pool of {pool_bytes} bytes: one block takes {format_size(fleet.chunk_bytes)}")
    run_tokens = chunk_tokens * chunks_a_run(round(chunk_tokens * fleet.bytes_per_token))

    def bill(demote: str) -> Bill:
        count = _Count(run_tokens, asks_stored=demote == "store")
        nodes = ClusterReplay(
            fleet,
            workload,
            pool_bytes // fleet.chunk_bytes,
            UNLIMITED // fleet.chunk_bytes,
            routing,
            waits_for_reuse=demote == "reuse",
        )
        return _bill_of(demote, count, nodes.replay(times, pool_bytes, UNLIMITED, count.note), seconds, fleet, prices)

    return bill("store"), bill("reuse")


def _bill_of(demote: str, count: _Count, row: ClusterRow, seconds: float, fleet: Cluster, prices: Prices) -> Bill:
    gets, puts = count.gets * _DAY / seconds, count.puts * _DAY / seconds
    block_bytes = BLOCK_TOKENS * fleet.bytes_per_token
    read, written = (blocks * block_bytes * _DAY / seconds for blocks in (count.read_blocks, count.written_blocks))
    requests = (gets * prices.get + puts * prices.put) / 1000 + read / 2**30 * prices.read
    storage = written / 2**30 * prices.month / _DAYS_A_MONTH
    return Bill(demote, row.hit_rate, row.tier_hit_rate, gets, puts, read, written, requests, storage)


def describe_bills(bills: Iterable[Bill], fleet: Cluster) -> str:
    """Return bills as text."""
    cells = [("--demote", "hits", "of the tier", "GET", "PUT", "read", "written", "requests", "storage", "sum")] + [
        (
            each.demote,
            f"{each.hit_rate:.1%}",
            f"{each.tier_hit_rate:.1%}",
            f"{each.gets:,.0f}",
            f"{each.puts:,.0f}",
            format_size(round(each.read_bytes)),
            format_size(round(each.written_bytes)),
            f"${each.request_dollars:,.2f}",
            f"${each.storage_dollars:,.2f}",
            f"${each.dollars:,.2f}",
        )
        for each in bills
    ]
    return (
        f"a day of {fleet.num_nodes} nodes, if each object is kept for a day\n"
        "hits: share of the prompt tokens\n\n" + as_table(cells)
    )


def bills_as_dict(bills: Iterable[Bill], fleet: Cluster, prices: Prices) -> dict[str, Any]:
    """Return bills as plain values, for JSON."""
    return {"num_nodes": fleet.num_nodes, "prices": asdict(prices), "bills": [asdict(each) for each in bills]}
