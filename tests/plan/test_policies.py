"""The choice between LRU and ARC, compared with both policies on all chunks."""

import random
from functools import cache
from itertools import count

import pytest
from blake3 import blake3

from kvdepot.features.estimates.feature import PolicySelector
from kvdepot_plan.simulate import simulate
from kvdepot_plan.trace import BLOCK_TOKENS, TraceRequest
from support.traffic import CHUNK, POOL, Traffic, popular, soon_again


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
