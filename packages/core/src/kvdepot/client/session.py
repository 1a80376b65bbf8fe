"""`Session`: a session with one run of the server, and the movers that the depot runs for it."""

import contextlib
import logging
import os
import select
import signal
import weakref
from pathlib import Path
from typing import Final

from kvdepot.pool.files import PoolMapping
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_MOVER_GRACE_SECONDS: Final = 10.0  # between two log lines about a mover that does not exit


class Session:
    """One registered session. The connection changes `suspended` and `slowness`; the rest is fixed at registration."""

    def __init__(self, opened: frames.SessionOpened, control: Path, mapping: PoolMapping | None) -> None:
        self.epoch = opened.epoch
        self.token = opened.token
        self.server_version = opened.server_version
        self.control = control
        self.mapping = mapping
        self.context = 0  # the depot's id of the registration
        self.registration: m.RegisterKVCache | m.RegisterScheduler | None = None
        self.verify = m.Verify.OFF
        self.move_seconds = 0.0  # the longest time until the depot answers a `Move`
        self.wants_tokens = False  # whether both the depot and this engine publish events
        self._movers: list[_Process] = []  # replaced, never mutated: other threads read it
        self.suspended = False
        self.slowness = 0.0  # number of long waits, minus a part of the short waits since
        self.lost_fd, lost_writer = os.pipe()  # readable once the session is lost; open while it is referenced
        weakref.finalize(self, os.close, self.lost_fd)
        self.mark_lost = weakref.finalize(self, os.close, lost_writer)  # wakes all waits for a reply

    def add_mover(self, pidfd: int) -> None:
        """Take ownership of the pidfd of a mover that the depot started for this session."""
        self._movers = [mover for mover in self._movers if not mover.wait(0.0)] + [_Process(pidfd)]

    def has_movers(self) -> bool:
        """Return whether a mover of this session is alive."""
        return not all(mover.wait(0.0) for mover in self._movers)

    def can_kill_movers(self) -> bool:
        """Return whether this process may kill the movers of this session, or they are dead."""
        return all(mover.can_kill() for mover in self._movers)

    def wait_for_movers(self, *, kill: bool = False) -> None:
        """Wait until all movers of this session are dead, so that none copies any more.

        A driver can delay the end of a killed process. Call this once the session is lost, as movers die with the
        depot, or with `kill` if the depot does not answer.
        """
        for mover in self._movers:
            if kill:
                mover.kill()
            while not mover.wait(_MOVER_GRACE_SECONDS):
                logger.error("a mover of the depot did not exit: the blocks of its transfer stay allocated")

    def end_movers(self) -> None:
        """Kill the movers of this session, and wait a bounded time until they are dead."""
        for mover in self._movers:
            mover.kill()
        if not all(mover.wait(_MOVER_GRACE_SECONDS) for mover in self._movers):
            logger.error("a mover of the depot did not exit: it still has the device's memory open")


class _Process:
    """A process, known by its pidfd. Garbage collection closes the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether the process died within that time. A dead process holds no resources."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_seconds * 1000))

    def can_kill(self) -> bool:
        """Return whether the process is dead, or this one may kill it."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, if that is allowed."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
