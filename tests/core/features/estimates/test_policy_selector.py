"""The choice between LRU and ARC, compared with both policies on all chunks."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count

import pytest
from blake3 import blake3

from kvdepot.features.estimates.feature import HitRateCurve, PolicySelector
from kvdepot.lab.simulate import simulate
from kvdepot.lab.trace import BLOCK_TOKENS, TraceRequest
from support.index import bench_and_worker, prompt

POOL = 2000
CHUNK = 4096


def popular(rng: random.Random) -> Iterator[int]:
    """Half of the lookups are for popular chunks, the others for chunks that never return. ARC keeps the former."""
    weights = [1 / (rank + 1) ** 0.6 for rank in range(2 * POOL)]
    for number, again in enumerate(rng.choices(range(2 * POOL), weights, k=10_000)):
        yield again
        yield 10**6 + number


def soon_again(rng: random.Random) -> Iterator[int]:
    """Each chunk is looked up twice, and LRU keeps it long enough."""
    upcoming: list[int] = []
    for number in range(10_000):
        yield number
        upcoming.append(number)
        if len(upcoming) > POOL * 0.45:
            yield upcoming.pop(rng.randrange(20))


Traffic = Callable[[random.Random], Iterator[int]]


@cache
def found(traffic: Traffic) -> dict[str, float]:
    """Return the hit rate of each policy."""
    requests = [TraceRequest(0, BLOCK_TOKENS, 1, (number,)) for number in traffic(random.Random(1))]
    table = simulate(requests, [POOL * CHUNK], bytes_per_token=CHUNK / BLOCK_TOKENS)
    return {row.policy: row.hit_rate for row in table.rows if row.pool_bytes == POOL * CHUNK}


@pytest.mark.slow
@pytest.mark.parametrize(("traffic", "better", "worse"), [(popular, "arc", "lru"), (soon_again, "lru", "arc")])
def test_auto_is_at_most_a_point_below_the_better_rule(traffic: Traffic, better: str, worse: str) -> None:
    rates = found(traffic)
    assert rates[better] > rates[worse] + 0.02
    assert rates["auto"] > rates[better] - 0.01


def test_lead_of_a_few_chunks_does_not_change_the_rule() -> None:
    """LRU leads by chance in a loop. Following it would spoil the lists with which ARC finds more."""
    rng, new = random.Random(31), count()
    prompts = [tuple(next(new) for _ in range(rng.randint(1, 5))) for _ in range(100)]
    looped = [prompt for _ in range(30) for prompt in rng.sample(prompts, len(prompts))]
    requests = [TraceRequest(0, len(prompt) * BLOCK_TOKENS, 1, prompt) for prompt in looped]
    pool = next(new) // 2 * CHUNK
    table = simulate(requests, [pool], bytes_per_token=CHUNK / BLOCK_TOKENS)
    rates = {row.policy: row.hit_rate for row in table.rows if row.pool_bytes == pool}
    assert rates["arc"] > rates["lru"] + 0.1
    assert rates["auto"] > rates["arc"] - 0.01


def test_chunk_whose_session_ended_is_a_miss() -> None:
    selector = PolicySelector(2 * POOL)
    selector.keep(10, lambda _key: True)
    selector.looked_up([b"once", b"again"], 1, 0)
    selector.looked_up([b"again"], 1, 1)
    for key in (b"once", b"again", b"unknown"):
        selector.ended(key)
    selector.looked_up([b"once", b"again"], 1, 0)
    assert selector.score == 0


@pytest.mark.parametrize("traffic", [popular, soon_again])
def test_arc_of_the_selector_finds_what_the_policy_finds(traffic: Traffic) -> None:
    selector, hits, count = PolicySelector(2 * POOL), 0.0, 0
    selector.keep(POOL, lambda _key: True)
    for number in traffic(random.Random(1)):
        selector.score = 0.0
        selector.looked_up(
            [bytes(2) + blake3(number.to_bytes(8, "little")).digest()[2:]], 1, 0
        )  # sampled digests begin with the same bytes
        hits, count = hits + selector.score, count + 1
    assert hits / count == pytest.approx(found(traffic)["arc"], abs=0.01)


def test_preference_follows_traffic_that_changes() -> None:
    hit_rates, rng = HitRateCurve(POOL * CHUNK), random.Random(2)
    shares: list[float] = []  # of the lookups at which LRU was preferred
    for traffic in (popular, soon_again):
        preferred: list[bool] = []
        for number in traffic(rng):
            preferred.append(hit_rates.preference.lru)
            hit_rates.looked_up(blake3(number.to_bytes(8, "little")).digest(), CHUNK)
        shares.append(sum(preferred) / len(preferred))
    assert shares[0] < 0.3
    assert shares[1] > 0.5


def test_chunks_larger_than_the_sampled_pool_are_misses() -> None:
    selector = PolicySelector(2 * POOL)
    selector.keep(10, lambda _key: True)
    for _ in range(1000):
        selector.looked_up([b"key"], 1000, 1)
    assert -2 < selector.score < 0


@pytest.mark.parametrize("prefers_lru", [False, True])
def test_the_index_evicts_by_the_rule_that_its_sample_prefers(prefers_lru: bool) -> None:
    bench, worker = bench_and_worker(pages=4)
    used_again, newer = prompt(1, 1), prompt(1, 2)
    worker.store(used_again)
    worker.release(worker.lookup(used_again).lease)
    worker.store(newer)
    bench.index.preference.lru = prefers_lru
    victim = bench.index.evictor.next_victim()
    assert victim is not None
    assert bench.index.nodes.key_of(victim) == (used_again if prefers_lru else newer).digests
