"""Child processes of a depot: they end with it, leave signals to it, and are told apart by their start times."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final

from kvdepot.processes.descriptors import raise_if_exhausted

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


def process_start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, 0 if the process does not exist.

    Together with the pid, it identifies a process even if the pid is reused.

    Raises:
        OSError: this process has no descriptor left.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError) as error:
        raise_if_exhausted(error)
        return 0
