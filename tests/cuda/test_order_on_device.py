"""The order of copies and the engine's work on a real device, with torch's streams, events and graphs.

Skipped under the same conditions as `test_on_device.py`. `test_device_suites.py` runs its suite with the fake driver.
"""

import importlib
import importlib.util
import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import pytest

from kvdepot.backends import CacheGroup, KVCache, ReadyEvent
from kvdepot.lab.processes import DepotProcess
from kvdepot_cuda import backend
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
from support.cuda.order import BATCH_BYTES, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES, WAYS, OrderSuite

REASON = backend.why_unavailable()
pytestmark = [
    pytest.mark.skipif(
        REASON is not None and not os.environ.get("KVDEPOT_REQUIRE_CUDA"), reason=f"no device: {REASON}"
    ),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="streams and graphs need torch"),
]
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

    def let_go(self) -> None:
        pass

    def values(self) -> set[int]:
        self._torch.cuda.synchronize()
        return set(self._torch.unique(self._memory).tolist())

    def _write(self, value: int) -> None:
        self._torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001  # torch has no other
        self._memory.fill_(value)


class TestOrder(OrderSuite):
    @pytest.fixture
    def order_depot(self) -> Iterator[DepotProcess]:
        with DepotProcess("--move-seconds", "20") as depot:
            yield depot

    @contextmanager
    def engine(self, url: str, way: str, kind: str) -> Generator[TorchEngine]:
        engine = TorchEngine(url, way, kind)
        with closing(engine.context):
            yield engine
