"""Simulates the hit rate of a trace with pools of several sizes. Only eviction policies run: no server, no bytes.

Each request is looked up, its hit is used, and its missing chunks are stored. Each block of the trace is one chunk,
even a partial last block. Requests run one after the other, and no lease outlives its request. Generated tokens are not
stored, because a trace has no ids for them. The policies are the depot's own, over a tree without records and extents.
Two reference rows show how good the policies are: Belady's rule, and a pool without limit.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Any, Final

from blake3 import blake3

from kvdepot.config import format_size, parse_size
from kvdepot.errors import ConfigError
from kvdepot.features.estimates.feature import HitRateCurve
from kvdepot.index.eviction import AUTO, POLICIES, EvictionPolicy, Preference
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.shares import Shares
from kvdepot.index.tree import NO_NODE, ChunkTree, Nodes
from kvdepot.keys import DIGEST_BYTES
from kvdepot.pool.extents import extent_size
from kvdepot_plan.plot import curves_as_svg
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest

LADDER: Final = (0.05, 0.1, 0.2, 0.4, 0.8)  # default pool sizes, as shares of an unlimited pool's content
BYTES_PER_TOKEN: Final = 32 * 8 * 128 * 2 * 2  # 8B GQA model: layers, KV heads, head size, K and V, bf16
BELADY: Final = "belady"
UNLIMITED: Final = "unlimited"

_NEARLY: Final = 0.01  # a difference in hit rate that does not matter
_NEVER: Final = 0xFFFFFFFF  # above the number of any request, and still 32 bits


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One policy with one pool size."""

    policy: str
    pool_bytes: int
    reachable: bool  # False: a reference that no server can reach
    prompt_tokens: int
    hit_tokens: int
    hit_chunks: int
    evictions: int  # to make room; for Belady, only of chunks that would have been used again

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were hits."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, for JSON."""
        return {**asdict(self), "hit_rate": round(self.hit_rate, 5)}


@dataclass(frozen=True, slots=True)
class SimulationTable:
    """Hit rate against pool size for each policy, to choose a pool size."""

    num_requests: int
    prompt_tokens: int
    num_chunks: int  # looked up by all requests together
    unique_chunks: int
    chunk_bytes: int  # of a chunk's extent
    rows: tuple[SimulationRow, ...]

    @property
    def unique_bytes(self) -> int:
        """Bytes in an unlimited pool at the end of the trace."""
        return self.unique_chunks * self.chunk_bytes

    def row(self, policy: str, pool_bytes: int) -> SimulationRow:
        """Return one row; raise KeyError if there is none."""
        for row in self.rows:
            if (row.policy, row.pool_bytes) == (policy, pool_bytes):
                return row
        raise KeyError((policy, pool_bytes))

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain values, for JSON."""
        rows = [row.as_dict() for row in self.rows]
        return {**asdict(self), "chunk_tokens": BLOCK_TOKENS, "unique_bytes": self.unique_bytes, "rows": rows}

    def describe(self) -> str:
        """Return the table as text: pool sizes as columns, policies as rows, hit rates in percent."""
        sizes = sorted({row.pool_bytes for row in self.rows if row.policy != UNLIMITED})
        rates = {(row.policy, row.pool_bytes): f"{row.hit_rate:.1%}" for row in self.rows}
        reachable = list(dict.fromkeys(row.policy for row in self.rows if row.reachable))
        lines = [["pool size", *map(_pool_name, sizes)]]
        lines.append(["of all chunks", *(f"{size / self.unique_bytes:.1%}" for size in sizes)])
        lines += [[policy, *(rates[policy, size] for size in sizes)] for policy in reachable]
        lines.append([f"{BELADY} *", *(rates[BELADY, size] for size in sizes)])
        lines.append([f"{UNLIMITED} *", *[rates[UNLIMITED, self.unique_bytes]] * len(sizes)])
        return (
            f"{self.num_requests:,} requests, {self.prompt_tokens:,} prompt tokens; {self.unique_chunks:,} different"
            f" chunks of {BLOCK_TOKENS} tokens, {format_size(self.unique_bytes)} in all\n"
            "share of the prompt tokens that is found in the pool:\n\n"
            + as_table(lines)
            + f"\n\n* no server reaches these: {BELADY} knows the future and does the best that can be done with this"
            f" much memory,\n  {UNLIMITED} keeps everything\n\n{self.recommendation()}"
        )

    def recommendation(self) -> str:
        """Recommend policies: each is at most one point below the best from its pool size up to the next one."""
        rates: dict[int, dict[str, float]] = {}
        for row in self.rows:
            if row.reachable:
                rates.setdefault(row.pool_bytes, {})[row.policy] = row.hit_rate
        if any(len(each) < 2 for each in rates.values()):
            return ""
        chosen: list[tuple[int, list[str]]] = []  # a size, and the policies that are good enough from it on
        for size, each in sorted(rates.items()):
            good = [policy for policy, rate in each.items() if rate >= max(each.values()) - _NEARLY]
            still = [policy for policy in chosen[-1][1] if policy in good] if chosen else []
            if still:
                chosen[-1] = chosen[-1][0], still
            else:
                chosen.append((size, good))
        if len(chosen) == 1:
            return f"recommended: --policy {chosen[0][1][0]}, at most one point below the best at every size"
        return "recommended: " + ", ".join(
            f"--policy {policies[0]} from {_pool_name(size)} on" for size, policies in chosen
        )

    def plot(self) -> str:
        """Return an SVG of hit rate against pool size."""
        names = list(dict.fromkeys(row.policy for row in self.rows if row.policy != UNLIMITED))
        curves = [
            (name, sorted((row.pool_bytes, row.hit_rate) for row in self.rows if row.policy == name)) for name in names
        ]
        limit = self.row(UNLIMITED, self.unique_bytes).hit_rate
        sizes = sorted({size for _, points in curves for size, _ in points})
        curves.append((UNLIMITED, [(size, limit) for size in sizes]))
        title = f"{self.num_requests:,} requests, {self.prompt_tokens:,} prompt tokens: share found in the pool"
        return curves_as_svg(title, curves)


def as_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, in columns: the first is aligned to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines)


def parse_pool_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list like "64GiB,256GiB".

    Raises:
        ConfigError: a part of the list is not a size.
    """
    return tuple(parse_size(part) for part in text.split(","))


