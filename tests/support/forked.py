"""Forks the tests' depots and engines from processes that have imported their modules, which is most of a start."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from kvdepot.lab.processes import DepotProcess, start_child
from kvdepot.testing.engine import EngineProcess
from support.nursery import Fork, Nursery

# Without numpy, as depots do not import it.
_OF_DEPOTS: Final = ("kvdepot.operate.cli", "kvdepot.operate.report", "kvdepot.server.app")
_OF_ENGINES: Final = ("kvdepot.testing.engine", "hypothesis")
_OF_FAKE_MOVERS: Final = (
    "kvdepot.lab.processes",
    "kvdepot_cuda.mover",
    "support.cuda.fake",
    "support.cuda.forked_movers",
)
_ON_A_DEVICE: Final = "support.staged.engine_child"


class _Forks:
    """A nursery for each list of modules. It starts with its first child."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._nurseries: dict[tuple[str, ...], Nursery] = {}

    def start_child(
        self, command: Sequence[str], *, has_pipes: bool = False, new_session: bool = False
    ) -> Fork | subprocess.Popen[bytes]:
        """Fork a child that runs `python -m MODULE ...` or an engine's script, always in a session of its own.

        Start others as usual.
        """
        python, *words = command
        if python == sys.executable and has_pipes and words[0].endswith(".py"):
            script, *arguments = words
            return self._nursery(_OF_ENGINES).fork(Path(script), *arguments, environment=_environment())
        if (python, words[0]) != (sys.executable, "-m"):
            return start_child(command, has_pipes=has_pipes, new_session=new_session)
        module, *arguments = words[1:]
        modules = _OF_DEPOTS if module == "kvdepot" else _OF_ENGINES
        if module == _ON_A_DEVICE:
            # Its first tensor on a pretend device makes torch import `torch.distributed.tensor`, for 0.9 CPU seconds.
            modules = (*_OF_ENGINES, "support.staged.devices", "torch.distributed.tensor")
        elif module == "kvdepot" and "KVDEPOT_FAKE_DEVICE" in os.environ:
            modules = (*_OF_DEPOTS, *_OF_FAKE_MOVERS)
        nursery = self._nursery(modules)
        fork = nursery.fork if has_pipes else nursery.fork_silent
        return fork(module, *arguments, environment=_environment())

    def _nursery(self, modules: tuple[str, ...]) -> Nursery:
        if modules not in self._nurseries:
            self._nurseries[modules] = self._stack.enter_context(Nursery(*modules))
        return self._nurseries[modules]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONFAULTHANDLER": "1"}


@contextlib.contextmanager
def forked_children() -> Generator[None]:
    """Start depots and engines by forking, until the end of the context."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        forks = _Forks(stack)
        for kind in (DepotProcess, EngineProcess):
            monkeypatch.setattr(kind, "start_child", staticmethod(forks.start_child))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """With `pytest -p support.forked`, for tests outside this folder."""
    with forked_children():
        yield
