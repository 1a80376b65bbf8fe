"""Greedy output with the depot equals the output without it, wherever a prefix came from."""

from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens

PROMPTS = prompts(4, 700) + prompts(2, 900, seed=1, shared=512)
WHOLE = [640, 640, 640, 640, 896, 896]  # tokens in whole blocks of 128, less the one that is always computed


@pytest.fixture(scope="module")
def first(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    """An engine with vLLM's own prefix cache."""
    with Engine(model("gqa"), connector(depot.url), reference=PROMPTS, max_tokens=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    """An engine without vLLM's own prefix cache that prefills in pieces of partial blocks."""
    with Engine(
        model("gqa"), connector(depot.url), max_tokens=4, enable_prefix_caching=False, max_num_batched_tokens=200
    ) as engine:
        yield engine


@pytest.mark.promise(17)
def test_cold_then_warm_then_warm_in_the_other_engine(first: Engine, second: Engine, depot: DepotProcess) -> None:
    cold = first.generate(PROMPTS, together=False)
    assert tokens(cold) == first.reference
    assert cached(cold) == [0, 0, 0, 0, 0, 512]  # the last prompt from vLLM's own cache
    first.reset()
    warm = first.generate(PROMPTS, together=False)
    assert tokens(warm) == first.reference
    assert cached(warm) == WHOLE
    other = second.generate(PROMPTS, together=False)
    assert tokens(other) == first.reference
    assert cached(other) == WHOLE
    status = depot.status()
    assert (status.num_leases, status.num_tickets) == (0, 0)
    assert status.counters["retrieve_chunks"] == status.counters["retrieve_chunks_hit"]


def test_batched(first: Engine, second: Engine) -> None:
    first.reset()
    for engine in (first, second):
        assert tokens(engine.generate(PROMPTS)) == first.reference


def test_tokens_that_vllm_holds_itself_are_not_loaded_again(first: Engine, depot: DepotProcess) -> None:
    first.reset()
    long = [PROMPTS[0][:300]]
    first.generate(long)
    before = depot.status().counters["retrieve_chunks"]
    outputs = first.generate(PROMPTS[:1])
    assert tokens(outputs) == first.reference[:1]
    assert cached(outputs) == [640]
    assert depot.status().counters["retrieve_chunks"] - before == 3  # 640 tokens less the 256 that vLLM had


@pytest.mark.promise(44)
def test_chunked_prefill_stores_what_one_prefill_stores(second: Engine, depot: DepotProcess) -> None:
    before = depot.status().num_chunks
    prompt = prompts(1, 700, seed=9)
    second.generate(prompt)
    assert depot.status().num_chunks - before == 5
    assert cached(second.generate(prompt)) == [640]


def test_output_tokens_are_stored_too(second: Engine) -> None:
    prompt = prompts(1, 766, seed=10)[0]
    output = second.generate([prompt])[0]["tokens"]
    assert cached(second.generate([prompt + output])) == [768]


def test_after_eviction_of_half_the_chunks(model: MakeModel) -> None:
    with (
        DepotProcess(pool_size="16MiB", new_session=True) as small,  # 32 chunks of 512 KiB, less the loss to alignment
        Engine(
            model("gqa"), connector(small.url), reference=PROMPTS, max_tokens=4, enable_prefix_caching=False
        ) as engine,
    ):
        many = prompts(6, 700, seed=5)
        assert tokens(engine.generate(PROMPTS, together=False)) == engine.reference
        engine.generate(many, together=False)
        assert small.status().counters["chunks_evicted"] >= 16
        again = engine.generate(PROMPTS, together=False)
        assert tokens(again) == engine.reference
        assert tokens(engine.generate(PROMPTS)) == engine.reference


@pytest.mark.promise(23)
def test_after_a_restart_of_the_depot(first: Engine, depot: DepotProcess) -> None:
    first.generate(PROMPTS[:4])
    depot.kill()
    first.reset()
    assert tokens(first.generate(PROMPTS[:2])) == first.reference[:2]
    depot.start()
    wait_until(lambda: not depot.status().recovering, 60)
    first.reset()
    warm = first.generate(PROMPTS[:4], together=False)
    assert tokens(warm) == first.reference[:4]
    assert cached(warm) == WHOLE[:4]


@pytest.mark.promise(18)
def test_under_preemption(depot: DepotProcess, model: MakeModel) -> None:
    wanted = prompts(3, 300, seed=3)
    with Engine(
        model("gqa"),
        connector(depot.url),
        reference=wanted,
        max_tokens=100,
        block_size=32,
        max_model_len=512,
        kv_cache_memory_bytes=34 * 32 * 2 * 128 * 4 * 4,
    ) as engine:
        assert tokens(engine.generate(wanted)) == engine.reference
        assert engine.ask("metrics")["vllm:num_preemptions"] > 0, "nothing was preempted: the test shows nothing"
        assert tokens(engine.generate(wanted)) == engine.reference
    wait_until(lambda: depot.status().num_leases == 0)
