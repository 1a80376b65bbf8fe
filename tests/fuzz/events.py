"""Subscriptions and replay requests as a target: messages of a stranger to the events port, then a router's."""

from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from fuzz.tiers import FOLDER
from kvdepot.features.routers.events import END, EventPublisher
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.numbers import Numbers
from kvdepot.lab.processes import wait_until
from support.events import MODEL, Context, View, description, events_of, ids_of
from support.index import Bench, prompt

_RUN: Final = prompt(3)
_FIRST: Final = bytes(8)  # the number from which a router wants all
_MOST_MESSAGES: Final = 16
_MOST_FRAMES: Final = 8
_LARGEST_FRAME_BYTES: Final = 100  # above the sockets' limit


class _Port:
    """A publisher whose clock runs fast, and sockets that talk to it."""

    def __init__(self, context: Context) -> None:
        self._context, self._now = context, 0.0
        self._opened: list[zmq.Socket[bytes]] = []  # until the context closes them
        bench = Bench(pages=20, num_records=24, holdings=Holdings())
        bench.worker().store(_RUN)
        holdings, visibility = bench.holdings, bench.index.visibility
        assert holdings is not None
        for request in description(_RUN, 1).requests(0, _RUN):
            found = visibility.find_run(bench.index.spaces[0], request.digests, request.first_chunk)
            text = holdings.read(bench.index.spaces[0], MODEL, request)
            assert text is not None
            assert holdings.describe(text, request.digests, *found)
        events, replay = (f"ipc://{FOLDER}/{name}" for name in ("events", "replay"))
        self._publisher = EventPublisher(context, holdings, events, replay, Numbers(), clock=lambda: self._now)

    def connect(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a socket: a DEALER asks for replays, and others subscribe."""
        opened = self._context.socket(kind)
        self._opened.append(opened)
        opened.setsockopt(zmq.RECONNECT_IVL, 1)  # a message that is too large ends its connection
        opened.connect(self._publisher.replay_endpoint if kind == zmq.DEALER else self._publisher.endpoint)
        return opened

    def serve(self) -> None:
        self._now += 10.0
        for _ in self._publisher.serve() or ():
            pass

    def ask(self, dealer: "zmq.Socket[bytes]") -> None:
        """Ask for a replay until it ends."""

        def has_ended() -> bool:
            with suppress(zmq.Again):
                dealer.send_multipart([b"", _FIRST], zmq.NOBLOCK)
            self.serve()
            return bool(dealer.poll(1)) and dealer.recv_multipart()[2] == END

        wait_until(has_ended)

    def check_snapshot(self) -> None:
        """Check that a new subscriber gets all blocks."""
        router, view = self.connect(zmq.SUB), View()
        router.subscribe(b"")

        def has_all() -> bool:
            self.serve()
            while router.poll(1):
                for event in events_of(router.recv_multipart()[2]):
                    view.take(event)
            return view.found == set(ids_of(_RUN))

        wait_until(has_all)


def bytes_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


def talk(data: bytes) -> None:
    """A list of messages `[port, frames]` of a stranger. The publisher then serves a router as if it were alone."""
    try:
        messages = msgspec.msgpack.decode(data, type=list[Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        messages = list[Any]([[len(data), [data]]])
    context = zmq.Context[Any]()
    try:
        port = _Port(context)
        stranger = [port.connect(kind) for kind in (zmq.XSUB, zmq.DEALER)]
        for message in messages[:_MOST_MESSAGES]:
            match message:
                case [int(number), [first, *rest]]:
                    frames = [bytes_of(each)[:_LARGEST_FRAME_BYTES] for each in [first, *rest][:_MOST_FRAMES]]
                    stranger[number & 1].send_multipart(frames)
                case _:
                    port.serve()
        port.ask(stranger[1])  # now the earlier messages were read
        port.check_snapshot()
        port.ask(port.connect(zmq.DEALER))
    finally:
        context.destroy(0)


def seeds() -> list[bytes]:
    """Return subscriptions and their ends, replay requests, and messages that are neither."""
    subscribe, leave, ask = [0, [b"\1"]], [0, [b"\0"]], [1, [b"", _FIRST]]
    each: list[list[Any]] = [
        [],
        [subscribe, None, leave, leave, [0, [b"\1topic"]], [0, [b"\0other"]]],
        [ask, None, ask, [1, [b"", END]], [1, [b"", b"\x7f" + bytes(7)]]],
        [[0, [b"\2"]], [0, [b""]], [0, [b"\1", b"\1", b""]], [0, [bytes(100)]]],
        [
            [1, [b""]],
            [1, [b"", _FIRST, b""]],
            [1, [_FIRST]],
            [1, [b"", b"short"]],
            [1, [b""] * 8],
            [1, [b"", bytes(100)]],
        ],
    ]
    return [msgspec.msgpack.encode(messages) for messages in each]
