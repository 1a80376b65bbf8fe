"""Protects ZeroMQ sockets from peers that open too many connections or send messages of too many frames.

ZeroMQ's own thread accepts connections until no descriptor is left, and then aborts the process on a Unix socket. So
while the reserve of descriptors is in use, `Listeners` keeps new connections out and leaves existing ones alone: a
socket filter drops packets that request a new TCP connection, and a Unix socket is renamed so that clients cannot find
it. Clients retry by themselves. ZeroMQ delivers a message with all its frames; `MessageReader` discards oversized
messages in steps.
"""

import ctypes
import logging
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from kvdepot.processes import is_reserve_touched

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.05  # between two checks of the descriptors: their reserve must outlast a flood so long

_SECONDS_BETWEEN_WARNINGS: Final = 10.0  # clients that are kept out keep retrying
_TAKEN_AT_ONCE: Final = 256  # frames per call: a request has three, and a longer message is read on by the next call
_IPC: Final = "ipc://"
# From Linux's asm-generic/socket.h and filter.h: the program is one instruction, "return 0", which drops every packet.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class BoundEndpoint:
    """One endpoint that a ZeroMQ socket listens on.

    Attributes:
        endpoint: the endpoint, with the chosen port for "*".

    Raises:
        zmq.ZMQError: the endpoint cannot be bound.
    """

    def __init__(self, bound: "zmq.Socket[bytes]", endpoint: str) -> None:
        self._socket = bound
        self._is_bound = self._is_paused = False
        bound.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._bind(endpoint)
        self.endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, endpoint: str) -> None:
        monitor = self._socket.get_monitor_socket(zmq.EVENT_LISTENING)
        try:
            self._socket.bind(endpoint)
            # ZeroMQ's descriptor, after the event's number. `zmq.utils.monitor` would import asyncio: 8 % of a start.
            _, self._fd = struct.unpack("=Hi", monitor.recv_multipart()[0])
            self._is_bound = True
        finally:
            self._socket.disable_monitor()
            monitor.close()

    def end_connections(self) -> None:
        """End all connections, so that ZeroMQ frees its memory of their peers, which connect again by themselves.

        Does nothing while paused, as peers that left could not come back.
        """
        if self._is_bound and not self._is_paused:
            self._socket.unbind(self.endpoint)
            self._is_bound = False

    def listen_again(self) -> bool:
        """Listen after `end_connections`. Return False if ZeroMQ has not closed the old descriptor yet."""
        if not self._is_bound:
            try:
                self._bind(self.endpoint)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
        return self._is_bound

    def pause(self) -> None:
        """Keep new connections out. Existing ones remain."""
        if not self._is_bound:  # its descriptor may be another file's by now
            return
        if self.endpoint.startswith(_IPC):
            self._path.rename(self._hidden)
        else:
            program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            self._set(_SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        self._is_paused = True

    def resume(self) -> None:
        """Let new connections in."""
        if not self._is_paused:
            return
        self._is_paused = False
        if self.endpoint.startswith(_IPC):
            self._hidden.rename(self._path)
        else:
            self._set(_SO_DETACH_FILTER, 0)

    def _set(self, option: int, value: bytes | int) -> None:
        borrowed = socket.socket(fileno=self._fd)
        try:
            borrowed.setsockopt(socket.SOL_SOCKET, option, value)
        finally:
            borrowed.detach()

    @property
    def _path(self) -> Path:
        return Path(self.endpoint.removeprefix(_IPC))

    @property
    def _hidden(self) -> Path:
        return self._path.with_name(f".{self._path.name}.paused")


class Listeners:
    """All endpoints that ZeroMQ listens on."""

    def __init__(self, listeners: Sequence[BoundEndpoint]) -> None:
        self._listeners = listeners
        self._is_paused = False
        self._warned_at = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def look(self, fd: int) -> None:
        """Pause if the reserve of descriptors is in use, else resume. `fd` is any open descriptor."""
        if not self._listeners or is_reserve_touched(fd) is self._is_paused:
            return
        if not self._is_paused and time.monotonic() >= self._warned_at + _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            endpoints = ", ".join(each.endpoint for each in self._listeners)
            logger.warning("few descriptors are left: new connections to %s wait", endpoints)
        self._set_paused(not self._is_paused)

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        for each in self._listeners:
            try:
                each.pause() if is_paused else each.resume()
            except OSError as error:
                logger.warning("cannot %s %s: %s", "pause" if is_paused else "resume", each.endpoint, error)

    def close(self) -> None:
        """Resume, so that Unix sockets get their names back."""
        if self._is_paused:
            self._set_paused(False)


class MessageReader:
    """Reads messages of at most `most_frames` frames from a socket."""

    def __init__(self, receiver: "zmq.Socket[bytes]", most_frames: int) -> None:
        self._receiver = receiver
        self._most_frames = most_frames
        self._frames: list[bytes] = []

    def take(self) -> list[bytes] | None:
        """Return a message, truncated to `most_frames` + 1 frames. None if its rest is read by the next call.

        Raises:
            zmq.Again: no message is waiting.
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
