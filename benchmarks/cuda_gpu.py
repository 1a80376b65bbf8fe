# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Test the CUDA backend on a GPU, in at most ten minutes: `python benchmarks/cuda_gpu.py --out FOLDER`.

On a machine with an NVIDIA GPU that is idle otherwise, with Python 3.11 or newer, torch, triton, numpy and
cuda-bindings. kvdepot and kvdepot-cuda have to be installed, and pyzmq, msgspec, blake3 and xxhash beside them; without
a network bring wheels (`uv build --all-packages --wheel`, `pip download`) and `pip install --no-deps` them. With pytest
9 or newer and hypothesis 6.140 or newer the suites run, too, out of the repository. Pools lie in /dev/shm, which wants
4 GiB.

Each step is a process of its own with a time limit, and has what the steps before it left over; one that fails, hangs,
is cut off or cannot run is reported with the reason, and the rest goes on. What decides whether it works at all comes
first. After each it writes `cuda_gpu.jsonl`, one object a line, and `cuda_gpu.md`, the same as tables.
`--fake` runs what can be run without a device, small: it shows that the script works, and its figures say nothing.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = 4096
MIB = 1 << 20
BEGUN = "begun"  # of a part: for the parent, which says where a step was cut off
SETTLE_SECONDS = 60.0
SPAWN = multiprocessing.get_context("spawn")


class Skipped(Exception):
    """A step or a part of one that cannot run here; the text says why."""


@dataclass(frozen=True)
class Setting:
    """The arguments of a step."""

    is_fake: bool
    seconds: float  # that it may take

    def need_device(self) -> None:
        """End the step where there is none."""
        if self.is_fake:
            raise Skipped("needs a device: the fake driver is one process without a model")


def emit(what: str, **values: Any) -> None:
    """Report one finding; the parent adds the step's name."""
    print(json.dumps({"what": what, **values}), flush=True)


def part(what: str, function: Any, *arguments: Any) -> None:
    """Run a part of a step. An error is its finding, and the next part goes on."""
    emit(BEGUN, part=what)
    try:
        function(*arguments)
    except Skipped as reason:
        emit(what, skipped=str(reason))
    except Exception as error:
        emit(what, failed=f"{type(error).__name__}: {error}"[:500])


def memory_used_mib() -> int | None:
    """Return what nvidia-smi says is used of the first device."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(query, check=False, capture_output=True, text=True, timeout=20)
    return int(done.stdout.split()[0]) if done.returncode == 0 and done.stdout.strip() else None


def open_driver(setting: Setting, ordinal: int = 0) -> Any:
    if setting.is_fake:
        from kvdepot_cuda.testing import FakeDriver

        return FakeDriver(ordinal)
    from kvdepot_cuda.nvidia import CudaDriver

    return CudaDriver(ordinal)


@contextlib.contextmanager
def shared_file(num_bytes: int):
    """Yield the path of a file on tmpfs with space for all of it."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        yield file.name


def map_file(path: str) -> tuple[mmap.mmap, int]:
    with open(path, "rb+") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- 1. does it work at all -------------------------------------------------------------------------------------------


def environment(setting: Setting) -> None:
    """Describe this machine."""
    packages = {}
    for name in (
        "kvdepot",
        "kvdepot-cuda",
        "torch",
        "triton",
        "numpy",
        "cuda-bindings",
        "pytest",
        "hypothesis",
        "vllm",
    ):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    shm = os.statvfs("/dev/shm")
    emit(
        "machine", python=platform.python_version(), kernel=platform.release(), cores=os.cpu_count(), packages=packages,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
    )  # fmt: skip
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current"
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            check=False, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        emit("nvidia-smi", query=query, answer=done.stdout.strip(), error=done.stderr.strip()[:300])
    driver = open_driver(setting)
    emit("device", description=driver.description, capability=driver.capability, has_batches=driver.has_batch_copy)
    driver.close()


