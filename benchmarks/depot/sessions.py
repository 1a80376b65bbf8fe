"""Replays agents that pause for tools, with and without sessions: `python benchmarks/depot/sessions.py`.

The agents are those of `policies.py`: they share a system prompt, and each turn has all before it and a little more.
Between two turns a tool runs for seconds to minutes. The pool holds 5 % of everything that the agents store, and a disk
tier holds all of it. An engine without a model looks up each turn and stores the new chunks. With sessions, the agent
retains its session over a short pause. At a long pause, it demotes the session when the tool begins, and prefetches it
shortly before the tool ends. Time runs `--speed` times faster, but storage does not. `modelled_sessions.py` replays the
same turns in modelled time.

With and without sessions, prints the share of tokens that the pool had at the lookup, and the times of the lookups,
which wait for the tier. For the slowest hundredth of them, prints how many were a session's first turn, or followed a
short or a long pause. `behind_p99_ms` tells how far the replay itself fell behind. `after_prefetch` counts turns, and
those that read the tier, by the outcome of their prefetch: it retained `all` of the session, or only a `part` as its
tenant had retained enough, or it ended too `late`. `--trace` replays a trace in Mooncake's format instead. There, a
prompt that continues another one is the next turn of its session, after the trace's own gap.

Each of `--tenants` tenants has its own agents and an equal quota. Asserts that no tenant ever retains more than its
quota. Also prints the largest use of a quota, which is above 1 if a tenant borrows space that others leave.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policies import agent_sessions

from kvdepot.client.operator import ask_depot
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.client import hint
from kvdepot.keys import KeyRun, Namespace, hash_prefix, split_digests
from kvdepot.lab.bench import describe_machine
from kvdepot.lab.engine_model import EngineModel, Geometry
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_plan.trace import read_trace

GEOMETRY = Geometry("small", num_layers=4, num_kv_heads=2, head_dim=128)  # 4 KiB a token
CHUNK_TOKENS = 64
LEAD_SECONDS = 0.15  # from a prefetch to its turn, in real time, as `--speed` does not speed up storage
SHORT_SECONDS = 3 * LEAD_SECONDS  # in real time: over a shorter pause a session stays in the pool
POOL_SHARE = 0.05


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    at: float  # seconds since the start
    session: str
    tokens: list[int]
    pause: float = math.inf  # seconds until the session's next turn, infinity if none
    before: float = math.inf  # seconds since the session's last turn
    tenant: str = "tenant 0"


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """Return tokens for the blocks of a prompt. A block is a chunk."""
    return [block * CHUNK_TOKENS + place for block in blocks for place in range(CHUNK_TOKENS)]


def agents(seed: int, tenant: str, num_sessions: int, num_open: int) -> list[Turn]:
    """Return the turns of a tenant's agents, of which `num_open` run at once. Pauses are lognormal around 20 s."""
    rng, turns = random.Random(seed), list[Turn]()
    free = [rng.uniform(0, 40) for _ in range(num_open)]
    heapq.heapify(free)
    for number, prompts in enumerate(agent_sessions(rng, first=8, grows=1.5, turns=8)[:num_sessions]):
        now = heapq.heappop(free)
        for blocks in prompts:
            turns.append(Turn(now, f"{tenant}, agent {number}", tokens_of(blocks), tenant=tenant))
            now += rng.lognormvariate(math.log(20), 0.9)
        heapq.heappush(free, now)
    return turns


def with_pauses(turns: list[Turn]) -> list[Turn]:
    """Return the turns ordered by time, each with its pauses."""
    following: dict[str, float] = {}
    found: list[Turn] = []
    for turn in sorted(turns, key=lambda turn: -turn.at):
        found.append(replace(turn, pause=following.get(turn.session, math.inf) - turn.at))
        following[turn.session] = turn.at
    last: dict[str, float] = {}
    for number, turn in enumerate(reversed(found)):
        found[len(found) - 1 - number] = replace(turn, before=turn.at - last.get(turn.session, -math.inf))
        last[turn.session] = turn.at
    return found[::-1]


