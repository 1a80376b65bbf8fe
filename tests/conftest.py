"""How many processes run the tests, how many examples they draw, and what their children find in the environment."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.events import Context

os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)

# The tests start hundreds of depots. Where nothing compiled is kept, each start takes 1.5 s instead of .85.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `pytest` draws few examples, tox many: `--hypothesis-profile=ci`. Neither has a deadline: 200 ms, the usual one, fails
# on a busy machine. Tests set no numbers of their own.
_default = settings.get_profile("default")  # not what Hypothesis chooses by itself where CI is set
settings.register_profile("few", _default, max_examples=15, deadline=None)
settings.register_profile("ci", _default, max_examples=100, deadline=None, print_blob=True)
settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a plain `pytest` in one process more than there are cores: tests wait for depots half of their time.

    Tests that are named run in this process; `-n` decides otherwise, `-n 0` for one process.
    """
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_plain and not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = len(os.sched_getaffinity(0)) + 1


@pytest.fixture
def context() -> "Iterator[Context]":
    """A ZeroMQ context. It closes the sockets in `support.events.kept` at the end of the test."""
    import zmq

    from support.events import kept

    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)
    kept.clear()
