"""`kvdepot bench transfer|lookup|blend|server`: the depot's cost on this machine, as ratios within one run.

Machines differ and are shared, so each figure comes with its spread and with a reference measured in the same run:
memcpy for transfers, an index of 1,000 entries for one of 1,000,000. Each bench starts its own depot and removes it.
"""

import ctypes
import gc
import itertools
import mmap
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.config import counted, format_size
from kvdepot.index.hit_rate_curve import HitRateCurve
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.engine_model import GEOMETRY_8B, EngineModel, Geometry
from kvdepot.lab.index_filler import ENTRY_BYTES, IndexFiller, filler_spec, prompt_key
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.processes.children import interrupts_blocked
from kvdepot.wire import operations as o
from kvdepot.wire.histogram import Histogram

_NUM_CLIENTS: Final = 4  # clients at once, so that requests queue in the server, as those of several engines do
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


DEFAULT_CASES: Final = (
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


def bench_transfer(
    cases: Sequence[TransferCase] = DEFAULT_CASES,
    *,
    geometry: Geometry = GEOMETRY_8B,
    num_bytes: int = 256 << 20,
    rounds: int = 9,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Time stores and retrieves of `num_bytes` between scattered blocks and the pool, server round trips included.

    The reference for each direction is one memcpy of as many bytes, in turn with the transfers. It copies between the
    same kinds of memory: the pool is shared memory, which has no huge pages unless the machine is configured for them,
    and a reference that copies into huge pages is 10 to 15 % too fast.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        gc.collect()  # frees the memory of the engine before: 0.3 s that must not be part of a round
        rows.append(_transfer_row(case, geometry, num_bytes, rounds))
        say(_transfer_line(rows[-1]))
    return {"bench": "transfer", "machine": describe_machine(), "geometry": geometry.name, "rows": rows}


def _transfer_row(case: TransferCase, geometry: Geometry, num_bytes: int, rounds: int) -> dict[str, Any]:
    import numpy as np

    geometry = replace(geometry, block_tokens=case.block_tokens)
    num_chunks = max(1, num_bytes // (geometry.bytes_per_token * case.chunk_tokens))
    num_bytes = num_chunks * geometry.bytes_per_token * case.chunk_tokens
    with DepotProcess("--verify", case.verify, pool_size=str(2 * num_bytes + (64 << 20))) as depot:
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
            pool = np.frombuffer(_shared_memory(num_bytes), np.uint8)
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            memcpy = _memcpy()
            times: dict[str, list[float]] = {"to_pool": [], "from_pool": [], "store": [], "retrieve": []}
            for number in range(rounds + 1):
                tokens = list(range(number, number + num_chunks * case.chunk_tokens))
                key = hash_prefix(Namespace(f"round {number}"), case.chunk_tokens, tokens)
                needed = num_chunks * case.chunk_tokens // case.block_tokens
                ids = rng.permutation(engine.cache.shape[1])
                out, back = ids[:needed].tolist(), ids[-needed:].tolist()
                started = time.perf_counter()
                memcpy(pool.ctypes.data, cache.ctypes.data, num_bytes)
                turned = time.perf_counter()
                memcpy(cache.ctypes.data, pool.ctypes.data, num_bytes)
                copied = time.perf_counter()
                stored = engine.context.submit_store("r", key, [out]).result()
                middle = time.perf_counter()
                retrieved = engine.context.submit_retrieve("r", key, [back]).result()
                ended = time.perf_counter()
                assert stored and retrieved, "the depot took or had less than all"
                if number:  # the first round warms up
                    times["to_pool"].append(turned - started)
                    times["from_pool"].append(copied - turned)
                    times["store"].append(middle - copied)
                    times["retrieve"].append(ended - middle)
                ask_depot(o.Clear(), depot.url, 30)
        finally:
            engine.close()
    row: dict[str, Any] = {
        "block_tokens": case.block_tokens,
        "chunk_tokens": case.chunk_tokens,
        "copy_threads": case.copy_threads,
        "verify": case.verify,
        "page_bytes": geometry.page_size_bytes,
        "num_bytes": num_bytes,
    }
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


def _shared_memory(num_bytes: int) -> mmap.mmap:
    """Return memory of a pool's kind."""
    descriptor = os.memfd_create("reference")
    try:
        os.ftruncate(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _memcpy() -> Callable[[int, int, int], object]:
    function = ctypes.CDLL(None).memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    return function


# --- lookup ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ClientTask:
    url: str
    chunk_tokens: int
    prompts: tuple[int, ...]
    num_chunks: int
    seconds: float


def _client(task: _ClientTask, gate: Any, results: Any) -> None:
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


def _run_clients(tasks: Sequence[_ClientTask]) -> tuple[list[float], float]:
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


def _latency_row(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        "max_ms": round(ordered[-1] * 1e3, 3),
        "num_lookups": len(ordered),
    }


def bench_lookup(*, seconds: float = 3.0, say: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
    """Time lookups of 128k-token prompts over the socket, all hits with leases: one client alone, then four at once."""
    rows: list[dict[str, Any]] = []
    for num_chunks, chunk_tokens in ((512, 256), (2048, 64)):
        with DepotProcess(pool_size="512MiB") as depot:
            wait_until(lambda depot=depot: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
            filler = IndexFiller(depot.url, chunk_tokens=chunk_tokens)
            prompts = tuple(range(8))
            for prompt in prompts:
                filler.store(prompt_key(prompt, num_chunks))
            for num_clients in (1, _NUM_CLIENTS):
                task = _ClientTask(depot.url, chunk_tokens, prompts, num_chunks, seconds)
                times, _ = _run_clients([task] * num_clients)
                rows.append({"num_chunks": num_chunks, "num_clients": num_clients, **_latency_row(times)})
                say(
                    f"128k tokens in {num_chunks:4} chunks, {counted(num_clients, 'client')}:"
                    f" p50 {rows[-1]['p50_ms']:.3f} ms, p99 {rows[-1]['p99_ms']:.3f} ms,"
                    f" {rows[-1]['num_lookups']:,} lookups"
                )
            filler.close()
    return {"bench": "lookup", "machine": describe_machine(), "rows": rows}


# --- blend ----------------------------------------------------------------------------------------------------------


def bench_blend(
    *, num_tokens: int = 131_072, rounds: int = 51, say: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Time naming and looking up the segments of a long prompt, and for comparison hashing and looking up its chunks.

    The depot has the same documents of 1,024 tokens in another order. No segment of them is at a multiple of a chunk.
    """
    import numpy as np

    from kvdepot.client.segments import SegmentNamer

    namespace, chunk_tokens, rng = Namespace("bench"), 64, np.random.default_rng(0)
    documents = rng.integers(0, 128_000, (num_tokens // 1024, 1024), dtype=np.uint32)
    source, prompt = documents.reshape(-1).tolist(), [1] * 7 + rng.permutation(documents).reshape(-1).tolist()
    namer, key = SegmentNamer(namespace), hash_prefix(namespace, chunk_tokens, source)
    times: dict[str, list[float]] = {"hash": [], "lookup": [], "name": [], "blend_lookup": []}
    with DepotProcess(pool_size="512MiB") as depot:
        filler = IndexFiller(depot.url, chunk_tokens=chunk_tokens)
        filler.store(key)
        with SchedulerClient(filler_spec(chunk_tokens), "bench", url=depot.url, deadline_seconds=30) as client:
            client.wait_until_connected(10)
            client.note_contents(key, namer.name(source))
            segments = namer.name(prompt)
            hit = client.submit_blend_lookup("warm-up", segments, min_run_tokens=64).result()
            for _ in range(rounds):
                moments = [time.perf_counter()]
                hash_prefix(namespace, chunk_tokens, prompt)
                moments.append(time.perf_counter())
                client.lookup("request", key)
                moments.append(time.perf_counter())
                namer.name(prompt)
                moments.append(time.perf_counter())
                client.submit_blend_lookup("request", segments, min_run_tokens=64).result()
                moments.append(time.perf_counter())
                client.end_request("request")
                for name, (began, ended) in zip(times, itertools.pairwise(moments), strict=True):
                    times[name].append(ended - began)
        longest = depot.status().loop_longest_seconds
        filler.close()
    result: dict[str, Any] = {"bench": "blend", "machine": describe_machine(), "num_tokens": len(prompt)}
    result["num_segments"], result["num_runs"] = len(segments), len(hit.runs)
    result["found_share"] = round(sum(run.length for run in hit.runs) / num_tokens, 3)
    for name, seconds in times.items():
        result[f"{name}_ms"] = {"min": round(min(seconds) * 1e3, 2), "p50": round(statistics.median(seconds) * 1e3, 2)}
    result["loop_longest_ms"] = round(longest * 1e3, 2)
    say(
        f"{len(prompt):,} tokens: {len(segments):,} segments named in {result['name_ms']['p50']} ms"
        f" (chunks hashed in {result['hash_ms']['p50']} ms), looked up in {result['blend_lookup_ms']['p50']} ms"
        f" (chunks in {result['lookup_ms']['p50']} ms); {result['found_share']:.0%} found in {len(hit.runs):,} runs"
    )
    return result


# --- server ---------------------------------------------------------------------------------------------------------


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS")) << 10


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bench_server(
    *, num_entries: int = 1_000_000, seconds: float = 3.0, say: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Measure the server itself: its start, memory and requests a second, and the slowdown by a full index."""
    result: dict[str, Any] = {"bench": "server", "machine": describe_machine()}
    result["import_ms"] = round(_import_ms("import kvdepot"), 1)
    result["import_client_ms"] = round(_import_ms("import kvdepot; kvdepot.SchedulerClient"), 1)
    say(f"import kvdepot: {result['import_ms']} ms, with its client {result['import_client_ms']} ms")
    pool_size = max(64 << 20, num_entries * ENTRY_BYTES + (64 << 20))
    started = time.perf_counter()
    with DepotProcess("--max-entries", str(num_entries + 8192), pool_size=str(pool_size)) as depot:
        result["start_seconds"] = round(time.perf_counter() - started, 3)
        result["resident_bytes_at_start"] = _resident_bytes(depot.pid)
        say(
            f"answers after {result['start_seconds']} s with a pool of {format_size(pool_size)};"
            f" resident {format_size(result['resident_bytes_at_start'])}"
        )
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
        filler = IndexFiller(depot.url)
        filler.store(prompt_key(0, 1000))
        single = tuple(_one_chunk_prompts())
        for prompt in single:
            filler.store(prompt_key(prompt, 1))
        before = _cpu_seconds(depot.pid)
        task = _ClientTask(depot.url, 64, single, 1, seconds)
        times, per_second = _run_clients([task] * _NUM_CLIENTS)
        cpu = (_cpu_seconds(depot.pid) - before) / seconds
        result["one_chunk_lookups_per_second"] = round(per_second)
        result["one_chunk_latency"] = _latency_row(times)
        result["server_cores_busy"] = round(cpu, 2)
        result["server_us_per_lookup"] = round(cpu / per_second * 1e6, 2)
        result["observing_us_per_lookup"] = round(_observing_seconds() * 1e6, 2)
        result["observing_share"] = round(
            result["observing_us_per_lookup"] / max(0.01, result["server_us_per_lookup"]), 4
        )
        say(f"{per_second:,.0f} one-chunk lookups a second from {_NUM_CLIENTS} clients, {cpu:.2f} cores of the server")
        say(
            f"of {result['server_us_per_lookup']:.1f} us of the server a lookup, histograms and hit rate curve take"
            f" {result['observing_us_per_lookup']:.2f} us ({result['observing_share']:.1%})"
        )
        small = _ClientTask(depot.url, 64, (0,), 1000, seconds)
        few, _ = _run_clients([small])
        resident, entries = _resident_bytes(depot.pid), depot.status().num_entries
        for prompt in range(1, num_entries // 1000):
            filler.store(prompt_key(prompt, 1000))
        status = depot.status()
        result["num_entries"] = status.num_entries
        scrapes = sorted(_seconds_of(lambda: depot.status()) for _ in range(21))
        result["status_ms"] = {"p50": round(scrapes[10] * 1e3, 2), "max": round(scrapes[-1] * 1e3, 2)}
        try:
            from kvdepot.operators.metrics import render_metrics
        except ImportError:
            say("/metrics is not timed: pip install 'kvdepot[http]'")
        else:
            scrapes = sorted(_seconds_of(lambda: render_metrics(depot.status())) for _ in range(21))
            result["metrics_ms"] = {"p50": round(scrapes[10] * 1e3, 2), "max": round(scrapes[-1] * 1e3, 2)}
            say(f"/metrics at {status.num_entries:,} entries takes {result['metrics_ms']['p50']} ms")
        result["bytes_per_entry"] = round((_resident_bytes(depot.pid) - resident) / (status.num_entries - entries))
        many, _ = _run_clients([replace(small, prompts=tuple(range(0, num_entries // 1000, 37)))])
        result["lookup_at_1000_entries"] = _latency_row(few)
        result["lookup_at_all_entries"] = _latency_row(many)
        result["latency_ratio"] = round(
            result["lookup_at_all_entries"]["p50_ms"] / result["lookup_at_1000_entries"]["p50_ms"], 2
        )
        say(
            f"{status.num_entries:,} entries: {result['bytes_per_entry']} bytes each; lookup of 1,000 chunks p50"
            f" {result['lookup_at_all_entries']['p50_ms']:.3f} ms"
            f" against {result['lookup_at_1000_entries']['p50_ms']:.3f} ms"
            f" at about 1,000 entries ({result['latency_ratio']}x)"
        )
        filler.close()
    return result


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _observing_seconds(num_lookups: int = 20_000, rounds: int = 7) -> float:
    """Return the seconds that counting a lookup of one chunk takes: in the sample, the tokens and a histogram."""
    hit_rates, histogram = HitRateCurve(1 << 30), Histogram(0.000016)
    keys = [prompt_key(prompt, 1).digests for prompt in _one_chunk_prompts()]
    tokens = {"default": [0, 0, 0]}

    def observed() -> None:
        began = time.monotonic()
        for _ in range(num_lookups // len(keys)):
            for key in keys:
                hit_rates.looked_up(key, 1 << 20)
                row = tokens.get("default") or [0]
                row[0] += 64
                row[1] += 64
                ended = time.monotonic()
                histogram.add(ended - began)
                began = ended

    def bare() -> None:
        for _ in range(num_lookups // len(keys)):
            for _key in keys:
                pass

    times = [_seconds_of(observed) - _seconds_of(bare) for _ in range(rounds)]
    return min(times) / num_lookups


def _one_chunk_prompts() -> range:
    return range(10_000_000, 10_000_100)


def _import_ms(code: str, rounds: int = 9) -> float:
    """Return the milliseconds that `code` adds to the start of an interpreter that finds bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {"pass": [], code: []}
    for number in range(rounds + 1):
        for program, seconds in times.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, env=environment)
            if number:  # the first run may write bytecode
                seconds.append(time.perf_counter() - started)
    empty, full = (statistics.median(seconds) for seconds in times.values())
    return (full - empty) * 1e3
