"""Sparse and compressed latent attention: every byte that a layer keeps comes back.

The layers, groups and pages are vLLM's own. No model is run, because vLLM has kernels for them on GPUs only.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot_vllm.groups import EngineCache, Unsupported, engine_cache
from support.vllm.engines import RunCode

ROUND_TRIP = """
import json, sys
from kvdepot.lab.processes import DepotProcess
from support.vllm import sparse
with DepotProcess(pool_size="64MiB") as depot:
    print(json.dumps(sparse.round_trip(*getattr(sparse, sys.argv[1])(), depot)))
"""


def round_trip(run_code: RunCode, model: str) -> dict[str, Any]:
    return json.loads(run_code(ROUND_TRIP, model).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.promise(17, 29)
def test_packed_vectors_and_the_indexer_s_keys_come_back(run_code: RunCode) -> None:
    """DeepSeek-V3.2: each token has 656 bytes and 132 for the indexer in each layer, stored once for all ranks."""
    assert round_trip(run_code, "of_v32") == {
        "chunk": 64,
        "groups": ["full_attention 64 0"],
        "parts": 1,
        "bytes": [4 * (656 + 132)],
    }


@pytest.mark.slow
@pytest.mark.promise(17, 29)
def test_compressed_vectors_windows_and_states_of_compressors_come_back(run_code: RunCode) -> None:
    """DeepSeek-V4: six groups. Of a window shorter than a chunk, only the blocks before the end of the chunk count."""
    found = round_trip(run_code, "of_v4")
    sizes = dict(zip(found.pop("groups"), found.pop("bytes"), strict=True))
    assert found == {"chunk": 256, "parts": 1}
    assert sizes == {
        "full_attention 256 0": 2 * ((584 + 132) / 4 + 584 / 128),  # vectors and keys of 4 tokens, vectors of 128
        "sliding_window 64 128": 2 * 584 / 2,  # in three groups
        "sliding_window 4 8": 2 * 2 * 2 * (512 + 128) * 4 / 32,
        "sliding_window 8 128": 2 * 2 * 512 * 4 / 2,
    }


def cache_of(**spec: Any) -> EngineCache:
    """Return the cache of an engine with one group of windows."""
    group = SimpleNamespace(
        kv_cache_spec=SimpleNamespace(max_tp_shards=1, block_size=64, **spec),
        layer_names=["a"],
        enable_kv_transfer=True,
        host_resident=False,
        is_eagle_group=False,
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="external_launcher"
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"),
        model_config=SimpleNamespace(dtype="bfloat16", is_hybrid=True, hf_text_config=None),
        speculative_config=None,
    )
    found = SimpleNamespace(kv_cache_groups=[group], cache_hit_alignment_tokens=None, kv_cache_layout="BLNHC")
    return engine_cache(config, found, lambda _: "sliding_window_mla", None)


def test_windows_that_vllm_computes_again_are_refused_with_the_way_out() -> None:
    """DeepSeek-V4.1 keeps no windows by default."""
    with pytest.raises(Unsupported, match="Start vLLM with --no-swa-bounded-replay"):
        cache_of(prefix_cacheable=False, prefix_replay_tokens=128)
    with pytest.raises(Unsupported, match=r"that could be reused$"):
        cache_of(prefix_cacheable=False)


def test_a_window_includes_the_tokens_that_a_drafter_reads_before_it() -> None:
    """Regression: of layers with own specs in one group, these tokens were ignored."""
    layers = {name: SimpleNamespace(sliding_window=128, extra_retained_tokens=3, max_tp_shards=1) for name in "ab"}
    group = cache_of(prefix_cacheable=True, kv_cache_specs=layers).groups[0]
    assert group.window_tokens == 131
    assert cache_of(prefix_cacheable=True, sliding_window=128).groups[0].window_tokens == 128
