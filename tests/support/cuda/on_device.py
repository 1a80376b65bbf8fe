"""Fixtures of the suites on a device: workers whose memory is freed, and a depot whose movers copy for them."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.plan import PLANS, Cache, WorkerPlan, prompt
from support.cuda.device_worker import DeviceWorker

DMA: dict[str, Any] = {"gather_kernel": False}
KERNEL: dict[str, Any] = {"gather_kernel": True}
REFUSALS = ("cannot register", "the kernel for them", "as a batch failed", "not possible")


class Workers:
    """Makes workers and frees their memory."""

    options: dict[str, Any] = {}  # noqa: RUF012  # of this class

    @pytest.fixture(autouse=True)
    def memory(self) -> Iterator[None]:
        self.made: list[DeviceWorker] = []
        yield
        for worker in self.made:
            worker.close()

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        self.made.append(DeviceWorker(url, plan, **(self.options | options)))
        assert self.made[-1].context.transfer_mode == self.options.get("mode", "direct")
        return self.made[-1]


class ByAMover(Workers):
    options = {"mode": "ipc"}  # noqa: RUF012

    @pytest.fixture
    def depot(self) -> Iterator[DepotProcess]:
        """A depot whose movers may be slow."""
        with DepotProcess("--move-seconds", "20") as depot:
            yield depot

    def test_the_mover_registers_the_pool_and_copies_go_on(self, capfd: pytest.CaptureFixture[str]) -> None:
        """The mover's first copies are pageable, later ones are not. The depot's log would show a failure."""
        plan = PLANS["large pages"]
        with DepotProcess("--move-seconds", "20") as depot:  # started here, so that `capfd` sees its mover's log
            worker = self.make_worker(depot.url, plan)
            worker.wait_until_connected(30)
            cache = Cache(worker, plan)
            assert cache.store(prompt(8))
            wait_until(lambda: cache.retrieve(prompt(8)) == 8 and worker.context.is_warm, 60, "the mover to be settled")
            for _ in range(3):
                assert cache.retrieve(prompt(8)) == 8
            assert cache.store(prompt(8, salt=1))
            assert depot.status().counters["moves"] >= 6
            worker.context.close()
        said = capfd.readouterr().err
        assert not any(refusal in said for refusal in REFUSALS), said