def raw_ipc(setting: Setting) -> None:
    """A raw handle between two processes and one registered file, also after they are killed."""
    setting.need_device()
    num_bytes = 64 * MIB
    before = memory_used_mib()
    with shared_file(2 * num_bytes) as path:
        ours, theirs, exporter = start_child(_exporter, path, num_bytes)
        peer, peers, importer = start_child(_importer, path, num_bytes)
        try:
            handle, offset = receive(ours)
            _, address = map_file(path)
            pattern = os.urandom(MIB)
            ctypes.memmove(address, pattern * (num_bytes // MIB), num_bytes)
            ours.send("upload")
            receive(ours)
            peer.send((handle, offset))
            opened = receive(peer)
            is_right = ctypes.string_at(address + num_bytes, num_bytes) == pattern * (num_bytes // MIB)
            emit("bytes out of the other's memory", right=is_right, **opened)
            ctypes.memset(address, 0x5A, num_bytes)
            peer.send("write")
            receive(peer)
            ours.send("download")
            receive(ours)
            written = ctypes.string_at(address + num_bytes, num_bytes) == b"\x5a" * num_bytes
            emit("bytes into the other's memory", right=written)
            used = {"before": before, "both": memory_used_mib()}
            kill_child(exporter)
            used["exporter killed"] = settled_memory()
            kill_child(importer)
            used["both killed"] = settled_memory()
            emit("memory used, MiB", **used)
        finally:
            for process in (exporter, importer):
                kill_child(process)
            theirs.close()
            peers.close()


def start_child(target: Any, *arguments: Any) -> Any:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_child, args=(target, theirs, *arguments), daemon=True)
    process.start()
    return ours, theirs, process


def _child(target: Any, pipe: Any, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    except (EOFError, OSError):
        pass
    except BaseException as error:
        pipe.send(RuntimeError(f"{target.__name__}: {type(error).__name__}: {error}"))


def receive(pipe: Any, seconds: float = 40.0) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a child said nothing for {seconds:g} s")
    found = pipe.recv()
    if isinstance(found, RuntimeError):
        raise found
    return found


def kill_child(process: Any) -> None:
    if process.is_alive():
        process.kill()
    process.join(20)


def settled_memory() -> int | None:
    time.sleep(1.0)
    return memory_used_mib()


def _checked(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code):
        raise RuntimeError(f"{code.name} ({int(code)})")
    return values[0] if len(values) == 1 else tuple(values)


def copy_bytes(driver: Any, source: int, target: int, num_bytes: int, *, to_host: bool) -> None:
    from kvdepot_cuda.driver import CopyKind

    stream = driver.create_stream()
    driver.copy(source, target, num_bytes, CopyKind.TO_HOST if to_host else CopyKind.TO_DEVICE, stream)
    driver.synchronize_stream(stream)
    driver.destroy_stream(stream)


def _exporter(pipe: Any, path: str, num_bytes: int) -> None:
    """Offers memory; moves it from the file's first half, and to its second."""
    from cuda.bindings import driver as cuda

    driver = open_driver(Setting(False, 0))
    _, address = map_file(path)
    with driver.activated():
        driver.register_host(address, 2 * num_bytes)
        memory = driver.allocate_device(num_bytes)
        base, _ = _checked(cuda.cuMemGetAddressRange(memory))
        handle = _checked(cuda.cuIpcGetMemHandle(memory))
        pipe.send((ctypes.string_at(handle.getPtr(), 64), memory - int(base)))
        while True:
            to_host = pipe.recv() == "download"
            source, target = (memory, address + num_bytes) if to_host else (address, memory)
            copy_bytes(driver, source, target, num_bytes, to_host=to_host)
            pipe.send("done")


def _importer(pipe: Any, path: str, num_bytes: int) -> None:
    """Stands for a mover: opens a handle, registers the file, and copies both ways."""
    from cuda.bindings import driver as cuda

    driver = open_driver(Setting(False, 0))
    _, address = map_file(path)
    raw, offset = pipe.recv()
    with driver.activated():
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, 64)
        started = time.perf_counter()
        base = int(_checked(cuda.cuIpcOpenMemHandle(handle, 1)))  # lazily with peers
        opened = time.perf_counter()
        driver.register_host(address, 2 * num_bytes)
        registered = time.perf_counter()
        copy_bytes(driver, base + offset, address + num_bytes, num_bytes, to_host=True)
        pipe.send({"open_ms": (opened - started) * 1e3, "register_ms": (registered - opened) * 1e3})
        pipe.recv()
        copy_bytes(driver, address, base + offset, num_bytes, to_host=False)
        pipe.send("done")
        pipe.recv()


# --- contexts ---------------------------------------------------------------------------------------------------------


class Cache:
    """A KV cache of `num_layers` pages a block on the device, and a context that moves it in one mode."""

    def __init__(
        self, setting: Setting, url: str, mode: str, *, page_bytes: int, num_layers: int, num_blocks: int,
        block_outermost: bool, **options: Any,
    ) -> None:  # fmt: skip
        from kvdepot.backends import CacheGroup, KVCache
        from kvdepot.errors import BackendUnavailable, ConfigError
        from kvdepot_cuda.carrier import CudaOptions
        from kvdepot_cuda.context import CudaTransferContext

        if setting.is_fake and mode != "direct":
            raise Skipped(f"mode {mode!r} needs a device: the fake driver is one process")
        self.page_bytes, self.num_layers, self.num_blocks = page_bytes, num_layers, num_blocks
        self.block_bytes = page_bytes * num_layers
        self._is_fake = setting.is_fake
        order = (page_bytes, self.block_bytes) if block_outermost else (page_bytes * num_blocks, page_bytes)
        if setting.is_fake:
            from kvdepot_cuda.testing import DEFAULT_STREAM, FakeDriver, FakeTensor, fake_gather

            self._driver = FakeDriver()
            self._address = self._driver.allocate(num_blocks * self.block_bytes)
            tensors = [
                FakeTensor(self._address + layer * order[0], (num_blocks, page_bytes), (order[1], 1))
                for layer in range(num_layers)
            ]
            options |= {
                "open_driver": lambda _ordinal: self._driver, "stream": lambda: DEFAULT_STREAM,
                "compile_gather": fake_gather,
            }  # fmt: skip
        else:
            import torch

            self.memory = torch.zeros(num_blocks * self.block_bytes, dtype=torch.uint8, device="cuda:0")
            tensors = [
                torch.as_strided(self.memory, (num_blocks, page_bytes), (order[1], 1), layer * order[0])
                for layer in range(num_layers)
            ]
        try:
            self.context = CudaTransferContext(
                KVCache([CacheGroup(tensors, 16)], "cuda_gpu", "bytes", chunk_tokens=16),
                CudaOptions(url=url, mode=mode, deadline_seconds=20.0, **options),
            )
        except (BackendUnavailable, ConfigError) as reason:
            raise Skipped(f"mode {mode!r} is not available: {reason}") from reason

    def wait_until_connected(self) -> None:
        """Wait for the depot, and for its mover where one copies."""
        from kvdepot.errors import BackendUnavailable

        try:
            self.context.wait_until_connected(30)
        except BackendUnavailable as reason:  # only the mover could know
            raise Skipped(str(reason)) from reason

    def fill(self, seed: int) -> None:
        """Put bytes into all blocks, of which no two are alike."""
        if self._is_fake:
            import numpy as np

            memory = self._driver.bytes_at(self._address, self.num_blocks * self.block_bytes)
            memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)
            return
        import torch

        torch.manual_seed(seed)
        words = self.memory.view(torch.int64)
        words.random_()
        torch.cuda.synchronize()

    def clear(self) -> None:
        """Put zeros into all blocks."""
        if self._is_fake:
            self._driver.bytes_at(self._address, self.num_blocks * self.block_bytes)[:] = 0
        else:
            self.memory.zero_()

    def bytes(self) -> bytes:
        """Return all of it."""
        if self._is_fake:
            return self._driver.bytes_at(self._address, self.num_blocks * self.block_bytes).tobytes()
        return self.memory.cpu().numpy().tobytes()

    def move(self, way: str, salt: object, blocks: list[int]) -> tuple[bool, float]:
        """Store or retrieve a prompt; return whether all of it was moved, and the seconds that took."""
        from kvdepot.keys import Namespace, hash_prefix

        key = hash_prefix(Namespace(f"cuda_gpu {salt}"), 16, range(len(blocks) * 16))
        submit = self.context.submit_store if way == "store" else self.context.submit_retrieve
        started = time.perf_counter()
        ok = submit("request", key, [blocks]).result(60)
        return ok, time.perf_counter() - started

    def wait_until_settled(self) -> None:
        """Wait until the pool is registered and the kernel loaded, by whoever copies; a mover says so with a copy.

        If that does not come the figures say so, and a line of its own.
        """
        end = time.monotonic() + SETTLE_SECONDS
        self.move("store", "settle", [0])
        while not self.context.is_settled:
            if time.monotonic() > end:
                emit("not settled", **self.state, why=f"not within {SETTLE_SECONDS:g} s: its copies may be pageable")
                return
            self.move("retrieve", "settle", [0])
            time.sleep(0.02)

    @property
    def state(self) -> dict[str, Any]:
        """How the copies are made; of a mover no more is known than whether it still makes anything ready."""
        found = {"mode": self.context.transfer_mode, "settled": self.context.is_settled}
        if self.context.transfer_mode == "ipc":
            return found
        return found | {"num_registered": self.context.num_registered, "kernel_loaded": self.context.uses_kernel}

    def close(self) -> None:
        """Leave the depot."""
        self.context.close()


@contextlib.contextmanager
def cache(setting: Setting, mode: str, pool_bytes: int, **options: Any):
    """Yield a connected cache on a depot of its own, once it is settled."""
    from kvdepot.lab.processes import DepotProcess, wait_until

    with DepotProcess(pool_size=str(pool_bytes)) as depot:
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
        made = Cache(setting, depot.url, mode, **options)
        try:
            made.wait_until_connected()
            made.wait_until_settled()
            yield made
        finally:
            made.close()


MODES = ("direct", "ipc")
KERNEL = {"kernel_run_bytes": 1 << 20, "kernel_runs": 1, "kernel_in_mover": True}


def patterned(setting: Setting) -> None:
    """Random bytes stored, cleared and retrieved, in every mode and layout, and by the kernel."""
    count = 8 if setting.is_fake else 64
    page_bytes = 8192 if setting.is_fake else 65536

    def one(mode: str, block_outermost: bool, options: dict[str, Any]) -> None:
        shape = {"page_bytes": page_bytes, "num_layers": 4, "num_blocks": count, "block_outermost": block_outermost}
        with cache(setting, mode, 256 * MIB, **shape, **options) as made:
            made.fill(seed=7)
            expected = made.bytes()
            blocks = list(range(count))[::-1]
            stored, _ = made.move("store", "pattern", blocks)
            made.clear()
            retrieved, _ = made.move("retrieve", "pattern", blocks)
            emit(
                "bytes", **made.state, block_outermost=block_outermost, kernel=bool(options), stored=stored,
                retrieved=retrieved, right=made.bytes() == expected,
            )  # fmt: skip

    for mode in MODES:
        for block_outermost in (True, False):
            part(f"bytes {mode}", one, mode, block_outermost, {})
        part(f"bytes {mode} with the kernel", one, mode, False, KERNEL)


# --- 2. who slows whom ------------------------------------------------------------------------------------------------


def interference(setting: Setting) -> None:
    """A loop of matmuls and one of small kernels, alone and beside copies of this and of another process."""
    setting.need_device()
    import torch

    seconds = min(1.5, setting.seconds / 100)
    torch.zeros(1, device="cuda:0")
    square = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    vectors = [torch.randn(1 << 16, device="cuda:0") for _ in range(64)]

    def matmul() -> None:
        torch.mm(square, square)

    def small() -> None:
        for vector in vectors:
            vector.mul_(1.0001)

    def rate(loop: Any) -> float:
        """Return runs of the loop a second; at most a few are queued, as an engine does."""
        for _ in range(5):
            loop()
        torch.cuda.synchronize()
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            for _ in range(4):
                loop()
            count += 4
            torch.cuda.synchronize()
        return count / (time.perf_counter() - started)

    for loop in (matmul, small):
        alone = rate(loop)
        for where, way in itertools.product(_Copiers, ("batches", "batches that hint at overlap", "the kernel")):
            for directions in (("to_host",), ("to_device",), ("to_host", "to_device")):
                if way == "the kernel" and directions != ("to_device",):
                    continue  # it retrieves only
                copiers = [_Copiers[where](direction, way) for direction in directions]
                try:
                    for copier in copiers:
                        copier.go()
                    beside = rate(loop)
                    speeds = {copier.direction: copier.stop() for copier in copiers}
                finally:
                    for copier in copiers:
                        copier.close()
                again = rate(loop)
                emit(
                    "slow-down", loop=loop.__name__, copies=" and ".join(directions), of=where, by=way,
                    slower=round((alone + again) / 2 / beside - 1, 4), alone_per_s=round(alone, 1),
                    drift=round(again / alone - 1, 4),
                    gb_per_s={name: round(speed, 2) for name, speed in speeds.items()},
                )  # fmt: skip
                alone = again


class _ThreadCopier:
    """Copies 2 MiB runs in batches on a thread of this process, until it is told to stop."""

    def __init__(self, direction: str, way: str) -> None:
        self.direction = direction
        self._way = way
        self._stop = threading.Event()
        self._go = threading.Event()
        self._result = 0.0
        self._error: Exception | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._is_ready.wait(60)

    def _run(self) -> None:
        try:
            self._result = copy_until(self.direction, self._way, self._is_ready.set, self._go, self._stop)
        except Exception as error:
            self._error = error
            self._is_ready.set()

    def go(self) -> None:
        self._go.set()

    def stop(self) -> float:
        self._stop.set()
        self._thread.join(30)
        if self._error is not None:
            raise self._error
        return self._result

    def close(self) -> None:
        self._go.set()
        self._stop.set()
        self._thread.join(30)


class _ProcessCopier:
    """The same in a process of its own, with a context of its own."""

    def __init__(self, direction: str, way: str) -> None:
        self.direction = direction
        self._pipe, self._theirs, self._process = start_child(_copier_child, direction, way)
        receive(self._pipe)

    def go(self) -> None:
        self._pipe.send("go")

    def stop(self) -> float:
        self._pipe.send("stop")
        return receive(self._pipe)

    def close(self) -> None:
        kill_child(self._process)


_Copiers: dict[str, Any] = {"this process": _ThreadCopier, "another process": _ProcessCopier}


def _copier_child(pipe: Any, direction: str, way: str) -> None:
    copier = _ThreadCopier(direction, way)
    pipe.send("ready")
    pipe.recv()
    copier.go()
    pipe.recv()
    pipe.send(copier.stop())


def copy_until(direction: str, how: str, ready: Any, go: threading.Event, stop: threading.Event) -> float:
    """Copy until `stop`; return GB/s. The kernel gets runs of the size that it is for."""
    import numpy as np

    from kvdepot_cuda.driver import CopyKind
    from kvdepot_cuda.gather import Gather, compile_gather
    from kvdepot_cuda.nvidia import CudaDriver

    way, num_bytes, run = CopyKind(direction), 256 * MIB, 2 * MIB
    if how == "the kernel":
        run = 8 << 10
    driver = CudaDriver(0, prefers_overlap="hint" in how)
    host = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    ctypes.memset(address, 1, num_bytes)
    with driver.activated():
        driver.register_host(address, num_bytes)
        memory, stream = driver.allocate_device(num_bytes), driver.create_stream()
        offsets = np.arange(0, 64 * MIB, run, dtype=np.uint64)
        ends = (offsets + np.uint64(address), np.random.default_rng(0).permutation(offsets) + np.uint64(memory))
        sources, targets = ends if way is CopyKind.TO_DEVICE else ends[::-1]
        sizes = np.full(len(offsets), run, np.uint64)
        gather = None
        if how == "the kernel":
            gather = Gather(driver, compile_gather(driver.capability), 4096)
            sources = offsets + np.uint64(driver.device_address_of(address))
        ready()
        go.wait()
        started, copied = time.perf_counter(), 0
        while not stop.is_set():
            if gather is not None:
                gather.copy(sources, targets, sizes, stream, 8)
            elif driver.has_batch_copy:
                driver.copy_batch(sources, targets, sizes, way, stream)
            else:
                for one in zip(sources.tolist(), targets.tolist(), strict=True):
                    driver.copy(*one, run, way, stream)
            driver.synchronize_stream(stream)
            copied += int(sizes.sum())
        speed = copied / (time.perf_counter() - started) / 1e9
        if gather is not None:
            gather.close()
        driver.unregister_host(address)
        driver.free_device(memory)
        driver.destroy_stream(stream)
    driver.close()
    return speed


# --- 3. the copy table ------------------------------------------------------------------------------------------------


def copies(setting: Setting) -> None:
    """Every way to copy pages, and the thresholds that follow."""
    from kvdepot_cuda import bench
    from kvdepot_cuda.gather import compile_gather
    from kvdepot_cuda.testing import fake_gather

    driver = open_driver(setting)
    plans = {
        "table": bench.BenchPlan(
            page_bytes=tuple(size << 10 for size in (8, 32, 64, 256, 2048)), rounds=3, seconds=setting.seconds * 0.5
        ),
        "tuning": replace(bench.TUNE, rounds=3, seconds=setting.seconds * 0.35),
    }
    for name, plan in plans.items():
        plan = bench.FAKE if setting.is_fake else plan
        result = bench.bench_copies(
            driver, plan, compile_gather=fake_gather if setting.is_fake else compile_gather
        )  # fmt: skip
        for row in result["rows"]:
            emit("copies", table=name, **row)
        emit("copies, in all", table=name, kernel=result["kernel"], cells_left_out=result["cells_left_out"])
        if name == "tuning":
            tuning = bench.tune(result["rows"])
            emit(
                "thresholds", kernel_run_bytes=tuning.use.run_bytes, kernel_runs=tuning.use.min_runs,
                kernel_programs=tuning.use.num_programs, gain=round(tuning.gain, 4),
            )  # fmt: skip
    driver.close()


# --- 4. fixed costs ---------------------------------------------------------------------------------------------------


def registration(setting: Setting) -> None:
    """Registering the pool by size of the pieces, and how long launches of another process stall meanwhile."""
    shm = os.statvfs("/dev/shm")
    free = shm.f_bavail * shm.f_frsize
    gib = 32 * MIB if setting.is_fake else 1 << 30  # what stands for a GiB
    total = max(gib, min(4 * gib, free // 4 // gib * gib))
    for share, is_touched in ((1, False), (1, True), (0.25, True), (4, True)):
        piece = min(int(share * gib), total)
        part("registration", _register, setting, total, piece, is_touched)


def _register(setting: Setting, total: int, piece: int, is_touched: bool) -> None:
    probe = None if setting.is_fake else start_child(_probe)
    driver = open_driver(setting)
    try:
        with shared_file(total) as path:
            memory, address = map_file(path)
            if is_touched:
                ctypes.memset(address, 1, total)
            if probe is not None:
                receive(probe[0])
                time.sleep(1.0)
                probe[0].send("registering")
            seconds = []
            with driver.activated():
                starts = range(address, address + total, piece)
                for start in starts:
                    before = time.perf_counter()
                    driver.register_host(start, min(piece, address + total - start))
                    seconds.append(time.perf_counter() - before)
                stalls = None
                if probe is not None:
                    probe[0].send("end")
                    stalls = receive(probe[0])
                for start in starts:
                    driver.unregister_host(start)
            emit(
                "registration", piece_mib=piece / MIB, total_mib=total // MIB, pages_were_touched=is_touched,
                seconds_a_gib=round(sum(seconds) / total * (1 << 30), 4), longest_call_s=round(max(seconds), 4),
                launches_of_another_process=stalls,
            )  # fmt: skip
            del memory
    finally:
        driver.close()
        if probe is not None:
            kill_child(probe[2])


def _probe(pipe: Any) -> None:
    """Copies 4 KiB again and again, and says how long that took before and while another process registers."""
    from kvdepot_cuda.driver import CopyKind

    driver = open_driver(Setting(False, 0))
    host = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    with driver.activated():
        driver.register_host(address, PAGE)
        memory, stream = driver.allocate_device(PAGE), driver.create_stream()
        pipe.send("ready")
        found = {}
        for phase in ("alone", "meanwhile"):
            times = []
            while not pipe.poll(0):
                before = time.perf_counter()
                driver.copy(address, memory, PAGE, CopyKind.TO_DEVICE, stream)
                driver.synchronize_stream(stream)
                times.append(time.perf_counter() - before)
            pipe.recv()
            found[phase] = _milliseconds(times)
        pipe.send(found)
        pipe.recv()


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 4),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 4),
        "max_ms": round(ordered[-1] * 1e3, 4),
        "count": len(ordered),
    }


