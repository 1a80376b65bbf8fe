"""Stops a depot's process for a while, as a debugger or an overloaded machine does."""

import contextlib
import signal
from collections.abc import Generator

from kvdepot.lab.processes import DepotProcess


@contextlib.contextmanager
def stopped(depot: DepotProcess) -> Generator[None]:
    """Keep a depot from answering until the end of the context."""
    depot.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        depot.signal(signal.SIGCONT)
