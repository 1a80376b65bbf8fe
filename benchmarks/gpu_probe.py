# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Find out in the first minutes on a GPU whether the CUDA backend works at all: `python gpu_probe.py --out FOLDER`.

**Never run on a GPU.** It needs what `cuda_gpu.py` beside it needs, and runs its steps in the same way: each a process
with a time limit, what it finds in `gpu_probe.jsonl` and `gpu_probe.md`. `--fake` shows that it starts and ends. What
to expect of each step, and what else to do, is in docs/cuda.md.
"""

import ctypes
import faulthandler
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cuda_gpu as base
from cuda_gpu import MIB, Setting, emit, part

DEVICE = Setting(False, 60.0)
SHAPE = {"page_bytes": 65536, "num_layers": 4, "num_blocks": 64, "block_outermost": True}


def anonymous(num_bytes: int) -> tuple[mmap.mmap, int]:
    host = mmap.mmap(-1, num_bytes)
    return host, ctypes.addressof(ctypes.c_char.from_buffer(host))


# --- small allocations: some of them in one 2 MiB block of the driver -------------------------------------------------


def small_ipc(setting: Setting) -> None:
    """Handles of allocations of 64 KiB and of 4 MiB: where they open in another process, and the bytes there."""
    setting.need_device()
    for size in (64 << 10, 4 * MIB):
        part(f"{size} bytes", _small_ipc, size)


def _small_ipc(size: int) -> None:
    to_exporter, _, exporter = base.start_child(_small_exporter, size)
    to_importer, _, importer = base.start_child(_small_importer, size)
    try:
        found = base.receive(to_exporter)
        emit("handles", size=size, all_differ=len({handle for handle, *_ in found}) == 4)
        to_importer.send(found)
        for number, line in enumerate(base.receive(to_importer)):
            emit("small ipc", size=size, number=number, **line)
    finally:
        base.kill_child(importer)
        base.kill_child(exporter)


def _small_exporter(pipe: Any, size: int) -> None:
    driver = base.open_driver(DEVICE)
    host, address = anonymous(size)
    found = []
    with driver.activated():
        for number in range(4):
            memory = driver.allocate_device(size)
            host[:] = bytes([0x41 + number]) * size
            base.copy_bytes(driver, address, memory, size, to_host=False)
            handle, start, num_bytes = driver.export_memory(memory)
            found.append((handle, memory, start, num_bytes))
        pipe.send(found)
        pipe.recv()


def _small_importer(pipe: Any, size: int) -> None:
    driver = base.open_driver(DEVICE)
    host, address = anonymous(size)
    lines = []
    with driver.activated():
        for number, (handle, memory, start, num_bytes) in enumerate(pipe.recv()):
            try:
                opened, opened_bytes = driver.open_memory(handle)
                host[:] = bytes(size)
                base.copy_bytes(driver, opened + memory - start, address, size, to_host=True)
                right = host[:] == bytes([0x41 + number]) * size
                lines.append({"bytes_here": opened_bytes, "bytes_there": num_bytes,
                              "offset_in_2_mib": memory % (2 * MIB), "right": right, "refused": ""})  # fmt: skip
            except Exception as error:
                lines.append({"bytes_here": 0, "bytes_there": num_bytes, "offset_in_2_mib": memory % (2 * MIB),
                              "right": False, "refused": str(error)})  # fmt: skip
    pipe.send(lines)


# --- torch's memory, by allocator -------------------------------------------------------------------------------------

ALLOCATOR = """
import json, torch
from kvdepot_cuda.nvidia import CudaDriver
big = torch.zeros(3 << 30, dtype=torch.int8, device="cuda")
small = torch.zeros(1000, device="cuda")
driver = CudaDriver(0)
with driver.activated():
    for name, tensor in (("view in 3 GiB", big[12345 * 4096:]), ("small", small)):
        line = {"tensor": name, "offset": 0, "bytes": 0, "same_handle": False, "refused": ""}
        try:
            handle, base, size = driver.export_memory(tensor.data_ptr())
            again = driver.export_memory(tensor.data_ptr() + 512)[0]
            line |= {"offset": tensor.data_ptr() - base, "bytes": size, "same_handle": handle == again}
        except Exception as error:
            line["refused"] = str(error)
        print(json.dumps(line), flush=True)
"""


def allocators(setting: Setting) -> None:
    """Memory of torch's allocators: the usual one is shared, the other two are refused in words."""
    setting.need_device()
    for name in ("", "expandable_segments:True", "backend:cudaMallocAsync"):
        part(name or "native", _allocator, name)


