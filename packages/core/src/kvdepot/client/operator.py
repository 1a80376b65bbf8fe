"""`ask_depot`: one request of an operator's tool, without a session."""

import os
from pathlib import Path

from kvdepot.client.channel import Channel
from kvdepot.client.session import Session
from kvdepot.config import CONTROL_SOCKET, directory_of_url
from kvdepot.errors import DepotUnavailable
from kvdepot.wire import frames
from kvdepot.wire.operation import Operation, R


def ask_depot(request: Operation[R], url: str | None = None, deadline_seconds: float = 2.0) -> R:
    """Send one request without a session and return the reply.

    Raises:
        ConfigError: the URL is malformed.
        DepotUnavailable: no depot runs there, or it does not answer; the text tells which.
        RemoteError: the depot refused the request.
    """
    session = Session(frames.SessionOpened(0, b"", 0, 0, ""), _control_socket(url), None)  # a placeholder
    channel = Channel(session, connect_seconds=deadline_seconds)
    try:
        reply = channel.call(request, deadline_seconds)
        assert isinstance(reply, request.reply_type())
        return reply
    except DepotUnavailable as error:
        if isinstance(error.__cause__, ConnectionRefusedError):  # the socket of a killed server
            raise _no_depot(directory_of_url(url)) from error
        raise DepotUnavailable(f"the depot in {directory_of_url(url)} does not answer: {error}") from error
    finally:
        channel.close()


def _no_depot(directory: Path) -> DepotUnavailable:
    return DepotUnavailable(f"no depot in {directory}: start one with 'kvdepot serve', or name its directory by --url")


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
