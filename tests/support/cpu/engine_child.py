"""An engine in a process of its own, for tests that kill it. Run: python engine_child.py URL INSTANCE

Reads one command a line and answers each with a line: `store SALT N`, `retrieve SALT N` (and ends the
request), `lookup SALT N`, `await SALT N` (a lookup for chunks that another engine hands over), `hand_over SALT N` (a
store for such a lookup), `prepare SALT N` (asks for extents, writes half of the first and stops there), `exit`.
"""

import sys
from typing import Any

import numpy as np

from kvdepot import SchedulerClient
from kvdepot.backends import CacheGroup, KVCache
from kvdepot.testing.backend import GroupPlan, prompt
from kvdepot.wire import messages as m
from kvdepot_cpu.context import CpuOptions, CpuTransferContext

NUM_BLOCKS, NUM_LAYERS, PAGE = 256, 4, 16384


def fill_value(salt: int, block: int) -> int:
    return (salt * 37 + block * 11 + 1) % 251 + 1


def main() -> None:
    url, instance = sys.argv[1:]
    cache = [np.zeros((NUM_BLOCKS, PAGE), np.uint8) for _ in range(NUM_LAYERS)]
    context = CpuTransferContext(
        KVCache([CacheGroup(cache, GroupPlan().block_tokens)], instance, "bytes"), CpuOptions(url=url)
    )
    scheduler = SchedulerClient(context.spec, instance, url=url)
    context.wait_until_connected(10)
    scheduler.wait_until_connected(10)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "exit":
            break
        salt, num_chunks = map(int, numbers)
        print(*answer(command, salt, num_chunks, cache, context, scheduler), flush=True)
    context.close()
    scheduler.close()


def answer(command: str, salt: int, num_chunks: int, cache: list[Any], context: Any, scheduler: Any) -> list[object]:
    run = prompt(num_chunks, salt=salt)
    blocks = list(range(num_chunks * 4))
    match command:
        case "store" | "hand_over":
            if command == "hand_over":
                scheduler.submit_lookup("request", run, hands_over=True).result()
            write(cache, salt, blocks)
            future = context.submit_store("request", run, [blocks])
            return [future.result(20), future.num_chunks]
        case "retrieve":
            for layer in cache:
                layer[:] = 0
            future = context.submit_retrieve("request", run, [blocks])
            future.result(20)
            scheduler.end_request("request")
            return [future.num_chunks, count_wrong(cache, salt, blocks[: future.num_chunks * 4])]
        case "lookup":
            return [scheduler.lookup("request", run).num_chunks]
        case "await":
            return [scheduler.submit_lookup("request", run, joins=True, awaits=num_chunks).result().num_chunks]
        case "prepare":
            link = context.connection.wait_until_open(10)
            channel = context.connection.channel(link)
            request = m.PrepareStore(link.context, "r", "t", run.digests, 0, run.parent, (num_chunks,))
            plan = channel.call(request, 5)
            offset, num_bytes = m.EXTENT.unpack_from(plan.extents)[6:]
            link.mapping.pool[offset : offset + num_bytes // 2] = b"\xee" * (num_bytes // 2)
            return [len(plan.extents) // m.EXTENT.size]
        case _:
            raise ValueError(command)


def write(cache: list[Any], salt: int, blocks: list[int]) -> None:
    for number, layer in enumerate(cache):
        for block in blocks:
            layer[block] = fill_value(salt + number, block)


def count_wrong(cache: list[Any], salt: int, blocks: list[int]) -> int:
    return sum(
        int(np.count_nonzero(layer[block] != fill_value(salt + number, block)))
        for number, layer in enumerate(cache)
        for block in blocks
    )


if __name__ == "__main__":
    main()
