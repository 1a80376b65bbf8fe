"""Sparse and compressed latent attention: every byte that a layer keeps comes back.

The layers, groups and pages are vLLM's own. No model is run, because vLLM has kernels for them on GPUs only.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot_vllm.groups import Unsupported, engine_cache
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
    """DeepSeek-V4: six groups. A window that is shorter than a chunk is kept for each of its blocks, at this cost."""
    found = round_trip(run_code, "of_v4")
    sizes = dict(zip(found.pop("groups"), found.pop("bytes"), strict=True))
    assert found == {"chunk": 256, "parts": 1}
    assert sizes == {
        "full_attention 256 0": 2 * ((584 + 132) / 4 + 584 / 128),  # vectors and keys of 4 tokens, vectors of 128
        "sliding_window 64 128": 2 * 584,  # in three groups
        "sliding_window 4 8": 2 * 2 * 2 * (512 + 128) * 4,
        "sliding_window 8 128": 2 * 2 * 512 * 4,
    }


def test_windows_that_vllm_computes_again_are_refused_with_the_way_out() -> None:
    """DeepSeek-V4.1 keeps no windows by default."""
    spec = SimpleNamespace(prefix_cacheable=False, prefix_replay_tokens=128)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"], enable_kv_transfer=True, host_resident=False)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend=None
        ),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    with pytest.raises(Unsupported, match="Start vLLM with --no-swa-bounded-replay"):
        engine_cache(config, SimpleNamespace(kv_cache_groups=[group]), lambda _: "sliding_window_mla", None)
