"""An engine in a child process that obeys commands, for suites that kill it, and the parent's end of its pipes.

The child's module calls `obey` with a function that makes its worker. The child answers each line of input with a line
of output. `store SALT N` and `retrieve SALT N` move the first N chunks of a prompt and report how many arrived (a
retrieve reports "wrong" if a byte differs from the stored one). `lookup SALT N` leases chunks and reports their number;
`lookup PEER SALT N` names the depot that has them. `await SALT N` does so for chunks that another engine hands over,
and `hand_over SALT N` stores for such a lookup. `gate store|retrieve before|half|after` stops the next copy in that
direction at that place: the child says `reached` and continues after the line `go`. `fork` leaves a child that keeps
all descriptors and does nothing, and reports its process number; the parent of the engine kills that child. The
worker's context must be built on `WorkerTransfers`.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kvdepot.backends import CopyBatch
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.lab.processes import start_child
from kvdepot.testing.backend import Worker
from kvdepot.testing.plan import PLANS, Cache, WorkerPlan, prompt
from kvdepot.wire.messages import EXTENT

PLAN: Final = PLANS["one group"]
_WAIT_SECONDS: Final = 60.0  # for a child that may first import a framework and create a context of its device

MakeWorker = Callable[[str, WorkerPlan], Worker]


def obey(make_worker: MakeWorker, url: str, instance: str, plan: WorkerPlan = PLAN) -> None:
    """Run the child until its input ends. The fault suite needs the default plan."""
    worker = make_worker(url, replace(plan, instance=instance))
    cache = Cache(worker, plan)
    scheduler = SchedulerClient(worker.spec, instance, url=url)
    worker.wait_until_connected(_WAIT_SECONDS)
    scheduler.wait_until_connected(_WAIT_SECONDS)
    _say("ready")
    for line in sys.stdin:
        command, *words = line.split()
        if command == "gate":
            _Gate(worker.context, *words)
            _say("armed")
        elif command == "fork":
            _say(_fork())
        else:
            *peer, salt, num_chunks = words
            _say(_answer(command, prompt(int(num_chunks), salt=int(salt)), cache, scheduler, "".join(peer)))
    worker.context.close()
    scheduler.close()


def _say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _fork() -> int:
    """Fork a child as a C library would, so that Python's hooks do not run in it."""
    pid = ctypes.PyDLL(None).fork()
    while pid == 0:
        signal.pause()
    return pid


def _answer(command: str, run: Any, cache: Cache, scheduler: SchedulerClient, peer: str) -> object:
    match command:
        case "store" | "hand_over":
            if command == "hand_over":
                scheduler.submit_lookup("request", run, hands_over=True).result()
            block_ids = cache.blocks(run)
            cache.fill(run, block_ids)
            future = cache.context.submit_store("request", run, block_ids)
            return future.num_chunks if future.result(_WAIT_SECONDS) else "missed"
        case "retrieve":
            try:
                return cache.retrieve(run)
            except AssertionError as error:
                return f"wrong: {error}"
            finally:
                scheduler.end_request("request")
        case "lookup":
            return scheduler.submit_lookup("request", run, peer=peer).result().num_chunks
        case "await":
            return scheduler.submit_lookup("request", run, joins=True, awaits=run.num_chunks).result().num_chunks
        case _:
            raise ValueError(command)


class _Gate:
    """Stops the next copy in one direction, once."""

    def __init__(self, context: Any, direction: str, where: str) -> None:
        self._copier = context.copier
        self._copy: Callable[[CopyBatch], None] = getattr(self._copier, direction)
        self._where = where
        self._name = "begin_retrieve" if direction == "retrieve" else direction
        self._original = getattr(self._copier, self._name)
        setattr(self._copier, self._name, self)

    def __call__(self, batch: CopyBatch) -> None:
        setattr(self._copier, self._name, self._original)
        if self._where == "half":
            half = len(batch.extents) // EXTENT.size // 2 * EXTENT.size
            self._copy(replace(batch, extents=batch.extents[:half]))
        elif self._where == "after":
            self._copy(batch)
        _say("reached")
        if sys.stdin.readline().strip() != "go":
            raise OSError("nobody opened the gate")
        if self._where != "after":
            self._copy(batch)


class EngineProcess:
    """The parent's end of a child's pipes.

    Args:
        command: starts the child.
    """

    start_child = staticmethod(start_child)  # tests replace it by a faster way

    def __init__(self, command: Sequence[str]) -> None:
        self._process = self.start_child(command, has_pipes=True)
        self._unread = b""
        self.expect("ready")

    @property
    def pid(self) -> int:
        """The process that the command started."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def listen(self, timeout_seconds: float = _WAIT_SECONDS) -> str:
        """Return the next line.

        Raises:
            AssertionError: no line came within `timeout_seconds`, or the child ended.
        """
        assert self._process.stdout is not None
        end, descriptor = time.monotonic() + timeout_seconds, self._process.stdout.fileno()
        poller = select.poll()  # `select` takes no descriptor above 1,023
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            assert poller.poll(1000 * max(0.0, end - time.monotonic())), (
                f"the engine said nothing for {timeout_seconds} s"
            )
            some = os.read(descriptor, 4096)
            assert some, f"the engine ended with {self._process.wait()}"
            self._unread += some
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def ask(self, line: str) -> str:
        """Send a line and return the answer."""
        self.say(line)
        return self.listen()

    def expect(self, answer: str, line: str = "") -> None:
        """Send a line, if there is one, and check the answer."""
        if line:
            self.say(line)
        found = self.listen()
        assert found == answer, f"{line!r} brought {found!r}, not {answer!r}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGSTOP for example."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the child as a crash would. A second call does nothing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the child and close its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
