"""What the watchdog of the server's loop counts."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import wait_until
from kvdepot.server import watch
from kvdepot.server.watch import SLOW_TURN_SECONDS, CollectionWatch, TurnWatch


@pytest.fixture
def turns() -> Iterator[TurnWatch]:
    turns = TurnWatch()
    turns.open()
    yield turns
    turns.close()


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_turn_that_waits_for_something_of_its_own_process_blocks(turns: TurnWatch) -> None:
    turns.begin()
    sleep(2 * SLOW_TURN_SECONDS)
    turns.end()
    assert turns.longest_seconds >= turns.longest_blocked_seconds >= SLOW_TURN_SECONDS
    assert turns.num_slow == 1
    assert sum(turns.turns.counts) == 1


_BUSY = "import os\nos.sched_setaffinity(0, {int(os.environ['CORE'])})\nprint(flush=True)\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not tell")
def test_a_turn_that_waits_for_a_core_does_not_block_meanwhile(
    turns: TurnWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    monkeypatch.setenv("CORE", str(core))
    os.sched_setaffinity(0, {core})
    busy = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()

        def turn() -> bool:
            turns.begin()
            worked = time.thread_time()
            while time.thread_time() - worked < 0.02:
                pass
            turns.end()
            return turns.longest_seconds - turns.longest_blocked_seconds > 0.005

        wait_until(turn)
    finally:
        busy.kill()
        busy.communicate()
        os.sched_setaffinity(0, cores)
    assert turns.longest_blocked_seconds >= 0.02


def test_where_the_kernel_does_not_tell_all_of_a_turn_counts() -> None:
    turns = TurnWatch()
    turns.begin()
    sleep(0.002)
    turns.end()
    assert turns.longest_seconds == turns.longest_blocked_seconds >= 0.002


def test_what_a_long_collection_looked_through_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    monkeypatch.setattr(watch, "_LONG_COLLECTION_SECONDS", 3600.0)
    collections = CollectionWatch()
    try:
        objects = [[number] for number in range(1000)]
        num_frozen = gc.get_freeze_count()
        gc.collect()
        assert gc.get_freeze_count() == num_frozen
        monkeypatch.setattr(watch, "_LONG_COLLECTION_SECONDS", 0.0)
        gc.collect(1)
        assert gc.get_freeze_count() == num_frozen
        gc.collect()
        assert gc.get_freeze_count() >= num_frozen + len(objects)
    finally:
        collections.close()
        gc.unfreeze()
    assert (gc.get_threshold(), list(gc.callbacks)) == before
