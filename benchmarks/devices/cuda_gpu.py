# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The plan for a GPU: `python benchmarks/devices/cuda_gpu.py --out FOLDER [--only PHASE,..]`.

Run it from the repository on an otherwise idle machine with torch, triton, numpy, cuda-bindings, pytest and hypothesis,
and with kvdepot and kvdepot-cuda installed. Each phase is a process with a limit of at most three minutes. A phase that
fails, hangs or cannot run is reported, and the next one starts. Findings go to `cuda_gpu.jsonl`, one a line, and as
tables to `cuda_gpu.md`. `--fake` rehearses without a device, on a small scale and with the tests' driver: it shows that
the script works, and its figures mean nothing.
README.md beside it says what to expect; docs/devices.md has the results on an H100 and H200s.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Self

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from kvdepot.backends import CacheGroup, KVCache  # noqa: E402  # after the path
from kvdepot.errors import KVDepotError  # noqa: E402
from kvdepot.keys import Namespace, hash_prefix  # noqa: E402
from kvdepot.lab.processes import DepotProcess, wait_until  # noqa: E402
from kvdepot_cuda.context import CudaOptions, CudaTransferContext  # noqa: E402
from kvdepot_cuda.driver import CopyKind  # noqa: E402
from kvdepot_cuda.gather import Gather, compile_gather  # noqa: E402
from kvdepot_cuda.nvidia import CudaDriver  # noqa: E402
from support.cuda.fake import DEFAULT_STREAM, FakeDriver, FakeTensor, fake_gather, fake_sums  # noqa: E402
from support.forked import forked_children  # noqa: E402

FAKE = "--fake" in sys.argv
MIB = 1 << 20
LAYERS, PAGE = (4, 8192) if FAKE else (32, 65536)  # of an 8B model: 32 layers, 16 tokens of 64 KiB
COUNT = 12 if FAKE else 10_000 // 16  # blocks for 10,000 tokens
# Transfers queued after device work of a second: the bytes must be right, and no transfer may run too early.
ORDER = ["order_on_device.py"]
# The suites of every backend at the same time, in both modes and with kills.
SUITES = "ByTheWorker ByTheWorkerWithTheKernel ByAMover SmallAllocations WorkerAndDepotKilled WorkerMoverAndDepotKilled"
CONFORMANCE = [f"on_device.py::Test{name}" for name in SUITES.split()]
if FAKE:  # two of the tests that need no device: they show that tests run in parallel
    ORDER = ["conformance.py::TestTheDevicesOwnTests"]
    CONFORMANCE = [*ORDER]
    CONFORMANCE.append("conformance.py::TestFaults::test_the_successor_of_a_killed_engine_finds_what_it_had_stored")


