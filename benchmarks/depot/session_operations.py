"""Times operations on one session among very many: `python benchmarks/depot/session_operations.py`.

A depot over a disk tier knows `--sessions` sessions of 31 chunks. One of them has its chunks in the pool. Every
operation on it uses a new connection, like `kvdepot session` and HTTP. Prints the median and the 99th percentile of the
round trips in milliseconds, and the mean of the server's part, from the request to the reply. In the first row, the
depot knows only this session. `prefetch` has nothing to promote. `bring up` is a prefetch with all chunks in the tier,
and is bound by the tier's speed.
"""

import argparse
import json
import os
import tempfile
import time

from kvdepot.client.operator import ask_depot
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.client import hint
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, hash_prefix
from kvdepot.lab.bench import describe_machine
from kvdepot.lab.engine_model import EngineModel, Geometry
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire.operation import OperatorRequest
from kvdepot.wire.status import DepotStatus

GEOMETRY = Geometry("small", num_layers=4, num_kv_heads=2, head_dim=128)  # 4 KiB a token
CHUNK_TOKENS = 64
NUM_CHUNKS = 31
_HINTS_AT_ONCE = 1000  # 1 MB: a client drops hints behind 16 MiB that the depot has not read


def measure(depot: DepotProcess, engine: EngineModel, key: KeyRun, rounds: int) -> dict[str, list[float]]:
    """Return the times of each operation in milliseconds."""
    times: dict[str, list[float]] = {}

    def timed(name: str, operation: OperatorRequest, expected: int | None = NUM_CHUNKS) -> None:
        began = time.perf_counter()
        count = ask_depot(operation, depot.url, 30).count
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        assert expected in (None, count), f"{name}: {count} chunks"

    for _ in range(rounds):
        timed("retain", session_operations.RetainSession("agent", 60.0))
        timed("prefetch", session_operations.PrefetchSession("agent", retain_seconds=60.0))
        timed("demote", session_operations.DemoteSession("agent"))
        timed("bring up", session_operations.PrefetchSession("agent", retain_seconds=60.0))
        timed("forget", session_operations.ForgetSession("agent"))
        remember(depot, engine, key)
    return times


def remember(depot: DepotProcess, engine: EngineModel, key: KeyRun) -> None:
    """Name the session, and wait until the depot knows it, as a hint gets no reply."""
    num_sessions = depot.status().num_agent_sessions
    hint(engine.scheduler, key, session="agent")
    wait_until(lambda: depot.status().num_agent_sessions > num_sessions)
    wait_until(lambda: not depot.status().tiers[0].queued_write_bytes)


def row(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the median and the 99th percentile of each operation."""
    ordered = {name: sorted(each) for name, each in times.items()}
    return {
        name: [round(each[len(each) // 2], 3), round(each[int(len(each) * 0.99)], 3)] for name, each in ordered.items()
    }


def server_part(before: DepotStatus, after: DepotStatus) -> dict[str, float]:
    """Return the server's mean milliseconds by operation. Half of the prefetches promote chunks."""
    found: dict[str, float] = {}
    for name, total in after.latencies.items():
        if name.endswith("_session"):
            earlier = before.latencies.get(name)
            count, seconds = sum(total.counts), total.total
            if earlier is not None:
                count, seconds = count - sum(earlier.counts), seconds - earlier.total
            found[name] = round(seconds / max(1, count) * 1e3, 3)
    return found


def main() -> None:
    """Measure with one session and with many, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(describe_machine())
    key = hash_prefix(Namespace("bench"), CHUNK_TOKENS, range(NUM_CHUNKS * CHUNK_TOKENS))
    with (
        tempfile.TemporaryDirectory() as folder,
        DepotProcess("--tier", f"disk://{folder}?capacity=1GiB", pool_size="256MiB") as depot,
    ):
        engine = EngineModel("bench", GEOMETRY, 1024, Namespace("bench"), url=depot.url, chunk_tokens=CHUNK_TOKENS)
        try:
            engine.wait_until_connected()
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            blocks = list(range(NUM_CHUNKS * engine.blocks_per_chunk))
            assert engine.context.submit_store("agent", key, [blocks]).result()
            for num_sessions in (1, options.sessions):
                for first in range(0, num_sessions - 1, _HINTS_AT_ONCE):
                    end = min(first + _HINTS_AT_ONCE, num_sessions - 1)
                    for number in range(first, end):
                        digests = os.urandom(NUM_CHUNKS * DIGEST_BYTES)
                        hint(engine.scheduler, KeyRun(digests, 0, bytes(DIGEST_BYTES)), session=f"other {number}")
                    wait_until(lambda end=end: depot.status().num_agent_sessions >= end)
                if num_sessions == 1:
                    remember(depot, engine, key)
                before = depot.status()
                times = row(measure(depot, engine, key, options.rounds))
                server = server_part(before, depot.status())
                print(json.dumps({"sessions": before.num_agent_sessions, **times, "server": server}), flush=True)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
