"""Ranks that divide the tokens of a block among them (decode context parallelism), and the replicas of a prefill.

No attention backend of vLLM on CPU supports it, so no engine runs here. vLLM's own kernel, interpreted, gives the slots
(`test_contract.py`), the pages are vLLM's own views, and the depot is a real one.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import MAXIMUM_HEADS, GroupKind, Part, Plane, mask_of
from kvdepot_vllm.groups import EngineCache, EngineGroup, Seat, Unsupported, engine_cache
from support.vllm.engines import RunCode

SHARDS = (1, 2, 4, 8)
SPLITS = [
    (size, heads, shards)
    for size, heads, shards in itertools.product((1, 2, 4, 8, 16), (1, 2, 4), SHARDS)
    if shards == 1 or (size // heads and not size // heads % shards)  # as vLLM demands
]


def group(heads: int, shards: int, *, number: int = 0) -> EngineGroup:
    kind = GroupKind.FULL_ATTENTION
    return EngineGroup(number, kind, 16 * shards, 0, ("a", "b"), False, False, heads, 0, 2, shards)


@pytest.mark.parametrize(("size", "heads", "shards"), SPLITS)
def test_the_ranks_hold_each_shard_of_each_head(size: int, heads: int, shards: int) -> None:
    """Two ranks hold the same part if they have the same shard of the same head, and only then."""
    one = group(heads, shards)
    cache = EngineCache((one,), 1, 16 * shards, size, "bfloat16")
    held: dict[Part, set[tuple[int, int]]] = {}
    covered, plane = 0, Plane(2, heads * shards)
    for rank in range(size):
        part, its_plane = cache.part(one, Seat(rank, shard=rank % shards))
        assert its_plane == plane
        assert part.is_in(plane)
        covered |= mask_of(part.number, plane.heads)
        held.setdefault(part, set()).add((rank * heads // size, rank % shards))
    assert covered == (1 << plane.layers * plane.heads) - 1
    assert all(len(each) == 1 for each in held.values())
    assert len(held) == (min(size, heads) * shards)


def test_a_group_that_vllm_does_not_divide_is_the_same_on_all_ranks() -> None:
    """A drafter's layers, for example."""
    divided, whole = group(1, 4), group(1, 1, number=1)
    cache = EngineCache((divided, whole), 2, 64, 8, "bfloat16")
    seats = [Seat(rank, shard=rank % 4) for rank in range(8)]
    assert len({cache.part(divided, seat) for seat in seats}) == 4
    assert len({cache.part(whole, seat) for seat in seats}) == 1


def test_each_worker_has_its_own_number_and_opaque_pages_their_own_part() -> None:
    cache = EngineCache((group(0, 2),), 1, 32, 2, "fp8", num_stages=2, num_replicas=3)
    seats = [Seat(*each) for each in itertools.product(range(2), range(2), range(3))]
    assert cache.num_workers == 12
    assert {cache.number_of(seat) for seat in seats} == set(range(12))
    assert cache.number_of(Seat(1, 1, 2)) == 11, "as vLLM numbers its ranks"
    assert {cache.part(cache.groups[0], seat) for seat in seats} == {(Part(number), Plane(12)) for number in range(12)}


def test_stages_whose_layers_differ_keep_their_shares_apart() -> None:
    kind = GroupKind.FULL_ATTENTION
    one = EngineGroup(0, kind, 32, 0, ("a", "b"), False, False, heads=1, num_shards=2)
    cache = EngineCache((one,), 1, 32, 2, "bfloat16", num_stages=2)
    found = [cache.part(one, Seat(rank, stage, shard=rank)) for stage in range(2) for rank in range(2)]
    assert found == [(Part(stage, 1, shard), Plane(2, 2)) for stage in range(2) for shard in range(2)]


def test_replicas_of_a_prefill_hold_the_same_part() -> None:
    cache = EngineCache((group(2, 1),), 1, 16, 2, "bfloat16", num_replicas=4)
    parts = [{cache.part(cache.groups[0], Seat(rank, replica=each)) for each in range(4)} for rank in range(2)]
    assert [len(each) for each in parts] == [1, 1]
    assert parts[0] != parts[1]


def config(shards: int, interleave: int) -> Any:
    parallel = {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": shards,
        "cp_kv_cache_interleave_size": interleave,
        "distributed_executor_backend": "mp",
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        device_config=SimpleNamespace(device_type="cuda"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype="bfloat16", hf_text_config=None, is_hybrid=True),
        speculative_config=None,
    )


