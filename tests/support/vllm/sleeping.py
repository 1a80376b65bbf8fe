# pyright: basic, reportMissingImports=false
"""Sleep and wake-up of vLLM 0.33's worker for a worker on CPU, from `vllm/v1/worker/gpu_worker.py` of its wheel.

The memory of the cache and of the weights goes and comes back between the connector's hooks. The cache's memory cannot
be touched meanwhile and comes back with wrong values. Weights are restored at level 1, and come back wrong at level 2.
"""

import ctypes
import mmap
from typing import Any

NONSENSE = 777.0  # finite, as vLLM multiplies masked rows by 0
WEIGHTS: dict[str, Any] = {}  # the weights of a worker that sleeps at level 1


def sleep(worker: Any, level: int = 1) -> None:
    """See vLLM's `Worker.sleep`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().unregister_kv_caches()
    WEIGHTS.clear()
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if level == 1:
            WEIGHTS[name] = parameter.data.clone()
        parameter.data.fill_(NONSENSE)
    _protect(worker, 0)


def wake_up(worker: Any, tags: list[str] | None = None) -> None:
    """See vLLM's `Worker.wake_up`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if tags is None or "weights" in tags:
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if name in WEIGHTS:
                parameter.data.copy_(WEIGHTS[name])
    if tags is None or "kv_cache" in tags:
        _protect(worker, mmap.PROT_READ | mmap.PROT_WRITE)
        for cache in worker.model_runner.kv_caches:
            cache.fill_(NONSENSE)
        get_kv_transfer_group().restore_kv_caches()


def _protect(worker: Any, protection: int) -> None:
    """Protect the whole pages of the cache's memory."""
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    for storage in {storage.data_ptr(): storage for storage in storages}.values():
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        assert mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), protection) == 0
