"""While a depot dies or hangs, requests finish with the right tokens, at most one deadline late, and leak nothing."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.stopped import stopped
from support.vllm.engines import Engine, MakeModel, Prompt, cached, connector, prompts, tokens

PROMPTS = prompts(6, 700, seed=20)
DEADLINE_SECONDS = 1.0


@pytest.fixture(scope="module")
def engine(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    """An engine whose prompts are all in the depot and not in vLLM's own cache."""
    config = connector(depot.url, deadline_seconds=DEADLINE_SECONDS)
    with Engine(model("gqa"), config, reference=PROMPTS, max_tokens=4, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture
def warm(engine: Engine, depot: DepotProcess) -> Engine:
    assert tokens(engine.generate(PROMPTS)) == engine.reference
    wait_until(lambda: cached(engine.generate(PROMPTS)) == [640] * 6, 60, "every prompt in the depot")
    return engine


def at_rest(engine: Engine) -> dict[str, int]:
    """Return the engine's state once no work is running."""
    engine.ask("drain")
    return engine.ask("state")


def leaks_nothing(engine: Engine, depot: DepotProcess, before: dict[str, int]) -> bool:
    wait_until(lambda: depot.status().num_leases == 0, what="leases")
    wait_until(lambda: depot.status().num_tickets == 0, what="tickets")
    return at_rest(engine) == before


@pytest.mark.promise(28)
def test_engine_first_depot_later(model: MakeModel, tmp_path: Any) -> None:
    with Engine(
        model("gqa"), connector(str(tmp_path)), reference=PROMPTS[:1], expects_depot=False, enable_prefix_caching=False
    ) as engine:
        assert tokens(engine.generate(PROMPTS[:1])) == engine.reference
        assert "no depot in" in engine.log()
        with DepotProcess(directory=tmp_path, new_session=True) as late:
            wait_until(lambda: len(late.status().contexts) == 2, 60, "the engine to find the depot")
            engine.generate(PROMPTS[:1])
            outputs = engine.generate(PROMPTS[:1])
            assert (tokens(outputs), cached(outputs)) == (engine.reference, [640])


WITHOUT_POOL = """
from kvdepot_vllm.connector import KVDepotConnector
KVDepotConnector.bind_gpu_block_pool = lambda _connector, _pool: None
"""


@pytest.mark.slow
def test_an_engine_whose_vllm_gives_no_block_pool_loads_and_says_that_it_does_not_store(
    depot: DepotProcess, model: MakeModel
) -> None:
    """Regression: a vLLM without this hook would have made an engine that stores nothing, without a word."""
    config = connector(depot.url, namespace="no pool")
    given = prompts(2, 300, seed=23)
    with Engine(model("gqa"), config, max_tokens=4) as engine:
        answers = tokens(engine.generate(given[:1]))
    with Engine(model("gqa"), config, max_tokens=4, first=WITHOUT_POOL) as engine:
        outputs = engine.generate(given[:1])
        assert (tokens(outputs), cached(outputs)) == (answers, [256])
        num_chunks = depot.status().num_chunks
        engine.generate(given[1:])
        engine.generate(prompts(1, 300, seed=24))
        assert depot.status().num_chunks == num_chunks
        assert engine.log().count("nothing is stored: this vLLM did not call") == 1


@pytest.mark.promise(23)
def test_a_killed_depot(warm: Engine, depot: DepotProcess) -> None:
    before = at_rest(warm)
    warm.send("generate", prompts=PROMPTS, max_tokens=warm.max_tokens)
    depot.kill()
    assert tokens(warm.answer()["outputs"]) == warm.reference
    assert tokens(warm.generate(PROMPTS)) == warm.reference
    assert at_rest(warm) == before
    depot.start()
    wait_until(lambda: len(depot.status().contexts) == 2, 60, "the engine to come back")
    wait_until(lambda: cached(warm.generate(PROMPTS)) == [640] * 6, 60, "hits again")


@pytest.mark.promise(25)
def test_a_hung_depot_costs_one_deadline_not_one_a_request(warm: Engine, depot: DepotProcess) -> None:
    before = at_rest(warm)
    started = time.monotonic()
    warm.generate(PROMPTS, together=False)
    usual = time.monotonic() - started
    with stopped(depot):
        started = time.monotonic()
        assert tokens(warm.generate(PROMPTS, together=False)) == warm.reference
        seconds = time.monotonic() - started
        assert tokens(warm.generate(PROMPTS)) == warm.reference
    assert DEADLINE_SECONDS <= seconds < 3 * DEADLINE_SECONDS + 3 * usual, (
        "six requests, each of a fraction of a second"
    )
    assert leaks_nothing(warm, depot, before)
    wait_until(lambda: cached(warm.generate(PROMPTS)) == [640] * 6, 60, "the depot to be used again")


def test_a_depot_that_hangs_during_loads_and_stores(warm: Engine, depot: DepotProcess) -> None:
    before = at_rest(warm)
    new = prompts(2, 700, seed=int(time.monotonic()) % 1000 + 100)
    warm.ask("submit", requests={f"hang-{n}": p for n, p in enumerate(PROMPTS[:2] + new)}, max_tokens=4, steps=3)
    with stopped(depot):
        warm.ask("drain", seconds=60)
    assert leaks_nothing(warm, depot, before)
    wait_until(lambda: tokens(warm.generate(PROMPTS)) == warm.reference, 60)


@pytest.mark.promise(16)
def test_a_full_depot_declines_and_nobody_waits(model: MakeModel) -> None:
    with (
        DepotProcess(pool_size="4MiB", new_session=True) as small,
        Engine(
            model("gqa"), connector(small.url), reference=PROMPTS, max_tokens=4, enable_prefix_caching=False
        ) as engine,
    ):
        for _ in range(2):
            assert tokens(engine.generate(PROMPTS)) == engine.reference
        assert small.status().counters["chunks_evicted"] > 0
        assert small.status().num_leases == 0


@pytest.mark.parametrize("aborted_after", ["the load", "steps"])
@pytest.mark.promise(10, 18)
def test_aborted_requests_leak_nothing(warm: Engine, depot: DepotProcess, aborted_after: str) -> None:
    before = at_rest(warm)
    requests = {f"abort-{aborted_after}-{number}": prompt for number, prompt in enumerate(PROMPTS[:4])}
    if aborted_after == "the load":
        warm.ask("fault", kind="hold")
        warm.ask("submit", requests=requests, max_tokens=8, steps=20)
        assert warm.ask("state")["loads"] > 0
        warm.ask("abort", requests=list(requests), steps=2)
        assert warm.ask("state")["loads"] > 0, "blocks are held until nothing writes into them"
        warm.ask("release")
    else:
        warm.ask("submit", requests=requests, max_tokens=8, steps=2)
        warm.ask("abort", requests=list(requests))
    assert leaks_nothing(warm, depot, before)
    assert tokens(warm.generate(PROMPTS)) == warm.reference


def test_a_request_aborted_while_it_loads_from_a_depot_that_dies(warm: Engine, depot: DepotProcess) -> None:
    before = at_rest(warm)
    warm.ask("submit", requests={"dying": PROMPTS[0]}, max_tokens=8, steps=1)
    depot.kill()
    warm.ask("abort", requests=["dying"], steps=1)
    assert at_rest(warm) == before
    depot.start()
    wait_until(lambda: len(depot.status().contexts) == 2, 60, "the engine to come back")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa", {}),
        ("gqa", {"enable_prefix_caching": False}),
        ("windows", {"kv_cache_memory_bytes": 128 << 20}),
        ("only-windows", {}),
    ],
    ids=["one group", "one group without vLLM's own cache", "several groups", "one group of windows"],
)
@pytest.mark.promise(32)
def test_a_load_that_fails_is_recomputed(
    name: str, options: dict[str, Any], depot: DepotProcess, model: MakeModel
) -> None:
    wanted = PROMPTS[:3]
    with Engine(model(name), connector(depot.url), reference=wanted, max_tokens=4, **options) as engine:
        engine.generate(wanted)
        before = at_rest(engine)
        for num_chunks in (0, 2):  # chunks that arrive before the failure
            engine.ask("fault", kind="fail", num_chunks=num_chunks)
            failed = engine.ask("metrics").get("vllm:kvdepot_failed_loads", 0)
            reset_unless(engine, options)
            outputs = engine.generate(wanted)
            assert tokens(outputs) == engine.reference
            assert engine.ask("metrics")["vllm:kvdepot_failed_loads"] - failed == 3
            state = at_rest(engine)
            assert {**state, "free_blocks": 0} == {**before, "free_blocks": 0}
            reset_unless(engine, options)
            assert tokens(engine.generate(wanted)) == engine.reference


def reset_unless(engine: Engine, options: dict[str, Any]) -> None:
    if options.get("enable_prefix_caching", True):
        engine.reset()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.promise(45)
def test_the_failure_policy_is_said_at_start(keeps: bool, depot: DepotProcess, model: MakeModel) -> None:
    wanted: list[Prompt] = PROMPTS[:1]
    config = connector(depot.url, **({"keep_load_failure_policy": True} if keeps else {}))
    with Engine(model("gqa"), config, reference=wanted, enable_prefix_caching=False) as engine:
        assert "kv_load_failure_policy" in engine.log()
        engine.generate(wanted)
        engine.ask("fault", kind="fail")
        (output,) = engine.generate(wanted)
        if keeps:
            assert (output["tokens"], output["reason"]) == ([], "error")
        else:
            assert output["tokens"] == engine.reference[0]
        if keeps:  # the failed load's wrong values were not stored
            engine.execute(
                "from vllm.distributed.kv_transfer import get_kv_transfer_group as g\n"
                "del g().worker_side.context.submit_retrieve"
            )
            assert tokens(engine.generate(wanted)) == engine.reference
