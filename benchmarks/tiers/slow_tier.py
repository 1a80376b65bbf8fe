"""Measures the effect of a slow tier on lookups that hit the pool: `python benchmarks/tiers/slow_tier.py`.

The only tier of a depot takes 100 ms for every call. One client looks up a prompt in the pool. In every second round
two other clients look up unknown prompts, each of which waits for the tier. Prints the latencies of the first client.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from kvdepot import SchedulerClient
from kvdepot.config import ServerConfig
from kvdepot.lab.bench import IndexFiller, filler_spec, prompt_key
from kvdepot.tiers.base import Extents, Tier, TierPool
from kvdepot.tiers.url import TierUrl, open_tier

CHUNK_TOKENS = 1
SPEC = filler_spec(CHUNK_TOKENS)


def serve(directory: str, pool_directory: str, call_seconds: float) -> None:
    """Serve with a tier in memory whose calls are slow."""
    from kvdepot.server.app import DepotServer
    from kvdepot.testing.faulty_tier import FaultyTier

    class SlowTier(FaultyTier):
        def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
            time.sleep(call_seconds)
            return super().contains(keys)

        def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
            time.sleep(call_seconds)
            return super().read(keys, extents)

        def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> Sequence[bool]:
            time.sleep(call_seconds)
            return super().write(keys, trailers, extents)

    def open_slow_tier(url: TierUrl, pool: TierPool) -> Tier:
        return SlowTier(open_tier(url, pool))

    config = ServerConfig(
        directory=Path(directory),
        pool_directory=Path(pool_directory),
        pool_size_bytes=64 << 20,
        tiers=("memory://?capacity=32MiB",),
    )
    with patch("kvdepot.tiers.opening.open_tier", open_slow_tier):
        server = DepotServer(config)
    server.run()


class Cold:
    """Look up unknown prompts in a loop while the event is set."""

    def __init__(self, url: str, number: int) -> None:
        self.wanted = threading.Event()
        self.num_lookups = 0
        self._number = number
        self._client = SchedulerClient(SPEC, "filler", url=url, deadline_seconds=30)
        self._client.wait_until_connected(20)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for number in range(1 << 30):
            self.wanted.wait()
            self._client.lookup("cold", prompt_key(1_000_000 * (self._number + 1) + number, 32))
            self._client.end_request("cold")
            self.num_lookups += 1


def main() -> None:
    """Print the latencies of both kinds of rounds, and their difference."""
    parser = argparse.ArgumentParser(description="The effect of a slow tier on lookups that hit the pool.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a round")
    parser.add_argument("--call-seconds", type=float, default=0.1, help="duration of each call of the tier")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as pool:
        server = get_context("spawn").Process(target=serve, args=(directory, pool, arguments.call_seconds))
        server.start()
        try:
            measure(directory, arguments.rounds, arguments.seconds)
        finally:
            server.kill()
            server.join()


def measure(url: str, num_rounds: int, seconds: float) -> None:
    """Alternate rounds with and without lookups that wait for the tier."""
    keys = {num_chunks: prompt_key(0, num_chunks) for num_chunks in (32, 2048)}
    filler = IndexFiller(url, chunk_tokens=CHUNK_TOKENS)  # a depot asks tiers only for the models of registered workers
    filler.store(keys[2048])
    client = SchedulerClient(SPEC, "filler", url=url, deadline_seconds=30)
    client.wait_until_connected(20)
    colds = [Cold(url, number) for number in range(2)]
    times: dict[tuple[int, bool], list[float]] = {}
    for number in range(num_rounds):
        is_slow = bool(number % 2)
        for cold in colds:
            (cold.wanted.set if is_slow else cold.wanted.clear)()
        time.sleep(0.3)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for num_chunks, key in keys.items():
                began = time.perf_counter()
                lease = client.lookup("hit", key)
                times.setdefault((num_chunks, is_slow), []).append(time.perf_counter() - began)
                assert lease.num_chunks == num_chunks, "a lookup missed stored chunks"
                client.release(lease)
                time.sleep(0.002)
    waited = sum(cold.num_lookups for cold in colds)
    print(f"{waited} lookups waited for the tier")
    for num_chunks in keys:
        rows = [
            statistics.quantiles([value * 1e3 for value in times[num_chunks, is_slow]], n=100)
            for is_slow in (False, True)
        ]
        p50, p99 = [row[49] for row in rows], [row[98] for row in rows]
        print(
            f"{num_chunks} chunks: p50 {p50[0]:.2f} ms alone, {p50[1]:.2f} ms beside them;"
            f" p99 {p99[0]:.2f} and {p99[1]:.2f} ms"
        )
    filler.close()
    client.close()


if __name__ == "__main__":
    main()
