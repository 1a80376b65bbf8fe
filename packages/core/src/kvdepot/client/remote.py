"""Operators' requests to a depot on another machine: over TCP, with ZeroMQ's CURVE keys."""

import zmq

from kvdepot.errors import ConfigError, DepotTimeout, DepotUnavailable, RemoteError
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.curve import ClientKeys


class RemoteChannel:
    """A connection to one endpoint, tcp://HOST:PORT, made by ZeroMQ in the background.

    Raises:
        ConfigError: the endpoint is malformed.
    """

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int(endpoint.startswith("tcp://["))),
            (zmq.CURVE_PUBLICKEY, keys.own.public),
            (zmq.CURVE_SECRETKEY, keys.own.secret),
            (zmq.CURVE_SERVERKEY, keys.server),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint}: {error}; give tcp://HOST:PORT or a directory") from error
        self._sequence = 0

    def call(self, request: frames.Request, deadline_seconds: float) -> frames.Reply:
        """Send a request and wait for its reply, one at a time.

        Raises:
            RemoteError: the depot refused the request.
            DepotTimeout: no reply in time.
            DepotUnavailable: the bytes received are not a reply.
        """
        self._sequence += 1
        self._socket.send(frames.encode_frame(self._sequence, request))
        if not self._socket.poll(max(0, int(deadline_seconds * 1000))):
            raise DepotTimeout(f"no answer within {deadline_seconds} s")
        try:
            reply = frames.decode_reply(self._socket.recv())
        except frames.FrameError as error:
            raise DepotUnavailable(f"the depot speaks another language: {error}") from error
        if isinstance(reply, m.ErrorReply):
            raise RemoteError(reply.code, reply.message)
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)


def ask_remote(request: o.OperatorRequest, endpoint: str, deadline_seconds: float, keys: ClientKeys) -> frames.Reply:
    """Send one request; see `kvdepot.client.operator.ask_depot`."""
    channel = RemoteChannel(endpoint, keys)
    try:
        return channel.call(request, deadline_seconds)
    except DepotUnavailable as error:
        raise DepotUnavailable(
            f"the depot at {endpoint} does not answer: {error}; is it there, is --curve-server its key, does its"
            " --curve-clients list ours?"
        ) from error
    finally:
        channel.close()
