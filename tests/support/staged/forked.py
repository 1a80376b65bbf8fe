"""Forks the engines of a fault suite from one process that has imported torch, which is most of their start."""

from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.engine import EngineProcess
from kvdepot.testing.faults import FaultSuite, Spawn
from support.nursery import Fork, Nursery


class _ForkedEngine(EngineProcess):
    def __init__(self, fork: Fork) -> None:
        self._process = fork  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]
        self._unread = b""
        self.expect("ready")


def torch_nursery() -> Nursery:
    """Return a process with torch and the other modules that the children import, except kvdepot's."""
    return Nursery("torch", "pytest", "hypothesis", "numpy", "zmq", "msgspec")


class ForkedFaultSuite(FaultSuite):
    """A `FaultSuite` whose engines the fixture `nursery` forks. `engine_command` must be `python -m MODULE ...`."""

    @pytest.fixture
    def spawn(self, depot: DepotProcess, nursery: Nursery) -> Iterator[Spawn]:
        engines: list[EngineProcess] = []

        def spawn(instance: str) -> EngineProcess:
            _, option, module, *arguments = self.engine_command(depot.url, instance)
            assert option == "-m"
            engines.append(_ForkedEngine(nursery.fork(module, *arguments)))
            return engines[-1]

        yield spawn
        for engine in engines:
            engine.close()
