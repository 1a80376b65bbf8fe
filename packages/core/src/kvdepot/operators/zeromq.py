"""Sockets of ZeroMQ that strangers can neither exhaust nor keep busy.

ZeroMQ accepts connections in a thread of its own, until no descriptor is left (and on a Unix socket ends the process
then), and hands over messages whole, however many frames a peer gave them. So `Listeners` stops listening while the
reserve of descriptors is touched, which ends the connections there; ZeroMQ makes its clients connect again.
`MessageReader` drops in steps what has too many frames.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

import zmq

from kvdepot.processes.descriptors import is_reserve_touched

logger = logging.getLogger(__name__)

LOOK_MILLISECONDS: Final = 50  # how often to look at the descriptors at least

_SECONDS_BETWEEN_WARNINGS: Final = 10.0
_TAKEN_AT_ONCE: Final = 256  # frames


class Listeners:
    """Where sockets of ZeroMQ listen, each with its endpoint."""

    def __init__(self, bound: "Sequence[tuple[zmq.Socket[bytes], str]]") -> None:
        self._bound = dict.fromkeys(bound, True)  # whether it listens there
        self._warned_at = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._bound)

    def leave_reserve(self, fd: int) -> None:
        """Stop listening and end the connections there if the reserve is touched; `fd` is any descriptor."""
        if not any(self._bound.values()) or not is_reserve_touched(fd):
            return
        if time.monotonic() >= self._warned_at + _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            endpoints = ", ".join(endpoint for _, endpoint in self._bound)
            logger.warning("few descriptors are left: ended the connections at %s, which may come back", endpoints)
        for (bound, endpoint), is_listening in self._bound.items():
            if is_listening:
                bound.unbind(endpoint)
                self._bound[bound, endpoint] = False

    def listen_again(self, fd: int) -> None:
        """Listen again where that was given up, if the reserve is not touched any more."""
        if all(self._bound.values()) or is_reserve_touched(fd):
            return
        for (bound, endpoint), is_listening in self._bound.items():
            if not is_listening:
                try:
                    bound.setsockopt(zmq.IPV6, int("[" in endpoint))
                    bound.bind(endpoint)
                except zmq.ZMQError as error:
                    logger.debug("cannot listen on %s again yet: %s", endpoint, error)
                else:
                    self._bound[bound, endpoint] = True


class MessageReader:
    """Takes messages of at most `most_frames` frames from a socket."""

    def __init__(self, receiver: "zmq.Socket[bytes]", most_frames: int) -> None:
        self._receiver = receiver
        self._most_frames = most_frames
        self._frames: list[bytes] = []

    def take(self) -> list[bytes] | None:
        """Return a message. Of one that has too many frames, one more than the most. None: it goes on at the next call.

        Raises:
            zmq.Again: there is no message.
        """
        frames = self._frames
        for _ in range(_TAKEN_AT_ONCE):
            frame = self._receiver.recv(zmq.NOBLOCK)
            if len(frames) <= self._most_frames:
                frames.append(frame)
            if not self._receiver.getsockopt(zmq.RCVMORE):
                self._frames = []
                return frames
        return None