def quotas_of(num_tenants: int, pool_bytes: int) -> dict[str, int]:
    """Return equal quotas that fill the pool."""
    return {f"tenant {number}": pool_bytes // num_tenants for number in range(num_tenants)}


def key_of(turn: Turn) -> KeyRun:
    return hash_prefix(Namespace("bench", tenant=turn.tenant), CHUNK_TOKENS, turn.tokens)


def conversations(path: Path, num_requests: int) -> list[Turn]:
    """Return the first requests as turns. Prompts that continue others join their session."""
    ends: dict[int, str] = {}
    turns: list[Turn] = []
    for number, request in enumerate(itertools.islice(read_trace(str(path)), num_requests)):
        blocks = list(request.hash_ids)
        session = next((ends[block] for block in reversed(blocks[1:]) if block in ends), f"conversation {number}")
        ends.update(dict.fromkeys(blocks[-2:], session))
        turns.append(Turn(request.timestamp_ms / 1000, session, tokens_of(blocks)))
    return turns


def steps(turns: list[Turn], speed: float) -> list[tuple[float, int, Turn]]:
    """Return the turns (1) and the early prefetches at the end of long pauses (0) with their real times."""
    found = [(turn.at / speed, 1, turn) for turn in turns]
    found += [
        ((turn.at + turn.pause) / speed - LEAD_SECONDS, 0, turn)
        for turn in turns
        if SHORT_SECONDS <= turn.pause / speed < math.inf
    ]
    return sorted(found, key=lambda step: step[:2])


def replay(turns: list[Turn], speed: float, num_tenants: int, *, with_sessions: bool) -> dict[str, Any]:
    """Replay once with an empty pool and an empty tier."""
    chunks = {digest for turn in turns for digest in split_digests(key_of(turn).digests)}
    num_bytes = len(chunks) * CHUNK_TOKENS * GEOMETRY.bytes_per_token
    pool_bytes = int(POOL_SHARE * num_bytes)
    quotas = [f"{name}={num}" for name, num in quotas_of(num_tenants, pool_bytes - (pool_bytes >> 6)).items()]
    with (
        tempfile.TemporaryDirectory() as folder,
        DepotProcess(
            *("--tier", f"disk://{folder}?capacity={2 * num_bytes}"),
            *(option for quota in quotas for option in ("--quota", quota)),
            pool_size=str(pool_bytes),
        ) as depot,
        ThreadPoolExecutor(8) as operators,
    ):
        engine = EngineModel("bench", GEOMETRY, 4096, Namespace("bench"), url=depot.url, chunk_tokens=CHUNK_TOKENS)
        try:
            engine.wait_until_connected()
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            return {"bytes": num_bytes} | _replay(turns, speed, depot, engine, operators if with_sessions else None)
        finally:
            engine.close()


def _replay(
    turns: list[Turn], speed: float, depot: DepotProcess, engine: EngineModel, operators: ThreadPoolExecutor | None
) -> dict[str, Any]:
    seconds: list[tuple[float, str]] = []  # of each lookup, with the kind of pause before it
    prefetches: dict[str, tuple[int, Future[int]]] = {}  # chunks of a session, and of these the ones retained
    after_prefetch: dict[str, list[int]] = {}  # turns, and of these the ones that read the tier
    behind: list[float] = []
    largest = dict.fromkeys(("used_bytes", "retained_bytes"), 0.0)  # parts of a quota
    total = here = promoted = cut = 0
    began = time.perf_counter()
    for at, kind, turn in steps(turns, speed):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        behind.append(time.perf_counter() - began - at)
        if not kind:
            if operators is not None:
                prefetches[turn.session] = key_of(turn).num_chunks, operators.submit(prefetch, turn, depot)
            continue
        key = key_of(turn)
        asked = time.perf_counter()
        lease = engine.scheduler.lookup(turn.session, key)
        before = turn.before / speed
        kind = "first" if before == math.inf else "short pause" if before < SHORT_SECONDS else "long pause"
        seconds.append((time.perf_counter() - asked, kind))
        total += key.num_chunks
        here += lease.num_chunks - lease.num_promoted
        promoted += lease.num_promoted
        if turn.session in prefetches:
            num_chunks, retained = prefetches.pop(turn.session)
            outcome = "late" if not retained.done() else "part" if retained.result() < num_chunks else "all"
            counts = after_prefetch.setdefault(outcome, [0, 0])
            counts[0] += 1
            counts[1] += bool(lease.num_promoted)
        rest = key.slice(lease.num_chunks)
        if rest.num_chunks:
            blocks = list(range(rest.num_chunks * engine.blocks_per_chunk))
            cut += not engine.context.submit_store(turn.session, rest, [blocks]).result()
        pause = turn.pause / speed
        if operators is not None:
            kept = pause + 1 if pause < SHORT_SECONDS else 0.0
            hint(engine.scheduler, key, session=turn.session, session_ended=pause == math.inf, retain_seconds=kept)
        engine.scheduler.end_request(turn.session)
        if operators is not None and SHORT_SECONDS <= pause < math.inf:
            operators.submit(
                ask_depot, session_operations.DemoteSession(turn.session, tenant=turn.tenant), depot.url, 30
            )
        if len(seconds) % 20 == 0:
            for use in depot.status().tenants.values():
                for name, most in largest.items():
                    largest[name] = max(most, (getattr(use, name) or 0) / (use.quota_bytes or math.inf))
    assert largest["retained_bytes"] <= 1, "a tenant retained more than its quota"
    by_time = sorted(seconds)
    ordered = [each for each, _ in by_time]
    continued = [each for each, kind in by_time if kind != "first"]
    slowest = Counter(kind for _, kind in by_time[int(len(by_time) * 0.99) :])
    return {
        "turns": len(seconds),
        "pool_hit_share": round(here / total, 3),
        "tier_hit_share": round(promoted / total, 3),
        "lookup_p50_ms": round(statistics.median(ordered) * 1e3, 2),
        "lookup_p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
        "continued_p99_ms": round(continued[int(len(continued) * 0.99)] * 1e3, 2),  # without first turns
        "lookup_max_ms": round(ordered[-1] * 1e3, 2),
        "behind_p99_ms": round(sorted(behind)[int(len(behind) * 0.99)] * 1e3, 2),
        "stores_cut": cut,
        "slowest_hundredth": dict(slowest),
        "after_prefetch": after_prefetch,
        "turns_by_kind": dict(Counter(kind for _, kind in seconds)),
        "largest_use_of_a_quota": round(largest["used_bytes"], 3),
        "largest_retained_of_a_quota": round(largest["retained_bytes"], 3),
    }


def prefetch(turn: Turn, depot: DepotProcess) -> int:
    """Prefetch the session of a turn. Return how many of its chunks are retained."""
    operation = session_operations.PrefetchSession(turn.session, tenant=turn.tenant, retain_seconds=5.0)
    return ask_depot(operation, depot.url, 30).count


def parse_options(about: str | None, speed: float = 5.0) -> tuple[argparse.Namespace, list[Turn]]:
    """Return the options of the command line, and the turns that they ask for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=200, help="of each tenant, at most 200")
    parser.add_argument("--open", type=int, default=40, help="agents of each tenant at a time")
    parser.add_argument("--speed", type=float, default=speed, help="of time")
    parser.add_argument("--trace", type=Path, help="a trace in the format of Mooncake, for one tenant")
    parser.add_argument("--requests", type=int, default=600, help="of the trace")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.trace:
        return options, with_pauses(conversations(options.trace, options.requests))
    made = [
        agents(options.seed + number, f"tenant {number}", options.sessions, options.open)
        for number in range(options.tenants)
    ]
    return options, with_pauses([turn for turns in made for turn in turns])


def main() -> None:
    """Replay with and without sessions, and print."""
    options, turns = parse_options(__doc__)
    print(describe_machine())
    for with_sessions in (False, True):
        found = replay(turns, options.speed, options.tenants, with_sessions=with_sessions)
        print(json.dumps({"sessions": with_sessions} | found), flush=True)


if __name__ == "__main__":
    main()