def _allocator(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR], env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": name},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        emit("allocator", allocator=name or "native", **json.loads(line))
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])


# --- order ------------------------------------------------------------------------------------------------------------


def order(setting: Setting) -> None:
    """Stores and retrieves behind work of the device that takes a second: tests/cuda/test_order_on_device.py."""
    setting.need_device()
    base.need_pytest()
    base.run_suites({"order": ["tests/cuda/test_order_on_device.py"]}, setting.seconds - 15)


# --- captures ---------------------------------------------------------------------------------------------------------


def captures(setting: Setting) -> None:
    """Graphs captured in torch's global mode beside a thread that registers, allocates and copies."""
    setting.need_device()
    import torch

    from kvdepot_cuda.driver import DriverError

    with base.cache(DEVICE, "direct", 256 * MIB, **SHAPE) as made:
        stop, errors, loops = threading.Event(), [], [0]
        thread = threading.Thread(target=_beside, args=(stop, errors, loops), daemon=True)
        thread.start()
        failed, marks = [], set()
        vector = torch.zeros(1 << 16, device="cuda")
        for number in range(60):
            try:
                graph = torch.cuda.CUDAGraph()
                before = float(vector[0])
                with torch.cuda.graph(graph):
                    for _ in range(100):
                        vector.add_(1)
                    if number % 10 == 0:
                        try:
                            made.context._engine.mark(int(torch.cuda.current_stream().cuda_stream))  # noqa: SLF001
                            marks.add("accepted, which is wrong")
                        except DriverError as error:
                            marks.add(str(error)[:80])
                graph.replay()
                torch.cuda.synchronize()
                if float(vector[0]) != before + 100:
                    failed.append(f"{number}: {before} became {float(vector[0])}")
            except Exception as error:
                failed.append(f"{number}: {type(error).__name__}: {error}"[:300])
                break
        stop.set()
        thread.join(20)
        emit(
            "captures", captured=number + 1 - len(failed), failed=failed[:3], loops_beside=loops[0],
            errors_beside=errors[:3], marks=sorted(marks), thread_hangs=thread.is_alive(),
        )  # fmt: skip


def _beside(stop: threading.Event, errors: list[str], loops: list[int]) -> None:
    import numpy as np

    from kvdepot_cuda.driver import CopyKind

    driver = base.open_driver(DEVICE)
    _host, address = anonymous(8 * MIB)
    source, size = np.array([address], np.uint64), np.array([4 * MIB], np.uint64)
    while not stop.is_set():
        try:
            with driver.activated():
                stream = driver.create_stream()
                driver.register_host(address, 8 * MIB)
                memory = driver.allocate_device(8 * MIB)
                driver.copy_batch(source, np.array([memory], np.uint64), size, CopyKind.TO_DEVICE, stream)
                driver.synchronize_stream(stream)
                driver.free_device(memory)
                driver.unregister_host(address)
                driver.destroy_stream(stream)
            loops[0] += 1
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            return


# --- many batches, both ways at once ----------------------------------------------------------------------------------


def stress(setting: Setting) -> None:
    """Repeated large batches in both directions: drivers of release 580 are reported to hang or crash."""
    setting.need_device()
    faulthandler.dump_traceback_later(setting.seconds - 5, exit=True)
    for runs_a_call in (256, 1024, 4096):
        part(f"{runs_a_call} runs a call", _stress, runs_a_call)


def _stress(runs_a_call: int) -> None:
    from kvdepot_cuda.driver import CopyKind

    results: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=_stress_one, args=(way, runs_a_call, results), name=way.value, daemon=True)
        for way in CopyKind
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    hung = [thread.name for thread in threads if thread.is_alive()]
    emit("stress", runs_a_call=runs_a_call, results=results, hung=hung)


