"""A router with llm-d's rules indexes a depot's chunks and forgets those that left."""

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from support.events import Context, Engine, tokens_of
from support.llm_d import Index
from support.peer import prompt


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [64, 16], ids=["the engine's blocks", "four in a block"])
def test_llm_d_indexes_what_a_depot_holds(block_tokens: int, context: Context) -> None:
    flags = ("--events", "tcp://127.0.0.1:0", "--events-topic", "kv@node-7@{model}")
    with DepotProcess(*flags, pool_size="1MiB") as depot:
        engines = {model: Engine(depot, model, model) for model in ("llama", "qwen")}
        index = Index(depot.status().event_endpoints[0], context, block_tokens)
        per_chunk = 64 // block_tokens

        def score(model: str, name: str, num_chunks: int) -> float:
            tokens = tokens_of(prompt(num_chunks, name), 64)
            return index.scores(tokens, model).get("node-7", 0) / per_chunk

        engines["llama"].store(prompt(8, "a"))
        engines["qwen"].store(prompt(4, "b"))
        wait_until(lambda: (score("llama", "a", 8), score("qwen", "b", 4)) == (8, 4))
        assert score("qwen", "a", 8) == 0, "a topic a model"
        late = Index(depot.status().event_endpoints[0], context, block_tokens)
        index, early = late, index
        wait_until(lambda: (score("llama", "a", 8), score("qwen", "b", 4)) == (8, 4), what="it has no replay")
        index = early
        for number in range(60):
            engines["llama"].store(prompt(9, f"more {number}"))
        wait_until(lambda: score("llama", "more 59", 9) == 9)
        assert depot.status().counters["chunks_evicted"] > 0
        wait_until(lambda: score("llama", "more 0", 9) == engines["llama"].worker.find(prompt(9, "more 0")).num_chunks)
        ask_depot(o.Clear(), depot.url, 30)
        wait_until(lambda: score("llama", "more 59", 9) == 0)
        assert early.num_skipped == 0
        for engine in engines.values():
            engine.close()
