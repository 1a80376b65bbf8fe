"""Transfers run after the slow work of an engine on a real device, with torch's streams, events and graphs.

An engine queues "write 7" and stores, then queues "write 0" and retrieves. Every byte must be 7. A store that runs too
early keeps the initial 1. A retrieve that runs too early is overwritten with 0. `test_order.py` does the same on the
fake device. Skipped under the same conditions as `test_on_device.py`.
"""

import importlib
import importlib.util
import os
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest

from kvdepot.backends import CacheGroup, KVCache, ReadyEvent
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cuda import backend
from kvdepot_cuda.context import CudaOptions, CudaTransferContext

REASON = backend.why_unavailable()
pytestmark = [
    pytest.mark.skipif(
        REASON is not None and not os.environ.get("KVDEPOT_REQUIRE_CUDA"), reason=f"no device: {REASON}"
    ),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="streams and graphs need torch"),
]
KINDS = ("default stream", "side stream", "graph on a side stream")
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"mode": "direct", "gather_kernel": False},
    "by the kernel": {"mode": "direct", "gather_kernel": True},
    "ipc": {"mode": "ipc"},
}
"""Ways to copy, with their options."""
NUM_BLOCKS = 64
NUM_LAYERS = 4
PAGE_BYTES = 64 << 10
BATCH_BYTES = 4 << 20  # so a transfer is four batches
WAIT_SECONDS = 60.0
BLOCK_IDS = [list(range(NUM_BLOCKS))]
SLEEP_CYCLES = int(1e9)  # cycles of the device: half a second to a second


class TorchEngine:
    def __init__(self, url: str, way: str, kind: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        cuda = self._torch.cuda
        self._memory = self._torch.full(
            (NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES), 1, dtype=self._torch.uint8, device="cuda:0"
        )
        self._stream = cuda.current_stream() if kind == "default stream" else cuda.Stream()
        self._is_graph = kind.startswith("graph")
        self._graphs: list[Any] = []
        layers = [self._memory[:, layer] for layer in range(NUM_LAYERS)]
        cuda.synchronize()
        self.context = CudaTransferContext(
            KVCache([CacheGroup(layers, 16)], "order", "bytes", chunk_tokens=16),
            CudaOptions(url=url, deadline_seconds=20.0, batch_bytes=BATCH_BYTES, **WAYS[way]),
        )

    def on_stream(self) -> AbstractContextManager[object]:
        return self._torch.cuda.stream(self._stream)

    def write(self, value: int) -> None:
        if not self._is_graph:
            self._write(value)
            return
        self._graphs.append(graph := self._torch.cuda.CUDAGraph())
        with self._torch.cuda.graph(graph, stream=self._stream):
            self._write(value)
        graph.replay()

    def event(self) -> ReadyEvent:
        event = self._torch.cuda.Event(blocking=True)
        event.record()
        return event

    def values(self) -> set[int]:
        self._torch.cuda.synchronize()
        return set(self._torch.unique(self._memory).tolist())

    def _write(self, value: int) -> None:
        self._torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001  # torch has no other
        self._memory.fill_(value)


def settle(context: CudaTransferContext) -> None:
    """Move blocks until copies are no longer pageable, as pageable copies wait for the device by themselves."""
    run = hash_prefix(Namespace("settle"), 16, range(16))
    assert context.submit_store("settle", run, [[0]]).result(WAIT_SECONDS)

    def is_warm() -> bool:
        return context.submit_retrieve("settle", run, [[0]]).result(WAIT_SECONDS) and context.is_warm

    wait_until(is_warm, WAIT_SECONDS, "the pool to be registered")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_transfers_come_after_the_work_of_the_engine(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks that continue each other are one large run.
    monkeypatch.setattr("kvdepot_cuda.gather.MOST_RUN_BYTES", BATCH_BYTES)
    monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
    run = hash_prefix(Namespace(f"{way} {kind}"), 16, range(NUM_BLOCKS * 16))
    with DepotProcess("--move-seconds", "20") as depot:
        engine = TorchEngine(depot.url, way, kind)
        with closing(engine.context) as context, engine.on_stream():
            context.wait_until_connected(WAIT_SECONDS)
            settle(context)
            assert context.uses_kernel == (way == "by the kernel")
            engine.write(7)
            stored = context.submit_store("request", run, BLOCK_IDS, engine.event())
            with pytest.raises(TimeoutError):
                stored.result(0.05)
            assert stored.result(WAIT_SECONDS)
            engine.write(0)
            retrieved = context.submit_retrieve("request", run, BLOCK_IDS)
            with pytest.raises(TimeoutError):
                retrieved.result(0.05)
            assert retrieved.result(WAIT_SECONDS)
            assert engine.values() == {7}
