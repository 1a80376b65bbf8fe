"""Child processes of a depot, and the descriptors of a process.

Children end with the depot, leave signals to it, and are told apart by their start times.

Tiers open files, movers are started, and sessions receive the pool. All of that needs descriptors while any number of
clients connect. So before accepting a connection, check `is_reserve_touched`, and leave new connections in the kernel's
queue until it returns False.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final

EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_MAXIMUM_DESCRIPTORS: Final = 65_536  # 4,096 workers x 7 descriptors, doubled
_RESERVE: Final = 256  # for files of tiers, pidfds and replies, so that only new connections suffer from a full table
_RESERVE_SHARE: Final = 8  # a small limit reserves one descriptor in 8
_PR_SET_PDEATHSIG: Final = 1
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by a terminal or a service manager


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAXIMUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAXIMUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve_of(limit: int) -> int:
    """Return how many of a process's descriptors are reserved."""
    return min(_RESERVE, limit // _RESERVE_SHARE)


def is_reserve_touched(fd: int) -> bool:
    """Return whether too many descriptors are open to accept another connection.

    The kernel assigns the lowest free number, so the number of a temporary copy of `fd` tells how many are open.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        copy = os.dup(fd)
    except OSError:
        return True
    os.close(copy)
    return copy >= limit - reserve_of(limit)


def raise_if_exhausted(error: Exception) -> None:
    """Re-raise an error that is caused by a lack of descriptors, and so tells nothing about the process in question."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        raise error


def be_a_child(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. Exit if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent died before the prctl
    ignore_signals()


def ignore_signals() -> None:
    """Ignore signals that a terminal or a service manager sends to the whole group, as the depot handles them."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts_blocked() -> Generator[None]:
    """Block SIGINT to start a child that inherits this. Ctrl-C then reaches only this process, which ends the child.

    A signal to stop takes effect afterwards, when the caller knows its child.
    """
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    handlers = {each: signal.signal(each, lambda number, _: seen.append(number)) for each in _STOPS if is_main}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in seen:
            signal.raise_signal(number)


@contextlib.contextmanager
def stopped_once() -> Generator[None]:
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, for the main thread. Ignore further ones.

    Supervisors send SIGINT to a process and its group at once. The second one would end the clean-up of the first, and
    leave child processes and their memory. So after the first one, this lasts until the process ends.
    """
    is_stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            raise KeyboardInterrupt

    # SIGHUP stays ignored below nohup.
    heard = [each for each in _STOPS if signal.getsignal(each) is not signal.SIG_IGN]
    handlers = {each: signal.signal(each, stop) for each in heard}
    try:
        yield
    finally:
        if not is_stopping:
            for number, handler in handlers.items():
                signal.signal(number, handler)


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
