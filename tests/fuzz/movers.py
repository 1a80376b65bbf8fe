"""The stateful target with movers: extents being copied have no other owner until the copy or its mover ends."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from unittest.mock import patch

import msgspec.structs

from fuzz.depot import PAGE, SPECS, Bytes, Life
from kvdepot.features.flights import feature as flights
from kvdepot.movers.protocol import Copy
from kvdepot.movers.table import MoveRefused, MoverTable, OnMoved
from kvdepot.pool.table import SEALED, WRITING, Writer
from kvdepot.wire import messages as m
from kvdepot.wire.messages import MoveOutcome

OFFER = m.MoverOffer("fake", "GPU-0", (b"handle",), ((m.PagePlace(0, 0, 8192), m.PagePlace(0, 4096, 8192)),) * 3)
REGISTRATION = m.RegisterKVCache(
    1, "engine", 0, 1, "cuda:0", "ipc", "model", SPECS[2], (m.GroupDetail((4096, 4096), 8),) * 3, OFFER
)


@dataclass
class Process:
    """A mover without a process."""

    context: int
    writer: Writer
    moves: "list[tuple[Copy, OnMoved]]" = field(default_factory=list["tuple[Copy, OnMoved]"])


class Movers:
    """A `MoverTable` whose processes follow the input. Killed processes die when the input says so."""

    move_seconds = 1.0

    def __init__(self) -> None:
        self.counters = Counter[str]()
        self.living: dict[int, Process] = {}  # by context
        self.dying: list[Process] = []
        self._next = 1000

    def start(self, context: int, session: int, registration: m.RegisterKVCache) -> None:
        del session, registration
        self.living[context] = Process(context, Writer(self._next, 1))
        self._next += 1

    def end(self, context: int) -> Writer | None:
        process = self.living.pop(context, None)
        if process is None:
            return None
        self.dying.append(process)
        return process.writer

    def writer_of(self, context: int) -> Writer | None:
        return self.living[context].writer if context in self.living else None

    def is_warm(self, context: int) -> bool:
        return context in self.living

    def status(self, context: int) -> tuple[str, int, str]:
        return ("ready", self.living[context].writer.pid, "") if context in self.living else ("", 0, "")

    def move(self, context: int, copy: Copy | None, wait_seconds: float, on_end: OnMoved) -> None:
        del wait_seconds
        process = self.living.get(context)
        if process is None:
            on_end(MoveOutcome.UNAVAILABLE, "none")
        elif copy is None:
            on_end(MoveOutcome.DONE, "")
        elif any(other.is_store is copy.is_store for other, _ in process.moves):
            raise MoveRefused("one is under way")
        else:
            process.moves.append((copy, on_end))


class LifeWithMovers(Life):
    """A life in which half of the workers offer their memory."""

    def start(self) -> None:
        super().start()
        self.movers = Movers()
        self.depot.state.movers = cast("MoverTable", self.movers)

    def completed(self, request: m.RegisterKVCache, choice: int) -> m.RegisterKVCache:
        if choice & 0x40:
            return request
        place = m.PagePlace(0, 0, PAGE * 2 + 1 if choice != 0x9F else 1)
        offer = m.MoverOffer("fake", "GPU-0", (b"handle",), ((place,),) * (len(request.details) + (choice == 0xA1)))
        return msgspec.structs.replace(request, offer=offer)

    def steps(self) -> list[Callable[[], None]]:
        return [*super().steps(), self.move, self.copy_ends, self.mover_dies]

    def move(self) -> None:
        who = self.who()
        context, choice = self.context(who), self.source.byte()
        known = self.depot.contexts.by_number.get(context)
        count = len(known.space.spec.groups) if known else 1
        numbers = [*self.depot.stores.tickets] if choice & 1 else [lease.number for lease in self.depot.leases]
        number = numbers[choice % len(numbers)] if numbers else choice
        ids = (bytes(4 * (choice >> 2)),) * (count if choice < 0xF0 else 2)
        self.ask(m.Move(context, number, bool(choice & 1), ids, (0,) * count, (0,) * count), who)

    def copy_ends(self) -> None:
        processes = [process for process in self.movers.living.values() if process.moves]
        if processes:
            choice = self.source.byte()
            process = processes[choice % len(processes)]
            _, on_end = process.moves.pop()
            on_end(MoveOutcome.FAILED if choice & 0x80 else MoveOutcome.DONE, "")

    def mover_dies(self) -> None:
        """End a killed mover. If there is none, end a living one, and another one takes its place."""
        processes = self.movers.dying or list(self.movers.living.values())
        if processes:
            process = processes[self.source.byte() % len(processes)]
            self._bury(process)
            if process in self.movers.dying:
                self.movers.dying.remove(process)
            else:
                self.movers.start(process.context, 0, REGISTRATION)

    def _bury(self, process: Process) -> None:
        for _, on_end in process.moves:
            on_end(MoveOutcome.FAILED, "dead")
        process.moves.clear()
        self.depot.end_mover(process.context, process.writer)

    def check(self) -> None:
        super().check()
        assert all(ticket.is_moving for ticket in self.depot.stores.tickets.values() if ticket.is_aborted)
        for process in [*self.movers.dying, *self.movers.living.values()]:
            for copy, _ in process.moves:
                for _, _, _, entry, _, header, offset, num_bytes in m.EXTENT.iter_unpack(copy.extents):
                    if copy.is_store:
                        assert self.depot.index.table.header(entry) == header - SEALED + WRITING, (
                            "given away under a copy"
                        )
                        assert header & 0xFF == SEALED
                        assert self.depot.index.table.extent(entry) == (offset, num_bytes)
                        assert self.depot.index.table.writer_of(entry) == process.writer

    def finish(self) -> None:
        for who in range(len(self.sessions)):
            self.depot.end_session(self.sessions[who])
        self.check()
        assert not self.movers.living
        for process in self.movers.dying:
            self._bury(process)
        super().finish()


def live_with_movers(data: bytes) -> None:
    """Run the first 400 bytes of an input."""
    with patch.object(flights, "LEAST_TOKENS", 2):
        LifeWithMovers(Bytes(data[:400])).run()
