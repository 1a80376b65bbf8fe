"""Measures the cost of KV events: `python benchmarks/depot/events.py`.

Two depots with full indexes get the traffic of `node.py`, one after the other: prompts that share nothing, so that each
chunk is stored and evicts another. One of them publishes events to a subscriber in another process, and its engines
describe their chunks as vLLM's connector does. After `--rounds`, a new pair of depots takes over, as the memory that a
process happens to get makes it up to 15 % faster or slower than another one. Prints, for each size of chunks, the
quartiles of the pairs' medians of two ratios: the processor time of the server's thread for a stored chunk, until its
event is sent, and the time of a lookup that finds a whole prompt.
"""

import argparse
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from node import MODELS, REQUEST_TOKENS, Link, Node, depot_for, new_prompts

from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.bench import describe_machine
from kvdepot.wire import messages as m

_SUBSCRIBER = """
import sys, zmq
subscriber = zmq.Context().socket(zmq.SUB)
subscriber.connect(sys.argv[1])
subscriber.subscribe(b"")
while subscriber.poll(60_000):
    subscriber.recv_multipart()
"""
_LOOKUPS_IN_TURN = 20  # at one depot: a busy one has its data in the caches
_SETTLE_SECONDS = 0.1  # for the last events of a round, which are sent within 0.02 s


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def store(node: Node, prompts: Sequence[bytes]) -> float:
    """Store prompts. Return the processor seconds of the server."""
    before = node.server_seconds()
    counts = node.run(prompts)
    assert not counts.found
    time.sleep(_SETTLE_SECONDS)
    return node.server_seconds() - before


def look_up(link: Link, digests: bytes) -> float:
    """Look up a prompt. Return the seconds."""
    began = time.perf_counter()
    reply = link.channel.call(m.Lookup(link.context, "r", digests), 10)
    seconds = time.perf_counter() - began
    assert isinstance(reply, m.LookupReply)
    assert reply.num_chunks == len(digests) // DIGEST_BYTES
    link.channel.call(m.EndRequest(link.context, "r"), 10)
    return seconds


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third one."""
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


def measure(
    num_entries: int, chunk_tokens: int, num_rounds: int, num_prompts: int, num_lookups: int, *, publishes_first: bool
) -> tuple[list[float], float, float]:
    """Return the medians of a new pair of depots: seconds of a stored chunk without and with events, both ratios."""
    num_chunks, endpoint = REQUEST_TOKENS // chunk_tokens, f"tcp://127.0.0.1:{free_port()}"
    new = new_prompts(random.Random(0), num_chunks)
    with ExitStack() as stack:
        depots = {
            publishes: stack.enter_context(depot_for(num_entries, *(("--events", endpoint) if publishes else ())))
            for publishes in (publishes_first, not publishes_first)
        }
        subscriber = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SUBSCRIBER, endpoint]))
        stack.callback(subscriber.kill)
        nodes = [
            Node(depots[side], MODELS["8B"], chunk_tokens, stack, "model" if side else "") for side in (False, True)
        ]
        for node in nodes:
            node.run(itertools.islice(new, int(1.2 * num_entries / num_chunks)))
        times, ratios, lookups = [list[float](), list[float]()], list[float](), list[float]()
        links = [node.engines[0].scheduler for node in nodes]
        for number in range(num_rounds):
            order = (0, 1) if number % 2 else (1, 0)
            prompts = [*itertools.islice(new, num_prompts)]
            for side in order:
                times[side].append(store(nodes[side], prompts) / num_prompts / num_chunks)
            ratios.append(times[1][-1] / times[0][-1])
            seconds = [list[float](), list[float]()]
            for _, side in itertools.product(range(num_lookups // _LOOKUPS_IN_TURN), order):
                seconds[side] += [look_up(links[side], prompts[-1 - turn % 4]) for turn in range(_LOOKUPS_IN_TURN)]
            lookups.append(statistics.median(seconds[1]) / statistics.median(seconds[0]))
        counters = depots[True].status().counters
        assert counters["chunks_described"] >= num_rounds * num_prompts * num_chunks
        assert counters["event_batches"] > num_rounds
    return [*map(statistics.median, times)], statistics.median(ratios), statistics.median(lookups)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=6, help="of depots, one after the other (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="with each pair (%(default)s)")
    parser.add_argument("--prompts", type=int, default=40, help="of 8,000 tokens in each round (%(default)s)")
    parser.add_argument("--lookups", type=int, default=200, help="at each depot in each round (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, nargs="*", default=[16, 64, 256])
    options = parser.parse_args()
    print(describe_machine())
    for chunk_tokens in options.chunk_tokens:
        sizes = options.entries, chunk_tokens, options.rounds, options.prompts, options.lookups
        pairs = [measure(*sizes, publishes_first=bool(pair % 2)) for pair in range(options.pairs)]
        times, ratios, lookups = zip(*pairs, strict=True)
        row = {
            "chunk_tokens": chunk_tokens,
            "us_a_chunk": [round(statistics.median(each) * 1e6, 1) for each in zip(*times, strict=True)],
            "stored": quartiles(ratios),
            "lookup": quartiles(lookups),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
