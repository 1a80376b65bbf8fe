"""What the processes that a depot starts have in common: they end with it, and signals are for it."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def be_a_child(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread ends that started it; ends it now if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before
    ignore_signals()


def ignore_signals() -> None:
    """Leave to the depot what a terminal or a service manager sends to the whole group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
