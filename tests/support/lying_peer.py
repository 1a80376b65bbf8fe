"""A man in the middle: relays between two depots, and changes what one sends to the other."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from kvdepot.features.peers import protocol as p

Change: TypeAlias = Callable[[p.Coming, list[bytes]], Iterable[bytes]]
"""Returns the bytes to send instead of an announcement and its payloads. Empty bytes: close the connection."""


def frame(message: p.FromPeer) -> bytes:
    body = p.encode(message)
    return len(body).to_bytes(4, "little") + body


def _first_two_swapped(entries: list[bytes]) -> list[bytes]:
    return [*entries[1::-1], *entries[2:]]


def _swapped(coming: p.Coming, payloads: list[bytes]) -> Iterable[bytes]:
    return frame(coming), *_first_two_swapped(payloads)


def _reordered(coming: p.Coming, payloads: list[bytes]) -> Iterable[bytes]:
    reordered = p.Coming(coming.sizes, _first_two_swapped(coming.trailers))
    return frame(reordered), *_first_two_swapped(payloads)


def _flipped(coming: p.Coming, payloads: list[bytes]) -> Iterable[bytes]:
    first = bytearray(payloads[0])
    first[random.randrange(len(first))] ^= 1
    return frame(coming), bytes(first), *payloads[1:]


CHANGES: Final[dict[str, Change]] = {
    "flipped": _flipped,
    "swapped": _swapped,
    "reordered": _reordered,
    "cut": lambda coming, payloads: (frame(coming), *payloads[:1], payloads[1][:100], b""),
    "other sizes": lambda coming, payloads: (
        frame(p.Coming([s + 1 for s in coming.sizes], coming.trailers)),
        *payloads,
    ),
    "fewer": lambda coming, payloads: (frame(p.Coming(coming.sizes[1:], coming.trailers[1:])), *payloads),
    "no trailers": lambda coming, payloads: (frame(p.Coming(coming.sizes, [b""] * len(coming.sizes))), *payloads),
    "garbage": lambda _, payloads: (random.randbytes(300), *payloads),
    "a long frame": lambda coming, _: ((1 << 31).to_bytes(4, "little"), frame(coming)),
    "another answer": lambda coming, _: (frame(p.Have(b"\1" * len(coming.sizes))),),
    "silence": lambda coming, payloads: (frame(coming), payloads[0]),
}


class LyingPeer:
    """Listens in place of a depot, to which it relays.

    Args:
        port: the depot's port for peers.
        change: what it does to entries.
    """

    def __init__(self, port: int, change: Change) -> None:
        self.num_changed = 0
        self._port = port
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._relay, args=(connection,), daemon=True).start()

    def _relay(self, connection: socket.socket) -> None:
        reader, depot = p.Stream(connection), p.Stream(socket.create_connection(("127.0.0.1", self._port)))
        with contextlib.suppress(OSError), contextlib.closing(reader), contextlib.closing(depot):
            reader.until = depot.until = 1e9
            reader.send(bytes(depot.receive(p.HELLO_BYTES)))
            depot.send(bytes(reader.receive(p.HELLO_BYTES + p.PROOF_BYTES)))
            reader.send(bytes(depot.receive(p.PROOF_BYTES)))
            while True:
                request = p.decode_from_reader(reader.receive_frame())
                depot.send_frame(request)
                if isinstance(request, p.Done):
                    continue
                answer = p.decode_from_peer(depot.receive_frame())
                if isinstance(answer, p.Have):
                    reader.send_frame(answer)
                    continue
                payloads = [bytes(depot.receive(size)) for size in answer.sizes]
                self.num_changed += 1
                for part in self._change(answer, payloads):
                    if not part:
                        return
                    reader.send(part)

    def close(self) -> None:
        self._listening.close()
