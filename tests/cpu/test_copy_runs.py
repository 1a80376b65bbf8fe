"""The copy kernels put every byte of every run in its place, touch no other byte, and return the right checksums."""

import itertools
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import kvdepot_cpu.kernels
from kvdepot.copying.runs import Addresses
from kvdepot.kvcache import CopyBatch
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, Part, Plane
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


@pytest.fixture(scope="module")
def portable_kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The library as it is built for other processors than x86-64."""
    compiler = shutil.which("cc")
    if compiler is None:
        tool_is_missing("needs a C compiler")
    folder = tmp_path_factory.mktemp("portable")
    (folder / "other.h").write_text("#undef __x86_64__\n")  # behind the system's headers, which need the definition
    headers = [f"-include{name}" for name in ("stdint.h", "stdlib.h", "string.h", folder / "other.h")]
    sources = map(str, sorted(Path(kvdepot_cpu.kernels.__file__).parent.glob("*.c")))
    command = [compiler, "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *headers, *sources]
    subprocess.run([*command, "-o", str(folder / "kernels.so")], check=True, timeout=60)
    return Kernels(folder / "kernels.so")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("which", ["native", "portable", "memcpy"])
def test_runs_of_any_size_and_alignment_arrive_whole(
    kernels: Kernels, portable_kernels: Kernels, which: str, seed: int
) -> None:
    copy_runs = {"native": kernels.copy_runs, "portable": portable_kernels.copy_runs, "memcpy": memcpy_runs}[which]
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
@pytest.mark.parametrize("which", ["native", "portable"])
def test_rows_of_any_size_and_step_arrive_whole(
    kernels: Kernels, portable_kernels: Kernels, which: str, seed: int
) -> None:
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

    {"native": kernels, "portable": portable_kernels}[which].copy_rows(
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
    numbers = 1, 2, 3, 64, 200, 511, 512, 513, 1100  # a run of more than 512 blocks is cut
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


def test_other_processors_make_no_checksums_and_move_no_tokens(portable_kernels: Kernels) -> None:
    """The caller then makes the checksums by other means, and moves the tokens by the framework."""
    source, target = np.ones(1 << 20, np.uint8), np.zeros((1 << 20) + SUMMED_ALIGNMENT_BYTES, np.uint8)
    aligned = target.ctypes.data + -target.ctypes.data % SUMMED_ALIGNMENT_BYTES
    runs = (np.array([number], np.uint64) for number in (source.ctypes.data, aligned, 1 << 20, 1 << 20))
    assert portable_kernels.copy_and_sum(*runs) is None
    assert not target.any()
    assert not portable_kernels.can_move_tokens


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


class Bench:
    """A copier of 64 pages of 256 KiB, enough for two threads, and its pool.

    Attributes:
        moved: the bytes that each of its compiled copies has moved.
    """

    def __init__(self, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: dict[str, int] = {}
        for name in ("copy_runs", "copy_and_sum"):
            self._count(name, monkeypatch)
        self.num_bytes = 16 << 20
        flat = np.random.default_rng(1).integers(0, 256, self.num_bytes + SUMMED_ALIGNMENT_BYTES, np.uint8)
        self.cache = flat[-flat.ctypes.data % SUMMED_ALIGNMENT_BYTES :][: self.num_bytes]
        page = PageLayout(self.cache.ctypes.data, 64, 256 << 10, 256 << 10)
        layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, 16, (page,)),), 16 * 32, "bfloat16")
        fd = os.memfd_create("pool")
        os.truncate(fd, self.num_bytes)
        self.pool = PoolMemory(fd, self.num_bytes)
        os.close(fd)
        self.copier = PageCopier(layout, (num_threads, num_threads), self.cache)
        self.blocks = list(range(64))[::-1]

    def _count(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        copy: Any = getattr(Kernels, name)

        def counted(kernels: Kernels, sources: Addresses, targets: Addresses, sizes: Addresses, *rest: Any) -> Any:
            done = copy(kernels, sources, targets, sizes, *rest)
            if name == "copy_runs" or done is not None:
                self.moved[name] = self.moved.get(name, 0) + int(sizes.sum())  # threads take turns at the GIL
            return done

        monkeypatch.setattr(Kernels, name, counted)

    def batch(self, with_checksums: bool, skip_blocks: int = 0) -> CopyBatch:
        """Return a batch of two chunks, the second one first in the pool."""
        half = self.num_bytes // 2
        extents = EXTENT.pack(0, 0, 0, 0, 0, 0, half, half) + EXTENT.pack(1, 0, 0, 0, 0, 0, 0, half)
        return CopyBatch(self.pool, extents, [self.blocks], (0,), (skip_blocks,), with_checksums=with_checksums)

    def check(self, digests: bytes | None, *, with_checksums: bool) -> None:
        """Assert that each byte was moved once, with the checksums of the two extents if any were asked for."""
        if with_checksums and digests is None:
            tool_is_missing("this processor lacks AVX2")
        assert self.moved == {"copy_and_sum" if with_checksums else "copy_runs": self.num_bytes}
        half = self.num_bytes // 2
        expected = b"".join(xxhash.xxh3_128_digest(bytes(self.pool.pool[at : at + half])) for at in (half, 0))
        assert digests == (expected if with_checksums else None)

    def in_order(self) -> bytes:
        """Return the blocks of the cache as they lie in the pool."""
        pages = self.cache.reshape(64, -1)
        return pages[self.blocks[32:]].tobytes() + pages[self.blocks[:32]].tobytes()


@pytest.mark.promise(47)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("with_checksums", [False, True], ids=["plain", "with checksums"])
def test_a_store_moves_each_byte_once(with_checksums: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_threads, monkeypatch)
    digests = bench.copier.store(bench.batch(with_checksums))
    assert bytes(bench.pool.pool) == bench.in_order()
    bench.check(digests, with_checksums=with_checksums)
    bench.copier.close()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("with_checksums", [False, True], ids=["plain", "with checksums"])
def test_a_retrieve_moves_each_byte_once(
    with_checksums: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(num_threads, monkeypatch)
    stored = np.random.default_rng(2).integers(0, 256, bench.num_bytes, np.uint8).tobytes()
    bench.pool.pool[:] = stored
    digests = bench.copier.retrieve(bench.batch(with_checksums))
    assert bench.in_order() == stored
    bench.check(digests, with_checksums=with_checksums)
    bench.copier.close()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_retrieve_of_parts_of_extents_returns_no_checksums(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that it leaves out belong to the checksum. No byte is moved in vain before that is known."""
    bench = Bench(num_threads, monkeypatch)
    stored = np.random.default_rng(2).integers(0, 256, bench.num_bytes, np.uint8)
    bench.pool.pool[:] = stored.tobytes()
    page_bytes, before = 256 << 10, bench.cache.reshape(64, -1)[63].tobytes()
    assert bench.copier.retrieve(bench.batch(with_checksums=True, skip_blocks=1)) is None
    assert bench.cache.reshape(64, -1)[63].tobytes() == before
    stored[bench.num_bytes // 2 :][:page_bytes] = np.frombuffer(before, np.uint8)
    assert bench.in_order() == stored.tobytes()
    assert bench.moved == {"copy_runs": bench.num_bytes - page_bytes}
    bench.copier.close()


@pytest.mark.usefixtures("kernels")
def test_checksums_of_a_retrieve_follow_the_extents_of_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of two workers, each with one layer, whose runs are copied in another order than the batch names them."""
    bench = Bench(1, monkeypatch)
    half, page_bytes = bench.num_bytes // 2, 256 << 10
    pages = tuple(PageLayout(bench.cache.ctypes.data + at, 32, page_bytes, page_bytes) for at in (0, half))
    group = LayerGroup(GroupKind.FULL_ATTENTION, 16, pages, part=Part(0, 2, 0, 1), plane=Plane(2, 1))
    copier = PageCopier(CacheLayout((group,), 16 * 32, "bfloat16"), (1, 1), bench.cache)
    stored = np.random.default_rng(2).integers(0, 256, bench.num_bytes, np.uint8).tobytes()
    bench.pool.pool[:] = stored
    extents = b""
    for layer, offset in ((1, half), (0, 0)):
        part = Part(layer, 1, 0, 1).number
        extents += EXTENT.pack(0, 0, part & 0xFFFF, 0, part >> 16, 0, offset, half)
    digests = copier.retrieve(CopyBatch(bench.pool, extents, [list(range(32))], (0,), (0,), with_checksums=True))
    assert bench.cache.tobytes() == stored
    bench.check(digests, with_checksums=True)
    copier.close()
    bench.copier.close()


def test_a_copy_that_fails_has_ended_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started, failed, threads, ended = threading.Event(), threading.Event(), set[int](), set[int]()

    class Failing:
        """Copies that fail on the caller's thread while another one copies."""

        def copy_runs(self, *_: Addresses) -> None:
            threads.add(threading.get_ident())
            if threading.current_thread() is threading.main_thread():
                started.wait(10)
                failed.set()
                raise RuntimeError("half of it")
            started.set()
            failed.wait(10)
            ended.add(threading.get_ident())

    monkeypatch.setattr("kvdepot_cpu.context.load_kernels", Failing)
    num_blocks, page_bytes = 64, 256 << 10
    cache = np.zeros(num_blocks * page_bytes, np.uint8)
    page = PageLayout(cache.ctypes.data, num_blocks, page_bytes, page_bytes)
    layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, 16, (page,)),), 16 * num_blocks, "bfloat16")
    fd = os.memfd_create("pool")
    os.truncate(fd, cache.size)
    pool = PoolMemory(fd, cache.size)
    os.close(fd)
    copier = PageCopier(layout, (2, 2), cache)
    extents = EXTENT.pack(0, 0, 0, 0, 0, 0, 0, cache.size)
    with pytest.raises(RuntimeError, match="half of it"):
        copier.retrieve(CopyBatch(pool, extents, [list(range(num_blocks))], (0,), (0,)))
    assert ended == threads - {threading.get_ident()}
    assert len(threads) == 2
    copier.close()
