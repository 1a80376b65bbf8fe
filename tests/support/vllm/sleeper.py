"""A worker that loses its cache's memory while transfers run: `python -m support.vllm.sleeper URL COUNT`.

It calls the worker's side in the order of vLLM 0.33's worker: `unregister_kv_caches`, the memory goes, the memory comes
back with wrong values, `restore_kv_caches`. Touching memory that is gone ends this process with SIGSEGV. Prints counts
of the transfers' results as JSON.
"""

import ctypes
import json
import mmap
import sys
import time
from collections import Counter

import numpy as np
from blake3 import blake3

from kvdepot.backends import BlockIds, CacheGroup, KVCache, TransferFuture
from kvdepot.keys import KeyRun, Namespace, PrefixHasher
from kvdepot_cpu.context import CpuOptions, CpuTransferContext
from kvdepot_vllm.jobs import LoadJob, StepPlan, StoreJob
from kvdepot_vllm.worker import WorkerSide

BLOCK_TOKENS, CHUNK_TOKENS, PAGE_BYTES, NUM_BLOCKS = 16, 64, 65536, 64
CHUNKS = 8  # chunks of a prompt
SOURCE, TARGET = [*range(32)], [*range(32, 64)]


class Memory:
    """The cache's memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_BLOCKS * PAGE_BYTES)
        self.blocks = np.frombuffer(self._memory, np.uint8).reshape(1, NUM_BLOCKS, PAGE_BYTES)
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect

    def _protect(self, protection: int) -> None:
        address = ctypes.c_void_p(self.blocks.ctypes.data)
        assert self._mprotect(address, ctypes.c_size_t(len(self._memory)), protection) == 0

    def take_away(self) -> None:
        self._protect(0)

    def bring_back(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.blocks[:] = 0xAB


class Context(CpuTransferContext):
    """A context that knows its last retrieve."""

    last: TransferFuture[bool]

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        self.last = super().submit_retrieve(request_id, key, block_ids, skip_tokens)
        return self.last


class Sleeper:
    """The worker, and the results of its loads and stores."""

    def __init__(self, url: str) -> None:
        self.memory = Memory()
        cache = KVCache([CacheGroup(list(self.memory.blocks), BLOCK_TOKENS)], "sleeper", "bytes")
        self._open: list[Context] = []

        def open_context() -> Context:
            self._open = [Context(cache, CpuOptions(url=url, deadline_seconds=20))]
            return self._open[0]

        self.side = WorkerSide(open_context(), CHUNK_TOKENS, BLOCK_TOKENS, None, open_context)
        self.counts: Counter[str] = Counter()
        self.stored: set[int] = set()
        self.wait_until_connected()

    def wait_until_connected(self) -> None:
        self._open[0].wait_until_connected(20)

    def begin_store(self, prompt: int) -> None:
        """Begin to store a prompt whose bytes are derived from its keys."""
        key = key_of(prompt)
        for place, block in enumerate(SOURCE):
            self.memory.blocks[0, block] = np.frombuffer(bytes_of(key, place), np.uint8)
        self.side.start_stores(StepPlan(stores=(StoreJob(prompt, "store", key, (SOURCE,)),)))

    def begin_load(self, prompt: int, name: str, blocks: list[int] = TARGET) -> None:
        self.side.start_loads(StepPlan(loads=(LoadJob(name, key_of(prompt), (blocks,), 0),)))

    def poll(self) -> tuple[set[str], set[int]]:
        """Count the stores that ended. Return the loads that ended and the blocks that they left unfilled."""
        report = self.side.take_report()
        for prompt, (_, num_chunks) in (report.ended if report else {}).items():
            self.counts["stores"] += 1
            if num_chunks == CHUNKS:
                self.stored.add(prompt)
        results = self.side.poll_loads()
        return results.finished, results.invalid_blocks

    def finish(self) -> tuple[set[str], set[int]]:
        finished, invalid = set[str](), set[int]()
        while self.side.num_pending:
            some, unfilled = self.poll()
            finished, invalid = finished | some, invalid | unfilled
        some, unfilled = self.poll()
        return finished | some, invalid | unfilled

    def load(self, prompt: int) -> bool:
        """Load a prompt and return whether all of it came. Count blocks with wrong bytes."""
        self.begin_load(prompt, "whole")
        _, invalid = self.finish()
        for place, block in enumerate(TARGET):
            if block not in invalid:
                self.counts["wrong"] += self.memory.blocks[0, block].tobytes() != bytes_of(key_of(prompt), place)
        return not invalid

    def sleep_and_wake(self, prompt: int) -> None:
        """Sleep while prompt 0 is being loaded and `prompt` is being stored, then wake."""
        self.begin_store(prompt)
        self.begin_load(0, "before")
        early = self.poll()[0] if prompt % 2 else set[str]()
        started = time.perf_counter()
        self.counts["loads_under_way"] += not self._open[0].last.query()
        self.side.leave()
        self.counts["slowest_ms"] = max(self.counts["slowest_ms"], int((time.perf_counter() - started) * 1000))
        self.memory.take_away()
        self.begin_load(0, "asleep", SOURCE)
        finished, invalid = self.finish()
        self.side.leave()
        assert finished == {"before", "asleep"} - early, "a load is never reported twice, and never not at all"
        assert invalid == {*SOURCE, *([] if early else TARGET)}, "what a load brought is lost with the memory"
        self.memory.bring_back()
        self.side.come_back()
        self.side.come_back()
        self.wait_until_connected()
        self.counts["first_hits"] += self.load(0)


def key_of(prompt: int) -> KeyRun:
    hasher = PrefixHasher(Namespace("sleeper"), CHUNK_TOKENS)
    hasher.extend([prompt, *range(1, CHUNKS * CHUNK_TOKENS)])
    return hasher.run()


def bytes_of(key: KeyRun, place: int) -> bytes:
    return blake3(key.digests + bytes([place])).digest(length=64) * (PAGE_BYTES // 64)


def main(url: str, count: int) -> None:
    sleeper = Sleeper(url)
    sleeper.begin_store(0)
    sleeper.finish()
    for prompt in range(1, count + 1):
        sleeper.sleep_and_wake(prompt)
    for prompt in sorted(sleeper.stored):
        sleeper.counts["kept"] += sleeper.load(prompt)
    print(json.dumps({**sleeper.counts, "stored": len(sleeper.stored)}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
