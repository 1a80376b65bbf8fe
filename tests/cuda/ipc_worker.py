"""A worker of the fake device in a process of its own, for tests that kill it. Run: ... URL INSTANCE MEMORY MODE

Reads a command a line, `store SALT N`, `retrieve SALT N` (checks every byte) or `submit-store SALT N` and
`submit-retrieve SALT N`, which do not wait, and answers each with a line; at the end of its input it leaves.
"""

import os
import sys
from pathlib import Path

from kvdepot.testing.backend import PLANS, Cache, prompt
from kvdepot_cuda.testing import FakeDriver
from tests.cuda.fake_worker import FakeWorker

PLAN = PLANS["large pages"]


def main() -> None:
    url, instance, memory, mode = sys.argv[1:]
    worker = FakeWorker(
        url, PLAN, driver=FakeDriver(root=Path(memory)), mode=mode, mover="fake-cuda", instance=instance
    )
    cache = Cache(worker, PLAN)
    cache.context.wait_until_connected(30)
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        salt, num_chunks = map(int, numbers)
        print(answer(cache, command, salt, num_chunks), flush=True)
    cache.context.close()


def answer(cache: Cache, command: str, salt: int, num_chunks: int) -> int:
    run = prompt(num_chunks, salt=salt)
    if command == "store":
        return int(cache.store(run))
    if command == "retrieve":
        return cache.retrieve(run)
    block_ids = cache.blocks(run)
    if command == "submit-store":
        cache.fill(run, block_ids)
        cache.context.submit_store("request", run, block_ids)
    else:
        cache.wipe()
        cache.context.submit_retrieve("request", run, block_ids)
    return 0


if __name__ == "__main__":
    main()
