"""Measures reads from a peer over loopback: `python benchmarks/depot/peers.py`.

Two depots, each with a worker that copies nothing. A lookup of one names the other, which has 256 MiB in entries of one
size, and waits until all have arrived in its pool and were verified. Prints the pace for each size, and the time of a
lookup of a single entry of 4 KiB beside one of a hit. With `--transfer-engine`, also the pace of Mooncake's transfer
engine in pieces of the same size, unverified, in turns with the depots: `pip install numpy
mooncake-transfer-engine-non-cuda`.
"""

import argparse
import importlib
import math
import mmap
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from kvdepot.client.connection import Connection
from kvdepot.config import format_size
from kvdepot.keys import KeyRun
from kvdepot.lab.bench import describe_machine, filler_spec, prompt_key
from kvdepot.lab.processes import DepotProcess
from kvdepot.wire import messages as m

TOTAL_BYTES: Final = 256 << 20
SIZES: Final = (64 << 10, 1 << 20, 16 << 20)
SECONDS: Final = 60.0
AT_ONCE: Final = 16  # pieces of a call: the transfer engine refuses more


class Worker:
    """A worker with chunks of one token and one size, which moves no byte.

    Args:
        depot: the depot that it joins.
        num_bytes: the size of a chunk.
        peer: HOST:PORT that its lookups name.
    """

    def __init__(self, depot: DepotProcess, num_bytes: int, peer: str = "") -> None:
        details = (m.GroupDetail((num_bytes,), 1),)
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, f"{num_bytes}", 0, 1, "none", "none", "filler", filler_spec(1), details
        )
        self._connection = Connection(depot.url, "peers", registration, maps_pool=False, deadline_seconds=SECONDS)
        self._context = self._connection.wait_until_open(SECONDS).context
        self._channel = self._connection.channel(self._connection.wait_until_open(SECONDS))
        self._peer = peer

    def store(self, key: KeyRun) -> None:
        """Store a prompt. Its entries have the bytes that the pool has there."""
        for start in range(0, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            part = key.slice(start, min(start + m.MAXIMUM_STORE_ENTRIES, key.num_chunks))
            plan = self._channel.call(
                m.PrepareStore(
                    self._context, "fill", part.tenant, part.digests, part.first_chunk, part.parent, (part.num_chunks,)
                ),
                SECONDS,
            )
            assert isinstance(plan, m.StorePlan)
            self._channel.call(m.CommitStore(self._context, plan.ticket), SECONDS)

    def find(self, key: KeyRun) -> float:
        """Look a prompt up. Return the seconds until all of it is in the pool; infinity if a call was late."""
        started = time.perf_counter()
        request = m.Lookup(self._context, "r", key.digests, peer=self._peer, wait_seconds=SECONDS)
        reply = self._channel.call(request, SECONDS)
        seconds = time.perf_counter() - started
        assert isinstance(reply, m.LookupReply)
        self._channel.call(m.EndRequest(self._context, "r"), SECONDS)
        return seconds if reply.num_chunks == key.num_chunks else math.inf

    def close(self) -> None:
        """Leave the depot."""
        self._channel.close()
        self._connection.close()


@contextmanager
def two_depots() -> Generator[tuple[DepotProcess, DepotProcess, str]]:
    """Yield two depots, and the address of the first one's listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16))
        secret = ("--peer-token", str(token), "--promote-seconds", "60")
        with (
            DepotProcess("--peers", address, *secret, pool_size="1GiB") as owner,
            DepotProcess("--peer-hints", address, *secret, pool_size="1GiB") as reader,
        ):
            yield owner, reader, address


def pace_of_depots(num_bytes: int) -> float:
    """Return the bytes that arrive in a second."""
    with two_depots() as (owner, reader, address):
        first, second = Worker(owner, num_bytes), Worker(reader, num_bytes, address)
        seconds = math.inf
        for number in range(8):
            key = prompt_key(number, TOTAL_BYTES // num_bytes)
            first.store(key)
            found = second.find(key)
            if number:  # the first one connects, and touches the pool
                seconds = min(seconds, found)
        first.close()
        second.close()
    return TOTAL_BYTES / seconds


def waits_of_lookups() -> tuple[float, float]:
    """Return the median seconds of lookups of one small entry: from the peer, and from the pool."""
    far, near = list[float](), list[float]()
    with two_depots() as (owner, reader, address):
        first, second = Worker(owner, 4096), Worker(reader, 4096, address)
        for number in range(200):
            key = prompt_key(number, 1)
            first.store(key)
            far.append(second.find(key))
            near.append(second.find(key))
        first.close()
        second.close()
    return statistics.median(far[20:]), statistics.median(near[20:])


# --- Mooncake's transfer engine ---------------------------------------------------------------------------------------


def _engine_pool(engine: Any, folder: str, name: str) -> tuple[Any, int]:
    np: Any = importlib.import_module("numpy")
    path = Path(folder) / name
    with path.open("w+b") as file:
        file.truncate(TOTAL_BYTES)
        array = np.frombuffer(mmap.mmap(file.fileno(), TOTAL_BYTES), np.uint8)
    array[:] = 7
    assert engine.register_memory(array.ctypes.data, TOTAL_BYTES) == 0
    return array, array.ctypes.data


def _engine() -> Any:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def _serve(folder: str, pipe: Any) -> None:
    engine = _engine()
    _, address = _engine_pool(engine, folder, "there")
    pipe.send((engine.get_rpc_port(), address))
    pipe.recv()
    os._exit(0)


def _read(folder: str, pipe: Any) -> None:
    engine = _engine()
    array, here = _engine_pool(engine, folder, "here")
    while (asked := pipe.recv()) is not None:
        size, port, there = asked
        seconds = 1e9
        for _ in range(3):
            array[:] = 0
            started = time.perf_counter()
            for first in range(0, TOTAL_BYTES // size, AT_ONCE):
                offsets = [place * size for place in range(first, min(first + AT_ONCE, TOTAL_BYTES // size))]
                failed = engine.batch_transfer_sync_read(
                    f"127.0.0.1:{port}",
                    [here + offset for offset in offsets],
                    [there + offset for offset in offsets],
                    [size] * len(offsets),
                )
                assert not failed
            seconds = min(seconds, time.perf_counter() - started)
        assert (array == 7).all()
        pipe.send(TOTAL_BYTES / seconds)
    os._exit(0)


class TransferEngines:
    """Two processes whose pools are connected by Mooncake's transfer engine over TCP."""

    def __init__(self, folder: str) -> None:
        context = get_context("spawn")
        self._server, theirs = context.Pipe()
        self._reader, its = context.Pipe()
        context.Process(target=_serve, args=(folder, theirs)).start()
        context.Process(target=_read, args=(folder, its)).start()
        self._there = self._server.recv()

    def pace(self, num_bytes: int) -> float:
        """Return the bytes that arrive in a second, in pieces of this size."""
        self._reader.send((num_bytes, *self._there))
        return self._reader.recv()

    def close(self) -> None:
        """End both processes."""
        self._reader.send(None)
        self._server.send(None)


def main() -> None:
    """Print paces and waits."""
    parser = argparse.ArgumentParser(description="Reads from a peer over loopback.")
    parser.add_argument("--transfer-engine", action="store_true", help="compare with Mooncake's transfer engine")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engines = TransferEngines(folder) if arguments.transfer_engine else None
        for size in SIZES:
            paces, others = list[float](), list[float]()
            for _ in range(arguments.rounds):
                paces.append(pace_of_depots(size))
                if engines is not None:
                    others.append(engines.pace(size))
            line = f"entries of {format_size(size)}: {statistics.median(paces) / 1e9:.2f} GB/s, verified"
            if others:
                ratio = statistics.median(own / other for own, other in zip(paces, others, strict=True))
                line += f"; transfer engine {statistics.median(others) / 1e9:.2f} GB/s; ratio {ratio:.2f}"
            print(line, flush=True)
        if engines is not None:
            engines.close()
    far, near = waits_of_lookups()
    print(f"lookup of one entry of 4 KiB: {far * 1000:.2f} ms from the peer, {near * 1000:.2f} ms from the pool")


if __name__ == "__main__":
    main()
