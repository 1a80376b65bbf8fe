"""The copy kernel: every byte of every run in its place, and no other byte touched."""

import numpy as np
import pytest

from kvdepot_cpu.kernels.copy import CopyRuns, memcpy_runs, native_copy_runs
from support.tools import tool_is_missing

_GAP = 512
_SIZES = (1, 127, 1023, 1024, 1500, 4095, 4096, 5000, 8192, 65_536, 65_537, 300_001)


@pytest.fixture(params=["native", "memcpy"])
def copy_runs(request: pytest.FixtureRequest) -> CopyRuns:
    """Each of the two copies."""
    found = native_copy_runs() if request.param == "native" else memcpy_runs()
    if found is None:
        tool_is_missing("the compiled copy was not built")
    return found


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_any_size_and_alignment_arrive_whole(copy_runs: CopyRuns, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 14))
    sizes = np.append(rng.choice(_SIZES, count), 1 << 20)  # enough together to be streamed
    starts = np.concatenate([[0], np.cumsum(sizes + _GAP)])[:-1]
    source = rng.integers(0, 256, int(sizes.sum()) + _GAP * len(sizes), dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    reads, writes = (starts + rng.integers(0, _GAP, len(sizes)) for _ in range(2))
    for read, write, size in zip(reads, writes, sizes, strict=True):
        expected[write : write + size] = source[read : read + size]

    copy_runs(
        (reads + source.ctypes.data).astype(np.uint64),
        (writes + target.ctypes.data).astype(np.uint64),
        sizes.astype(np.uint64),
    )

    assert np.array_equal(target, expected)
