"""Which path is taken, what makes it be left, and that nothing is lost on the way."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kvdepot.copying.staged.bridge import Bridge
from kvdepot.errors import BackendUnavailable, ConfigError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot.testing.device import FakeDevice
from kvdepot.testing.xpu_kernels import FakeKernels
from kvdepot_cpu.xpu.context import Path, XpuCopier
from kvdepot_cpu.xpu.kernels import Kernels
from support.xpu.workers import XpuWorker

Make = Callable[..., XpuWorker]


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess() as depot:
        yield depot


@pytest.fixture
def install_kernels(fake: FakeDevice) -> Iterator[Callable[..., FakeKernels]]:
    with contextlib.ExitStack() as stack:

        def install_kernels(**options: bool) -> FakeKernels:
            return stack.enter_context(FakeKernels(fake, **options))

        yield install_kernels


@pytest.fixture
def kernels(install_kernels: Callable[..., FakeKernels]) -> FakeKernels:
    return install_kernels()


@pytest.fixture
def make(depot: DepotProcess, install_kernels: object) -> Iterator[Make]:
    """Make workers, which are closed before the operators go."""
    made: list[XpuWorker] = []

    def make(**options: Any) -> XpuWorker:
        made.append(XpuWorker(depot.url, WorkerPlan(), **options))
        made[-1].wait_until_connected(20)
        return made[-1]

    yield make
    for worker in made:
        worker.context.close()


def comes_back(worker: XpuWorker, salt: int = 0) -> bool:
    """Store a prompt and retrieve it; wrong bytes are an error."""
    cache = Cache(worker, WorkerPlan())
    return cache.store(prompt(4, salt=salt)) and cache.retrieve(prompt(4, salt=salt)) == 4


def wait_until_registered(worker: XpuWorker) -> None:
    wait_until(lambda: worker.context.is_registered, 20, "the pool to be registered")


def test_the_best_path_that_works_is_taken_and_named_in_status(
    make: Make, install_kernels: Callable[..., FakeKernels], depot: DepotProcess
) -> None:
    assert make().context.path is Path.STAGED
    install_kernels()
    assert make().context.path is Path.REGISTERED
    for path in ("staged", "synchronous"):
        worker = make(path=path)
        assert worker.context.path == path
        assert comes_back(worker)
    modes = [context.transfer_mode for context in depot.status().contexts]
    assert sorted(modes) == ["registered", "staged", "staged", "synchronous"]


def test_a_path_that_does_not_work_is_an_error_with_the_reason(
    make: Make, install_kernels: Callable[..., FakeKernels]
) -> None:
    with pytest.raises(BackendUnavailable, match="vllm_xpu_kernels is not installed"):
        make(path="registered")
    with pytest.raises(ConfigError, match="registered, staged, synchronous"):
        make(path="fast")
    install_kernels().most_registered_bytes = 0
    with pytest.raises(BackendUnavailable, match="refuses to register host memory"):
        make(path="registered")


def test_operators_whose_bytes_do_not_arrive_are_not_used(
    make: Make, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object) -> None: ...

    monkeypatch.setattr(Kernels, "copy", nothing)
    with pytest.raises(BackendUnavailable, match="do not arrive"):
        make(path="registered")
    worker = make()
    assert worker.context.path is Path.STAGED
    assert comes_back(worker)
    assert not kernels.registered


def test_memory_that_cannot_be_pinned_is_said_once(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Bridge.host_buffer

    def pageable(bridge: Bridge, num_bytes: int) -> tuple[Any, bool]:
        return allocate(bridge, num_bytes)[0], False

    monkeypatch.setattr(Bridge, "host_buffer", pageable)
    worker = make()
    assert worker.context.path is Path.SYNCHRONOUS
    assert sum("could not be pinned" in record.message for record in caplog.records) == 1
    assert comes_back(worker)
    with pytest.raises(BackendUnavailable, match="cannot be pinned"):
        make(path="staged")


@pytest.mark.parametrize("takes_tensor", [True, False])
def test_both_forms_of_the_operators_are_spoken(
    takes_tensor: bool, make: Make, install_kernels: Callable[..., FakeKernels]
) -> None:
    kernels = install_kernels(takes_tensor=takes_tensor)
    worker = make(path="registered")
    wait_until_registered(worker)
    assert comes_back(worker)
    assert kernels.num_waited == 0
    worker.context.close()
    assert not kernels.registered


def test_until_the_pool_is_registered_blocks_are_staged(
    make: Make, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, register = threading.Event(), Kernels.register

    def slowly(of: Kernels, address: int, num_bytes: int) -> bool:
        assert num_bytes < 1 << 20 or opened.wait(20)
        return register(of, address, num_bytes)

    monkeypatch.setattr(Kernels, "register", slowly)
    worker = make()
    before = kernels.num_calls
    assert comes_back(worker)
    assert kernels.num_calls == before
    opened.set()
    wait_until_registered(worker)
    assert comes_back(worker, salt=1)
    assert kernels.num_calls > before
    assert kernels.num_waited == 0


def test_a_pool_that_is_refused_is_staged_for_good(
    make: Make, kernels: FakeKernels, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.most_registered_bytes = 1 << 20
    worker = make()

    def num_said() -> int:
        return sum("refuses 64 MiB of the pool" in record.message for record in caplog.records)

    wait_until(lambda: bool(num_said()), 20)
    assert worker.context.path is Path.STAGED
    assert comes_back(worker)
    assert num_said() == 1


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_operator_that_fails_costs_one_line_and_no_bytes(
    after: int, make: Make, kernels: FakeKernels, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    wait_until_registered(worker)
    copier: Any = cast("XpuCopier", worker.context.copier).registered
    monkeypatch.setattr(copier, "_call_bytes", 1024)
    kernels.fails_after_calls = kernels.num_calls + after
    assert comes_back(worker)
    assert comes_back(worker, salt=1)
    assert worker.context.path is Path.STAGED
    assert sum("the pretend copy engine fails" in record.message for record in caplog.records) == 1


def test_one_call_takes_no_more_than_its_share_of_pinned_memory(
    make: Make, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    wait_until_registered(worker)
    copier: Any = cast("XpuCopier", worker.context.copier).registered
    monkeypatch.setattr(copier, "_call_bytes", 3072)
    kernels.largest_call_bytes = 0
    assert comes_back(worker)
    assert 1024 < kernels.largest_call_bytes <= 3072


def test_ten_restarts_leave_one_registration(make: Make, kernels: FakeKernels, depot: DepotProcess) -> None:
    worker = make()
    wait_until_registered(worker)
    assert comes_back(worker)
    for _ in range(10):
        depot.kill()
        depot.start()
        worker.wait_until_connected(20)
    wait_until_registered(worker)
    assert sum(kernels.registered.values()) == 64 << 20
    wait_until(lambda: not depot.status().recovering)
    wait_until(lambda: comes_back(worker), 20, "the worker to notice that the last depot is another one")
