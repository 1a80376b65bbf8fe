"""KV events of a depot as vLLM's own decoder reads them."""

import json
from collections.abc import Iterator

import pytest
import zmq

from kvdepot.client.connection import Connection
from kvdepot.client.operator import ask_depot
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from support.vllm.engines import RunCode

SPEC = m.CacheSpec(64, (m.GroupShape(GroupKind.FULL_ATTENTION, 16),), "bytes", "test")
DETAIL = m.GroupDetail(page_sizes_bytes=(64,), num_blocks=8)


_DECODE = """
import json, sys, msgspec
from vllm.distributed import kv_events as vllm

class Batch(vllm.EventBatch, array_like=True, omit_defaults=True):
    events: list[vllm.BlockStored | vllm.BlockRemoved | vllm.AllBlocksCleared]

decoder = msgspec.msgpack.Decoder(Batch)
print(json.dumps([
    [
        type(event).__name__, [key.hex() for key in event.block_hashes], event.medium == vllm.MEDIUM_CPU,
        getattr(event, "block_size", None), getattr(event, "parent_block_hash", None),
    ]
    for payload in json.load(sys.stdin) for event in decoder.decode(bytes.fromhex(payload)).events
]))
print(vllm.ZmqEventPublisher.END_SEQ.hex())
"""


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    flags = ("--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0")
    with DepotProcess(*flags, pool_size="1MiB", new_session=True) as depot:
        yield depot


def replayed(endpoint: str) -> tuple[list[bytes], bytes]:
    """Ask for everything as vLLM's publisher answers it: the batches, and the number that ends them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(endpoint)
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    batches: list[bytes] = []
    try:
        while asking.poll(10_000):
            _, _, number, payload = asking.recv_multipart()
            if not payload:
                return batches, number
            assert int.from_bytes(number, "big") == len(batches)
            batches.append(payload)
        raise AssertionError("no end within 10 s")
    finally:
        asking.close()
        context.term()


def test_vllm_s_decoder_reads_a_depot_s_events(depot: DepotProcess, run_code: RunCode) -> None:
    request = m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", 0, 1, "none", "none", "model", SPEC, (DETAIL,))
    connection = Connection(depot.url, "test", request, maps_pool=False)
    link = connection.wait_until_open(20)
    channel = connection.channel(link)
    run = hash_prefix(Namespace("model"), 64, range(64 * 5))
    plan = channel.call(m.PrepareStore(link.context, "r", "t", run.digests, 0, run.parent, (5,)), 10)
    assert isinstance(plan, m.StorePlan)
    channel.call(m.CommitStore(link.context, plan.ticket), 10)
    ask_depot(o.Clear(), depot.url, 30)
    channel.close()
    connection.close()
    batches, end = replayed(depot.status().event_endpoints[1])
    given = json.dumps([payload.hex() for payload in batches])
    decoded, vllm_s_end = run_code(_DECODE, given=given).splitlines()[-2:]
    keys = [run.digests[place : place + 32].hex() for place in range(0, 5 * 32, 32)]
    stored, removed = json.loads(decoded)
    assert stored == ["BlockStored", keys, True, 64, None]
    assert removed == ["BlockRemoved", keys[::-1], True, None, None]
    assert end.hex() == vllm_s_end


_STORED = """
import torch
from types import SimpleNamespace
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request
from kvdepot.layout import GroupKind
from kvdepot_vllm.events import stored_events
from kvdepot_vllm.groups import EngineCache, EngineGroup
from kvdepot_vllm.stores import EndedStore

request = Request("r", list(range(40)), SamplingParams(max_tokens=1), None, session_id="a conversation")
request.block_hashes = [bytes([number]) * 32 for number in range(2)]
spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
config = SimpleNamespace(hash_block_size=16, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
group = EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, ("a",), False, False)
cache = EngineCache((group,), 1, 16, 1, "bytes", "test", 0)
(event,) = stored_events(cache, config, EndedStore(request, 0, 2, (2,)))
print(len(event.token_ids), event.session_id)
"""


def test_an_engine_s_event_names_the_session_of_its_request(run_code: RunCode) -> None:
    assert run_code(_STORED).splitlines()[-1] == "32 a conversation"
