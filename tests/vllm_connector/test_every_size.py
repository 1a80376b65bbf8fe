"""Engines of all sizes and stages share entries: the same tokens, and every byte is in the pool once."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.leftovers import left_in_shared_memory
from support.vllm.engines import (
    PROFILE,
    Engine,
    MakeModel,
    Prompt,
    cached,
    connector,
    generate_until_stored,
    prompts,
    tokens,
    wait_until_stored,
)

pytestmark = pytest.mark.slow

PROMPTS = prompts(1, 800, seed=70)
REUSE = 768  # of 800 tokens, in blocks of 128

# (ranks, stages) of engines that follow one of a single rank
SIZES: dict[str, list[tuple[int, int]]] = {
    "gqa": [(1, 2), (2, 1), (4, 1)],
    "eight-heads": [(2, 1), (4, 1)],
    "windows": [(2, 1), (4, 1)],
}
# what the ranks of each size store of "gqa": every part is in the pool once, even if there are more ranks than heads
PARTS = {
    (1, 1): [""],
    (1, 2): ["layers 0 to 1 of 4", "layers 2 to 3 of 4"],
    (2, 1): ["head 0 of 2", "head 1 of 2"],
    (4, 1): ["head 0 of 2", "head 0 of 2", "head 1 of 2", "head 1 of 2"],
}


def options_of(num_ranks: int, num_stages: int = 1) -> dict[str, Any]:
    binding = "|".join(str(rank % 2) for rank in range(num_ranks * num_stages))
    return {
        "max_tokens": 4,
        "tensor_parallel_size": num_ranks,
        "pipeline_parallel_size": num_stages,
        "first": PROFILE if num_stages > 1 else "",
        "max_num_batched_tokens": 2048,  # what PROFILE computes: by vLLM's default it takes most of a test
        "multiprocessing": True,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": binding},
    }


def loads_all(engine: Engine, wanted: list[Prompt], reference: list[list[int]], depot: DepotProcess) -> None:
    before = depot.status()
    outputs = engine.generate(wanted)
    assert cached(outputs) == [REUSE] * len(wanted)
    assert tokens(outputs) == reference
    wait_until(lambda: depot.status().num_tickets == depot.status().num_leases == 0)
    assert depot.status().num_entries == before.num_entries, "what is there is not stored again"


def store(engine: Engine, wanted: list[Prompt], reference: list[list[int]], depot: DepotProcess) -> int:
    """Return the number of new entries for each new chunk."""
    before = depot.status()
    outputs, status = generate_until_stored(engine, wanted, depot, before.num_chunks + REUSE // 128 * len(wanted))
    assert tokens(outputs) == reference
    num_entries, remainder = divmod(status.num_entries - before.num_entries, status.num_chunks - before.num_chunks)
    assert remainder == 0
    return num_entries


def parts_of(depot: DepotProcess) -> list[str]:
    return sorted(context.groups[0].part for context in depot.status().contexts if context.role == "worker")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.promise(20, 29, 33)
def test_an_engine_of_another_size_loads_every_prompt(name: str, depot: DepotProcess, model: MakeModel) -> None:
    """Each engine loads what those before it stored, and stores prompts that all later ones load.

    All tokens are those of an engine of one rank without a connector.
    """
    given = prompts(2 * (1 + len(SIZES[name])), 800, seed=71)
    with Engine(model(name), connector(depot.url), reference=given, max_tokens=4) as one:
        num_entries = store(one, given[:2], one.reference[:2], depot)
        if name == "gqa":
            assert (parts_of(depot), num_entries) == (PARTS[1, 1], 1)
        for place, size in enumerate(SIZES[name], 1):
            known, mine = given[: 2 * place], given[2 * place : 2 * place + 2]
            reference = one.reference[2 * place : 2 * place + 2]
            with Engine(model(name), connector(depot.url), **options_of(*size)) as engine:
                wait_until_stored(engine, depot, seed=900 + 50 * place)
                loads_all(engine, known, one.reference[: 2 * place], depot)
                num_entries = store(engine, mine, reference, depot)
                if name == "gqa":
                    assert parts_of(depot) == PARTS[1, 1] + PARTS[size]
                    assert num_entries == len({*PARTS[size]})
                engine.reset()
                loads_all(engine, mine, reference, depot)
        assert left_in_shared_memory(), "what they leave there when they are killed can be told from what others have"
        loads_all(one, given[2:], one.reference[2:], depot)


def test_states_of_another_size_are_a_miss(depot: DepotProcess, model: MakeModel) -> None:
    """Each of two engines computes what the other one stored, with the tokens of its own size without a depot."""
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20}
    others = prompts(1, 800, seed=980)
    with Engine(model("recurrent"), connector(depot.url), reference=others, **options) as one:
        generate_until_stored(one, PROMPTS, depot, depot.status().num_chunks + 1)
        two_ranks = options | options_of(2)
        with Engine(model("recurrent"), connector(depot.url), reference=PROMPTS, **two_ranks) as two:
            num_chunks = depot.status().num_chunks
            generate_until_stored(two, others, depot, num_chunks + 1)  # so it is connected
            outputs = two.generate(PROMPTS)
            assert cached(outputs) == [0]
            assert tokens(outputs) == two.reference
        outputs = one.generate(others)
        assert cached(outputs) == [0]
        assert tokens(outputs) == one.reference


def test_data_parallel_replicas_of_an_external_launcher_are_engines_of_their_own(
    depot: DepotProcess, model: MakeModel
) -> None:
    """Each has one worker, although vLLM's `world_size` is 2, and loads what the other one stored."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = model("gqa")
    options: dict[str, Any] = {"data_parallel_size": 2, "distributed_executor_backend": "external_launcher"}

    def start(rank: int) -> Engine:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        first = f"import os; os.environ.update({ {name: str(value) for name, value in variables.items()} })"
        return Engine(path, connector(depot.url), first=first, max_tokens=4, **options)

    given = prompts(2, 800, seed=72)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        engines = [stack.enter_context(engine) for engine in pool.map(start, range(2))]

        def serve(rank: int, number: int) -> list[dict[str, Any]]:
            return engines[rank].generate([given[number]])

        num_chunks = depot.status().num_chunks
        stored = [*pool.map(serve, range(2), range(2))]
        wait_until(lambda: depot.status().num_chunks == num_chunks + 2 * REUSE // 128, 60)
        wait_until(lambda: depot.status().num_tickets == 0, 60)
        loaded = [*pool.map(serve, range(2), (1, 0))]
        assert [*map(cached, loaded)] == [[REUSE], [REUSE]]
        assert [*map(tokens, loaded[::-1])] == [*map(tokens, stored)]
        assert [each.world_size for each in depot.status().contexts if each.role == "worker"] == [1, 1]
