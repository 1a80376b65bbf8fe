"""The behaviour of a depot's child processes: they end with the depot and leave signals to it."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def be_a_child(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit if it has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent died before prctl
    ignore_signals()


def ignore_signals() -> None:
    """Ignore signals that a terminal or a service manager sends to the whole group; the depot handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
