"""Processes between two depots: one knows the token and lies about entries, one only relays and forges them."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from kvdepot.features.peers import protocol as p
from kvdepot.tiers.keys import KEY_BYTES
from kvdepot.tiers.trailer import checksum_of, make_trailer

Change: TypeAlias = Callable[[p.Coming, list[bytes]], Iterable[p.FromPeer | bytes]]
"""Returns the messages and bytes to send instead of an announcement and its payloads. Empty bytes: close."""


def _first_two_swapped(entries: list[bytes]) -> list[bytes]:
    return [*entries[1::-1], *entries[2:]]


def _swapped(coming: p.Coming, payloads: list[bytes]) -> Iterable[p.FromPeer | bytes]:
    return coming, *_first_two_swapped(payloads)


def _reordered(coming: p.Coming, payloads: list[bytes]) -> Iterable[p.FromPeer | bytes]:
    return p.Coming(coming.sizes, _first_two_swapped(coming.trailers)), *_first_two_swapped(payloads)


def _flipped(coming: p.Coming, payloads: list[bytes]) -> Iterable[p.FromPeer | bytes]:
    first = bytearray(payloads[0])
    first[random.randrange(len(first))] ^= 1
    return coming, bytes(first), *payloads[1:]


CHANGES: Final[dict[str, Change]] = {
    "flipped": _flipped,
    "swapped": _swapped,
    "reordered": _reordered,
    "cut": lambda coming, payloads: (coming, *payloads[:1], payloads[1][:100], b""),
    "other sizes": lambda coming, payloads: (p.Coming([s + 1 for s in coming.sizes], coming.trailers), *payloads),
    "fewer": lambda coming, payloads: (p.Coming(coming.sizes[1:], coming.trailers[1:]), *payloads),
    "no trailers": lambda coming, payloads: (p.Coming(coming.sizes, [b""] * len(coming.sizes)), *payloads),
    "garbage": lambda _, payloads: (random.randbytes(300), *payloads),
    "a long frame": lambda coming, _: ((1 << 31).to_bytes(4, "little"), coming),
    "another answer": lambda coming, _: (p.Have(b"\1" * len(coming.sizes)),),
    "silence": lambda coming, payloads: (coming, payloads[0]),
}


class _Between:
    """Listens in place of a depot, and serves each connection by another one to the depot's `port`."""

    def __init__(self, port: int) -> None:
        self.num_changed = 0
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        reader, depot = p.Stream(connection), p.Stream(socket.create_connection(("127.0.0.1", self._port)))
        reader.until = depot.until = 1e9
        with contextlib.suppress(OSError), contextlib.closing(reader), contextlib.closing(depot):
            self.serve(reader, depot)

    def serve(self, reader: p.Stream, depot: p.Stream) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._listening.close()


class LyingPeer(_Between):
    """Knows the token, and changes the depot's entries. `keys` are those that were read last."""

    def __init__(self, port: int, token: bytes, change: Change) -> None:
        self.keys: list[bytes] = []
        self._token = token
        self._change = change
        super().__init__(port)

    def serve(self, reader: p.Stream, depot: p.Stream) -> None:
        reader.greet_as_listener(self._token)
        depot.greet_as_reader(self._token)
        while True:
            request = p.decode_from_reader(reader.receive_frame())
            depot.send_frame(request)
            if isinstance(request, p.Done):
                continue
            answer = p.decode_from_peer(depot.receive_frame())
            if isinstance(answer, p.Have):
                reader.send_frame(answer)
                continue
            assert isinstance(request, p.Read)
            assert isinstance(answer, p.Coming)
            self.keys = request.keys
            payloads = [bytes(depot.receive(size)) for size in answer.sizes]
            self.num_changed += 1
            for part in self._change(answer, payloads):
                if isinstance(part, p.FromPeer):
                    reader.send_frame(part)
                elif part:
                    reader.send(part)
                else:
                    return


class Forger(_Between):
    """Relays without the token, and replaces entries and trailers by its own, which match each other."""

    def serve(self, reader: p.Stream, depot: p.Stream) -> None:
        reader.send(bytes(depot.receive(p.HELLO_BYTES)))
        depot.send(bytes(reader.receive(p.HELLO_BYTES + p.PROOF_BYTES)))
        reader.send(bytes(depot.receive(p.PROOF_BYTES)))
        while True:
            head, body, code = self._frame(reader)
            request = p.decode_from_reader(body)
            depot.send(head + body + code)
            if isinstance(request, p.Done):
                continue
            head, body, code = self._frame(depot)
            answer = p.decode_from_peer(body)
            if isinstance(answer, p.Coming) and isinstance(request, p.Read):
                self.num_changed += 1
                payloads = [random.randbytes(len(depot.receive(size))) for size in answer.sizes]
                trailers = [
                    make_trailer(key[:KEY_BYTES], len(payload), checksum_of(memoryview(payload)))
                    for key, payload in zip(request.keys, payloads, strict=True)
                ]
                body = p.encode(p.Coming(answer.sizes, trailers))
                reader.send(len(body).to_bytes(4, "little") + body + code + b"".join(payloads))
            else:
                reader.send(head + body + code)

    def _frame(self, stream: p.Stream) -> tuple[bytes, bytes, bytes]:
        head = bytes(stream.receive(4))
        return head, bytes(stream.receive(int.from_bytes(head, "little"))), bytes(stream.receive(p.CODE_BYTES))
