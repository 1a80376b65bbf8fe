"""The engine never waits for a lookup, a load or a store, and holds blocks until their copy ends."""

import time
from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.stopped import stopped
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts

HIT, OTHER, THIRD, FOURTH = prompts(4, 700, seed=40)
_NUM_RUNNING = "result = len(child.llm.llm_engine.engine_core.engine_core.scheduler.running)"


@pytest.fixture
def engine(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    with Engine(model("gqa"), connector(depot.url), enable_prefix_caching=False) as engine:
        engine.generate([HIT])
        yield engine


@pytest.mark.promise(36)
def test_others_are_served_while_one_loads(engine: Engine) -> None:
    engine.ask("fault", kind="hold")
    done = engine.ask("submit", requests={"loads": HIT, "computes": OTHER}, max_tokens=4, steps=100)
    assert done["finished"] == ["computes"]
    assert engine.ask("state")["loads"] == 1
    engine.ask("release")
    assert engine.ask("step", steps=100)["finished"] == ["loads"]


@pytest.mark.promise(13, 18, 36)
def test_a_store_holds_its_blocks_and_nothing_else(engine: Engine) -> None:
    before = engine.ask("state")
    engine.ask("hold_stores")
    assert engine.ask("submit", requests={"stores": FOURTH}, max_tokens=4, steps=100)["finished"] == ["stores"]
    state = engine.ask("state")
    assert state["requests"] == 0
    assert state["connector"] == {"requests": 0, "held_blocks": 5, "stores": 1, "blends": 0}
    assert state["free_blocks"] == before["free_blocks"] - 5, "the partial block is free, the stored ones are not"
    assert engine.ask("submit", requests={"next": THIRD}, max_tokens=4, steps=100)["finished"] == ["next"]
    engine.ask("release")
    engine.ask("drain")
    assert engine.ask("state") == before
    assert cached(engine.generate([FOURTH, THIRD])) == [640, 640]


def test_stores_never_hold_more_than_their_share(depot: DepotProcess, model: MakeModel) -> None:
    config = connector(depot.url, max_pinned_share=0.2)
    with Engine(model("gqa"), config, enable_prefix_caching=False, kv_cache_memory_bytes=20 << 20) as engine:
        num_blocks = engine.ask("state")["free_blocks"] + 1
        engine.ask("hold_stores")
        engine.ask("submit", requests={"stores": prompts(1, 1500, seed=41)[0]}, max_tokens=30, steps=40)
        assert 0 < engine.ask("state")["connector"]["held_blocks"] <= 0.2 * num_blocks < 11
        engine.ask("release")
        engine.ask("drain")
        assert engine.ask("metrics")["vllm:kvdepot_stores_put_off"] > 0


@pytest.mark.promise(36)
def test_a_lookup_without_an_answer_stops_nobody(depot: DepotProcess, model: MakeModel) -> None:
    config = connector(depot.url, deadline_seconds=100.0)
    with Engine(model("gqa"), config, enable_prefix_caching=False) as engine:
        engine.ask("submit", requests={"running": THIRD}, max_tokens=200, steps=1)
        wait_until(lambda: engine.ask("step", steps=1) and engine.execute(_NUM_RUNNING), 60, "the first token")
        with stopped(depot):
            started = time.monotonic()
            done = engine.ask("submit", requests={"waiting": HIT}, max_tokens=4, steps=150)
            assert done["finished"] == []
            assert engine.ask("step", steps=100)["finished"] == ["running"]
            assert time.monotonic() - started < 100, "no step waited for the deadline"
        wait_until(lambda: engine.ask("step", steps=5)["finished"] == ["waiting"], 60)


@pytest.mark.promise(48)
def test_the_engine_asks_once_a_request_however_often_it_is_asked(engine: Engine, depot: DepotProcess) -> None:
    # four requests fit into the batch, and vLLM asks for the waiting ones again in every step
    before = depot.status().counters["lookups"]
    engine.ask("submit", requests={f"many-{n}": p for n, p in enumerate(prompts(12, 300, seed=42))}, max_tokens=40)
    engine.ask("drain")
    assert depot.status().counters["lookups"] - before == 12
