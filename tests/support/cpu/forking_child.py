"""An engine that forks and uses its clients on both sides: `python -m support.cpu.forking_child URL DEADLINE`.

Its transfers run on the caller's thread. It answers each line of input with a line of JSON:

- `twins N END SALT`: both processes store, retrieve and look up prompts of their own at the same time, at least N each,
  with salts from SALT + `PARENT` or `CHILD` on. The child then ends as END says: it closes its clients, exits, or drops
  them and exits.
- `locked`: the child looks up and stores while a thread of the parent waits for a reply.
- `lost`: a thread of the parent waits for a reply. The parent closes its connection while a child lives.
"""

import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvdepot import SchedulerClient
from kvdepot.client.session import Channel
from kvdepot.errors import DepotUnavailable
from kvdepot.testing.engine import PLAN
from kvdepot.testing.plan import Cache, prompt
from kvdepot.wire import frames
from support.cpu.workers import NumpyWorker

NUM_CHUNKS: Final = 4  # of each prompt
PARENT, CHILD, HELD = 1000, 500_000, 1  # the first salts of each side's prompts; the salt of one that stays leased
_CHILD_SECONDS: Final = 20  # the longest life of a child, so that none outlives a failed test


@dataclass
class Engine:
    cache: Cache
    scheduler: SchedulerClient

    def close(self) -> None:
        self.cache.context.close()
        self.scheduler.close()


def sockets() -> set[str]:
    """Return the names of this process's sockets."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return {name for link in links if os.path.lexists(link) and (name := os.readlink(link)).startswith("socket:")}


def in_child(work: Callable[[], object]) -> tuple[int, int]:
    """Fork. Return the child's pid, and a pipe from which the JSON of its work's result can be read."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, for a process with threads
        pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    signal.alarm(_CHILD_SECONDS)
    os.write(writer, json.dumps(work()).encode())
    os.close(writer)
    sys.exit()  # calls exit functions and finalizers


def result_of(reader: int) -> Any:
    with open(reader, "rb") as pipe:
        return json.loads(pipe.read())


def use(engine: Engine, first_salt: int, num_rounds: int, is_over: Callable[[], bool]) -> dict[str, Any]:
    """Store, retrieve and look up one prompt a round. Return how many chunks arrived, and the number of rounds."""
    counts = {"stored": 0, "retrieved": 0, "found": 0, "wrong": 0, "rounds": 0}
    while counts["rounds"] < num_rounds or not is_over():
        run = prompt(NUM_CHUNKS, salt=first_salt + counts["rounds"])
        counts["rounds"] += 1
        counts["stored"] += NUM_CHUNKS * engine.cache.store(run)
        try:
            counts["retrieved"] += engine.cache.retrieve(run)
        except AssertionError:
            counts["wrong"] += 1
        counts["found"] += engine.scheduler.lookup("twin", run).num_chunks
        engine.scheduler.end_request("twin")
    return counts


def twins(engine: Engine, num_rounds: int, end: str, salt: int, own: set[str]) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("kvdepot").addHandler(handler)
        pending_chunks = pending.result().num_chunks
        counts = use(engine, salt + CHILD, num_rounds, lambda: True)
        engine.scheduler.release(held)
        if end == "close":
            engine.close()
        elif end == "collect":
            engine.cache = engine.scheduler = None  # type: ignore[assignment]
            gc.collect()
        return {**counts, "pending": pending_chunks, "lines": lines, "shared": len(own & sockets())}

    held = engine.scheduler.lookup("held", prompt(NUM_CHUNKS, salt=HELD))
    pending = engine.scheduler.submit_lookup("pending", prompt(NUM_CHUNKS, salt=HELD))
    session = engine.cache.context.connection.session  # type: ignore[attr-defined]
    child, reader = in_child(work)
    parent = use(engine, salt + PARENT, num_rounds, lambda: bool(select.select([reader], [], [], 0)[0]))
    counts = {"parent": parent, "child": result_of(reader), "held": held.num_chunks}
    _, status = os.waitpid(child, 0)
    is_same = engine.cache.context.connection.session is session  # type: ignore[attr-defined]
    after = use(engine, salt + PARENT + parent["rounds"], 1, lambda: True)
    return {**counts, "status": status, "is_same": is_same, "after": after}


def waiting_thread(work: Callable[[], object]) -> threading.Thread:
    """Start a thread, and return when it waits for a reply."""
    waits, wait = threading.Event(), Channel.wait

    def wait_seen(self: Channel, sequence: int, deadline_seconds: float) -> frames.Reply:
        waits.set()
        return wait(self, sequence, deadline_seconds)

    Channel.wait = wait_seen
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert waits.wait(10)
    Channel.wait = wait
    return thread


def locked(engine: Engine) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        began = time.monotonic()
        counts = use(engine, CHILD, 1, lambda: True)
        try:
            engine.scheduler.wait_until_connected(60.0)
        except DepotUnavailable as error:
            counts["why"] = str(error)
        engine.close()
        return {**counts, "seconds": time.monotonic() - began}

    waiting_thread(lambda: engine.scheduler.lookup("waits", prompt(NUM_CHUNKS, salt=HELD)))
    return result_of(in_child(work)[1])


def lost(engine: Engine) -> dict[str, Any]:
    run = prompt(NUM_CHUNKS, salt=PARENT)
    thread = waiting_thread(lambda: engine.cache.store(run))
    child, _ = in_child(signal.pause)
    engine.cache.context.connection.close()  # type: ignore[attr-defined]
    thread.join(10)
    os.kill(child, signal.SIGKILL)
    return {"is_waiting": thread.is_alive()}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    before = sockets()
    url, seconds = sys.argv[1], float(sys.argv[2])
    worker = NumpyWorker(url, PLAN, synchronous=True, deadline_seconds=seconds)
    engine = Engine(Cache(worker, PLAN), SchedulerClient(worker.spec, "engine", url=url, deadline_seconds=seconds))
    worker.wait_until_connected(60.0)
    engine.scheduler.wait_until_connected(60.0)
    assert engine.cache.store(prompt(NUM_CHUNKS, salt=HELD))
    say("ready")
    for line in sys.stdin:
        match line.split():
            case ["twins", num_rounds, end, salt]:
                answer = twins(engine, int(num_rounds), end, int(salt), sockets() - before)
            case ["locked"]:
                answer = locked(engine)
            case _:
                answer = lost(engine)
        say(json.dumps(answer))


if __name__ == "__main__":
    main()