def simulate(
    requests: Iterable[TraceRequest],
    pool_sizes: Sequence[int] = (),
    policies: Sequence[str] = tuple(POLICIES),
    bytes_per_token: float = BYTES_PER_TOKEN,
    session_ends: float = 0.0,
    on_row: Callable[[SimulationRow], None] | None = None,
) -> SimulationTable:
    """Replay a trace with each policy and each pool size.

    Takes about 3 microseconds for each chunk, policy and pool size.

    Args:
        requests: the trace.
        pool_sizes: in bytes; if empty, the shares `LADDER` of the trace's chunks.
        policies: names of `POLICIES`.
        bytes_per_token: the bytes per token of the model's KV cache, on all workers together.
        session_ends: share of the sessions that announce their end, as a client's hint does. The rest of the trace
            shows which request ends a session: its last whole chunk is not used again.
        on_row: called with each finished row.

    Raises:
        ConfigError: a policy is unknown, or a size, a number of bytes or a share is out of range.
        TraceError: there is nothing to replay, or `requests` raised it.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ConfigError(f"no eviction policy {unknown[0]!r}: there are {', '.join(sorted(POLICIES))}")
    for what, size in (*(("a pool", each) for each in pool_sizes), ("a token", bytes_per_token)):
        if size <= 0:
            raise ConfigError(f"{what} of {size} bytes: give a size above 0")
    if not 0 <= session_ends <= 1:
        raise ConfigError(f"a share of {session_ends} of the sessions reports its end: give a number from 0 to 1")
    workload = Workload.of(requests)
    if not workload.digests:
        raise TraceError("the trace has no requests with blocks")
    chunk_bytes = extent_size(max(1, round(BLOCK_TOKENS * bytes_per_token)))
    unique_bytes = len(workload.digests) * chunk_bytes
    ladder = [max(1, int(share * len(workload.digests))) * chunk_bytes for share in LADDER]
    sizes = sorted(set(pool_sizes)) or ladder
    next_uses = _next_uses(workload)
    ends = _session_ends(workload, next_uses, session_ends)
    rows: list[SimulationRow] = []

    def add(policy: str, pool_bytes: int, replay: Callable[[], tuple[list[int], int]]) -> None:
        found, evictions = replay()
        hit_tokens, is_reachable = workload.tokens_of(found), policy in POLICIES
        rows.append(
            SimulationRow(policy, pool_bytes, is_reachable, workload.prompt_tokens, hit_tokens, sum(found), evictions)
        )
        if on_row is not None:
            on_row(rows[-1])

    add(UNLIMITED, unique_bytes, lambda: (workload.repeated_chunks(), 0))
    for size in sizes:
        add(BELADY, size, lambda size=size: _replay_offline(workload, next_uses, size // chunk_bytes))
    for policy in dict.fromkeys(policies):
        for size in sizes:
            add(policy, size, lambda policy=policy, size=size: replay(workload, policy, size // chunk_bytes, ends))
    num_chunks = sum(map(len, workload.paths))
    return SimulationTable(
        len(workload.lengths), workload.prompt_tokens, num_chunks, len(workload.digests), chunk_bytes, tuple(rows)
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace whose chunks are numbered in the order of their first use, a parent before its children."""

    lengths: list[int]  # prompt tokens, by request
    paths: "list[array[int]]"  # numbers of the prompt's chunks, by request
    packed: list[bytes]  # their digests, (num_chunks, 32)
    digests: list[bytes]  # by chunk

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> "Workload":
        """Number the chunks of a trace."""
        workload = cls([], [], [], [])
        digests = workload.digests
        numbers: dict[tuple[int, int], int] = {}  # (number of the chunk before, hash id)
        for request in requests:
            last, digest = _NEVER, bytes(DIGEST_BYTES)
            path = array("I")
            for hash_id in request.hash_ids:
                number = numbers.get((last, hash_id))
                if number is None:
                    number = numbers[last, hash_id] = len(digests)
                    digests.append(blake3(digest + hash_id.to_bytes(8, "little")).digest())
                last, digest = number, digests[number]
                path.append(number)
            workload.lengths.append(request.input_length)
            workload.paths.append(path)
            workload.packed.append(b"".join([digests[number] for number in path]))
        return workload

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.lengths)

    def repeated_chunks(self) -> list[int]:
        """Return the number of chunks that each request shares with earlier ones: the hits of an unlimited pool."""
        found: list[int] = []
        seen = 0  # chunks are numbered in the order of first use: lower numbers were seen
        for path in self.paths:
            found.append(sum(number < seen for number in path))
            seen = max(seen, max(path, default=-1) + 1)
        return found

    def tokens_of(self, found: Sequence[int]) -> int:
        """Return the tokens of all prompts in their first `found` chunks, given by request."""
        return sum(map(min, (chunks * BLOCK_TOKENS for chunks in found), self.lengths))


