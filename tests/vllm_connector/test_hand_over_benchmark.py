"""`benchmarks/engine/hand_over.py` leaves nothing behind when it is terminated."""

import os
import signal
from pathlib import Path

from kvdepot.lab.processes import wait_until
from support.nursery import Nursery

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine" / "hand_over.py"


def children_of(pid: int) -> list[int]:
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(other for child in children for other in children_of(child))]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_sigterm_ends_depot_and_engines(nursery: Nursery, tmp_path: Path) -> None:
    it = nursery.fork(SCRIPT, "--prompts", "1", environment={**os.environ, "TMPDIR": str(tmp_path)})
    with it.stdin, it.stdout:
        wait_until(lambda: len(children_of(it.pid)) > 1, 120, "the depot and an engine")
        started = children_of(it.pid)
        it.send_signal(signal.SIGTERM)
        assert it.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(is_running, started)), 30, "the end of all processes")
    assert not [*Path("/dev/shm").glob(f"kvdepot-pool-{it.pid}-*")], "the pool's folder has the session in its name"
