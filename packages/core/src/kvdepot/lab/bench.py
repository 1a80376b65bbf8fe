"""`kvdepot bench transfer|lookup`: the depot's cost on this machine, as ratios within one run.

Machines differ and are shared, so each figure comes with its spread and with a reference measured in the same run:
memcpy for transfers, one client alone for four. Each bench starts its own depot and removes it. An `IndexFiller` fills
its index with entries without bytes.
"""

import ctypes
import gc
import itertools
import mmap
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvdepot.client.connection import Connection
from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.session import Channel
from kvdepot.config import counted
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.dependent import DependentDepot
from kvdepot.lab.engine_model import GEOMETRY_8B, EngineModel
from kvdepot.lab.processes import note_on_place, wait_until
from kvdepot.layout import GroupKind
from kvdepot.operate import operations as o
from kvdepot.processes import interrupts_blocked
from kvdepot.wire import messages as m

ENTRY_BYTES: Final = 4096  # of a filler's entry: a page, the smallest extent
_PATIENT_SECONDS: Final = 30.0  # far beyond a start or a store, so that only a depot that hangs reaches it
NUM_CLIENTS: Final = 4  # they keep the server's queue full, as several engines do
_TRANSFER_BYTES: Final = 256 << 20  # far beyond the caches of a processor
_TRANSFER_POOL_BYTES: Final = 2 * _TRANSFER_BYTES + (64 << 20)
_LOOKUP_POOL_BYTES: Final = 512 << 20
_ROUNDS: Final = 9
_SECONDS: Final = 3.0  # of lookups in each row
_LOOKUPS_PER_REQUEST: Final = 16  # leases end with their request


