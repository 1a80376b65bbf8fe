"""The copy kernels put every byte of every run in its place, touch no other byte, and return the right checksums."""

import itertools
import os
from typing import Any

import numpy as np
import pytest
import xxhash

from kvdepot.copying.runs import Addresses
from kvdepot.kvcache import CopyBatch
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import EXTENT
from kvdepot_cpu.context import PageCopier
from kvdepot_cpu.kernels import SUMMED_ALIGNMENT_BYTES, SUMMED_BLOCK_BYTES, Kernels, load_kernels, memcpy_runs
from support.tools import tool_is_missing

_GAP = 512
_SIZES = (1, 127, 1023, 1024, 1500, 4095, 4096, 5000, 8192, 65_536, 65_537, 300_001)


@pytest.fixture
def kernels() -> Kernels:
    found = load_kernels()
    if found is None:
        tool_is_missing("the compiled copy was not built")
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "memcpy"])
def test_runs_of_any_size_and_alignment_arrive_whole(kernels: Kernels, is_native: bool, seed: int) -> None:
    copy_runs = kernels.copy_runs if is_native else memcpy_runs
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 14))
    sizes = np.append(rng.choice(_SIZES, count), 1 << 20)  # together enough for streaming
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


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_any_size_and_step_arrive_whole(kernels: Kernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_pages, num_rows = int(rng.integers(1, 14)), int(rng.integers(2, 20))
    sizes = rng.choice(_SIZES[:9], num_pages)
    sizes[0] = (1 << 20) // num_rows  # together enough for streaming
    room = int((sizes.max() + _GAP) * num_rows)
    source = rng.integers(0, 256, num_pages * room, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    reads, writes = (np.arange(num_pages) * room + rng.integers(0, _GAP, num_pages) for _ in range(2))
    read_steps, write_steps = (sizes + rng.integers(0, _GAP - _GAP // num_rows, num_pages) for _ in range(2))
    for page, row in itertools.product(range(num_pages), range(num_rows)):
        read, write = reads[page] + row * read_steps[page], writes[page] + row * write_steps[page]
        expected[write : write + sizes[page]] = source[read : read + sizes[page]]

    kernels.copy_rows(
        (reads + source.ctypes.data).astype(np.uint64),
        (writes + target.ctypes.data).astype(np.uint64),
        sizes.astype(np.uint64),
        read_steps.astype(np.uint64),
        write_steps.astype(np.uint64),
        num_rows,
    )

    assert np.array_equal(target, expected)


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_that_makes_checksums_makes_those_of_xxhash(kernels: Kernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block, gap = SUMMED_BLOCK_BYTES, SUMMED_ALIGNMENT_BYTES
    numbers = 1, 2, 3, 64, 200, 1023, 1024, 1025, 2500  # a run of more than 1,024 blocks is cut
    runs = [block * rng.choice(numbers, int(rng.integers(1, 9))) for _ in range(5)]  # by extent
    sizes, extents = np.concatenate(runs).astype(np.uint64), np.array([each.sum() for each in runs], np.uint64)
    source = rng.integers(0, 256, int(sizes.sum()) + 1, dtype=np.uint8)
    target = np.zeros(int(sizes.sum()) + gap * (len(sizes) + 1), np.uint8)
    reads = np.cumsum(sizes) - sizes + np.uint64(1)  # an engine's blocks may lie anywhere
    writes = np.cumsum(sizes) - sizes + np.arange(len(sizes), dtype=np.uint64) * np.uint64(gap)
    writes += np.uint64(-target.ctypes.data % gap)
    expected = np.zeros_like(target)
    for read, write, size in zip(reads.tolist(), writes.tolist(), sizes.tolist(), strict=True):
        expected[write : write + size] = source[read : read + size]

    digests = kernels.copy_and_sum(
        reads + np.uint64(source.ctypes.data), writes + np.uint64(target.ctypes.data), sizes, extents
    )

    if digests is None:
        tool_is_missing("this processor lacks AVX2")
    assert np.array_equal(target, expected)
    stops = 1 + np.cumsum(extents.astype(np.int64))
    payloads = np.split(source[1:], stops[:-1] - 1)
    assert [each.tobytes() for each in digests] == [xxhash.xxh3_128_digest(each.tobytes()) for each in payloads]


def test_a_copy_that_makes_checksums_refuses_what_it_cannot_sum(kernels: Kernels) -> None:
    """The caller then copies the runs and makes the checksums by other means."""
    block = SUMMED_BLOCK_BYTES
    source, target = np.ones(4 * block, np.uint8), np.zeros(5 * block, np.uint8)
    aligned = target.ctypes.data + -target.ctypes.data % SUMMED_ALIGNMENT_BYTES

    def numbers(*values: int) -> Addresses:
        return np.array(values, np.uint64)

    for targets, sizes, extents in (
        (numbers(aligned + 1), numbers(2 * block), numbers(2 * block)),  # not aligned
        (numbers(aligned), numbers(block + 512), numbers(block + 512)),  # half a block
        (numbers(aligned), numbers(2 * block), numbers(block + 512, block - 512)),
        (numbers(aligned), numbers(2 * block), numbers(2 * block, 0)),
        (numbers(aligned), numbers(2 * block), numbers(3 * block)),  # the runs do not fill the extent
        (numbers(aligned), numbers(2 * block), numbers(block)),
    ):
        assert kernels.copy_and_sum(numbers(source.ctypes.data), targets, sizes, extents) is None
    assert not target.any()


@pytest.mark.promise(47)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("with_checksums", [False, True], ids=["plain", "with checksums"])
def test_a_store_moves_each_byte_once(with_checksums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int]] = []

    def count(name: str) -> None:
        copy: Any = getattr(Kernels, name)

        def counted(kernels: Kernels, sources: Addresses, targets: Addresses, sizes: Addresses, *rest: Any) -> Any:
            done = copy(kernels, sources, targets, sizes, *rest)
            if name == "copy_runs" or done is not None:
                moved.append((name, int(sizes.sum())))
            return done

        monkeypatch.setattr(Kernels, name, counted)

    count("copy_runs")
    count("copy_and_sum")
    num_blocks, page_bytes, num_bytes = 64, 64 << 10, 4 << 20
    cache = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)
    page = PageLayout(cache.ctypes.data, num_blocks, page_bytes, page_bytes)
    layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, 16, (page,)),), 16 * num_blocks, "bfloat16")
    fd = os.memfd_create("pool")
    os.truncate(fd, num_bytes)
    pool = PoolMemory(fd, num_bytes)
    os.close(fd)
    copier = PageCopier(layout, (1, 1), cache)
    blocks = list(range(num_blocks))[::-1]
    digest = copier.store(
        CopyBatch(
            pool, EXTENT.pack(0, 0, 0, 0, 0, 0, 0, num_bytes), [blocks], (0,), (0,), with_checksums=with_checksums
        )
    )
    stored = bytes(pool.pool)
    assert stored == cache.reshape(num_blocks, -1)[blocks].tobytes()
    assert moved == [("copy_and_sum" if digest else "copy_runs", num_bytes)]
    assert digest is None or (with_checksums and digest == xxhash.xxh3_128_digest(stored))
    copier.close()
