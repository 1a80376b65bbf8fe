# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalCall=false
"""Runs the kernels in Triton's interpreter; started by `test_kernels`, with TRITON_INTERPRET set."""

import sys

import numpy as np
import xxhash

from kvdepot.copying.runs import EXTENT_DTYPE, Runs
from kvdepot.kvcache import CopyBatch
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda import gather as use
from kvdepot_cuda import gather_kernel, sum_kernel
from kvdepot_cuda.sums import BLOCK_BYTES, DeviceSums
from support.cuda.fake import FakeDriver, fake_gather, fake_sums
from support.cuda.fake_worker import FakeWorker

SIZES = (1, 7, 15, 16, 17, 64, 1000, 8192, 8192 + 40, 3 * 8192 + 16, 20_001)
NUM_RUNS = 10_000  # of digests
DIGEST_BYTES = 4 << 20
OFFSETS = ((0, 0), (16, 48), (8, 8), (1, 0), (0, 3), (5, 5))


def check_bytes() -> None:
    """Compare with numpy. The bytes between the runs must not change."""
    rng = np.random.default_rng(0)
    room = max(SIZES) + 64
    count = len(SIZES) * len(OFFSETS)
    source = rng.integers(0, 256, count * room + 16, np.uint8)
    target = np.full(count * room + 16, 0xAB, np.uint8)
    first = [-array.ctypes.data % 16 for array in (source, target)]
    expected = target.copy()
    rows = []
    for number, (size, offsets) in enumerate((size, offsets) for size in SIZES for offsets in OFFSETS):
        at, to = (first[side] + number * room + offsets[side] for side in (0, 1))
        rows.append((source.ctypes.data + at, target.ctypes.data + to, size))
        expected[to : to + size] = source[at : at + size]
    table = np.array(rows, np.int64)
    for programs, num_runs in ((1, count), (4, count), (7, count), (3, 1)):
        target[:] = 0xAB
        gather_kernel.gather_runs[(programs,)](int(table.ctypes.data), num_runs, WORDS=1024)
        if num_runs == count:
            assert np.array_equal(target, expected), f"bytes differ with {programs} programs"
        else:
            assert np.count_nonzero(target != 0xAB) <= SIZES[0], "more runs than the table has"
    print(f"{count} runs are right")


def run_kernel(name: str, arguments: tuple[int, ...], num_programs: int) -> None:
    """Run a kernel of the backend in the interpreter."""
    if name == "gather_runs":
        gather_kernel.gather_runs[(num_programs,)](*arguments[:2], WORDS=1024)
    elif name == "sum_blocks":
        sum_kernel.sum_blocks[(num_programs,)](*arguments[:4], RUNS=128, BLOCKS=4)
    else:
        sum_kernel.digest_extents[(num_programs,)](*arguments[:4], EXTENTS=32)


def check_digests() -> None:
    """Compare with xxhash: random bytes in scattered runs at multiples of 16, in batches of random extents."""
    rng = np.random.default_rng(1)
    driver = FakeDriver(run_kernel=run_kernel)
    memory = driver.allocate(DIGEST_BYTES)
    device = driver.bytes_at(memory, DIGEST_BYTES)
    device[:] = rng.integers(0, 256, DIGEST_BYTES, np.uint8)
    with driver.activated():
        stream = driver.create_stream()
        sums = DeviceSums(driver, fake_sums(90), DIGEST_BYTES)
        num_runs = num_extents = 0
        while num_runs < NUM_RUNS:
            ends = np.cumsum(rng.integers(1, 100, rng.integers(1, 33))) * BLOCK_BYTES
            cuts = np.unique([0, ends[-1], *(rng.integers(0, ends[-1] // BLOCK_BYTES, 1600) * BLOCK_BYTES)])
            places, sizes = cuts[:-1].astype(np.uint64), np.diff(cuts).astype(np.uint64)
            order = rng.permutation(len(sizes))
            gaps = rng.integers(0, 9, len(sizes)).astype(np.uint64) * np.uint64(16)
            scattered = np.empty_like(places)
            scattered[order] = np.cumsum(sizes[order] + gaps) - sizes[order]
            records = np.zeros(len(ends), EXTENT_DTYPE)
            records["num_bytes"] = np.diff(ends, prepend=0)
            batch = CopyBatch(None, records.tobytes(), ((),), (0,), (0,), 0, True)
            digests = sums.begin(batch, Runs(scattered + np.uint64(memory), places, sizes), stream)
            driver.synchronize_stream(stream)
            columns = zip(scattered.tolist(), sizes.tolist(), strict=True)
            data = b"".join([device[at : at + size].tobytes() for at, size in columns])
            extents = [data[end - size : end] for end, size in zip(ends, records["num_bytes"].tolist(), strict=True)]
            assert digests() == b"".join(map(xxhash.xxh3_128_digest, extents))
            num_runs, num_extents = num_runs + len(sizes), num_extents + len(extents)
        sums.close()
        driver.destroy_stream(stream)
    assert driver.violations == []
    print(f"digests of {num_extents} extents in {num_runs} runs are right")


def check_worker() -> None:
    """Store and retrieve by the kernels. The depot and the worker compare the checksums of every entry."""
    use.MOST_RUN_BYTES, use.LEAST_RUNS = 1 << 20, 1  # every run of these plans
    kernels = {"gather_kernel": True, "compile_gather": fake_gather, "checksum_kernel": True, "compile_sums": fake_sums}
    with DepotProcess("--verify", "all") as depot:
        for salt, (plan, sums) in enumerate({"one group": True, "odd page sizes": False, "large pages": True}.items()):
            driver = FakeDriver(run_kernel=run_kernel)
            worker = FakeWorker(depot.url, PLANS[plan], driver=driver, **kernels)
            worker.wait_until_connected(20)
            wait_until(lambda worker=worker: worker.context.is_warm)
            cache = Cache(worker, PLANS[plan])
            assert cache.store(prompt(6, salt=salt))
            stored = driver.calls["gathered"]
            assert cache.retrieve(prompt(6, salt=salt)) == 6
            worker.context.close()
            assert driver.calls["gathered"] > stored > 0
            assert (driver.calls["digest_extents"] == 6) == sums
            assert driver.violations == []
            assert driver.left_over == {}
    print("copies are right")


if __name__ == "__main__":
    {"bytes": check_bytes, "digests": check_digests, "worker": check_worker}[sys.argv[1]]()