def describe_machine() -> str:
    """Describe the machine of the measurement."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"


# --- transfer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferCase:
    """One combination of settings to measure, and so one row of the result."""

    block_tokens: int
    chunk_tokens: int
    copy_threads: int = 1
    verify: str = "off"  # as in `kvdepot serve`


_CASES: Final = (
    TransferCase(16, 16),
    TransferCase(16, 64),
    TransferCase(16, 256),
    TransferCase(32, 64),
    TransferCase(32, 256),
    TransferCase(128, 128),
    TransferCase(128, 256),
    TransferCase(16, 256, copy_threads=2),
    TransferCase(16, 256, verify="sample"),
    TransferCase(16, 256, verify="all"),
)


def bench_transfer(say: Callable[[str], None]) -> dict[str, Any]:
    """Time stores and retrieves of 256 MiB between scattered blocks and the pool, server round trips included.

    The reference for each direction is one memcpy of as many bytes, in turn with the transfers. It copies between the
    same kinds of memory: the pool is shared memory, which has no huge pages unless the machine is configured for them,
    and a reference that copies into huge pages is 10 to 15 % too fast.
    """
    rows: list[dict[str, Any]] = []
    if note := note_on_place(_TRANSFER_POOL_BYTES):
        say(note)
    for case in _CASES:
        gc.collect()  # frees the memory of the engine before: 0.3 s that must not be part of a round
        rows.append(_transfer_row(case))
        say(_transfer_line(rows[-1]))
    return {"bench": "transfer", "geometry": GEOMETRY_8B.name, "rows": rows}


def _transfer_row(case: TransferCase) -> dict[str, Any]:
    import numpy as np

    geometry = replace(GEOMETRY_8B, block_tokens=case.block_tokens)
    num_chunks = _TRANSFER_BYTES // (geometry.bytes_per_token * case.chunk_tokens)
    num_bytes = num_chunks * geometry.bytes_per_token * case.chunk_tokens
    with DependentDepot("--verify", case.verify, pool_size=str(_TRANSFER_POOL_BYTES), log_level="error") as depot:
        engine = EngineModel(
            "bench",
            geometry,
            4 * num_bytes // geometry.block_size_bytes,
            Namespace("bench"),
            url=depot.url,
            chunk_tokens=case.chunk_tokens,
            copy_threads=case.copy_threads,
        )
        try:
            engine.wait_until_connected()
            rng = np.random.default_rng(0)
            cache = engine.cache.reshape(-1).view(np.uint8)
            pool = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)  # shared memory, like a pool
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            times: dict[str, list[float]] = {"to_pool": [], "from_pool": [], "store": [], "retrieve": []}
            for number in range(_ROUNDS + 1):
                tokens = list(range(number, number + num_chunks * case.chunk_tokens))
                key = hash_prefix(Namespace(f"round {number}"), case.chunk_tokens, tokens)
                needed = num_chunks * case.chunk_tokens // case.block_tokens
                ids = rng.permutation(engine.cache.shape[1])
                out, back = ids[:needed].tolist(), ids[-needed:].tolist()
                moments = [time.perf_counter()]
                ctypes.memmove(pool.ctypes.data, cache.ctypes.data, num_bytes)
                moments.append(time.perf_counter())
                ctypes.memmove(cache.ctypes.data, pool.ctypes.data, num_bytes)
                moments.append(time.perf_counter())
                stored = engine.context.submit_store("r", key, [out]).result()
                moments.append(time.perf_counter())
                retrieved = engine.context.submit_retrieve("r", key, [back]).result()
                moments.append(time.perf_counter())
                assert stored and retrieved, "the depot took or had less than all"
                for name, (began, ended) in zip(times, itertools.pairwise(moments), strict=True):
                    if number:  # the first round warms up
                        times[name].append(ended - began)
                ask_depot(o.Clear(), depot.url, 30)
        finally:
            engine.close()
    row: dict[str, Any] = {**asdict(case), "page_bytes": geometry.page_size_bytes, "num_bytes": num_bytes}
    for name, reference in (("store", "to_pool"), ("retrieve", "from_pool")):
        ratios = sorted(memcpy / seconds for memcpy, seconds in zip(times[reference], times[name], strict=True))
        row[name] = {
            "memcpy_gb_per_s": round(num_bytes / statistics.median(times[reference]) / 1e9, 2),
            "gb_per_s": round(num_bytes / statistics.median(times[name]) / 1e9, 2),
            "ratio_to_memcpy": round(statistics.median(ratios), 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
    return row


def _transfer_line(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {row[name]['gb_per_s']:5.2f} GB/s = {row[name]['ratio_to_memcpy']:.2f} of memcpy's"
        f" {row[name]['memcpy_gb_per_s']:5.2f} ({row[name]['spread'][0]:.2f} to {row[name]['spread'][1]:.2f})"
        for name in ("store", "retrieve")
    ]
    return (
        f"blocks of {row['block_tokens']:3} tokens, chunks of {row['chunk_tokens']:3},"
        f" {counted(row['copy_threads'], 'thread')}, verify {row['verify']:6}: " + "; ".join(parts)
    )


# --- lookup ---------------------------------------------------------------------------------------------------------


def filler_spec(chunk_tokens: int) -> m.CacheSpec:
    """Return the spec of a filler's entries: one group of full attention."""
    return m.CacheSpec(chunk_tokens, (m.GroupShape(GroupKind.FULL_ATTENTION, chunk_tokens),), "bytes", "filler")


def prompt_key(prompt: int, num_chunks: int) -> KeyRun:
    """Return the key of a prompt of `num_chunks` chunks, with digests as random as real ones."""
    return hash_prefix(Namespace(f"prompt {prompt}"), 1, range(num_chunks))