def report(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


@contextlib.contextmanager
def part(what: str) -> Iterator[None]:
    """Report an error as a finding, so that the next part runs."""
    try:
        yield
    except Exception as error:
        report("failed", part=what, why=f"{type(error).__name__}: {error}"[:500])


def open_driver() -> Any:
    return FakeDriver(root=Path(os.environ["KVDEPOT_FAKE_DEVICE"]) / "memory") if FAKE else CudaDriver(0)


def percentiles(seconds: list[float]) -> dict[str, float]:
    found = sorted(seconds)
    at = (("p50_ms", len(found) // 2), ("p99_ms", len(found) * 99 // 100), ("max_ms", -1))
    return {name: round(found[index] * 1e3, 4) for name, index in at}


# --- does it work at all ----------------------------------------------------------------------------------------------


def machine(_seconds: float) -> None:
    """Report versions, the device, and the time that a process needs to open it."""
    names = ("kvdepot", "kvdepot-cuda", "torch", "triton", "numpy", "cuda-bindings", "pytest")
    report("packages", **{each.name: each.version for each in distributions() if each.name in names})
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max"
        done = subprocess.run(["nvidia-smi", query, "--format=csv"], check=False, capture_output=True, text=True)
        report("nvidia-smi", said=done.stdout + done.stderr)
    began, driver = time.perf_counter(), open_driver()
    seconds, free = time.perf_counter() - began, shutil.disk_usage("/dev/shm").free // MIB
    report("device", description=driver.description, uuid=driver.uuid, open_seconds=seconds, shm_free_mib=free)


class Cache:
    """A KV cache on the device, its own depot, and a context that moves its blocks."""

    def __init__(
        self,
        mode: str,
        num_blocks: int,
        *,
        layers: int = LAYERS,
        page: int = PAGE,
        block_outermost: bool = True,
        verify: str = "sample",
        is_full: bool = False,
        **options: Any,
    ) -> None:
        self.half: list[int] = np.random.default_rng(0).permutation(num_blocks)[: num_blocks // 2].tolist()
        self.salts = itertools.count()
        self.block_bytes, self.num_bytes = layers * page, layers * page * num_blocks
        pool_bytes = 2 * self.num_bytes + 128 * MIB
        self.depot = DepotProcess("--move-seconds", "20", "--verify", verify, pool_size=str(pool_bytes))
        wait_until(lambda: self.depot.status().pool_ready_bytes == self.depot.status().pool_size_bytes, 120)
        self.driver = open_driver()
        with self.driver.activated():
            self.address = self.driver.allocate_device(self.num_bytes)
            self.others = fill_device(self.driver) if is_full else []
        step, stride = (page, self.block_bytes) if block_outermost else (page * num_blocks, page)
        tensors = [FakeTensor(self.address + n * step, (num_blocks, page), (stride, 1)) for n in range(layers)]
        if FAKE:
            options |= {"open_driver": lambda _: self.driver, "mover": "fake-cuda", "compile_gather": fake_gather}
            options["compile_sums"] = fake_sums
        began = time.monotonic()
        self.context = CudaTransferContext(
            KVCache([CacheGroup(tensors, 16)], "cuda_gpu", "bytes", chunk_tokens=16),
            CudaOptions(url=self.depot.url, mode=mode, deadline_seconds=20.0, stream=lambda: DEFAULT_STREAM, **options),
        )
        self.context.wait_until_connected(30)
        self.move("store", "settle", [0])
        while not self.context.is_warm and time.monotonic() < began + 60:  # copies are pageable until then
            self.move("retrieve", "settle", [0])
        self.settle_seconds = time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
        self.depot.close()
        if not FAKE:  # the context has already closed the fake device's only driver
            with self.driver.activated():
                for address in (self.address, *self.others):
                    self.driver.free_device(address)

    def move(self, way: str, salt: object, blocks: list[int]) -> float:
        """Store or retrieve a prompt. Return the seconds."""
        key = hash_prefix(Namespace(f"cuda_gpu {salt}"), 16, range(len(blocks) * 16))
        submit = self.context.submit_store if way == "store" else self.context.submit_retrieve
        began = time.perf_counter()
        if not submit("request", key, [blocks]).result(60):
            raise RuntimeError(f"a {way} was a miss")
        return time.perf_counter() - began

    def copy(self, host: Any, kind: CopyKind) -> None:
        """Copy all blocks from or to the host without the depot."""
        ends = (host.ctypes.data, self.address) if kind is CopyKind.TO_DEVICE else (self.address, host.ctypes.data)
        with self.driver.activated():
            stream = self.driver.create_stream()
            self.driver.copy(*ends, self.num_bytes, kind, stream)
            self.driver.synchronize_stream(stream)
            self.driver.destroy_stream(stream)

    def again(self, way: str) -> float:
        """Retrieve the prompt "kept", or store a new prompt. Return the seconds."""
        return self.move(way, "kept" if way == "retrieve" else next(self.salts), self.half)

    def brings_bytes_back(self) -> bool:
        """Store random bytes, clear the device and retrieve them. Return whether all are right."""
        host = np.random.default_rng(7).integers(0, 256, self.num_bytes, np.uint8)
        expected, blocks = host.copy(), list(range(2 * len(self.half)))[::-1]
        self.copy(host, CopyKind.TO_DEVICE)
        self.move("store", "bytes", blocks)
        self.copy(np.zeros_like(host), CopyKind.TO_DEVICE)
        self.move("retrieve", "bytes", blocks)
        self.copy(host, CopyKind.TO_HOST)
        return bool(np.array_equal(host, expected))

    @property
    def state(self) -> dict[str, Any]:
        """Return the mode, and when the pool was registered. A mover's pieces and kernel are not known here."""
        made, settled = self.context, {"settled": self.context.is_warm, "settle_seconds": self.settle_seconds}
        return {"mode": made.transfer_mode, **settled, "pieces": made.num_registered, "kernel": made.uses_kernel}


def bytes_(_seconds: float) -> None:
    """Store, clear and retrieve random bytes, in both modes and layouts, by DMA and by the kernel."""
    for mode, outermost, kernel in itertools.product(("direct", "ipc"), (True, False), (False, True)):
        if kernel and mode == "ipc":
            continue  # a mover has no kernel
        shape: dict[str, Any] = {"layers": 4, "page": 8192, "block_outermost": outermost, "gather_kernel": kernel}
        with part(f"{mode}, {outermost=}, {kernel=}"), Cache(mode, 64, **shape) as cache:
            report("bytes", **cache.state, block_outermost=outermost, right=cache.brings_bytes_back())


def full(_seconds: float) -> None:
    """Do the same while the device has no free memory: pieces that it refuses to register are copied as pageable."""
    for mode in ("direct", "ipc"):
        with part(mode), Cache(mode, 64, layers=4, page=8192, is_full=True) as cache:
            report("full", **cache.state, allocations=len(cache.others), right=cache.brings_bytes_back())


def fill_device(driver: Any) -> list[int]:
    """Allocate the rest of the device, down to 2 MiB. The fake refuses the registration of the first piece instead."""
    if FAKE:
        driver.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY (2)", times=1)
        return []
    found: list[int] = []
    for mib in (16384, 2048, 256, 32, 2):
        with contextlib.suppress(KVDepotError):
            while True:
                found.append(driver.allocate_device(mib * MIB))
    return found


def captures(_seconds: float) -> None:
    """Capture CUDA graphs in torch's global mode while another thread opens contexts, registers pools and copies."""
    if FAKE:
        report("skipped", why="needs a device and torch")
        return
    torch, found = importlib.import_module("torch"), []
    vector = torch.zeros(1 << 16, device="cuda")
    with beside(one_engine, found):
        for number in range(60):
            with part(f"graph {number}"):
                before, graph = float(vector[0]), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(100):
                        vector.add_(1)
                graph.replay()
                found.append(float(vector[0]) == before + 100)
    report("captures", right=found.count(True), engines_beside=found.count("engine"))


def one_engine(found: list[Any]) -> None:
    with Cache("direct", 8) as cache:
        cache.move("retrieve", "settle", [0])
    found.append("engine")


@contextlib.contextmanager
def beside(work: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Repeat `work` on a thread during the block. Its error ends the part."""
    stop, errors = threading.Event(), []

    def repeat() -> None:
        try:
            while not stop.is_set():
                work(*arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    if errors or thread.is_alive():
        raise RuntimeError(f"the thread beside it ended, or hangs: {errors}")


def stress(seconds: float) -> None:
    """Store and retrieve at the same time, many small runs a call: drivers of release 580 are reported to hang."""
    sizes = (64, 128) if FAKE else (256, 1024, 4096)
    for batch_runs, kernel in [*((size, False) for size in sizes), (sizes[-1], True)]:
        shape: dict[str, Any] = {"page": 8192, "block_outermost": False, "batch_runs": batch_runs}
        shape["gather_kernel"] = kernel
        with part(f"{batch_runs} runs a call, {kernel=}"), Cache("direct", 512, **shape) as cache:
            host = np.random.default_rng(3).integers(0, 256, cache.num_bytes, np.uint8)
            expected = host.copy()
            cache.copy(host, CopyKind.TO_DEVICE)
            cache.move("store", "kept", cache.half)
            with beside(cache.again, "store"):
                end, times = time.monotonic() + (0.5 if FAKE else seconds / 7), []
                while time.monotonic() < end:
                    times.append(cache.again("retrieve"))
            cache.copy(host, CopyKind.TO_HOST)
            right = bool((host == expected).all())
            report("stress", batch_runs=batch_runs, kernel=kernel, right=right, **percentiles(times))


def run_tests(seconds: float, names: Sequence[str]) -> None:
    """Run tests in parallel. Report the end of each one's output, even if it was cut off."""
    environment = os.environ | ({} if FAKE else {"KVDEPOT_REQUIRE_CUDA": "1"})
    flags = ["-q", "--maxfail=3", "--tb=short", "-m", "", "-p", "no:cacheprovider", "--color=no"]
    command = [sys.executable, "-m", "pytest", *flags]
    running: list[tuple[str, Any, Any]] = []
    for name in names:
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115  # until the end of this process
        test = [*command, f"tests/cuda/test_{name}"]
        running.append((name, out, subprocess.Popen(test, stdout=out, stderr=out, cwd=ROOT, env=environment)))
    end = time.monotonic() + seconds - 10
    for name, out, process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        status = process.poll()
        out.seek(0)
        said = out.read()[-8000 if status else -800 :]
        report("tests", name=name, status="cut off" if status is None else status, said=said)


# --- how fast, and at whose cost --------------------------------------------------------------------------------------


def interference(_seconds: float) -> None:
    """Measure how much longer matmuls, small kernels and graphs of small kernels take beside copies."""
    if FAKE:
        square, wait = np.ones((64, 64)), lambda: None
        loops: dict[str, Any] = {"no device": lambda: square @ square}
    else:
        torch = importlib.import_module("torch")
        square, wait = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.synchronize
        vectors = [torch.randn(1 << 16, device="cuda") for _ in range(64)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _ = [each.mul_(1.0001) for each in vectors]
        loops = {"matmul": lambda: torch.mm(square, square), "small": lambda: [each.mul_(1.0001) for each in vectors]}
        loops["graph"] = graph.replay

    def rate(loop: Callable[[], object]) -> float:
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + (0.1 if FAKE else 1.0):
            for _ in range(4):  # an engine does not queue more
                loop()
            wait()
            count += 4
        return count / (time.perf_counter() - began)

    small = {"block_outermost": False, "page": 8192, "gather_kernel": False}
    kernel = small | {"gather_kernel": True}
    ways: list[tuple[str, Any]] = [("direct", {}), ("direct", small), ("direct", kernel), ("ipc", {})]
    for (mode, options), way in itertools.product(ways, ("retrieve", "store")):
        with part(f"{mode}, {options}, {way}"), Cache(mode, 256, **options) as cache:
            cache.move("store", "kept", cache.half)
            for name, loop in loops.items():
                alone = rate(loop)
                with beside(cache.again, way):
                    times = alone / rate(loop)
                row = {"mode": mode, "options": list(options), "kernel": cache.context.uses_kernel}
                report("takes times as long", **row, copies=way, loop=name, times=round(times, 3))


def retrieve(_seconds: float) -> None:
    """Time 10,000 tokens of an 8B model and one block, by mode, layout, kernel, batch size and checksums."""
    ways = [("direct", True, False), ("direct", False, False), ("direct", False, True), ("ipc", True, False)]
    ways.append(("ipc", False, False))
    for (mode, outermost, kernel), (batch_mib, verify) in itertools.product(
        ways, ((64, "sample"), (64, "off"), (256, "sample"))
    ):
        shape: dict[str, Any] = {"block_outermost": outermost, "gather_kernel": kernel, "batch_bytes": batch_mib * MIB}
        with part(f"{mode}, {shape}"), Cache(mode, 2 * COUNT, verify=verify, **shape) as cache:
            cache.move("store", "kept", cache.half)
            store = statistics.median(cache.again("store") for _ in range(3))
            one = [cache.move("retrieve", "settle", [0]) for _ in range(20)]
            times = [cache.again("retrieve") for _ in range(5)]
            row = {"block_outermost": outermost, "batch_mib": batch_mib, "verify": verify, **percentiles(times)}
            row |= {"store_ms": round(store * 1e3, 2), "one_block": percentiles(one)}
            row["gb_per_s"] = round(COUNT * cache.block_bytes / statistics.median(times) / 1e9, 2)
            report("retrieve", **cache.state, **row)


def copies(_seconds: float) -> None:
    """Compare the ways to copy scattered pages with one large copy. The kernel's thresholds come from these ratios."""
    driver, count, sizes = open_driver(), 16 if FAKE else 1024, (4, 8) if FAKE else (4, 8, 16, 32, 64, 256)
    with driver.activated():
        gather = None
        with part("kernel"):
            gather = Gather(driver, (fake_gather if FAKE else compile_gather)(driver.capability), count)
        host = np.frombuffer(mmap.mmap(-1, count * max(sizes) << 10), np.uint8)
        driver.register_host(host.ctypes.data, host.nbytes)
        device, stream = driver.allocate_device(2 * host.nbytes), driver.create_stream()

        def seconds(way: Callable[[], object]) -> float:
            began = time.perf_counter()
            for _ in range(8):
                way()
            driver.synchronize_stream(stream)
            return time.perf_counter() - began

        for size, kind in itertools.product([kib << 10 for kib in sizes], (CopyKind.TO_DEVICE, CopyKind.TO_HOST)):
            places = np.random.default_rng(0).permutation(2 * count)[:count].astype(np.uint64)
            pages, offsets = (
                places * np.uint64(size) + np.uint64(device),
                np.arange(count, dtype=np.uint64) * np.uint64(size),
            )
            each, order = np.full(count, np.uint64(size)), slice(None, None, 1 if kind is CopyKind.TO_DEVICE else -1)
            by_dma = (offsets + np.uint64(host.ctypes.data), pages)[order]
            by_kernel = (offsets + np.uint64(driver.device_address_of(host.ctypes.data)), pages)[order]
            ways: dict[str, Callable[[], object]] = {
                "one": partial(driver.copy, *(host.ctypes.data, device)[order], count * size, kind, stream),
                "batch": partial(driver.copy_batch, *by_dma, each, kind, stream),
            }
            if gather is not None:
                ways["kernel"] = partial(gather.copy, *by_kernel, each, stream)
            rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(6)][
                1:
            ]  # the first one warms up
            ratios = {name: round(statistics.median(r["one"] / r[name] for r in rounds), 3) for name in ways}
            gb_per_s = round(8e-9 * count * size / statistics.median(r["one"] for r in rounds), 1)
            report("copies", direction=kind.value, page_bytes=size, gb_per_s=gb_per_s, ratios=ratios)


def sums(_seconds: float) -> None:
    """Compare digests of the device with xxhash, and stores whose checksums the device or threads compute, in turn."""
    page, layers = (8192, 4) if FAKE else (65536, 32)
    for outermost, size in itertools.product((True, False), (page, 8192)):
        shape: dict[str, Any] = {"block_outermost": outermost, "page": size, "layers": layers * page // size}
        ways: dict[str, dict[str, Any]] = {"off": {"verify": "off"}, "threads": {}, "device": {"checksum_kernel": True}}
        with contextlib.ExitStack() as stack, part(f"{shape}"):
            caches = dict[str, Cache]()
            for way, options in ways.items():
                all_options: dict[str, Any] = {"verify": "all"} | shape | options
                caches[way] = stack.enter_context(Cache("direct", COUNT, **all_options))
            for cache in caches.values():
                cache.copy(np.random.default_rng(5).integers(0, 256, cache.num_bytes, np.uint8), CopyKind.TO_DEVICE)
                cache.move("store", "kept", cache.half)
            caches["device"].again("retrieve")  # a miss if a digest is not that of xxhash
            rounds = [{way: cache.again("store") for way, cache in caches.items()} for _ in range(7)]
            ratios = {way: round(statistics.median(r[way] / r["off"] for r in rounds), 3) for way in caches}
            store_ms = {way: round(statistics.median(r[way] for r in rounds) * 1e3, 2) for way in caches}
            shape["block_outermost"] = outermost
            report("sums", **shape, right=caches["device"].context.uses_sums, ratios=ratios, store_ms=store_ms)


def run_script(_seconds: float, name: str, options: Sequence[str] = (), needs: str = "kvdepot_cuda") -> None:
    """Run a script whose findings are lines in the same form."""
    if importlib.util.find_spec(needs) is None:
        report("skipped", why=f"needs {needs}")
        return
    script = str(Path(__file__).parent / name)
    subprocess.run([sys.executable, script, *options, *["--fake"] * FAKE], check=True)


def vllm(*options: str) -> Callable[[float], None]:
    return partial(run_script, name="vllm_cuda.py", needs="vllm", options=options)


SGLANG = ("--device", "cuda", "--kinds", "--rounds", "2", "--steps", "300")
# In the order in which a fault would harm users. To add a check, for example of another kernel, add a function here.
PHASES: dict[str, tuple[Callable[[float], None], float]] = {  # with each one's time limit in seconds
    "machine": (machine, 30), "bytes": (bytes_, 90), "ranks": (partial(run_script, name="register_ranks.py"), 150),
    "kinds": (vllm("--only", "kinds"), 180), "sleep": (vllm("--only", "sleep"), 120),
    "sglang": (partial(run_script, name="../engine/sglang_decoders.py", options=SGLANG, needs="sglang"), 180),
    "served": (vllm("--only", "large", "--engines", "alone,offloading,direct"), 180),
    "full": (full, 60), "kills": (vllm("--only", "kills"), 120),
    "order": (partial(run_tests, names=ORDER), 90), "captures": (captures, 60), "stress": (stress, 120),
    "conformance": (partial(run_tests, names=CONFORMANCE), 180), "interference": (interference, 150),
    "retrieve": (retrieve, 150), "copies": (copies, 60), "sums": (sums, 90),
    "shared": (vllm("--only", "large", "--engines", "direct,other,ipc"), 180),
}  # fmt: skip


def tables(findings: Sequence[dict[str, Any]]) -> str:
    """Return a table for each kind of finding."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in findings:
        values = {key: value for key, value in line.items() if key not in ("phase", "what", "is_a_gpu", "said", "why")}
        kinds.setdefault((line["phase"] * (line["what"] != "end"), line["what"]), []).append(
            {"phase": line["phase"], **values} if line["what"] == "end" else values
        )
    text: list[str] = []
    for (phase, what), rows in kinds.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in rows)]
        text += [f"## {phase} {what}", "", *("| " + " | ".join(map(str, each)) + " |" for each in cells), ""]
    return "\n".join(text)


def run_phase(name: str, limit: float) -> list[dict[str, Any]]:
    """Run a phase in its own process group. Return its findings. The last one says how the phase ended."""
    command = [sys.executable, __file__, "--phase", name, *["--fake"] * FAKE]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            status = "failed" if process.wait(limit) else "ok"
        except subprocess.TimeoutExpired:
            status = "cut off"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pool in Path("/dev/shm").glob(f"kvdepot-pool-{process.pid}-*"):  # of depots that were killed with the phase
            shutil.rmtree(pool, ignore_errors=True)
        out.seek(0)
        lines = out.read().splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"what"')]
    if status == "ok" and any(x["what"] == "failed" or x.get("right") is False or x.get("status") for x in found):
        status = "wrong"
    why = lines[-1][-500:] if lines and status != "ok" else ""
    end = {"what": "end", "status": status, "seconds": round(time.monotonic() - began, 1), "why": why}
    return [{"phase": name, "is_a_gpu": not FAKE, **line} for line in [*found, end]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for cuda_gpu.jsonl (default .)")
    parser.add_argument("--only", default=",".join(PHASES), metavar="PHASE,..", help="of %(default)s")
    parser.add_argument("--fake", action="store_true", help="without a device")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        with forked_children() if FAKE else contextlib.nullcontext():
            PHASES[options.phase][0](PHASES[options.phase][1])
        return
    if FAKE:
        os.environ["KVDEPOT_FAKE_DEVICE"] = folder = tempfile.mkdtemp(prefix="kvd-", dir="/dev/shm")
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([f"{ROOT}/tests/support/cuda/movers", f"{ROOT}/tests", before])
        (Path(folder) / "memory").mkdir()
    options.out.mkdir(parents=True, exist_ok=True)
    findings: list[dict[str, Any]] = []
    for name in options.only.split(","):
        findings += run_phase(name, PHASES[name][1])
        (options.out / "cuda_gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in findings))
        (options.out / "cuda_gpu.md").write_text(tables(findings))
        print(name, *list(findings[-1].values())[3:], flush=True)
    if FAKE:
        shutil.rmtree(os.environ["KVDEPOT_FAKE_DEVICE"])


if __name__ == "__main__":
    main()
