"""The number of the tests' processes, the number of their examples, the start of their children, and their folder."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from kvdepot.lab.processes import DepotProcess
    from support.events import Context

os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)

# Engines without a url look for a depot here. Without this, tests would attach to one in the folder of their user.
_runtime = tempfile.TemporaryDirectory(prefix="kvdepot-tests-")
os.environ["XDG_RUNTIME_DIR"] = _runtime.name

# The tests start hundreds of depots. Without cached bytecode, each start takes 1.5 s instead of .85.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `pytest` draws few examples, tox many: `--hypothesis-profile=ci`. Neither has a deadline, as the default of 200 ms
# fails on a busy machine. Tests set no numbers of their own.
_default = settings.get_profile("default")  # not the profile that Hypothesis chooses if CI is set
settings.register_profile("few", _default, max_examples=15, deadline=None)
settings.register_profile("ci", _default, max_examples=100, deadline=None, print_blob=True)
settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a plain `pytest` in one more process than there are cores, as tests wait for depots half of their time.

    Tests named on the command line run in this process. `-n` overrides both; `-n 0` uses one process.
    """
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_plain and not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = len(os.sched_getaffinity(0)) + 1


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """Fork depots and engines from processes that have imported what they need. The tests start hundreds of them."""
    if importlib.util.find_spec("kvdepot") is None:
        yield  # tests of wheels, which are installed elsewhere
        return
    from support.forked import forked_children

    with forked_children():
        yield


@pytest.fixture
def depot() -> "Iterator[DepotProcess]":
    """A depot with a pool of 64 MiB."""
    from kvdepot.lab.processes import DepotProcess

    with DepotProcess() as depot:
        yield depot


@pytest.fixture
def context() -> "Iterator[Context]":
    """A ZeroMQ context. At the end of the test it closes its sockets, which `support.events.kept` holds until then."""
    import zmq

    from support.events import kept

    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)
    kept.clear()
