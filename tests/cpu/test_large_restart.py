"""A full pool of 4 GiB survives `kill -9` of its server."""

import time

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cpu.context import CpuOptions, CpuTransferContext

_LAYERS, _BLOCKS, _PAGE = 8, 128, 65536  # 64 MiB; each prompt has its own copy in the pool
_PROMPTS = 66  # two more than fit


def has_room(depot: DepotProcess) -> bool:
    """Return whether the pool is ready 256 MiB ahead of the stores: a new pool gets its memory in the background."""
    status = depot.status()
    return status.pool_ready_bytes >= min(status.pool_size_bytes, status.pool_used_bytes + (256 << 20))


@pytest.mark.slow
@pytest.mark.promise(23, 39)
def test_four_gibibytes_of_chunks_are_found_again() -> None:
    cache = [np.empty((_BLOCKS, _PAGE), np.uint8) for _ in range(_LAYERS)]
    keys = [hash_prefix(Namespace(f"model-{number}"), 64, range(_BLOCKS * 16)) for number in range(_PROMPTS)]
    with DepotProcess(pool_size="4GiB") as depot:
        worker = CpuTransferContext(KVCache([CacheGroup(cache, 16)], "engine", "bytes"), CpuOptions(url=depot.url))
        try:
            worker.wait_until_connected(10)
            for number, key in enumerate(keys):
                wait_until(lambda: has_room(depot), 60, "the pool's space")
                for layer, pages in enumerate(cache):
                    pages[:] = (number * 8 + layer) % 251
                assert worker.submit_store("r", key, [list(range(_BLOCKS))]).result(60)
            before = depot.status()
            assert before.pool_used_bytes > 0.99 * (4 << 30)
            depot.kill()
            started = time.monotonic()
            depot.start()
            answered = time.monotonic() - started
            assert answered < 1.0
            wait_until(lambda: not depot.status().recovering, 10, "the table to be read")
            assert depot.status().num_entries >= 0.99 * before.num_entries
            worker.wait_until_connected(10)
            for number, key in enumerate(keys[-60:], start=_PROMPTS - 60):
                for pages in cache:
                    pages[:] = 255
                assert worker.submit_retrieve("r", key, [list(range(_BLOCKS))]).result(60)
                assert all((pages == (number * 8 + layer) % 251).all() for layer, pages in enumerate(cache))
        finally:
            worker.close()
    print(f"{before.num_entries} entries, answered after {answered:.2f} s")  # noqa: T201  # shown by pytest -s
