"""Engines of all tensor-parallel sizes share entries: the same tokens, and every byte is in the pool once."""

from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire.status import DepotStatus
from support.vllm.engines import (
    PROFILE,
    Engine,
    MakeModel,
    cached,
    connector,
    generate_until_stored,
    prompts,
    tokens,
    wait_until_stored,
)

pytestmark = pytest.mark.slow

PROMPTS = prompts(3, 1500, seed=70)
REUSE = 1408  # of 1,500 tokens, in blocks of 128


def options_of(num_ranks: int, num_stages: int = 1) -> dict[str, Any]:
    if num_ranks * num_stages == 1:
        return {}
    binding = "|".join(str(rank % 2) for rank in range(num_ranks * num_stages))
    return {
        "tensor_parallel_size": num_ranks,
        "pipeline_parallel_size": num_stages,
        "first": PROFILE,
        "multiprocessing": True,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": binding},
    }


def entries_of(status: DepotStatus, before: DepotStatus) -> tuple[int, int]:
    return status.num_entries - before.num_entries, status.num_chunks - before.num_chunks


@pytest.mark.parametrize("name", ["gqa", "eight-heads", "windows"])
@pytest.mark.parametrize(("stored_by", "loaded_by"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.promise(20, 29, 33)
def test_an_engine_of_another_size_loads_every_prompt(
    stored_by: int, loaded_by: int, name: str, depot: DepotProcess, model: MakeModel
) -> None:
    mine = prompts(3, 1500, seed=70 + stored_by)  # the depot already has the prompts of other pairs
    with Engine(model(name), connector(depot.url), **options_of(stored_by)) as engine:
        wait_until_stored(engine, depot, seed=900 + stored_by)
        before = depot.status()
        generate_until_stored(engine, mine, depot, before.num_chunks + REUSE // 128 * len(mine))
    with Engine(model(name), connector(depot.url), reference=mine, **options_of(loaded_by)) as engine:
        wait_until_stored(engine, depot, seed=950 + stored_by)
        before = depot.status()
        outputs = engine.generate(mine)
        assert cached(outputs) == [REUSE] * len(mine)
        assert tokens(outputs) == engine.reference
        wait_until(lambda: depot.status().num_tickets == depot.status().num_leases == 0)
        assert depot.status().num_entries == before.num_entries, "what is there is not stored again"


@pytest.mark.parametrize(("stored_by", "loaded_by"), [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 2), (2, 1))])
def test_stages_of_a_pipeline_load_what_other_stages_stored(
    stored_by: tuple[int, int], loaded_by: tuple[int, int], depot: DepotProcess, model: MakeModel
) -> None:
    """Pairs of (ranks, stages) that store and load."""
    mine = prompts(3, 1500, seed=100 * stored_by[1] + 10 * loaded_by[0])
    with Engine(model("gqa"), connector(depot.url), **options_of(*stored_by)) as engine:
        wait_until_stored(engine, depot, seed=990)
        before = depot.status()
        generate_until_stored(engine, mine, depot, before.num_chunks + REUSE // 128 * len(mine))
        parts = {context.groups[0].part for context in depot.status().contexts if context.role == "worker"}
        assert parts == ({""} if stored_by == (1, 1) else {"layers 0 to 1 of 4", "layers 2 to 3 of 4"})
    with Engine(model("gqa"), connector(depot.url), reference=mine, **options_of(*loaded_by)) as engine:
        wait_until_stored(engine, depot, seed=995)
        before = depot.status()
        outputs = engine.generate(mine)
        assert cached(outputs) == [REUSE] * len(mine)
        assert tokens(outputs) == engine.reference
        wait_until(lambda: depot.status().num_tickets == depot.status().num_leases == 0)
        assert depot.status().num_entries == before.num_entries, "what is there is not stored again"


def test_ranks_beyond_the_heads_store_each_head_once(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("gqa"), connector(depot.url), reference=PROMPTS[:1], **options_of(4)) as engine:
        wait_until_stored(engine, depot, seed=960)
        before = depot.status()
        outputs, status = generate_until_stored(engine, PROMPTS[:1], depot, before.num_chunks + REUSE // 128)
        num_entries, num_chunks = entries_of(status, before)
        assert (tokens(outputs), num_entries) == (engine.reference, 2 * num_chunks)
        assert sorted(c.groups[0].part for c in status.contexts if c.role == "worker") == [
            "head 0 of 2", "head 0 of 2", "head 1 of 2", "head 1 of 2"
        ]  # fmt: skip


def test_states_of_another_size_are_a_miss(depot: DepotProcess, model: MakeModel) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20}
    with Engine(model("recurrent"), connector(depot.url), **options) as engine:
        generate_until_stored(engine, PROMPTS[:1], depot, 1)
    with Engine(model("recurrent"), connector(depot.url), **options, **options_of(2)) as engine:
        num_chunks = depot.status().num_chunks
        generate_until_stored(engine, prompts(1, 1500, seed=980), depot, num_chunks + 1)  # so it is connected
        assert cached(engine.generate(PROMPTS[:1])) == [0]