class _Ending:
    """The policies of one share as one policy, for a pool whose sessions announce their ends."""

    def __init__(
        self, nodes: Nodes, make_policy: Callable[[ChunkTree], EvictionPolicy], on_ended: Callable[[bytes], object]
    ) -> None:
        self._ended = nodes.tree.ended
        self._shares = Shares(nodes, self, QuotaTable(1), make_policy, on_ended)

    def has_sealed(self, _node: int) -> bool:
        return True

    def move(self, node: int, share: int) -> None:
        raise NotImplementedError(f"node {node} cannot move to share {share}: there is one")

    def added(self, nodes: Sequence[int]) -> None:
        self._shares.added(nodes)

    def used(self, node: int) -> None:
        sum(self._shares.used(node) or ())

    def unpinned(self, node: int) -> None:
        self._shares.policy_of(node).unpinned(node)

    def evicted(self, nodes: Sequence[int]) -> None:
        self._shares.policy_of(nodes[0]).evicted(nodes)

    def removed(self, nodes: Sequence[int]) -> None:
        self._shares.removed(nodes)
        for node in nodes:
            self._ended[node] = False

    def next_of(self, nodes: Sequence[int]) -> Sequence[int]:
        return self._shares.policy_of(nodes[0]).next_of(nodes)

    def victim(self) -> int | None:
        return self._shares.victim(0)

    def end_session(self, node: int) -> None:
        sum(self._shares.end_session(node, lambda _label: True))


