"""Sets up a depot's child processes: they end with the depot, and leave signals to it."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Generator
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def be_a_child(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. Exit if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent died before the prctl
    ignore_signals()


def ignore_signals() -> None:
    """Ignore signals that a terminal or a service manager sends to the whole group, as the depot handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts_blocked() -> Generator[None]:
    """Block SIGINT to start a child that inherits this. Ctrl-C then reaches only this process, which ends the child.

    A Ctrl-C meanwhile takes effect afterwards, when the caller knows its child.
    """
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    handler = signal.signal(signal.SIGINT, lambda number, _: seen.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler)
        if seen:
            signal.raise_signal(signal.SIGINT)
