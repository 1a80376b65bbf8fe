"""`ask_depot`: one request of an operator's tool, without a session."""

import os
import socket
import struct
from pathlib import Path
from typing import Final

from kvdepot.config import CONTROL_SOCKET, DEADLINE_SECONDS, directory_of_url
from kvdepot.errors import DepotUnavailable, RemoteError
from kvdepot.ownership import refuse_foreign_server
from kvdepot.pool.inventory import name_others
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import Operation, R

_MOST_REPLY_BYTES: Final = 64 << 20  # far beyond any reply: a larger length means that the framing is lost
_TIMEVAL: Final = struct.Struct("ll")


def ask_depot(request: Operation[R], url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS) -> R:
    """Send one request without a session and return the reply. The deadline is that of each step.

    Raises:
        ConfigError: the URL is malformed.
        DepotUnavailable: no depot runs there, it does not answer, or another user does; the text tells which.
        RemoteError: the depot refused the request.
    """
    control, frame = _control_socket(url), frames.encode_frame(1, request)
    kind = request.reply_type()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # Not `settimeout`: with it, connect would not wait while the depot is busy accepting other connections.
            seconds, rest = divmod(deadline_seconds, 1)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))
            connection.connect(str(control))
            refuse_foreign_server(connection, control)
            connection.sendall(frames.encode_greeting(None) + frames.LENGTH.pack(len(frame)) + frame)
            (length,) = frames.LENGTH.unpack(_receive(connection, frames.LENGTH.size))
            if length > _MOST_REPLY_BYTES:
                raise OSError(f"it sent a malformed reply: {length} bytes")
            reply = frames.decode_reply(_receive(connection, length), kind)
    except ConnectionRefusedError as error:  # the socket of a killed server
        raise _no_depot(directory_of_url(url)) from error
    except (OSError, frames.FrameError) as error:
        why = f"no answer within {deadline_seconds} s" if isinstance(error, BlockingIOError) else error
        raise DepotUnavailable(f"the depot in {directory_of_url(url)} does not answer: {why}") from error
    if isinstance(reply, m.ErrorReply):
        raise RemoteError(reply.code, reply.message)
    assert isinstance(reply, kind)
    return reply


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:  # a signal can end MSG_WAITALL early
        more = connection.recv(num_bytes - len(received), socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError("it closed the connection")
        received += more
    return received


def _no_depot(directory: Path) -> DepotUnavailable:
    return DepotUnavailable(
        f"no depot in {directory}: start one with 'kvdepot serve', or name its directory by --dir"
        f"{name_others(directory)}"
    )


def _control_socket(url: str | None) -> Path:
    directory = directory_of_url(url)
    control = directory / CONTROL_SOCKET
    if os.access(control, os.W_OK):
        return control
    try:
        control.stat()
    except PermissionError:
        pass
    except OSError as error:
        raise _no_depot(directory) from error
    raise DepotUnavailable(
        f"this user may not connect to the depot in {directory}: ask as the depot's user, or serve with --socket-group"
        " GROUP and be a member of it"
    )
