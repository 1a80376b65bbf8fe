"""The subset of the protocol of Valkey and Redis (RESP2) that a tier needs, without copies of large values.

Payloads are sent from the pool, and replies are read into it, at 2.8 to 3.5 GB/s on one connection. redis-py, which
copies them into `bytes`, reached 0.42 to 0.48 GB/s (`docs/architecture.md`).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Final, TypeAlias

Reader: TypeAlias = "BufferedReader[socket.SocketIO]"

_CRLF: Final = b"\r\n"
_LARGEST_REPLY: Final = 64 << 20  # limit of a string: a tier writes none larger
_MOST_ITEMS: Final = 1 << 20  # of an array: bounds what a foreign server can make this process allocate
_DEEPEST: Final = 4  # nested arrays; the reply to a scan has two levels
_SMALL: Final = 4096  # strings up to this size are copied into one send


@dataclass(frozen=True, slots=True)
class ReplyError:
    """The server's refusal of a command. A value, not an exception, because the replies after it must be read, too."""

    text: str


Reply = bytes | memoryview | int | None | ReplyError | list["Reply"]
Argument = bytes | memoryview
Command = Sequence[Argument]


def send(to: socket.socket, commands: Sequence[Command]) -> None:
    """Send commands.

    Raises:
        OSError: the connection is unusable from now on.
    """
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            small += b"$%d\r\n" % len(argument)
            if len(argument) <= _SMALL:
                small += argument
            else:
                to.sendall(small)
                to.sendall(argument)
                small.clear()
            small += _CRLF
    if small:
        to.sendall(small)


def receive(reader: Reader, target: memoryview | None = None, depth: int = 0) -> Reply:
    """Read one reply. If it is a string of exactly the size of `target`, read it into `target` and return that.

    Raises:
        OSError: the connection is unusable from now on.
    """
    line = reader.readline(65536)
    if not line.endswith(_CRLF):
        raise ConnectionResetError("the server closed the connection")
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return rest
        case b"-":
            return ReplyError(rest.decode(errors="replace"))
        case b":":
            return _number(rest)
        case b"$":
            return _receive_string(reader, _number(rest), target)
        case b"*":
            count = _number(rest)
            if count > _MOST_ITEMS or depth == _DEEPEST:
                raise ConnectionAbortedError(f"a reply of {count} items, {depth} arrays deep")
            return None if count < 0 else [receive(reader, None, depth + 1) for _ in range(count)]
        case _:
            raise ConnectionAbortedError(f"not a reply: {line[:20]!r}")


def _receive_string(reader: Reader, size: int, target: memoryview | None) -> bytes | memoryview | None:
    if size < 0:
        return None
    if size > _LARGEST_REPLY:
        raise ConnectionAbortedError(f"a reply of {size} bytes")
    fits = target is not None and target.nbytes == size
    place = target if target is not None and fits else memoryview(bytearray(size))
    done = 0
    while done < size:
        read = reader.readinto(place[done:])
        if not read:
            raise ConnectionResetError("the server closed the connection")
        done += read
    if reader.read(2) != _CRLF:
        raise ConnectionAbortedError("a string that does not end")
    return place if fits else bytes(place)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConnectionAbortedError(f"not a number: {text[:20]!r}") from error
