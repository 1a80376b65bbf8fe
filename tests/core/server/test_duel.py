"""The choice between LRU and ARC, beside both on all chunks."""

import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from blake3 import blake3

from kvdepot.index.eviction import Preference
from kvdepot.lab.simulate import simulate
from kvdepot.lab.trace import BLOCK_TOKENS, TraceRequest
from kvdepot.server.duel import Duel
from kvdepot.server.shadow import ShadowIndex
from support.index import Bench

POOL = 2000
CHUNK = 4096


def popular(rng: random.Random) -> Iterator[int]:
    """Some chunks are asked for again and again, every other one never: ARC keeps the former."""
    weights = [1 / (rank + 1) ** 0.6 for rank in range(2 * POOL)]
    for number, again in enumerate(rng.choices(range(2 * POOL), weights, k=10_000)):
        yield again
        yield 10**6 + number


def soon_again(rng: random.Random) -> Iterator[int]:
    """Each chunk is asked for twice, and LRU keeps it long enough."""
    upcoming: list[int] = []
    for number in range(10_000):
        yield number
        upcoming.append(number)
        if len(upcoming) > POOL * 0.45:
            yield upcoming.pop(rng.randrange(20))


Traffic = Callable[[random.Random], Iterator[int]]


@cache
def found(traffic: Traffic) -> dict[str, float]:
    """The hit rate of each policy."""
    requests = [TraceRequest(0, BLOCK_TOKENS, 1, (number,)) for number in traffic(random.Random(1))]
    table = simulate(requests, [POOL * CHUNK], bytes_per_token=CHUNK / BLOCK_TOKENS)
    return {row.policy: row.hit_rate for row in table.rows if row.pool_bytes == POOL * CHUNK}


@pytest.mark.parametrize(("traffic", "better", "worse"), [(popular, "arc", "lru"), (soon_again, "lru", "arc")])
def test_auto_is_at_most_a_point_below_the_better_rule(traffic: Traffic, better: str, worse: str) -> None:
    rates = found(traffic)
    assert rates[better] > rates[worse] + 0.02
    assert rates["auto"] > rates[better] - 0.01


@pytest.mark.parametrize("traffic", [popular, soon_again])
def test_arc_of_the_duel_finds_what_the_policy_finds(traffic: Traffic) -> None:
    duel, hits, count = Duel(), 0.0, 0
    duel.keep(POOL, lambda _key: True)
    for number in traffic(random.Random(1)):
        duel.score = 0.0
        duel.looked_up([number.to_bytes(8, "little")], 1, 0)
        hits, count = hits + duel.score, count + 1
    assert hits / count == pytest.approx(found(traffic)["arc"], abs=0.01)


def test_preference_follows_traffic_that_changes() -> None:
    preference, rng = Preference(), random.Random(2)
    shadow = ShadowIndex(POOL * CHUNK, preference)
    shares: list[float] = []  # of the lookups before which LRU was preferred
    for traffic in (popular, soon_again):
        preferred: list[bool] = []
        for number in traffic(rng):
            preferred.append(preference.lru)
            shadow.looked_up(blake3(number.to_bytes(8, "little")).digest(), CHUNK)
        shares.append(sum(preferred) / len(preferred))
    assert shares[0] < 0.3
    assert shares[1] > 0.5


def test_chunks_larger_than_the_sampled_pool_are_misses() -> None:
    duel = Duel()
    duel.keep(10, lambda _key: True)
    for _ in range(1000):
        duel.looked_up([b"key"], 1000, 1)
    assert -2 < duel.score < 0


def test_depot_tells_its_index() -> None:
    bench = Bench(pages=4)
    assert bench.depot.state.usage.shadow.preference is bench.index.preference
