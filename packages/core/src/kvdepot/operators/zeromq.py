"""Protects ZeroMQ sockets from peers that open too many connections or send messages of too many frames.

ZeroMQ's own thread accepts connections until no descriptor is left, and then aborts the process on a Unix socket. So
`Listeners` stops listening while the reserve of descriptors is touched, which closes the connections there; ZeroMQ
clients reconnect by themselves. ZeroMQ delivers a message with all its frames; `MessageReader` drops oversized ones in
steps.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

import zmq

from kvdepot.processes.descriptors import is_reserve_touched

logger = logging.getLogger(__name__)

LOOK_MILLISECONDS: Final = 50  # between two checks of the descriptors

_SECONDS_BETWEEN_WARNINGS: Final = 10.0
_TAKEN_AT_ONCE: Final = 256  # frames


class Listeners:
    """Listening ZeroMQ sockets with their endpoints."""

    def __init__(self, bound: "Sequence[tuple[zmq.Socket[bytes], str]]") -> None:
        self._bound = dict.fromkeys(bound, True)  # whether the socket listens
        self._warned_at = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._bound)

    def leave_reserve(self, fd: int) -> None:
        """Stop listening, which closes all connections, if the reserve is touched. `fd` is any open descriptor."""
        if not any(self._bound.values()) or not is_reserve_touched(fd):
            return
        if time.monotonic() >= self._warned_at + _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            endpoints = ", ".join(endpoint for _, endpoint in self._bound)
            logger.warning("few descriptors are left: closed all connections at %s; clients may reconnect", endpoints)
        for (bound, endpoint), is_listening in self._bound.items():
            if is_listening:
                bound.unbind(endpoint)
                self._bound[bound, endpoint] = False

    def listen_again(self, fd: int) -> None:
        """Resume listening if the reserve is no longer touched."""
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
    """Reads messages of at most `most_frames` frames from a socket."""

    def __init__(self, receiver: "zmq.Socket[bytes]", most_frames: int) -> None:
        self._receiver = receiver
        self._most_frames = most_frames
        self._frames: list[bytes] = []

    def take(self) -> list[bytes] | None:
        """Return a message, cut to `most_frames` + 1 frames, or None if the rest of it comes at the next call.

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
