"""A worker's preparations before its first transfer, which make this as fast as later ones."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cpu.context import CpuOptions, CpuTransferContext


def resident_bytes(folder: Path) -> int:
    """Return the resident bytes of this process's mapping of a pool."""
    found = 0
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if re.search(rf"{folder}/\.?pool", block.partition("\n")[0]):  # a new pool is created under another name
            size = re.search(r"^Rss: +(\d+) kB", block, re.MULTILINE)
            assert size is not None
            found += int(size[1]) * 1024
    return found


@pytest.mark.promise(38)
def test_a_worker_touches_the_whole_pool_before_it_needs_it() -> None:
    with DepotProcess() as depot:
        context = CpuTransferContext(
            KVCache([CacheGroup([np.zeros((8, 64), np.uint8)], 16)], "e", "bytes"), CpuOptions(url=depot.url)
        )
        try:
            context.wait_until_connected(10)
            wait_until(
                lambda: resident_bytes(depot.pool_directory) == 64 << 20, 120, "every page of the pool"
            )  # the thread has idle priority
        finally:
            context.close()