def _stress_one(way: Any, runs_a_call: int, results: list[dict[str, Any]], count: int = 400) -> None:
    import numpy as np

    from kvdepot_cuda.driver import CopyKind

    driver = base.open_driver(DEVICE)
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 65, runs_a_call).astype(np.uint64) * np.uint64(1024)
    starts = np.cumsum(sizes) - sizes
    used = int(sizes.sum())
    total = -(-used // base.PAGE) * base.PAGE
    host, address = anonymous(total)
    view = np.frombuffer(host, np.uint8)
    shuffled = rng.permutation(runs_a_call)
    with driver.activated():
        driver.register_host(address, total)
        memory, stream = driver.allocate_device(total), driver.create_stream()
        ends = (starts + np.uint64(address))[shuffled], (starts + np.uint64(memory))[shuffled]
        sources, targets = ends if way is CopyKind.TO_DEVICE else ends[::-1]
        began = time.perf_counter()
        for number in range(count):
            is_checked, value = number % 20 == 0, (number + 1) & 0xFF  # comparing costs more than copying
            if is_checked:
                view[:] = value
                if way is CopyKind.TO_HOST:
                    base.copy_bytes(driver, address, memory, total, to_host=False)
                    view[:] = 0
            driver.copy_batch(sources, targets, sizes[shuffled], way, stream)
            driver.synchronize_stream(stream)
            if not is_checked:
                continue
            if way is CopyKind.TO_DEVICE:
                view[:] = 0
                base.copy_bytes(driver, memory, address, total, to_host=True)
            if not (view[:used] == value).all():
                results.append({"way": way.value, "wrong_bytes_in": number})
                return
        results.append({"way": way.value, "batches": count, "seconds": round(time.perf_counter() - began, 2)})


# --- killed under a DMA -----------------------------------------------------------------------------------------------


def killed(setting: Setting) -> None:
    """A process that is killed in the middle of large copies: how long it takes to die, what stays of its memory."""
    setting.need_device()
    before = base.memory_used_mib()
    pipe, _, process = base.start_child(_busy)
    base.receive(pipe)
    time.sleep(0.5)
    during, began = base.memory_used_mib(), time.perf_counter()
    base.kill_child(process)
    died = time.perf_counter() - began
    emit("killed under a DMA", used_mib=[before, during, base.settled_memory()], seconds_to_die=round(died, 3))
    driver = base.open_driver(DEVICE)
    emit("the device afterwards", description=driver.description)


def _busy(pipe: Any) -> None:
    from kvdepot_cuda.driver import CopyKind

    driver = base.open_driver(DEVICE)
    size = 512 * MIB
    _host, address = anonymous(size)
    with driver.activated():
        driver.register_host(address, size)
        memory, stream = driver.allocate_device(size), driver.create_stream()
        pipe.send("busy")
        while True:
            driver.copy(address, memory, size, CopyKind.TO_DEVICE, stream)
            driver.synchronize_stream(stream)


# --- what a retrieve loses between its batches ------------------------------------------------------------------------


def batch_bytes(setting: Setting) -> None:
    """10,000 tokens of an 8B model by how much is asked for at once: the gaps between batches, at no other change."""
    count, num_layers = (8, 4) if setting.is_fake else (625, 32)
    for mode in base.MODES:
        for size in (64, 256, 2048):
            part(f"{mode} {size} MiB", _batch_bytes, setting, mode, size * MIB, count, num_layers)


def _batch_bytes(setting: Setting, mode: str, num_bytes: int, count: int, num_layers: int) -> None:
    page_bytes = 8192 if setting.is_fake else 65536
    shape = {"page_bytes": page_bytes, "num_layers": num_layers, "num_blocks": 2 * count, "block_outermost": True}
    pool_bytes = (256 if setting.is_fake else 3072) * MIB
    with base.cache(setting, mode, pool_bytes, batch_bytes=num_bytes, **shape) as made:
        made.fill(seed=3)
        blocks = random.Random(0).sample(range(2 * count), count)
        stored, _ = made.move("store", "x", blocks)
        times = sorted(made.move("retrieve", "x", blocks)[1] for _ in range(7))
        emit(
            "10,000 tokens by batch_bytes", **made.state, stored=stored, batch_mib=num_bytes // MIB,
            median_ms=round(times[3] * 1e3, 2), best_ms=round(times[0] * 1e3, 2),
            gb_per_s=round(count * num_layers * page_bytes / times[3] / 1e9, 2),
        )  # fmt: skip


STEPS: base.Steps = {
    "small_ipc": (small_ipc, 50),
    "allocators": (allocators, 70),
    "captures": (captures, 60),
    "order": (order, 120),
    "stress": (stress, 110),
    "killed": (killed, 40),
    "batch_bytes": (batch_bytes, 100),
}
SECONDS = sum(limit for _, limit in STEPS.values())


if __name__ == "__main__":
    base.run_steps(
        STEPS, "gpu_probe", script=Path(__file__).resolve(), title="First probes of a GPU", description=__doc__ or "",
        seconds=SECONDS,
    )  # fmt: skip