class IndexFiller:
    """A worker that stores without moving a byte; it stays registered until `close`.

    Args:
        url: the URL of the depot.
        chunk_tokens: tokens of a chunk.
    """

    def __init__(self, url: str, *, chunk_tokens: int = 64) -> None:
        spec, details = filler_spec(chunk_tokens), (m.GroupDetail((ENTRY_BYTES,), 1),)
        registration = m.RegisterKVCache(m.PROTOCOL_VERSION, "filler", 0, 1, "none", "none", "filler", spec, details)
        self._connection = Connection(url, "filler", registration, maps_pool=False, deadline_seconds=_PATIENT_SECONDS)
        self._session = self._connection.wait_until_open(_PATIENT_SECONDS)
        self._channel: Channel = self._connection.channel(self._session)

    def prepare(self, key: KeyRun) -> m.StorePlan:
        """Ask for space for at most `MAXIMUM_STORE_ENTRIES` chunks."""
        request = m.PrepareStore(
            self._session.context, "fill", key.tenant, key.digests, key.first_chunk, key.parent, (key.num_chunks,)
        )
        plan = self._channel.call(request, _PATIENT_SECONDS)
        assert isinstance(plan, m.StorePlan)
        return plan

    def store(self, key: KeyRun) -> None:
        """Store a prompt.

        Raises:
            AssertionError: the depot declined a part of it.
        """
        for start in range(0, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            plan = self.prepare(key.slice(start, min(start + m.MAXIMUM_STORE_ENTRIES, key.num_chunks)))
            assert not plan.num_declined, "the pool is too small"
            if plan.ticket:
                self._channel.call(m.CommitStore(self._session.context, plan.ticket), _PATIENT_SECONDS)

    def close(self) -> None:
        """Leave the depot."""
        self._channel.close()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class ClientTask:
    """Lookups of prompts of `num_chunks` chunks, one after the other, for some seconds."""

    url: str
    chunk_tokens: int
    prompts: tuple[int, ...]
    num_chunks: int
    seconds: float


def _client(task: ClientTask, gate: Any, results: Any) -> None:
    client = SchedulerClient(filler_spec(task.chunk_tokens), f"client-{os.getpid()}", url=task.url, deadline_seconds=30)
    client.wait_until_connected(10)
    keys = [prompt_key(prompt, task.num_chunks) for prompt in task.prompts]
    for key in keys:
        client.release(client.lookup("warm-up", key))
    gate.wait()
    times: list[float] = []
    misses = 0
    end = time.perf_counter() + task.seconds
    for number, key in enumerate(itertools.cycle(keys), 1):
        started = time.perf_counter()
        lease = client.lookup("request", key)
        ended = time.perf_counter()
        times.append(ended - started)
        misses += lease.num_chunks != task.num_chunks
        if number % _LOOKUPS_PER_REQUEST == 0:
            client.end_request("request")
        if ended > end:
            break
    client.close()
    results.put((times, misses))


def run_clients(tasks: Sequence[ClientTask]) -> tuple[list[float], float]:
    """Run the tasks in parallel; return the seconds of each lookup, and the lookups a second of all tasks."""
    spawn = multiprocessing.get_context("spawn")
    gate, results = spawn.Barrier(len(tasks)), spawn.Queue()
    processes = [spawn.Process(target=_client, args=(task, gate, results), daemon=True) for task in tasks]
    with interrupts_blocked():
        for process in processes:
            process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
    assert not any(misses for _, misses in found), "a lookup missed stored chunks"
    times = [seconds for client_times, _ in found for seconds in client_times]
    return times, sum(len(client_times) for client_times, _ in found) / tasks[0].seconds


def latencies(times: list[float]) -> dict[str, Any]:
    """Return figures of lookups that took these seconds."""
    ordered = sorted(times)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        "max_ms": round(ordered[-1] * 1e3, 3),
        "num_lookups": len(ordered),
    }


def bench_lookup(say: Callable[[str], None]) -> dict[str, Any]:
    """Time lookups of 128k-token prompts over the socket, all hits with leases: one client alone, then four at once."""
    rows: list[dict[str, Any]] = []
    if note := note_on_place(_LOOKUP_POOL_BYTES):
        say(note)
    for num_chunks, chunk_tokens in ((512, 256), (2048, 64)):
        with DependentDepot(pool_size=str(_LOOKUP_POOL_BYTES), log_level="error") as depot:
            wait_until(lambda depot=depot: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            filler = IndexFiller(depot.url, chunk_tokens=chunk_tokens)
            prompts = tuple(range(8))
            for prompt in prompts:
                filler.store(prompt_key(prompt, num_chunks))
            for num_clients in (1, NUM_CLIENTS):
                task = ClientTask(depot.url, chunk_tokens, prompts, num_chunks, _SECONDS)
                times, _ = run_clients([task] * num_clients)
                rows.append({"num_chunks": num_chunks, "num_clients": num_clients, **latencies(times)})
                say(
                    f"128k tokens in {num_chunks:4} chunks, {counted(num_clients, 'client')}:"
                    f" p50 {rows[-1]['p50_ms']:.3f} ms, p99 {rows[-1]['p99_ms']:.3f} ms,"
                    f" {rows[-1]['num_lookups']:,} lookups"
                )
            filler.close()
    return {"bench": "lookup", "rows": rows}