def cache_of(shards: int, interleave: int, *are_divided: bool, max_tp_shards: int = 1) -> EngineCache:
    """Return the cache of an engine with groups of latent attention, some of which vLLM divides."""
    groups = [
        SimpleNamespace(
            kv_cache_spec=SimpleNamespace(
                block_size=16, prefix_cacheable=True, dcp_sharded=is_divided, max_tp_shards=max_tp_shards
            ),
            layer_names=["layers.0"],
            enable_kv_transfer=True,
            host_resident=False,
            is_eagle_group=False,
        )
        for is_divided in are_divided
    ]
    found = SimpleNamespace(kv_cache_groups=groups, cache_hit_alignment_tokens=None, kv_cache_layout="LBNHC")
    return engine_cache(config(shards, interleave), found, lambda _: "mla_attention", None)


def test_a_block_spans_the_tokens_of_all_shards() -> None:
    cache = cache_of(8, 1, True, False)
    assert [(each.block_tokens, each.page_tokens, each.plane_heads) for each in cache.groups] == [
        (128, 16, 8),
        (16, 16, 1),
    ]
    assert cache.chunk_tokens == 128
    assert cache_of(2, 1, True).chunk_tokens == 64
    most = [cache_of(shards, 1, True).groups[0].heads for shards in (MAXIMUM_HEADS, 2 * MAXIMUM_HEADS)]
    assert most == [1, 0], "a part's number has no room for more"


def test_the_format_names_the_division() -> None:
    """Engines with other divisions keep other tokens in their pages."""
    assert [cache_of(*each).division for each in ((1, 1, True), (8, 1, False), (2, 1, True), (8, 16, True))] == [
        "",
        "",
        " cp2x1",
        " cp8x16",
    ]


@pytest.mark.parametrize("interleave", [0, 3, 32])
def test_an_interleave_that_does_not_divide_a_block_is_refused(interleave: int) -> None:
    with pytest.raises(Unsupported, match=f"interleave of {interleave}: give a --cp-kv-cache-interleave-size"):
        cache_of(2, interleave, True)
    cache_of(2, interleave, False)


BYTES = """
import itertools, sys
from support.vllm.context_parallel import Engine, Shape
url, latent, layout, interleave = sys.argv[1], sys.argv[2] == "latent", sys.argv[3], int(sys.argv[4])
heads, salt, engines = 1 if latent else 2, 0, []
for shards, size in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
    if shards == 1 or not size % (heads * shards):
        engines.append(Engine(Shape(size, shards, interleave, latent=latent, layout=layout), url, 128))
if latent:
    for size, replicas, shards in ((2, 2, 1), (2, 2, 2), (2, 4, 8)):
        engines.append(Engine(Shape(size, shards, interleave, replicas=replicas, latent=True, layout=layout), url, 128))
if layout == "LBNHC":
    for shards in (1, 2):
        engines.append(Engine(Shape(8, shards, interleave, 32, latent=latent, layout=layout), url, 128))
shared = 0
for writer in engines:
    salt += 1
    if writer.shape.shards > 1:
        assert writer.store(salt, slice(writer.shape.shards - 1)) and writer.found(salt) == 0, "a shard lacks"
    assert writer.store(salt) and writer.found(salt) == 2, writer.shape
    for reader in engines:
        same = reader.cache.format == writer.cache.format
        assert reader.load(salt) == same, (writer.shape, reader.shape)
        shared += same and reader is not writer
for engine in engines:
    engine.close()
print("right", len(engines), shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize(("kind", "layout"), [("latent", "LBNHC"), ("heads", "LBNHC"), ("heads", "LBHNC")])
@pytest.mark.promise(33)
def test_every_split_reads_the_bytes_of_every_other_with_the_same_division(
    kind: str, layout: str, interleave: int, run_code: RunCode
) -> None:
    """Each reader's pages are compared with a transposition of the prompt's KV. Other divisions are a miss."""
    with DepotProcess(pool_size="16MiB") as depot:  # small, because each rank touches all of it
        word, engines, shared = run_code(BYTES, depot.url, kind, layout, str(interleave)).split()[-3:]
    assert word == "right"
    assert int(engines) > 10
    assert int(shared) > 20
