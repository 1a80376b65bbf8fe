"""KV events of a depot, read with vLLM's own decoder, and the events that engines publish for it."""

import contextlib
from pathlib import Path

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import operations as o
from support.events import FLAGS, Context, Listener, Router
from support.vllm.engines import Engine, MakeModel, RunCode, connector, prompts

_DECODE = """
import msgspec
from kvdepot.operators import holdings as ours
from vllm.distributed import kv_events as vllm

stored = ours.BlockStored([7, 8], 6, [1, 2, 3, 4], 2, None, ours.POOL, "poet", [["salt"], None], 1, "mla_attention")
stored.locality, stored.kv_cache_spec_sliding_window = ours.LOCAL, 128
removed = ours.BlockRemoved([8], ours.POOL, 1, ours.LOCAL)
events = [ours.AllBlocksCleared(), stored, removed]
decoder = msgspec.msgpack.Decoder(list[vllm.BlockStored | vllm.BlockRemoved | vllm.AllBlocksCleared])
for mine, theirs in zip(events, decoder.decode(msgspec.msgpack.encode(events)), strict=True):
    for name in mine.__struct_fields__:
        told, read = getattr(mine, name), getattr(theirs, name)
        assert told == read or [list(e or ()) for e in told] == [list(e or ()) for e in read], name
assert (vllm.MEDIUM_CPU, vllm.MEDIUM_STORAGE) == (ours.POOL, "STORAGE")
print(vllm.ZmqEventPublisher.END_SEQ.hex())
"""


def test_vllm_s_decoder_reads_a_depot_s_events(run_code: RunCode) -> None:
    assert run_code(_DECODE).splitlines()[-1] == "ff" * 8


def test_each_engine_announces_what_its_depot_holds(model: MakeModel, tmp_path: Path, context: Context) -> None:
    """Two engines store, one empties its own cache, the pool is cleared, one is restarted, and a router comes late."""
    endpoints = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    asked = prompts(6, 300, seed=70)

    def start(endpoint: str) -> Engine:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        return Engine(model("gqa"), connector(depot.url), kv_events=events)

    with DepotProcess(*FLAGS, new_session=True) as depot, contextlib.ExitStack() as others:
        truth, routers = Router(depot, context), [Listener(endpoint, context) for endpoint in endpoints]
        first = start(endpoints[0])
        others.callback(first.close)
        second = others.enter_context(start(endpoints[1]))
        per_prompt = 300 // 128
        for engine, part, total in ((first, asked[:3], 3), (second, asked[3:], 6)):
            engine.generate(part)
            wait_until(lambda: len((truth.take_all(), truth.found)[1]) == total * per_prompt)  # noqa: B023
            for router in routers:
                wait_until(lambda: router.holds(truth), what="what both have stored")  # noqa: B023
        told = {truth.tokens[each] for each in truth.found}
        assert told == {tuple(prompt[start : start + 128]) for prompt in asked for start in (0, 128)}
        own = second.execute("""
from vllm.v1.core.kv_cache_utils import BlockHash
pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
result = [int.from_bytes(b.block_hash[:-4], "big") & (1 << 64) - 1 for b in pool.blocks if b.block_hash is not None]
""")
        assert set(own) & truth.found, "the engine's own ids"

        first.reset()
        first.generate(prompts(1, 20, seed=72))  # an idle engine publishes nothing by itself
        wait_until(lambda: (routers[0].take_all(), routers[0].num_clears)[1], what="that the engine's cache is empty")
        wait_until(lambda: routers[0].holds(truth), what="what the depot still has")

        ask_depot(o.Clear(), depot.url, 30)
        for router in routers:
            wait_until(lambda: not router.num_found(), what="that everything left")  # noqa: B023
        first.generate(prompts(2, 300, seed=71))
        wait_until(lambda: routers[1].num_found() == 2 * per_prompt)
        first.close()
        late = Listener(endpoints[0], context)
        others.enter_context(start(endpoints[0]))
        latest = Listener(endpoints[1], context)  # of an idle engine
        for router in (late, routers[1], latest):
            wait_until(lambda: router.num_found() == 2 * per_prompt, what="what the depot holds")  # noqa: B023
