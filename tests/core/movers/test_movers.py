"""Movers at the depot's loop: real processes without a device, and a depot without sockets."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from kvdepot import backends as registry
from kvdepot.errors import ErrorCode
from kvdepot.index.index import ChunkIndex
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import wait_until
from kvdepot.layout import GroupKind
from kvdepot.movers import table as movers
from kvdepot.movers.protocol import Ready, Setup, encode
from kvdepot.movers.table import MoverState, MoverTable
from kvdepot.operate.report import status_of
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.processes import process_start_time
from kvdepot.server.depot import Depot
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.wire import frames
from kvdepot.wire import messages as m

POOL_BYTES = 1 << 20
SESSION = 7
WORKER = Writer(os.getpid(), process_start_time(os.getpid()))
WAIT_SECONDS = 30.0
START_SECONDS = 20.0
SPEC = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes")
RUN = hash_prefix(Namespace("model"), 1, range(4))


def offer(device: str, **fields: Any) -> m.MoverOffer:
    return m.MoverOffer("test", device, (b"handle",), ((m.PagePlace(0, 0, 4096),),), **fields)


def registration(device: str, **fields: Any) -> m.RegisterKVCache:
    detail = m.GroupDetail((4096,), 8)
    made = m.RegisterKVCache(
        m.PROTOCOL_VERSION, "engine", 0, 1, "none", "moved", "model", SPEC, (detail,), offer(device)
    )
    return msgspec.structs.replace(made, **fields)


@dataclass
class Node:
    """A depot with movers, and a loop that runs one turn at a time on demand."""

    depot: Depot
    movers: MoverTable
    pool_fd: int
    handed_over: list[int] = field(default_factory=list[int])
    takes: bool = True

    def register(self, device: str = "quick", **fields: Any) -> int:
        reply = self.depot.handle(SESSION, WORKER, registration(device, **fields))
        assert isinstance(reply, m.Registered)
        assert reply.move_seconds == self.movers.move_seconds
        return reply.context

    def turn(self) -> None:
        self.movers.serve()
        self.depot.state.timers.expire(time.monotonic())

    def turn_until(self, condition: Callable[[], object], what: str = "") -> None:
        def is_so() -> bool:
            self.turn()
            return bool(condition())

        wait_until(is_so, WAIT_SECONDS, what)

    def ready(self, device: str = "quick") -> int:
        """Register a worker and wait for its mover. Return the context."""
        context = self.register(device)
        self.wait_until_ready(context)
        return context

    def state(self, context: int) -> str:
        return self.movers.status(context)[0]

    def pid(self, context: int) -> int:
        return self.movers.status(context)[1]

    def wait_until_ready(self, context: int) -> None:
        self.turn_until(lambda: self.state(context) == MoverState.READY, "the mover")

    def ask(self, request: frames.Request) -> Any:
        return self.depot.handle(SESSION, WORKER, request)

    def prepare(self, context: int) -> m.StorePlan:
        plan = self.ask(m.PrepareStore(context, "r", "default", RUN.digests, 0, RUN.parent, (4,)))
        assert isinstance(plan, m.StorePlan)
        return plan

    def move(
        self, context: int, number: int, *, is_store: bool = True, wait_seconds: float = 60.0
    ) -> m.Moved | PendingReply:
        request = m.Move(context, number, is_store, (bytes(16),), (0,), (0,), wait_seconds)
        reply = self.ask(request if number else m.Move(context, 0, wait_seconds=wait_seconds))
        assert isinstance(reply, m.Moved | PendingReply)
        return reply

    def ended(self, moving: m.Moved | PendingReply) -> m.Moved:
        if isinstance(moving, m.Moved):
            return moving
        self.turn_until(lambda: moving.reply, "the end of a move")
        assert isinstance(moving.reply, m.Moved)
        return moving.reply

    def outcome(self, moving: m.Moved | PendingReply) -> m.MoveOutcome:
        return self.ended(moving).outcome

    @property
    def quarantined_bytes(self) -> int:
        return int(status_of(self.depot).quarantined_bytes)

    def counter(self, name: str) -> int:
        return int(status_of(self.depot).counters.get(name, 0))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    def module(name: str) -> str | None:
        return "support.mover_child" if name == "test" else None

    monkeypatch.setattr(movers, "mover_module", module)
    pool_fd = os.memfd_create("pool")
    os.ftruncate(pool_fd, POOL_BYTES)
    index = ChunkIndex(ExtentAllocator(POOL_BYTES), IndexTable.in_memory(64))
    depot = Depot(index, epoch=1, lease_seconds=300.0, clock=time.monotonic)

    def hand_over(session: int, fd: int) -> bool:
        assert session == SESSION
        if node.takes:
            node.handed_over.append(os.dup(fd))
        return node.takes

    table = MoverTable(
        pool_fd,
        POOL_BYTES,
        depot.state.timers,
        hand_over=hand_over,
        on_dead=depot.end_mover,
        start_seconds=START_SECONDS,
        move_seconds=20.0,
    )
    depot.state.movers = table
    node = Node(depot, table, pool_fd)
    yield node
    table.close()
    os.close(pool_fd)
    for fd in node.handed_over:
        assert select.select([fd], [], [], 0)[0], "a mover lives on"
        os.close(fd)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_mover_writes_what_the_depot_chose_and_nothing_else(node: Node) -> None:
    context = node.register()
    assert node.prepare(context).num_declined == 4  # no mover could write yet
    assert node.outcome(node.move(context, 0)) is m.MoveOutcome.DONE
    plan = node.prepare(context)
    extents, pid = [*m.EXTENT.iter_unpack(plan.extents)], node.pid(context)
    for extent in extents:  # so if this depot is killed, the next one waits for the mover's death
        assert node.depot.index.table.writer_of(extent[3]) == Writer(pid, process_start_time(pid))
    assert node.outcome(node.move(context, plan.ticket)) is m.MoveOutcome.DONE
    offsets = {extent[6] for extent in extents}
    pool = os.pread(node.pool_fd, POOL_BYTES, 0)
    assert {place for place, byte in enumerate(pool) if byte} == offsets
    assert node.ask(m.CommitStore(context, plan.ticket)) == m.Done(1, 4)
    retrieve = node.ask(m.PrepareRetrieve(context, "r", RUN.digests, 0, (4,)))
    assert retrieve.num_chunks == 4
    assert node.outcome(node.move(context, retrieve.lease, is_store=False)) is m.MoveOutcome.DONE
    assert node.counter("moves") == 2


@pytest.mark.parametrize("device", ["quick", "settled"])
def test_a_mover_says_whether_later_copies_will_be_faster(device: str, node: Node) -> None:
    """Before its first copy it says nothing, and neither does its successor."""
    context = node.register(device)
    found: list[bool] = []
    for number in (0, None, 0):
        moved = node.ended(node.move(context, node.prepare(context).ticket if number is None else number))
        assert moved.outcome is m.MoveOutcome.DONE
        found.append(moved.is_warm)
    assert found == [False, device == "settled", device == "settled"]
    before = node.pid(context)
    os.kill(before, signal.SIGKILL)
    node.turn_until(lambda: node.state(context) == MoverState.READY and node.pid(context) != before, "another mover")
    assert node.move(context, 0) == m.Moved(1, m.MoveOutcome.DONE)


def test_a_ticket_that_is_being_written_can_neither_be_committed_nor_given_away(node: Node) -> None:
    context = node.ready("hangs")
    plan = node.prepare(context)
    moving = node.move(context, plan.ticket)
    with pytest.raises(Refused, match="still being written"):
        node.ask(m.CommitStore(context, plan.ticket))
    with pytest.raises(Refused, match="is being written"):
        node.move(context, plan.ticket)
    assert node.ask(m.AbortStore(context, plan.ticket)) == m.Done(1, 4)
    assert node.depot.index.extents.used_bytes == 4 * 4096
    node.movers.end(context)
    node.turn()
    assert node.outcome(moving) is m.MoveOutcome.FAILED
    assert node.depot.index.extents.used_bytes == 0
    assert not node.depot.stores.tickets


def test_one_copy_a_direction(node: Node) -> None:
    context = node.ready("hangs")
    first = node.prepare(context)
    node.move(context, first.ticket)
    other = hash_prefix(Namespace("model", tenant="other"), 1, range(4))
    second = node.ask(m.PrepareStore(context, "r", "other", other.digests, 0, other.parent, (4,)))
    with pytest.raises(Refused, match="in this direction") as caught:
        node.move(context, second.ticket)
    assert caught.value.code is ErrorCode.MALFORMED
    assert node.ask(m.AbortStore(context, second.ticket)) == m.Done(1, 4)
    assert node.depot.index.extents.used_bytes == 4 * 4096


def test_a_store_that_was_granted_to_a_lost_mover_does_not_wait_for_its_successor(node: Node) -> None:
    node.movers.move_seconds = 0.01
    context = node.ready("hangs")
    first = node.prepare(context)
    other = hash_prefix(Namespace("model", tenant="other"), 1, range(4))
    second = node.ask(m.PrepareStore(context, "r", "other", other.digests, 0, other.parent, (4,)))
    moving = node.move(context, first.ticket)
    timers = node.depot.state.timers
    wait_until(lambda: (timers.expire(time.monotonic()), node.state(context) == MoverState.ENDING)[1])
    moved = node.move(context, second.ticket)
    assert isinstance(moved, m.Moved), "its extents are free when the lost mover is dead"
    assert moved.outcome is m.MoveOutcome.FAILED
    assert node.outcome(moving) is m.MoveOutcome.FAILED


@pytest.mark.parametrize("how", ["connection", "unregister"])
def test_extents_that_a_mover_may_be_writing_are_free_when_it_is_dead_and_not_before(how: str, node: Node) -> None:
    context = node.ready("hangs")
    node.move(context, node.prepare(context).ticket)
    if how == "connection":
        node.depot.end_session(SESSION)
    else:
        node.ask(m.Unregister(context))
    node.depot.end_process(WORKER)  # the mover may outlive its worker
    assert node.quarantined_bytes == 4 * 4096
    node.turn_until(lambda: not node.quarantined_bytes, "the mover's death")
    assert node.depot.index.extents.used_bytes == 0
    assert node.depot.index.entries.num_sealed == 0


# --- ends of movers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "why"), [("dies", "it exited"), ("babbles", "a malformed answer"), ("hangs", "more than 0.3 s")]
)
def test_a_lost_mover_fails_its_copy_and_is_replaced_once(device: str, why: str, node: Node) -> None:
    node.movers.move_seconds = 0.3 if device == "hangs" else 20.0
    context = node.register(device)
    pids: list[int] = []
    for number in range(2):
        node.turn_until(lambda: node.state(context) == MoverState.READY, "the mover")
        pids.append(node.pid(context))
        plan = node.prepare(context)
        moving = node.move(context, plan.ticket)
        assert node.outcome(moving) is m.MoveOutcome.FAILED
        assert not node.depot.stores.tickets
        assert node.depot.index.extents.used_bytes == 0
        assert node.counter("movers_lost") == number + 1
    assert len(set(pids)) == 2
    assert node.state(context) == MoverState.UNAVAILABLE
    assert why in node.movers.status(context)[2]
    assert node.outcome(node.move(context, 0)) is m.MoveOutcome.UNAVAILABLE
    assert node.prepare(context).num_declined == 4
    assert node.counter("movers_started") == 2


@pytest.mark.slow
def test_a_mover_that_lived_long_does_not_count_against_the_next(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "LONG_LIFE_SECONDS", 0.0)
    context = node.register("dies")
    for _ in range(4):
        node.wait_until_ready(context)
        assert node.outcome(node.move(context, node.prepare(context).ticket)) is m.MoveOutcome.FAILED
    node.wait_until_ready(context)


def test_an_offer_that_no_mover_can_open_is_not_tried_twice(node: Node) -> None:
    context = node.register("final")
    waiting = node.move(context, 0)
    assert node.outcome(waiting) is m.MoveOutcome.UNAVAILABLE
    assert node.counter("movers_started") == 1
    assert node.movers.status(context)[2] == "there is no such device"


def test_a_mover_that_is_never_ready_is_given_up_and_waiting_workers_are_told(node: Node) -> None:
    context = node.register("late")
    assert node.outcome(node.move(context, 0, wait_seconds=0.05)) is m.MoveOutcome.FAILED
    node.movers.start_seconds = 0.3
    patient = node.move(context, 0)
    node.depot.state.timers.expire(time.monotonic() + START_SECONDS)  # the first mover's; the second has 0.3 s
    assert node.outcome(patient) is m.MoveOutcome.UNAVAILABLE
    assert "not ready within 0.3 s" in node.movers.status(context)[2]
    assert node.counter("movers_started") == 2


def test_a_mover_that_is_late_says_where_it_hangs(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOVER_TRACE_SECONDS", "0.2")
    node.register("late")
    printed: list[str] = []

    def is_traced() -> bool:
        printed.append(capfd.readouterr().err)
        return "in open_device" in "".join(printed)

    node.turn_until(is_traced, "a traceback in the depot's log")


def test_a_copy_that_a_mover_refuses_costs_only_itself(node: Node) -> None:
    context = node.ready("refuses")
    plan = node.prepare(context)
    moved = node.ended(node.move(context, plan.ticket))
    assert (moved.outcome, moved.why) == (m.MoveOutcome.FAILED, "blocks of somebody else")
    assert node.state(context) == MoverState.READY
    assert node.ask(m.AbortStore(context, plan.ticket)) == m.Done(1, 4)
    assert node.counter("moves_refused") == 1


def test_without_a_module_or_with_too_many_there_is_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    context = node.register(offer=msgspec.structs.replace(offer("quick"), mover="nobody"))
    assert node.outcome(node.move(context, 0)) is m.MoveOutcome.UNAVAILABLE
    assert "no mover 'nobody' is installed" in node.movers.status(context)[2]
    monkeypatch.setattr(movers, "MAXIMUM_MOVERS", 1)
    first, second = node.register(), node.register()
    assert node.outcome(node.move(first, 0)) is m.MoveOutcome.DONE
    assert node.outcome(node.move(second, 0)) is m.MoveOutcome.UNAVAILABLE
    node.depot.end_session(SESSION)
    node.turn_until(lambda: not node.movers.num_processes)
    assert node.outcome(node.move(node.register(), 0)) is m.MoveOutcome.DONE


def test_a_worker_that_cannot_see_its_movers_death_gets_none(node: Node) -> None:
    node.takes = False
    context = node.register()
    assert node.outcome(node.move(context, 0)) is m.MoveOutcome.UNAVAILABLE
    assert "does not listen" in node.movers.status(context)[2]


def test_a_mover_ends_when_its_socket_closes(node: Node) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "support.mover_child", str(os.getpid()), str(node.pool_fd), str(theirs.fileno())],
        pass_fds=(node.pool_fd, theirs.fileno()),
    )
    theirs.close()
    ours.sendall(encode(Setup(POOL_BYTES, registration("quick"))))
    assert ours.recv(4096) == encode(Ready())
    assert process.poll() is None
    ours.close()
    assert process.wait(WAIT_SECONDS) == 0


# --- requests of workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"pages": ((m.PagePlace(0, 0, 4096), m.PagePlace(0, 0, 4096)),)},
        {"pages": ((m.PagePlace(0, 0, 4096),),) * 2},
        {"pages": ((m.PagePlace(1, 0, 4096),),)},
        {"pages": ((m.PagePlace(0, 0, 4095),),)},
        {"allocations": (b"handle", b"handle")},
    ],
)
def test_offers_that_do_not_add_up_are_refused(wrong: dict[str, Any], node: Node) -> None:
    with pytest.raises(Refused) as caught:
        node.register(offer=msgspec.structs.replace(offer("quick"), **wrong))
    assert caught.value.code is ErrorCode.BAD_LAYOUT
    assert not node.depot.contexts.by_number
    assert node.counter("movers_started") == 0


def test_only_tickets_and_leases_of_this_worker_are_moved(node: Node) -> None:
    context, other = node.register(), node.register()
    for each in (context, other):
        node.wait_until_ready(each)
    plan = node.prepare(context)
    with pytest.raises(Refused, match="was not prepared here"):
        node.move(other, plan.ticket)
    with pytest.raises(Refused, match="was not granted to a retrieve"):
        node.move(context, plan.ticket, is_store=False)
    with pytest.raises(Refused, match="layer groups"):
        node.ask(m.Move(context, plan.ticket, True, (), (), ()))
    node.ask(m.AbortStore(context, plan.ticket))
    with pytest.raises(Refused, match="was not prepared here"):
        node.move(context, plan.ticket)


def test_a_worker_that_offered_nothing_has_no_mover(node: Node) -> None:
    reply = node.depot.handle(SESSION, WORKER, registration("quick", offer=None, fallback="memory without a handle"))
    assert isinstance(reply, m.Registered)
    moved = node.ask(m.Move(reply.context, 0))
    assert moved.outcome is m.MoveOutcome.UNAVAILABLE
    assert node.counter("workers_fallen_back") == 1
    (status,) = status_of(node.depot).contexts
    assert (status.mover, status.fallback) == ("", "memory without a handle")


def test_a_module_is_found_by_its_entry_point_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[2] / "support" / "cuda" / "movers"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert registry.mover_module("stubborn") == "stubborn_mover"
    assert registry.mover_module("nobody") is None
