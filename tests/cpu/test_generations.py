"""Generations of weights in a depot process with tiers: its knowledge of them; chunks and sessions after a kill."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.client import hint
from kvdepot.keys import GENERATION, KeyRun, Namespace, hash_prefix
from kvdepot.lab.engine_model import EngineModel, Geometry
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate.status import describe_status

GEOMETRY = Geometry("small", num_layers=2, num_kv_heads=2, head_dim=64)
CHUNK_TOKENS = 64


def namespace(generation: str) -> Namespace:
    return Namespace("small", extra=((GENERATION, generation),))


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[DepotProcess]:
    with DepotProcess("--tier", f"disk://{tmp_path / 'tier'}?capacity=64MiB", pool_size="2MiB") as depot:
        yield depot


def store(engine: EngineModel, generation: str, name: int, num_chunks: int = 4) -> KeyRun:
    tokens = [name * 100_000 + token for token in range(num_chunks * CHUNK_TOKENS)]
    key = hash_prefix(namespace(generation), CHUNK_TOKENS, tokens)
    blocks = list(range(num_chunks * engine.blocks_per_chunk))
    engine.context.submit_store(f"{generation} {name}", key, [blocks]).result()
    return key


def test_a_generation_is_found_in_the_tier_under_its_own_name_and_by_session(depot: DepotProcess) -> None:
    with ExitStack() as stack:
        engine = EngineModel("trained", GEOMETRY, 512, namespace("7 abc"), url=depot.url, chunk_tokens=CHUNK_TOKENS)
        stack.callback(engine.close)
        engine.wait_until_connected()
        first = store(engine, "7 abc", 0)
        hint(engine.scheduler, first, session="agent")
        wait_until(lambda: depot.status().num_agent_sessions == 1)
        wait_until(lambda: not depot.status().tiers[0].queued_write_bytes)
        for name in range(1, 20):
            store(engine, "7 abc", name)
            wait_until(lambda: not depot.status().tiers[0].queued_write_bytes)
        lease = engine.scheduler.lookup("again", first)
        assert (lease.num_chunks, lease.num_promoted) == (4, 4)
        engine.scheduler.end_request("again")
        for name in range(20, 40):
            store(engine, "7 abc", name)
            wait_until(lambda: not depot.status().tiers[0].queued_write_bytes)
        reply = ask_depot(session_operations.PrefetchSession("agent", retain_seconds=5.0), depot.url, 30)
        assert reply.count == 4


@pytest.mark.slow
def test_status_names_versions_and_the_next_server_knows_them_and_the_sessions(depot: DepotProcess) -> None:
    with ExitStack() as stack:
        engine = EngineModel("trained", GEOMETRY, 512, namespace(""), url=depot.url, chunk_tokens=CHUNK_TOKENS)
        stack.callback(engine.close)
        engine.wait_until_connected()
        hint(engine.scheduler, store(engine, "", 0), session="old")
        engine.scheduler.change_weights(namespace("7 abc").weights)
        wait_until(lambda: "weights 7 abc" in describe_status(depot.status()), what="the scheduler's weights")
        hint(engine.scheduler, store(engine, "7 abc", 1, num_chunks=2), session="new")
        wait_until(lambda: depot.status().num_agent_sessions == 2, what="both sessions")
        depot.kill()
        depot.start()
        engine.wait_until_connected()
        wait_until(lambda: len(depot.status().contexts) == 2, what="the engine")
        wait_until(lambda: not depot.status().recovering, what="the entries of the server before")
        status = depot.status()
        assert [(each.name, each.num_schedulers) for each in status.generations] == [("", 0), ("7 abc", 1)]
        assert all(each.used_bytes for each in status.generations)
        text = describe_status(status)
        assert "weights  7 abc of small: 128.0 KiB, 1 engine" in text
        assert "weights  as loaded of small: 256.0 KiB" in text
        assert status.num_agent_sessions == 2
        retained = [
            ask_depot(session_operations.RetainSession(name, 60.0), depot.url, 30).count for name in ("old", "new")
        ]
        assert (retained, depot.status().num_pins) == ([4, 2], 2)
