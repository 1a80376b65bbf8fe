"""Times stores and lookups at a depot that publishes KV events and at one that does not.

Run `python benchmarks/depot/events.py`. Each of two depots has an engine without a model; one depot has `--events` and
a subscriber. A round stores the same prompt at both in turn, sends its tokens to the depot with events as a connector
does, and looks the prompt up at both. This gives three ratios: the store with events to the store without; the store
including the sending of tokens to the store alone; and the lookups. After `--rounds`, a new pair of depots takes over,
as the memory that a process happens to get makes it up to 15 % faster or slower than another one. Prints the quartiles
of the pairs' medians.
"""

import argparse
import json
import socket
import statistics
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq

from kvdepot.client import SchedulerClient
from kvdepot.client.operator import ask_depot
from kvdepot.features.routers.feed import Description
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.bench import describe_machine
from kvdepot.lab.engine_model import GEOMETRY_8B, EngineModel
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o

BLOCK_TOKENS = GEOMETRY_8B.block_tokens


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Side:
    """One depot with one engine."""

    def __init__(self, name: str, stack: ExitStack, num_tokens: int, chunk_tokens: int, *flags: str) -> None:
        num_blocks = num_tokens // BLOCK_TOKENS
        size = 2 * num_blocks * GEOMETRY_8B.block_size_bytes + (64 << 20)
        self.depot = stack.enter_context(DepotProcess(*flags, pool_size=str(size)))
        url = self.depot.url
        self.engine = EngineModel(name, GEOMETRY_8B, num_blocks, Namespace("bench"), url=url, chunk_tokens=chunk_tokens)
        stack.callback(self.engine.close)
        self.engine.wait_until_connected()
        self.blocks = [np.random.default_rng(0).permutation(num_blocks).tolist()]
        spec = self.engine.context.spec
        self.client = stack.enter_context(SchedulerClient(spec, f"{name} scheduler", url=url, served_model="model"))
        self.client.wait_until_connected(10)
        wait_until(lambda: self.depot.status().pool_ready_bytes == self.depot.status().pool_size_bytes, 600)

    def store(self, key: KeyRun, tokens: list[int]) -> tuple[float, float]:
        """Store a prompt, then describe it if the depot wants tokens. Return the seconds until the end of each."""
        ids = [hash((tokens[0], block)) & (1 << 63) - 1 for block in range(len(tokens) // BLOCK_TOKENS)]
        began = time.perf_counter()
        assert self.engine.context.submit_store("r", key, self.blocks).result()
        stored = time.perf_counter() - began
        if self.client.wants_tokens:
            description = Description(bytes(32), tokens, ids)
            self.client.post(lambda context: description.requests(context, key))
        return stored, time.perf_counter() - began

    def lookup(self, key: KeyRun) -> float:
        """Look up a prompt. Return the seconds."""
        began = time.perf_counter()
        lease = self.client.lookup("r", key)
        seconds = time.perf_counter() - began
        assert lease.num_chunks == key.num_chunks
        self.client.release(lease)
        return seconds


def measure(
    num_tokens: int, chunk_tokens: int, rounds: int, lookups: int, rng: np.random.Generator, names: tuple[str, str]
) -> dict[str, float]:
    """Return the medians of the ratios for a new pair of depots, started in the order of their names."""
    ratios: dict[str, list[float]] = {"store": [], "told": [], "lookup": []}
    with ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        flags = {"plain": (), "events": ("--events", endpoint)}
        sides = {name: Side(name, stack, num_tokens, chunk_tokens, *flags[name]) for name in names}
        subscriber = stack.enter_context(zmq.Context()).socket(zmq.SUB)
        stack.callback(subscriber.close, 0)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        for number in range(rounds + 1):
            tokens = rng.integers(0, 128_000, num_tokens).tolist()
            key = hash_prefix(Namespace("bench"), chunk_tokens, tokens)
            order = names[:: 1 if number % 2 else -1]
            stores = {name: sides[name].store(key, tokens) for name in order}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(lookups):
                for name in order[:: 1 if turn % 2 else -1]:
                    times[name].append(sides[name].lookup(key))
            if number:  # the first round warms up
                ratios["store"].append(stores["events"][0] / stores["plain"][0])
                ratios["told"].append(stores["events"][1] / stores["events"][0])
                ratios["lookup"].append(statistics.median(times["events"]) / statistics.median(times["plain"]))
            for side in sides.values():
                ask_depot(o.Clear(), side.depot.url, 30)
        told = sides["events"].depot.status().counters["chunks_described"]
        assert told == (rounds + 1) * num_tokens // chunk_tokens, "each chunk is described once"
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=8, help="of depots, one after the other")
    parser.add_argument("--rounds", type=int, default=10, help="with each pair")
    parser.add_argument("--lookups", type=int, default=200, help="at each depot in each round")
    parser.add_argument("--chunk-tokens", type=int, nargs="*", default=[16, 64, 256])
    options = parser.parse_args()
    print(describe_machine())
    rng = np.random.default_rng(1)
    for chunk_tokens in options.chunk_tokens:
        num_tokens = options.tokens // chunk_tokens * chunk_tokens
        pairs = [
            measure(num_tokens, chunk_tokens, options.rounds, options.lookups, rng, names)
            for names in (("plain", "events"), ("events", "plain"))
            for _ in range(max(1, options.pairs // 2))
        ]
        row: dict[str, Any] = {"tokens": num_tokens, "chunk_tokens": chunk_tokens, "pairs": len(pairs)}
        for name in ("store", "told", "lookup"):
            row[name] = [round(value, 3) for value in statistics.quantiles([pair[name] for pair in pairs], n=4)]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
