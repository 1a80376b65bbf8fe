"""Compares eviction policies on generated traffic and on a trace: `python benchmarks/depot/policies.py [TRACE.jsonl]`.

For each kind of traffic, prints the share of prompt tokens that each policy finds, with pools of 2 to 80 % of the
different chunks. At the end, prints how far each policy falls below the better of LRU and ARC at worst. TRACE is
replayed a second time with every session reporting its end. The generated prompts have no sessions. Takes some minutes.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from kvdepot.index.eviction import AUTO
from kvdepot_plan.simulate import BYTES_PER_TOKEN, UNLIMITED, simulate
from kvdepot_plan.trace import BLOCK_TOKENS, TraceRequest, read_trace

SIZES: Final = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8)  # of the different chunks
CHUNK_BYTES: Final = BLOCK_TOKENS * BYTES_PER_TOKEN

Prompts = list[list[int]]  # block ids of each prompt
Blocks = Callable[[int], list[int]]  # returns that many new block ids


def blocks() -> Blocks:
    """Return a source of new block ids."""
    ids = count()
    return lambda number: [next(ids) for _ in range(number)]


def about(rng: random.Random, middle: float, spread: float) -> int:
    """Draw a number of at least 1 from a long-tailed distribution."""
    return max(1, int(rng.lognormvariate(math.log(middle), spread)))


def agent_sessions(rng: random.Random, *, first: int, grows: float, turns: int) -> list[Prompts]:
    """Return the prompts of 200 coding agents with one system prompt. Each turn repeats all before it."""
    new = blocks()
    system, sessions = new(20), list[Prompts]()
    for _ in range(200):
        context, prompts = system + new(about(rng, first, 0.8)), Prompts()
        for _ in range(about(rng, turns, 0.9)):
            prompts.append(context + new(1))  # a partial block, which the next turn replaces
            context = context + new(about(rng, grows, 1.0))
        sessions.append(prompts)
    return sessions


def agents(seed: int, *, num_open: int, first: int, grows: float, turns: int, in_a_row: int) -> Prompts:
    """The turns of agents, of which `num_open` run at once."""
    rng = random.Random(seed)
    sessions = agent_sessions(rng, first=first, grows=grows, turns=turns)
    running = [sessions.pop() for _ in range(num_open)]
    trace = Prompts()
    while running:
        session = rng.choice(running)
        for _ in range(about(rng, in_a_row, 0.5)):
            if session:
                trace.append(session.pop(0))
        if not session:
            running.remove(session)
            if sessions:
                running.append(sessions.pop())
    return trace


def documents(seed: int, num_documents: int, skew: float, once: float, drift: int = 0) -> Prompts:
    """Questions about documents, some far more popular, with a share of prompts that never return."""
    rng, new = random.Random(seed), blocks()
    known = [new(about(rng, 20, 0.6)) for _ in range(num_documents)]
    weights = [1 / (rank + 1) ** skew for rank in range(num_documents)]
    trace = Prompts()
    for number in range(8000):
        if drift and number % drift == 0:
            for _ in range(num_documents // 10):
                one, other = rng.randrange(num_documents), rng.randrange(num_documents)
                known[one], known[other] = known[other], known[one]
        is_once = rng.random() < once
        trace.append(new(about(rng, 20, 0.6)) if is_once else rng.choices(known, weights)[0] + new(rng.randint(1, 3)))
    return trace


def uploads(seed: int) -> Prompts:
    """Long documents with a few questions soon after their upload, between short prompts."""
    rng, new, now = random.Random(seed), blocks(), 0.0
    events: list[tuple[float, list[int]]] = []
    for _ in range(1800):
        now += rng.expovariate(1)
        if rng.random() < 0.3:
            events.append((now, new(1)))
            continue
        document, then = new(about(rng, 45, 0.6)), now
        for _ in range(1 + int(rng.expovariate(0.7))):
            events.append((then, document + new(rng.randint(1, 3))))
            then += rng.lognormvariate(math.log(60), 1.3)
    return [prompt for _, prompt in sorted(events, key=lambda event: event[0])]


def evaluation(seed: int) -> Prompts:
    """The same prompts again and again, each time in another order."""
    rng, new = random.Random(seed), blocks()
    prompts = [new(rng.randint(6, 24)) for _ in range(400)]
    return [prompt for _ in range(8) for prompt in rng.sample(prompts, len(prompts))]


def one_after_another(*traces: Prompts) -> Prompts:
    """Traffic that changes: one trace after the other."""
    return [[block * len(traces) + place for block in prompt] for place, trace in enumerate(traces) for prompt in trace]


def at_once(seed: int, *traces: Prompts) -> Prompts:
    """Several kinds of traffic at once: the traces, interleaved at random."""
    rng = random.Random(seed)
    order = [place for place, trace in enumerate(traces) for _ in trace]
    rng.shuffle(order)
    rests: list[Iterator[list[int]]] = [iter(trace) for trace in traces]
    return [[block * len(traces) + place for block in next(rests[place])] for place in order]


def main() -> None:
    """Print the tables."""
    traces: dict[str, list[TraceRequest]] = {path: list(read_trace(path)) for path in sys.argv[1:]}
    generated = {
        "agents, few at once": agents(1, num_open=12, first=15, grows=2, turns=20, in_a_row=3),
        "agents, many at once": agents(2, num_open=80, first=8, grows=1.5, turns=8, in_a_row=1),
        "popular documents": documents(3, 600, 0.9, 0.0),
        "popular documents that change, one prompt in two never returns": documents(4, 600, 0.7, 0.5, 500),
        "uploads": uploads(5),
        "evaluation in a loop": evaluation(6),
        "uploads, then agents, then documents": one_after_another(
            uploads(7), agents(8, num_open=12, first=15, grows=2, turns=5, in_a_row=3), documents(9, 300, 0.8, 0.2)
        ),
        "uploads and documents at once": at_once(10, uploads(11), documents(12, 500, 0.9, 0.1)),
    }
    for name, prompts in generated.items():
        traces[name] = [TraceRequest(0, len(prompt) * BLOCK_TOKENS, 1, tuple(prompt)) for prompt in prompts]
    worst = {"lru": 0.0, "arc": 0.0, AUTO: 0.0}
    replays = [(name, ends) for name in traces for ends in ((0.0, 1.0) if name in sys.argv[1:] else (0.0,))]
    for name, ends in replays:
        requests = traces[name]
        unique = simulate(requests, [CHUNK_BYTES], []).unique_chunks
        table = simulate(requests, [int(size * unique) * CHUNK_BYTES for size in SIZES], session_ends=ends)
        rates: dict[str, list[float]] = {policy: [] for policy in worst}
        for row in table.rows:
            if row.policy in rates:
                rates[row.policy].append(row.hit_rate)
        limit = table.row(UNLIMITED, table.unique_bytes).hit_rate
        hints = ", sessions report their ends" if ends else ""
        print(f"{name}{hints}: {len(requests):,} requests, {unique:,} different chunks, at most {limit:.1%}")
        for policy, found in rates.items():
            print(f"  {policy:5}", *(f"{rate:6.1%}" for rate in found), flush=True)
            gaps = [rate - max(best) for rate, *best in zip(found, rates["lru"], rates["arc"], strict=True)]
            worst[policy] = min(worst[policy], *gaps)
    print("furthest below the better:", ", ".join(f"{policy} {100 * gap:.1f} points" for policy, gap in worst.items()))


if __name__ == "__main__":
    main()
