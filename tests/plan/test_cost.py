"""The cost of a shared store, checked with the requests that real depots made (`tests/tiers/test_runs.py`)."""

import pytest

from kvdepot.errors import ConfigError
from kvdepot_plan.cluster import RANDOM, Cluster
from kvdepot_plan.cost import Bill, Prices, bills_as_dict, describe_bills, prices_of, simulate_cost
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest

SECONDS = 100.0  # of a trace that is counted
DAY = 86_400.0
# 16 tokens of 2 KiB are 32 KiB, and a run of 128 chunks has 2,048 tokens: four blocks of a trace.
FLEET = Cluster(1, bytes_per_token=2048)
FREE = Prices()
PROMPT_BYTES = 16 * BLOCK_TOKENS * 2048


def prompt(second: float, first: int) -> TraceRequest:
    """Return a prompt of 8,192 tokens, which are four runs, and one more."""
    return TraceRequest(second * 1000, 16 * BLOCK_TOKENS + 1, 1, tuple(range(first, first + 16)))


def bills_of(*prompts: int, pool_prompts: int = 1, prices: Prices = FREE) -> tuple[Bill, Bill]:
    """Return the bills of prompts after a first one, which is not counted."""
    step = SECONDS / (len(prompts) - 1)
    trace = [prompt(0, 1000), *(prompt(1 + step * place, 100 * number) for place, number in enumerate(prompts))]
    assert len(trace) <= 9, "more are not counted"
    return simulate_cost(trace, FLEET, pool_prompts * PROMPT_BYTES, RANDOM, prices, 16)


def in_trace(number: float) -> float:
    return round(number * SECONDS / DAY, 3)


def test_prompts_cost_the_requests_that_real_depots_make() -> None:
    # Two new prompts, of which the second evicts the first. Then the first one again, from the tier, and from the pool.
    store, reuse = bills_of(1, 2, 1, 1)
    assert (in_trace(store.gets), in_trace(store.puts)) == ((2 + 4) * 2 + 6 + 4, 4 * 2)
    assert in_trace(store.written_bytes) == 2 * PROMPT_BYTES
    assert in_trace(store.read_bytes) == PROMPT_BYTES
    # The tier has the first one only after it was found again.
    assert (in_trace(reuse.gets), in_trace(reuse.puts)) == (2 * 3 + 4, 4)
    assert in_trace(reuse.read_bytes) == 0
    assert 0.49 < store.hit_rate < 0.5
    assert 0.24 < reuse.hit_rate < 0.25


def test_dollars_are_the_requests_and_what_a_day_writes() -> None:
    prices = Prices(put=1.0, get=0.1, read=2.0, month=3.0)
    bill, _ = bills_of(1, 2, 1, 1, prices=prices)
    requests = (bill.puts * 1.0 + bill.gets * 0.1) / 1000 + bill.read_bytes / 2**30 * 2.0
    assert bill.request_dollars == pytest.approx(requests)
    assert bill.dollars - bill.request_dollars == pytest.approx(bill.written_bytes / 2**30 * 3.0 / 30)
    text = describe_bills([bill], FLEET)
    assert "store" in text
    assert f"${bill.dollars:,.2f}" in text
    assert bills_as_dict([bill], FLEET, prices)["prices"]["month"] == 3.0


def test_a_part_of_a_long_prefix_is_asked_for_by_one_object_in_eight() -> None:
    def long(second: float, first: int, num_blocks: int = 64) -> TraceRequest:
        ids = tuple(range(first, first + num_blocks))
        return TraceRequest(second * 1000, num_blocks * BLOCK_TOKENS + 1, 1, ids)

    trace = [prompt(0, 10_000), long(1, 0), long(51, 1000), long(100, 0, 72), long(101, 0)]
    bill, _ = simulate_cost(trace, FLEET, 5 * PROMPT_BYTES, RANDOM, FREE, 16)
    # Sixteen runs: two prompts are new. One with two runs more is read as far as it is there, with questions for its
    # first and its last run, and for the eighth and the last of the sixteen. Then one is used from the pool.
    assert (in_trace(bill.gets), in_trace(bill.puts)) == ((2 + 16) * 2 + (2 + 2 + 16 + 2) + 16, 16 * 2 + 2)


def test_a_store_of_ones_own_has_no_prices_and_given_ones_replace_the_list() -> None:
    assert prices_of("s3://bucket/kv").put == 0.005
    assert prices_of("s3://bucket/kv?endpoint=https://minio.internal:9000") == Prices()
    assert prices_of("file:///mnt/shared", "month=0.1") == Prices(month=0.1)
    assert prices_of("gs://bucket", "put=0,get=1").get == 1.0
    for given in ("tax=1", "put", "put=much", "put=-1"):
        with pytest.raises(ConfigError):
            prices_of("s3://bucket", given)
    with pytest.raises(ConfigError, match="only object stores"):
        prices_of("disk:///cache?capacity=1GiB")


def test_a_trace_without_blocks_or_time_is_refused() -> None:
    for trace in ([], [prompt(0, 1)]):
        with pytest.raises(TraceError, match="no requests"):
            simulate_cost(trace, FLEET, PROMPT_BYTES, RANDOM, FREE, 16)
    with pytest.raises(ConfigError, match="one block takes"):
        simulate_cost([prompt(0, 1), prompt(1, 1)], FLEET, 4096, RANDOM, FREE, 16)
