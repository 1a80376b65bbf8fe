"""KV events of a depot, read with vLLM's own decoder, and the events that engines publish for it."""

import contextlib
from pathlib import Path

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from support.events import FLAGS, Context, Listener, Router
from support.vllm.engines import Engine, MakeModel, RunCode, connector, prompts

_DECODE = """
import msgspec
from kvdepot.features.routers import reader as ours
from kvdepot.features.routers.shelves import POOL
from vllm.distributed import kv_events as vllm

stored = ours.BlockStored([7, 8], 6, [1, 2, 3, 4], 2, None, POOL, "poet", [["salt"], None], 1, "mla_attention")
stored.locality, stored.kv_cache_spec_sliding_window = ours.LOCAL, 128
removed = ours.BlockRemoved([8], POOL, 1, ours.LOCAL)
events = [ours.AllBlocksCleared(), stored, removed]
decoder = msgspec.msgpack.Decoder(list[vllm.BlockStored | vllm.BlockRemoved | vllm.AllBlocksCleared])
for mine, theirs in zip(events, decoder.decode(msgspec.msgpack.encode(events)), strict=True):
    for name in mine.__struct_fields__:
        told, read = getattr(mine, name), getattr(theirs, name)
        assert told == read or [list(e or ()) for e in told] == [list(e or ()) for e in read], name
assert (vllm.MEDIUM_CPU, vllm.MEDIUM_STORAGE) == (POOL, "STORAGE")
print(vllm.ZmqEventPublisher.END_SEQ.hex())
"""


def test_vllm_s_decoder_reads_a_depot_s_events(run_code: RunCode) -> None:
    assert run_code(_DECODE).splitlines()[-1] == "ff" * 8


# Compares descriptions with vLLM's events for the same blocks. Prints the number of blocks that have extra keys.
_DESCRIBE = """
import struct
import msgspec, torch
from kvdepot.features.routers.messages import DescribeChunks
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.layout import GroupKind
from kvdepot_vllm.events import Describer
from kvdepot_vllm.groups import EngineCache, EngineGroup
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

HASHED, BLOCK, CHUNK, CHUNKS = 16, 32, 128, 3
init_none_hash(sha256_cbor)
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=HASHED)
group = EngineGroup(0, GroupKind.FULL_ATTENTION, BLOCK, 0, ("layer",), is_mla=False, states_by_position=False)
describer = Describer(EngineCache((group,), 1, CHUNK, 1, "float32"), config)
image = lambda name, offset: MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 100))
cases = {
    "plain": {},
    "adapter": {"lora_request": LoRARequest("poet", 3, "/adapters/poet")},
    "salt": {"cache_salt": "secret"},
    "images": {"mm_features": [image("cat", 40), image("dog", 150)]},
    "embeddings": {"prompt_token_ids": None, "prompt_embeds": torch.rand(CHUNKS * CHUNK + 50, 4)},
}
cases["all"] = cases["adapter"] | cases["salt"] | cases["images"]
for name, fields in cases.items():
    fields = {"prompt_token_ids": list(range(1000, 1050 + CHUNKS * CHUNK))} | fields
    hasher = get_request_block_hasher(HASHED, sha256_cbor)
    request = Request("r", sampling_params=SamplingParams(), pooling_params=None, block_hasher=hasher, **fields)
    for first in range(CHUNKS):
        pool = BlockPool(32, True, HASHED, enable_kv_cache_events=True)
        blocks, per_chunk = pool.get_new_blocks(CHUNKS * CHUNK // BLOCK), CHUNK // BLOCK
        pool.cache_full_blocks(request, blocks, first * per_chunk, len(blocks), BLOCK, 0)
        (event,) = pool.take_events()
        run = hash_prefix(Namespace("model"), CHUNK, request.all_token_ids).slice(first)
        run, description = describer.describe(request, bytes(32), run)
        (told,) = description.requests(1, run)
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=DescribeChunks)
        assert run.num_chunks == CHUNKS - first and told.first_chunk == first
        assert list(struct.unpack(f"<{len(told.tokens) // 4}I", told.tokens)) == list(event.token_ids)
        assert list(struct.unpack(f"<{len(told.block_ids) // 8}Q", told.block_ids)) == event.block_hashes
        assert int.from_bytes(told.parent_id, "little") == (event.parent_block_hash or 0), name
        assert (told.lora_name or None, told.groups[0].number) == (event.lora_name, event.group_idx)
        as_text = lambda key: key.hex() if isinstance(key, bytes) else key
        wanted = [keys and tuple(map(as_text, keys)) for keys in event.extra_keys]
        assert list(told.extra_keys) == (wanted if any(wanted) else []), (name, told.extra_keys, wanted)
        if not first:
            print(name, sum(map(bool, wanted)))
"""