def contexts(setting: Setting) -> None:
    """Time and device memory of a process that opens the device, with and without torch."""
    setting.need_device()
    for name in ("driver only", "driver and torch"):
        before = memory_used_mib()
        started = time.perf_counter()
        pipe, _, process = start_child(_opener, name == "driver and torch")
        try:
            inside = receive(pipe, 60)
            emit(
                "a process with the device", kind=name, seconds_from_start=round(time.perf_counter() - started, 3),
                memory_mib=None if before is None else (settled_memory() or 0) - before, **inside,
            )  # fmt: skip
        finally:
            kill_child(process)


def _opener(pipe: Any, with_torch: bool) -> None:
    started = time.perf_counter()
    if with_torch:
        import torch

        torch.zeros(1, device="cuda:0")
    imported = time.perf_counter()
    driver = open_driver(Setting(False, 0))
    with driver.activated():
        driver.create_stream()
        driver.create_stream()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))
    pipe.send({
        "torch_s": round(imported - started, 3), "open_s": round(time.perf_counter() - imported, 3),
        "resident_mib": resident,
    })  # fmt: skip
    pipe.recv()


def latency(setting: Setting) -> None:
    """From a submission to its future, for one block, in each mode."""
    count = 20 if setting.is_fake else 200
    shape = {
        "page_bytes": 4096 if setting.is_fake else 65536,
        "num_layers": 32,
        "num_blocks": 8,
        "block_outermost": True,
    }

    def one(mode: str) -> None:
        started = time.perf_counter()
        with cache(setting, mode, 512 * MIB, **shape) as made:
            times: dict[str, list[float]] = {"store": [], "retrieve": []}
            made.fill(seed=1)
            first = None
            for number in range(count):
                for way, found in times.items():
                    ok, seconds = made.move(way, number, [number % 8])
                    if not ok:
                        raise RuntimeError(f"{way} {number} failed")
                    found.append(seconds)
                    first = first or time.perf_counter() - started
            for way, found in times.items():
                emit("one block", **made.state, way=way, block_bytes=made.block_bytes, **_milliseconds(found[3:]))
            emit("first copy once settled", mode=mode, seconds_from_nothing=round(first or 0.0, 3))

    for mode in MODES:
        part(f"one block {mode}", one, mode)


