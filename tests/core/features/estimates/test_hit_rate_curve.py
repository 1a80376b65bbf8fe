"""The estimate for other pool sizes, compared with the real index with pools of those sizes."""

import random
from collections.abc import Iterator

import pytest
from blake3 import blake3

from kvdepot.features.estimates.feature import SCALES, HitRateCurve
from kvdepot.index.entries import NewRun, PartPlace
from kvdepot.index.index import MOST_EVICTED, ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable
from kvdepot.wire.messages import CacheSpec, GroupShape
from kvdepot.wire.status import NUM_BUCKETS, Histogram

CHUNK = 4096
PLACE = PartPlace(0, 0, CHUNK, 0)
SPEC = CacheSpec(1, (GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes")


def traffic(num_requests: int, seed: int = 1) -> Iterator[bytes]:
    """Yield packed digests of prompts: few popular starts, many continuations, and growing turns."""
    rng = random.Random(seed)
    turns: list[list[int]] = []
    for number in range(num_requests):
        if turns and rng.random() < 0.6:
            path = turns[min(len(turns) - 1, int(rng.paretovariate(0.3)) - 1)]
            path += [number * 1000 + n for n in range(rng.randint(1, 4))]
        else:
            path = [rng.randrange(20), *(number * 1000 + n for n in range(rng.randint(2, 12)))]
            turns.insert(rng.randrange(len(turns) + 1), path)
        digest, packed = bytes(32), b""
        for name in path[:200]:
            digest = blake3(digest + name.to_bytes(8, "little")).digest()
            packed += digest
        yield packed


def found_in(num_chunks: int, prompts: list[bytes]) -> float:
    """Return the share of the chunks that the real index finds with a pool of `num_chunks`."""
    index = ChunkIndex(ExtentAllocator(num_chunks * CHUNK), IndexTable.in_memory(num_chunks), "lru")
    space = index.space(SPEC)
    found = asked = 0
    for digests in prompts:
        hits, nodes = index.visibility.match(space, digests)
        found, asked = found + hits, asked + len(digests) // 32
        parent = nodes[0] if hits else NO_NODE
        if hits:
            index.shares.used(parent)
        for start in range(hits, len(digests) // 32, MOST_EVICTED):
            run = NewRun(space, digests[start * 32 : (start + MOST_EVICTED) * 32], start, parent)
            wanted = [(chunk, PLACE) for chunk in range(len(run.digests) // 32)]
            begun, _ = index.reserve(run, wanted)
            nodes = index.seal([extent[0] for _, _, extent in begun])
            if len(begun) < len(wanted):
                break
            parent = nodes[-1]
    return found / asked


@pytest.mark.slow
@pytest.mark.promise(57)
def test_estimates_are_what_pools_of_those_sizes_find() -> None:
    prompts = list(traffic(4000))
    hit_rates = HitRateCurve(4096 * CHUNK)
    for digests in prompts:
        hit_rates.looked_up(digests, CHUNK)
        hit_rates.stored(digests, CHUNK)
    rates = [estimate.hit_chunks / hit_rates.num_chunks for estimate in hit_rates.estimates()]
    real = [found_in(int(scale * 4096), prompts) for scale in SCALES]
    assert real[-1] - real[0] > 0.2, "sizes matter in this traffic"
    assert rates == sorted(rates)
    for estimated, exact in zip(rates, real, strict=True):
        assert abs(estimated - exact) < 0.05, (rates, real)
    asked = sum(len(digests) // 32 for digests in prompts)
    assert abs(hit_rates.num_chunks / asked - 1) < 0.1


def test_memory_is_bounded_by_a_lower_rate() -> None:
    hit_rates = HitRateCurve(100_000 * CHUNK, budget=500)
    before = hit_rates.rate
    rng = random.Random(2)
    for _ in range(3000):
        hit_rates.looked_up(rng.randbytes(32 * 100), CHUNK)
        assert len(hit_rates.segment_of) <= 500 + 100
    assert 0 < hit_rates.rate < 1 / 64
    assert before == 0
    assert hit_rates.num_chunks == pytest.approx(300_000, rel=0.15)
    assert [estimate.hit_chunks for estimate in hit_rates.estimates()] == [0] * len(SCALES), "nothing came twice"


def test_chunks_that_were_only_stored_are_found_and_not_counted_as_asked() -> None:
    hit_rates = HitRateCurve(4096 * CHUNK)
    digests = random.Random(3).randbytes(32 * 800)
    hit_rates.stored(digests, CHUNK)
    assert hit_rates.num_chunks == 0
    hit_rates.looked_up(digests, CHUNK)
    assert hit_rates.num_chunks > 0
    assert hit_rates.estimates()[0].hit_chunks == hit_rates.num_chunks


def test_chunks_whose_session_ended_are_not_found() -> None:
    hit_rates = HitRateCurve(4096 * CHUNK)
    digests = random.Random(5).randbytes(32 * 800)
    hit_rates.looked_up(digests, CHUNK)
    assert len(hit_rates.segment_of) > 0
    for place in range(0, len(digests), 32):
        hit_rates.ended(digests[place : place + 32])
    assert len(hit_rates.segment_of) == 0
    hit_rates.looked_up(digests, CHUNK)
    assert [estimate.hit_chunks for estimate in hit_rates.estimates()] == [0] * len(SCALES)
    hit_rates.looked_up(digests, CHUNK)
    assert hit_rates.estimates()[0].hit_chunks > 0, "a use takes the end back"


def test_one_chunk_at_a_time_is_sampled_as_a_run_is() -> None:
    digests = random.Random(4).randbytes(32 * 2000)
    whole, single = HitRateCurve(4096 * CHUNK), HitRateCurve(4096 * CHUNK)
    whole.looked_up(digests, CHUNK)
    for place in range(0, len(digests), 32):
        single.looked_up(digests[place : place + 32], CHUNK)
    assert whole.num_chunks == single.num_chunks
    assert len(whole.segment_of) == len(single.segment_of) > 0


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.9, 0), (1.0, 1), (1.9, 1), (2.0, 2), (1e300, NUM_BUCKETS - 1)]
)
def test_values_are_counted_by_powers_of_two(value: float, bucket: int) -> None:
    histogram = Histogram(1.0)
    histogram.add(value)
    assert histogram.status().counts.index(1) == bucket
