"""The choice between LRU and ARC by a sample; `tests/plan/test_policies.py` compares it with both on all chunks."""

import random

import pytest
from blake3 import blake3

from kvdepot.features.estimates.feature import HitRateCurve, PolicySelector
from support.index import bench_and_worker, prompt
from support.traffic import CHUNK, POOL, popular, soon_again


def test_chunk_whose_session_ended_is_a_miss() -> None:
    selector = PolicySelector(2 * POOL)
    selector.keep(10, lambda _key: True)
    selector.looked_up([b"once", b"again"], 1, 0)
    selector.looked_up([b"again"], 1, 1)
    for key in (b"once", b"again", b"unknown"):
        selector.ended(key)
    selector.looked_up([b"once", b"again"], 1, 0)
    assert selector.score == 0


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