# --- 5. the whole -----------------------------------------------------------------------------------------------------


SUITES = {
    "by the worker": "TestByTheWorker",
    "by a mover": "TestByAMover",
    "worker, mover and depot killed": "TestWorkerMoverAndDepotKilled",
    "worker and depot killed": "TestWorkerAndDepotKilled",
    "by the worker, with the kernel": "TestByTheWorkerWithTheKernel",
    "by a mover, with the kernel": "TestByAMoverWithTheKernel",
    "by a mover, small allocations": "TestSmallAllocations",
}


def conformance(setting: Setting) -> None:
    """The suites of every backend with the real driver, in both modes and with kills, all at the same time."""
    setting.need_device()
    need_pytest()
    run_suites({name: [f"tests/cuda/test_on_device.py::{test}"] for name, test in SUITES.items()}, setting.seconds - 15)


def need_pytest() -> None:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"needs {' and '.join(missing)}")


PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have those in the background ignore it
sys.exit(pytest.main())
"""


def run_suites(suites: dict[str, list[str]], seconds: float) -> None:
    """Run pytest for each with its arguments; say how each ended, or how far it got in `seconds`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = {}
        for number, (name, arguments) in enumerate(suites.items()):
            out = stack.enter_context(open(f"{folder}/{number}.out", "w+"))
            command = [sys.executable, "-c", PYTEST, "-v", "-rfEs", "--maxfail=5", "-p", "no:cacheprovider",
                       "--color=no", f"--basetemp={folder}/{number}", *arguments]  # fmt: skip
            environment = {**os.environ, "KVDEPOT_REQUIRE_CUDA": "1", "PYTHONUNBUFFERED": "1",
                           "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # fmt: skip
            running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            ), out  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process, _ in running.values()):
            time.sleep(0.1)
        late = [process for process, _ in running.values() if process.poll() is None]
        for process in late:
            process.send_signal(signal.SIGINT)  # so that it ends its depots and says where it was
        grace = time.monotonic() + 8
        for name, (process, out) in running.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, grace - time.monotonic()))
            process.kill()
            returned = process.wait()
            status: Any = f"cut off after {seconds:.0f} s" if process in late else returned
            out.seek(0)
            lines = out.read().splitlines()
            words = [word for line in lines if "::" in line for word in line.split()[1:2]]
            emit(
                "suite", suite=name, status=status,
                **{word.lower(): words.count(word) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")},
                last_lines=lines[-12:] if status else lines[-1:],
            )  # fmt: skip


def retrieve(setting: Setting) -> None:
    """10,000 tokens of an 8B model (32 layers x 64 KiB a block), by layout, mode and kernel."""
    count = 12 if setting.is_fake else 625
    page_bytes = 4096 if setting.is_fake else 65536
    rounds = 2 if setting.is_fake else 5

    def one(mode: str, block_outermost: bool, options: dict[str, Any]) -> None:
        shape = {
            "page_bytes": page_bytes,
            "num_layers": 32,
            "num_blocks": 2 * count,
            "block_outermost": block_outermost,
        }
        num_bytes = count * 32 * page_bytes
        with cache(setting, mode, 2 * num_bytes + 256 * MIB, **shape, **options) as made:
            import random

            made.fill(seed=3)
            blocks = random.Random(0).sample(range(2 * count), count)
            times: dict[str, list[float]] = {"store": [], "retrieve": []}
            for number in range(rounds):
                for way, found in times.items():
                    ok, seconds = made.move(way, f"{number % 2}", blocks)
                    if not ok:
                        raise RuntimeError(f"{way} {number} failed")
                    if way == "retrieve" or number < 2:  # later stores find their chunks there
                        found.append(seconds)
            for way, found in times.items():
                emit(
                    "10,000 tokens", **made.state, block_outermost=block_outermost, kernel=bool(options), way=way,
                    ms=round(statistics.median(found) * 1e3, 2),
                    gb_per_s=round(num_bytes / statistics.median(found) / 1e9, 2),
                    spread_ms=[round(min(found) * 1e3, 2), round(max(found) * 1e3, 2)],
                )  # fmt: skip

    for mode in MODES:
        for block_outermost in (True, False):
            part(f"10,000 tokens {mode}", one, mode, block_outermost, {})
        part(f"10,000 tokens {mode} with the kernel", one, mode, False, KERNEL)
    emit("time to the first token", skipped="needs vLLM and a model: compare with its OffloadingConnector by hand")


Steps = dict[str, tuple[Any, float]]
STEPS: Steps = {
    "environment": (environment, 20),
    "raw_ipc": (raw_ipc, 40),
    "patterned": (patterned, 60),
    "conformance": (conformance, 130),
    "copies": (copies, 90),
    "interference": (interference, 70),
    "retrieve": (retrieve, 60),
    "latency": (latency, 40),
    "registration": (registration, 50),
    "contexts": (contexts, 30),
}
"""In this order; with the seconds that each has in any case: all together no more than the whole may take."""
SECONDS = 590.0
assert sum(limit for _, limit in STEPS.values()) <= SECONDS


def limit_of(name: str, wanted: list[str], left: float, steps: Steps) -> float:
    """Return the seconds of a step, of the `left` for it and all that follow: its own, and what others left over."""
    following = wanted[wanted.index(name) :]
    own = steps[name][1]
    return min(left, own + min(own, max(0.0, left - sum(steps[step][1] for step in following))))


# --- parent -----------------------------------------------------------------------------------------------------------


def run_step(name: str, limit: float, *, is_fake: bool, script: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run one step in a process group of its own; return what it found, and how it ended."""
    command = [sys.executable, str(script), "--step", name, "--limit", str(limit)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command + ["--fake"] * is_fake, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        reason, is_cut = "", False
        try:
            status = {0: "ok", 3: "skipped"}.get(process.wait(limit), "failed")
        except subprocess.TimeoutExpired:
            status, reason = "timed out", f"not done after {limit:.0f} s"
            is_cut = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pool in Path("/dev/shm").glob(f"kvdepot-pool-{process.pid}-*"):  # of depots that were killed with the step
            shutil.rmtree(pool, ignore_errors=True)
        out.seek(0)
        err.seek(0)
        findings = []
        for line in out.read().splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    findings.append({"step": name, **found})
        complaints = err.read().strip().splitlines()
    parts = [found["part"] for found in findings if found.get("what") == BEGUN]
    findings = [found for found in findings if found.get("what") != BEGUN]
    if is_cut and parts:
        reason += f": cut off in {parts[-1]!r}, part {len(parts)}; what follows it was not begun"
    if status in ("failed", "skipped") and complaints:
        reason = complaints[-1][:500]
    end = {"step": name, "status": status, "seconds": round(time.monotonic() - started, 1)}
    return findings, end | ({"reason": reason} if reason else {})


def tables(
    findings: list[dict[str, Any]], ends: list[dict[str, Any]], *, is_fake: bool, steps: Steps, title: str
) -> str:
    """Return everything as Markdown."""
    lines = [f"# {title}", ""]
    if is_fake:
        lines += ["**No GPU is behind these figures: they come of a driver without a device and say nothing.**", ""]
    lines += ["| step | how it ended | seconds | why |", "|---|---|---|---|"]
    lines += [f"| {end['step']} | {end['status']} | {end['seconds']} | {end.get('reason', '')} |" for end in ends]
    for step in steps:
        mine = [found for found in findings if found["step"] == step]
        if mine:
            lines += ["", f"## {step}"]
        kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for found in mine:
            values = {name: value for name, value in found.items() if name != "step"}
            if "ways" in values:
                ways = values.pop("ways")
                values |= {name: f"{way['ratio']:.2f} ({way['submit_us']:.0f} us)" for name, way in ways.items()}
            kinds.setdefault(tuple(values), []).append(values)
        for columns, rows in kinds.items():
            lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [f"| {' | '.join(_cell(row[column]) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")


def run_steps(steps: Steps, name: str, *, script: Path, title: str, description: str, seconds: float) -> None:
    """Be the command line of a script whose steps these are; its files have this name."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="where the two files go (default .)")
    parser.add_argument("--seconds", type=float, default=seconds, help="for all of it (default %(default)s)")
    parser.add_argument("--only", default="", metavar="STEP,..", help=f"of {', '.join(steps)}")
    parser.add_argument("--fake", action="store_true", help="without a device: shows that the script works")
    parser.add_argument("--step", choices=sorted(steps), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        try:
            steps[options.step][0](Setting(options.fake, options.limit))
        except Skipped as reason:
            print(reason, file=sys.stderr)
            sys.exit(3)
        return
    wanted = options.only.split(",") if options.only else list(steps)
    if unknown := set(wanted) - set(steps):
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    findings: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    files = [options.out / f"{name}{suffix}" for suffix in (".jsonl", ".md")]
    with open(files[0], "w") as log:
        for each in (each for each in steps if each in wanted):
            limit = limit_of(each, [step for step in steps if step in wanted], deadline - time.monotonic(), steps)
            if limit < 5:
                found, end = [], {"step": each, "status": "skipped", "seconds": 0.0, "reason": "no time was left"}
            else:
                found, end = run_step(each, limit, is_fake=options.fake, script=script)
            findings += found
            ends.append(end)
            log.writelines(json.dumps({"is_a_gpu": not options.fake, **line}) + "\n" for line in [*found, end])
            log.flush()
            files[1].write_text(tables(findings, ends, is_fake=options.fake, steps=steps, title=title))
            reason = f": {end['reason']}" if "reason" in end else ""
            print(f"{each}: {end['status']}, {end['seconds']} s{reason}", flush=True)
    print(files[1])


if __name__ == "__main__":
    run_steps(
        STEPS, "cuda_gpu", script=Path(__file__).resolve(), title="CUDA on a GPU", description=__doc__ or "",
        seconds=SECONDS,
    )  # fmt: skip
