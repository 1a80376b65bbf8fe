"""The cost of a prompt token, fitted to steps of an engine whose true cost is known."""

import random

import pytest

from kvdepot_vllm.prefill_cost import PrefillCost

FIXED_SECONDS, TOKEN_SECONDS = 0.04, 70e-6


def run(cost: PrefillCost, num_tokens: int, now: float, idle_seconds: float = 0.0) -> float:
    """Run one step and return the time after it."""
    cost.planned(now, num_tokens)
    now += FIXED_SECONDS + num_tokens * TOKEN_SECONDS
    cost.reported(now)
    return now + idle_seconds


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9, 0.99])
def test_the_fixed_cost_of_steps_is_not_taken_for_the_cost_of_tokens(hit_rate: float) -> None:
    rng, cost, now = random.Random(7), PrefillCost(), 0.0
    for _ in range(500):
        prompt = rng.randint(20, 300) if rng.random() < hit_rate else rng.randint(1000, 2048)
        num_tokens = rng.randint(1, 4) if rng.random() < 0.7 else prompt
        now = run(cost, num_tokens, now) + rng.random() * 0.002  # noise
    assert cost.token_seconds == pytest.approx(TOKEN_SECONDS, rel=0.15)


def test_an_engine_without_requests_is_not_taken_for_a_slow_one() -> None:
    cost, now = PrefillCost(), 0.0
    for _ in range(20):
        now = run(cost, 1000, run(cost, 1, now), idle_seconds=30.0)
    assert cost.token_seconds == pytest.approx(TOKEN_SECONDS)


def test_steps_that_overlap_last_from_plan_to_plan() -> None:
    cost = PrefillCost()
    for step in range(20):
        cost.planned(0.1 * step, 1000)
        if step:
            cost.reported(0.1 * step + 0.01)  # the time of the previous step
    assert cost.token_seconds == pytest.approx(1e-4)


def test_steps_of_one_size_give_an_upper_bound() -> None:
    cost, now = PrefillCost(), 0.0
    for _ in range(10):
        now = run(cost, 2000, now)
    assert cost.token_seconds == pytest.approx(FIXED_SECONDS / 2000 + TOKEN_SECONDS)


def test_few_or_small_steps_say_nothing() -> None:
    cost, now = PrefillCost(), 0.0
    for num_tokens in [1] * 50 + [100] * 50 + [2000] * 2:
        now = run(cost, num_tokens, now)
        assert cost.token_seconds == 0.0