def test_descriptions_equal_the_events_of_vllm_with_adapters_salts_and_images(run_code: RunCode) -> None:
    with_keys = dict(line.split() for line in run_code(_DESCRIBE).splitlines())
    assert with_keys == {"plain": "0", "adapter": "12", "salt": "1", "images": "7", "embeddings": "12", "all": "12"}


def announcing_engine(model: MakeModel, depot: DepotProcess, endpoint: str) -> Engine:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return Engine(model("gqa"), connector(depot.url), kv_events=events)


def test_each_engine_announces_what_its_depot_holds(model: MakeModel, tmp_path: Path, context: Context) -> None:
    """Two engines store, one empties its own cache, the pool is cleared, one is restarted, and a router comes late."""
    endpoints = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    asked = prompts(6, 300, seed=70)

    def start(endpoint: str) -> Engine:
        return announcing_engine(model, depot, endpoint)

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


_REPEAT = """
from collections import Counter
import msgspec
from kvdepot.features.routers.messages import News
from kvdepot_vllm.events import Announcer, BlockRemoved, BlockStored

def stored(*ids):
    return BlockStored(list(ids), None, [7] * 4 * len(ids), 4, None, "CPU", None)

counts, announcer = Counter(), Announcer()
def publish(events):
    for event in events:
        step = 1 if isinstance(event, BlockStored) else -1
        for each in event.block_hashes:
            counts[each] = max(0, counts[each] + step)
announcer.publish = publish
announcer._is_heard.set()

def tell(*events, is_start=False):
    announcer.on_news(News(1, 1, msgspec.msgpack.encode(events), is_start, False))

tell(stored(1, 2), stored(3), is_start=True)
for _ in range(10):  # subscribers that come
    announcer._must_repeat = True
    tell(stored(1, 2), stored(3), is_start=True)
tell(stored(3, 4), stored(1))  # neighbours found them
assert counts == {1: 1, 2: 1, 3: 1, 4: 1}, counts
tell(BlockRemoved([2, 4], medium="CPU"))
announcer.on_lost()
assert not +counts, counts
print("right")
"""


def test_what_an_engine_announces_again_it_retracts_before(run_code: RunCode) -> None:
    """Regression: routers that count announcements never forgot a block after a further subscriber had come."""
    assert run_code(_REPEAT).strip() == "right"


def test_each_engine_announces_what_came_back_from_a_tier(model: MakeModel, tmp_path: Path, context: Context) -> None:
    """An engine's lookup promotes a prompt that its neighbour computed and that was evicted to the disk."""
    endpoints = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    tier = f"disk://{tmp_path}/tier?capacity=64MiB"
    flags = (*FLAGS, "--tier", tier, "--promote-seconds", "30", "--policy", "lru")
    (asked,), others = prompts(1, 300, seed=73), iter(prompts(40, 300, seed=74))
    with (
        DepotProcess(*flags, pool_size="8MiB", new_session=True) as depot,
        announcing_engine(model, depot, endpoints[0]) as first,
        announcing_engine(model, depot, endpoints[1]) as second,
    ):
        routers = [Listener(endpoint, context) for endpoint in endpoints]
        first.generate([asked])
        for router in routers:
            wait_until(lambda: router.num_found() == 2, what="the stored chunks")  # noqa: B023
        chunks = set(routers[0].found)
        wait_until(lambda: depot.status().tiers[0].counters.get("written_entries", 0) >= 2)

        def are_only_in_tier() -> bool:
            first.generate([next(others)])
            return all((router.num_found(), chunks <= router.in_tier - router.found)[1] for router in routers)

        wait_until(are_only_in_tier, 120, what="that the chunks were evicted")
        (output,) = second.generate([asked])
        assert output["cached"] == 256
        assert second.hit_sources() == {"disk": 256}
        for router in routers:
            wait_until(
                lambda: (router.num_found(), chunks <= router.found - router.in_tier)[1],  # noqa: B023
                what="that the chunks came back",
            )