def replay(workload: Workload, policy_name: str, capacity_chunks: int, ends: bytearray) -> tuple[list[int], int]:
    """Replay with one policy; return the number of chunks that each request found, and the number of evictions.

    Only the tree is simulated, as the policy sees it. A chunk's number in the workload is its node, so no chunk is
    searched by its key.
    """
    num_chunks = len(workload.digests)
    nodes = Nodes(num_chunks, [])
    tree = nodes.tree
    tree.keys.extend([None] * num_chunks)
    hit_rates = HitRateCurve(max(1, capacity_chunks), (1.0,)) if policy_name == AUTO else None
    preference = Preference() if hit_rates is None else hit_rates.preference
    ending = None
    if any(ends):
        on_ended: Callable[[bytes], object] = hit_rates.ended if hit_rates is not None else lambda _key: None
        ending = _Ending(nodes, lambda tree: POLICIES[policy_name](tree, preference), on_ended)
    policy = ending or POLICIES[policy_name](tree, preference)
    keys, parents, children, holds = tree.keys, tree.parent, tree.num_children, tree.holds
    found: list[int] = []
    num_kept = evictions = 0
    for request, path in enumerate(workload.paths):
        if hit_rates is not None:
            hit_rates.looked_up(workload.packed[request], 1)
        hits = 0
        for node in path:
            if keys[node] is None:
                break
            hits += 1
        found.append(hits)
        if hits:
            policy.used(path[hits - 1])
        end = path[hits - 1] if hits else NO_NODE
        if end != NO_NODE:
            holds[end] += 1  # must not be evicted to make room for its child
        new = path[hits:]
        while (missing := num_kept + len(new) - capacity_chunks) > 0 and (victim := policy.victim()) is not None:
            leaving = [victim]
            while len(leaving) < missing:
                above = parents[leaving[-1]]
                if above == NO_NODE or children[above] > 1 or holds[above]:
                    break
                leaving.append(above)
            leaving = policy.next_of(leaving)
            policy.evicted(leaving)
            policy.removed(leaving)
            above = NO_NODE
            for node in leaving:
                above = parents[node]
                keys[node] = None
                if above != NO_NODE:
                    children[above] -= 1
            if above != NO_NODE:
                policy.unpinned(above)
            num_kept -= len(leaving)
            evictions += len(leaving)
        if end != NO_NODE:
            holds[end] -= 1
            policy.unpinned(end)
        del new[max(0, capacity_chunks - num_kept) :]  # the request is longer than the pool: its beginning stays
        above = end
        for node in new:
            keys[node] = workload.digests[node]
            parents[node] = above
            if above != NO_NODE:
                children[above] += 1
            above = node
        num_kept += len(new)
        if new:
            policy.added(new[::-1])  # deepest first, as the index seals them
        last = hits + len(new)
        if ending is not None and ends[request] and last:
            ending.end_session(path[last - 1])
    return found, evictions


def _next_uses(workload: Workload) -> "list[array[int]]":
    """Return for each chunk of each request the next request that uses it, `_NEVER` if none does."""
    upcoming = array("I", [_NEVER]) * len(workload.digests)
    next_uses: list[array[int]] = []
    for request in range(len(workload.paths) - 1, -1, -1):
        path = workload.paths[request]
        next_uses.append(array("I", [upcoming[number] for number in path]))
        for number in path:
            upcoming[number] = request
    next_uses.reverse()
    return next_uses


def _session_ends(workload: Workload, next_uses: "list[array[int]]", share: float) -> bytearray:
    """Return for each request whether it announces the end of its session.

    A session has ended when its last whole chunk is not used again. A partial last chunk is never used again, even if
    the session continues.
    """
    ends = bytearray(len(workload.paths))
    due = 0.0
    for request, (length, upcoming) in enumerate(zip(workload.lengths, next_uses, strict=True)):
        place = length // BLOCK_TOKENS - 1
        if upcoming and upcoming[max(0, place)] == _NEVER:
            due += share
            if due >= 1:
                due -= 1
                ends[request] = 1
    return ends


def _replay_offline(workload: Workload, next_uses: "list[array[int]]", capacity_chunks: int) -> tuple[list[int], int]:
    """Replay with Belady's rule, which keeps the chunks that are used again soonest. Return the same as `replay`.

    Using a chunk uses all chunks before it. So the chunk that is used again last, the deepest first, is always a leaf,
    and no kept chunk misses its prefix. No rule finds more chunks with this capacity.
    """
    kept: dict[int, int] = {}  # chunk -> its next use
    latest: list[int] = []  # heap of -(next use << 32 | chunk), with outdated entries
    found: list[int] = []
    evictions = 0
    for path, upcoming in zip(workload.paths, next_uses, strict=True):
        hits = 0
        for number in path:
            if number not in kept:
                break
            hits += 1
        found.append(hits)
        for number, next_use in zip(path, upcoming, strict=True):
            if next_use == _NEVER:
                kept.pop(number, None)
            else:
                kept[number] = next_use
                heappush(latest, -(next_use << 32 | number))
        while len(kept) > capacity_chunks:
            next_use, number = divmod(-heappop(latest), 1 << 32)
            if kept.get(number) == next_use:
                del kept[number]
                evictions += 1
    return found, evictions


def _pool_name(num_bytes: int) -> str:
    """Name a pool size. From 1 GiB on it is in GiB, however large, so that sizes compare at a glance."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 1 << 30 else format_size(num_bytes)
