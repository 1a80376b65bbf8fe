"""Shows that transfers run after the slow work that an engine has queued on its device.

An engine queues "write 7" and stores, then queues "write 0" and retrieves. Every byte must be 7. A store that runs too
early keeps the initial 1. A retrieve that runs too early is overwritten with 0.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest

from kvdepot.backends import ReadyEvent
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cuda.context import CudaTransferContext

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


class Engine(Protocol):
    """A device and its worker. Every byte of the cache starts as 1."""

    context: CudaTransferContext

    def on_stream(self) -> AbstractContextManager[object]:
        """Make the engine's stream the current one."""
        ...

    def write(self, value: int) -> None:
        """Queue slow work that ends by writing `value` into every byte of the cache."""
        ...

    def event(self) -> ReadyEvent:
        """Return an event after all queued work."""
        ...

    def let_go(self) -> None:
        """Let the queued work end, if it does not by itself."""
        ...

    def values(self) -> set[int]:
        """Return the set of byte values in the cache after all queued work."""
        ...


class OrderSuite:
    def engine(self, url: str, way: str, kind: str) -> AbstractContextManager[Engine]:
        """Make an engine."""
        raise NotImplementedError

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("way", WAYS)
    def test_transfers_come_after_the_work_of_the_engine(
        self, way: str, kind: str, order_depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Blocks that continue each other are one large run.
        monkeypatch.setattr("kvdepot_cuda.gather.MOST_RUN_BYTES", BATCH_BYTES)
        monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
        run = hash_prefix(Namespace(f"{way} {kind}"), 16, range(NUM_BLOCKS * 16))
        with self.engine(order_depot.url, way, kind) as engine, engine.on_stream():
            context = engine.context
            context.wait_until_connected(WAIT_SECONDS)
            settle(context)
            assert context.uses_kernel == (way == "by the kernel")
            engine.write(7)
            stored = context.submit_store("request", run, BLOCK_IDS, engine.event())
            with pytest.raises(TimeoutError):
                stored.result(0.05)
            engine.let_go()
            assert stored.result(WAIT_SECONDS)
            engine.write(0)
            retrieved = context.submit_retrieve("request", run, BLOCK_IDS)
            with pytest.raises(TimeoutError):
                retrieved.result(0.05)
            engine.let_go()
            assert retrieved.result(WAIT_SECONDS)
            assert engine.values() == {7}


def settle(context: CudaTransferContext) -> None:
    """Move blocks until copies are no longer pageable, as pageable copies wait for the device by themselves."""
    run = hash_prefix(Namespace("settle"), 16, range(16))
    assert context.submit_store("settle", run, [[0]]).result(WAIT_SECONDS)

    def is_warm() -> bool:
        return context.submit_retrieve("settle", run, [[0]]).result(WAIT_SECONDS) and context.is_warm

    wait_until(is_warm, WAIT_SECONDS, "the pool to be registered")
