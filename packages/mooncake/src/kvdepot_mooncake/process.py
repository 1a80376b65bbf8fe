"""Starts, calls and kills the child process with Mooncake's SDK.

A **channel** is a socket to the child that carries one request at a time. There are several, so that the calls of
several threads run concurrently. One channel is reserved for probes.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Final, TypeVar

import msgspec

from kvdepot.tiers.base import TierPool
from kvdepot_mooncake import messages as m
from kvdepot_mooncake.options import MooncakeOptions, MooncakeUnavailable

logger = logging.getLogger(__name__)

_CHILD_MODULE: Final = "kvdepot_mooncake.child"
_WAIT_SECONDS: Final = 1.0  # the longest wait of a call for a starting child
_LEAVE_SECONDS: Final = 1.5  # time for a child to leave the cluster
_DIE_SECONDS: Final = 1.0  # after SIGKILL: unmapping a large pool takes the kernel some time

T = TypeVar("T")


class ChildProcess:
    """One run of the child process, from connecting to the master until its death.

    Its thread lives exactly as long, because the kernel kills the child when the *thread* that started it ends.
    """

    def __init__(self, options: MooncakeOptions, pool: TierPool) -> None:
        self.pid = 0  # 0 unless it is alive
        self.why = "the child process is still starting"  # the reason why it cannot be called; "" if it can
        self.is_final = False  # whether another child would fail, too
        self.start_ended = threading.Event()  # set when it can be called, or is dead
        self.dead = threading.Event()  # set when the process does not exist any more
        self._options = options
        self._pool = pool
        self._is_leaving = False
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._channels: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._idle_probe: list[socket.socket] = []
        threading.Thread(target=self._keep, name="kvdepot-mooncake", daemon=True).start()

    def ask(self, request: m.Request, expected: type[T], *, is_probe: bool = False) -> T:
        """Send a request and return its reply.

        Raises:
            MooncakeUnavailable: the child is starting, is dead, or failed to serve the request.
        """
        idle = self._idle_probe if is_probe else self._idle
        self.start_ended.wait(_WAIT_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: idle or self.why, self._options.timeout_seconds)
            if self.why or not idle:
                raise MooncakeUnavailable(self.why or "all channels are in use")
            channel = idle.pop()
        try:
            reply = _call(channel, request, self._options.timeout_seconds)
        except OSError as error:
            self._lose(f"the child process was lost: {error}")
            self.dead.wait()
            raise MooncakeUnavailable(self.why) from error
        finally:
            with self._changed:
                idle.append(channel)
                self._close_channels()
                self._changed.notify()
        if isinstance(reply, expected):
            return reply
        raise MooncakeUnavailable(reply.text if isinstance(reply, m.NodeFailed) else f"an unexpected reply: {reply}")

    def leave(self) -> None:
        """Make the child leave the cluster and exit, or kill it. Takes a bounded time."""
        with self._changed:
            self._is_leaving = True
            self.why = self.why or "the tier is closed"
            for channel in self._channels:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_WR)  # replies under way still arrive
            self._changed.notify_all()
        if not self.dead.wait(_LEAVE_SECONDS):
            self._kill()
            self.dead.wait(_DIE_SECONDS)

    def _lose(self, why: str) -> None:
        with self._changed:
            self.why = self.why or why
            self._changed.notify_all()
        if not (self._is_leaving and self.dead.wait(_LEAVE_SECONDS)):
            self._kill()

    def _kill(self) -> None:
        with self._changed:
            if self._process is not None:
                self._process.kill()

    def _keep(self) -> None:
        try:
            self._start()
            logger.info("mooncake: child process %s has joined the cluster of %s", self.pid, self._options.setup.master)
        except Exception as error:
            if not isinstance(error, MooncakeUnavailable):
                logger.exception("mooncake: the child process could not be started")
            self.why = f"{error}"
            self._kill()
        has_joined = not self.why
        self.start_ended.set()
        if self._process is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            self.why = self.why or "the child process has ended"
            if self._process is not None:
                status = self._process.wait()  # afterwards, the pid may be reused
                if has_joined and not self._is_leaving:
                    logger.error("mooncake: child process %s ended with %s: %s", self.pid, status, self.why)
            self._process, self.pid = None, 0
            self.dead.set()
            self._close_channels()
            self._changed.notify_all()

    def _start(self) -> None:
        reached_from = self._options.look_for_master()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._options.num_threads + 1)]
        channels = [ours for ours, _ in pairs]
        try:
            fds = [self._pool.fd, *(theirs.fileno() for _, theirs in pairs)]
            command = [sys.executable, "-P", "-m", _CHILD_MODULE, str(os.getpid()), *map(str, fds)]
            with self._changed:
                self._channels += channels
                self._idle_probe += channels[:1]
                self._idle += channels[1:]
                if self._is_leaving:
                    raise MooncakeUnavailable("the tier is closed")
                self._process = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                self.pid = self._process.pid
        finally:
            for _, theirs in pairs:
                theirs.close()
        try:
            setup = self._options.setup_for(self._pool.view.nbytes, reached_from)
            reply = _call(channels[0], setup, self._options.start_seconds)
        except OSError as error:
            raise MooncakeUnavailable(f"the child process did not start: {error}") from error
        if isinstance(reply, m.NodeFailed):
            self.is_final = reply.is_final
            raise MooncakeUnavailable(reply.text)
        with self._changed:
            self.why = "the tier is closed" if self._is_leaving else ""

    def _close_channels(self) -> None:
        if self.dead.is_set():
            for channel in (*self._idle, *self._idle_probe):
                channel.close()


def _call(channel: socket.socket, request: m.Request, timeout_seconds: float) -> m.Reply:
    channel.settimeout(timeout_seconds)
    channel.send(msgspec.msgpack.encode(request))
    try:
        message = channel.recv(m.MESSAGE_BYTES)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_seconds:g} s") from error
    if not message:
        raise ConnectionError("it has ended")
    return m.decode_reply(message)
