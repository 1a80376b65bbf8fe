# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""Runs the gather kernel in Triton's interpreter; started by `test_gather_kernel`, with TRITON_INTERPRET set."""

import sys

import numpy as np

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda import gather as use
from kvdepot_cuda import gather_kernel
from support.cuda.fake import FakeDriver
from support.cuda.fake_worker import FakeWorker

SIZES = (1, 7, 15, 16, 17, 64, 1000, 8192, 8192 + 40, 3 * 8192 + 16, 20_001)
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


def check_worker() -> None:
    def run_kernel(table: int, num_runs: int, num_programs: int) -> None:
        gather_kernel.gather_runs[(num_programs,)](table, num_runs, WORDS=1024)

    use.MOST_RUN_BYTES, use.LEAST_RUNS = 1 << 20, 1  # every run of these plans
    image = use.GatherImage(b"image", "gather_runs", 128, 0, 0)
    driver = FakeDriver(run_kernel=run_kernel)
    with DepotProcess() as depot:
        for salt, plan in enumerate(("one group", "odd page sizes", "large pages")):
            worker = FakeWorker(
                depot.url, PLANS[plan], driver=driver, gather_kernel=True, compile_gather=lambda _capability: image
            )
            worker.wait_until_connected(20)
            wait_until(lambda worker=worker: worker.context.is_warm)
            cache = Cache(worker, PLANS[plan])
            assert cache.store(prompt(6, salt=salt))
            stored = driver.calls["gathered"]
            assert cache.retrieve(prompt(6, salt=salt)) == 6
            worker.context.close()
            assert driver.calls["gathered"] > stored > 0
            assert driver.violations == []
            assert driver.left_over == {}
            driver = FakeDriver(run_kernel=run_kernel)
    print("copies are right")


if __name__ == "__main__":
    if sys.argv[1] == "bytes":
        check_bytes()
    else:
        check_worker()
