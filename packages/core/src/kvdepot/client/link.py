"""`Link`: one session with one life of the server, and the movers that the depot runs for it."""

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

_MOVER_GRACE_SECONDS: Final = 10.0  # between two lines of the log about one that does not end


class Link:
    """One registered session. The connection sets `suspended` and `slowness`; the rest stays as registered."""

    def __init__(self, opened: frames.SessionOpened, control: Path, mapping: PoolMapping | None) -> None:
        self.epoch = opened.epoch
        self.token = opened.token
        self.server_version = opened.server_version
        self.control = control
        self.mapping = mapping
        self.context = 0  # as registered
        self.registration: m.RegisterKVCache | m.RegisterScheduler | None = None
        self.verify = m.Verify.OFF
        self.move_seconds = 0.0  # until the depot answers a `Move`
        self.wants_tokens = False  # the depot publishes events, and this engine does, too
        self._movers: list[_Process] = []  # replaced, never changed
        self.suspended = False
        self.slowness = 0.0  # long waits, less a part of the short ones since
        self.lost_fd, lost_writer = os.pipe()  # readable once the link is lost; open as long as anybody has the link
        weakref.finalize(self, os.close, self.lost_fd)
        self.mark_lost = weakref.finalize(self, os.close, lost_writer)  # wakes every wait for an answer

    def add_mover(self, pidfd: int) -> None:
        """Take over the pidfd of a mover that the depot started for this session."""
        self._movers = [mover for mover in self._movers if not mover.wait(0.0)] + [_Process(pidfd)]

    def has_movers(self) -> bool:
        """Return whether a mover of this session lives."""
        return not all(mover.wait(0.0) for mover in self._movers)

    def can_kill_movers(self) -> bool:
        """Return whether the movers of this session are this user's processes, or dead."""
        return all(mover.can_kill() for mover in self._movers)

    def wait_for_movers(self, *, kill: bool = False) -> None:
        """Return when no mover of this session lives, so that none copies.

        This takes as long as the kernel needs to end a killed process, which a driver can delay. Call it once the link
        is lost, as movers die with the depot, or with `kill` if the depot does not answer.
        """
        for mover in self._movers:
            if kill:
                mover.kill()
            while not mover.wait(_MOVER_GRACE_SECONDS):
                logger.error("a mover of the depot does not die: the blocks of its transfer stay in use")

    def end_movers(self) -> None:
        """Kill the movers of this session and wait for their end, for a bounded time."""
        for mover in self._movers:
            mover.kill()
        if not all(mover.wait(_MOVER_GRACE_SECONDS) for mover in self._movers):
            logger.error("a mover of the depot does not die: it has the device's memory open")


class _Process:
    """A process, known by its pidfd; garbage collection closes that."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether it died within that time. A dead process has given everything back."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_seconds * 1000))

    def can_kill(self) -> bool:
        """Return whether this user may kill it, or it is dead."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill it, if that is allowed."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
