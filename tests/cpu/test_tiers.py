"""Depot processes with tiers, and engines: right bytes or a miss, whatever the storage does."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.engine import EngineProcess
from kvdepot.testing.plan import prompt
from kvdepot.wire.status import TierStatus
from support.commands import KVDEPOT, run_kvdepot
from support.cpu.engines import large_engine

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 1.0  # for lookups that wait for tiers


class Node:
    """A depot with tiers and its engines."""

    def __init__(self, *tiers: str, pool_size: str = "64MiB", options: tuple[str, ...] = ()) -> None:
        flags = [flag for tier in tiers for flag in ("--tier", tier)]
        self.depot = DepotProcess(*flags, *options, pool_size=pool_size)
        self.engines: list[EngineProcess] = []

    def spawn(self, name: str = "engine") -> EngineProcess:
        self.engines.append(large_engine(self.depot, name))
        return self.engines[-1]

    def tier(self, number: int = 0) -> TierStatus:
        return self.depot.status().tiers[number]

    def settle(self) -> None:
        wait_until(lambda: not self.tier().queued_write_bytes, what="the end of writes")

    def lose_the_pool(self) -> None:
        """Empty the pool, as by a restart of the machine."""
        self.settle()
        self.depot.kill()
        for path in self.depot.pool_directory.glob("*"):
            path.unlink()
        self.depot.start()
        wait_until(lambda: len(self.depot.status().contexts) == 2 * len(self.engines), what="the engines")

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.depot.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def make() -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(*tiers: str, pool_size: str = "64MiB", options: tuple[str, ...] = ()) -> Node:
        nodes.append(Node(*tiers, pool_size=pool_size, options=options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def disk(folder: Path) -> str:
    return f"disk://{folder}/tier?capacity=1GiB&queue=64MiB"


def find(engine: EngineProcess, salt: int, num_chunks: int) -> int:
    """Return how many chunks an engine finds and retrieves. Check their bytes."""
    found = int(engine.ask(f"lookup {salt} {num_chunks}"))
    if found:
        engine.expect(str(found), f"retrieve {salt} {found}")
    return found


@pytest.mark.parametrize("rule", ["store", "reuse", "evict"])
def test_every_rule_of_demotion_serves_right_bytes_under_pressure(rule: str, make: MakeNode, tmp_path: Path) -> None:
    node = make(disk(tmp_path), pool_size="8MiB", options=("--demote", rule))
    engines = [node.spawn("one"), node.spawn("two")]
    found = 0
    for turn in range(24):
        engine, salt = engines[turn % 2], turn // 2 * 5 % 8
        here = find(engine, salt, 8)
        found += here
        if here < 8:
            engine.ask(f"store {salt} 8")
        node.settle()
    assert found > 0


@pytest.mark.promise(29)
def test_a_depot_killed_while_it_writes_and_reads_leaves_no_wrong_byte(make: MakeNode, tmp_path: Path) -> None:
    node = make(disk(tmp_path), pool_size="8MiB")
    engines = [node.spawn("one"), node.spawn("two")]
    for turn in range(6):
        for engine in engines:
            engine.say(f"store {turn} 16")
        for engine in engines:
            engine.listen()
        for number, engine in enumerate(engines):
            engine.say(f"lookup {max(0, turn - number)} 16")
        node.depot.kill()
        for engine in engines:
            engine.listen()
        node.depot.start()
        wait_until(lambda: len(node.depot.status().contexts) == 4)
        wait_until(lambda: not node.depot.status().recovering)
        for salt in range(turn + 1):
            find(engines[turn % 2], salt, 16)
    assert node.depot.status().quarantined_bytes == 0


def test_prefixes_are_warmed_by_command(make: MakeNode, tmp_path: Path) -> None:
    node = make(disk(tmp_path))
    engine = node.spawn()
    engine.ask("store 1 8")
    node.lose_the_pool()
    digests = prompt(8, salt=1).digests
    keys = tmp_path / "keys"
    line = {"tenant": prompt(8, salt=1).tenant, "digests": [digests[i : i + 32].hex() for i in range(0, 8 * 32, 32)]}
    keys.write_text(json.dumps(line) + "\n")
    command = ("warm", str(keys), "--url", node.depot.url)
    done = run_kvdepot(*command)
    assert done.stdout == "8 of 8 chunks are in the pool\n", done.stderr
    assert node.depot.status().num_chunks == 8
    traced = {"tokens": list(range(6 * 64)), "namespace": {"model": "test", "tenant_salt": "1"}, "chunk_tokens": 64}
    keys.write_text(json.dumps(line) + "\n" + json.dumps(traced) + "\n")
    done = run_kvdepot(*command)
    assert done.stdout == "14 of 14 chunks are in the pool\n", done.stderr
    keys.write_text("nonsense")
    done = run_kvdepot(*command)
    assert done.returncode == 1
    assert str(keys) in done.stderr


def test_a_share_under_two_writers_is_at_its_size_after_each_collection(make: MakeNode, tmp_path: Path) -> None:
    """Depots write before and during each pass, and another one reads. Between passes, writes make the share grow."""
    capacity, url, num_stored, salts = 36 << 20, f"file://{tmp_path}/share", 0, itertools.count()
    writers, reader = [make(url, pool_size="256MiB") for _ in range(2)], make(url, pool_size="8MiB")
    engines, other = [node.spawn(f"writer {number}") for number, node in enumerate(writers)], reader.spawn("reader")
    command = [*KVDEPOT, "tier", "gc", url, "--capacity", "36MiB"]

    def size() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "share").rglob("*") if path.is_file())

    def store(num_prompts: int, num_chunks: int) -> None:
        nonlocal num_stored
        for engine in engines * num_prompts:
            engine.expect(str(num_chunks), f"store {next(salts)} {num_chunks}")
            num_stored += num_chunks

    def is_written() -> bool:
        return sum(node.tier().counters.get("written_entries", 0) for node in writers) == num_stored

    found = 0
    for _ in range(3):
        store(5, 16)
        wait_until(is_written, what="the end of writes")
        assert size() > 1.05 * capacity
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as collection:
            store(1, 2)
            for salt in range(0, next(salts), 3):
                found += find(other, salt, 16)
            assert "removed: " in collection.communicate(timeout=60)[0]
        wait_until(is_written, what="the end of writes")
        assert size() <= 1.05 * capacity
    assert found
    counters = [node.tier().counters for node in (*writers, reader)]
    assert [each.get("errors", 0) + each.get("corrupt", 0) for each in counters] == [0, 0, 0]


HANGING = """
import time
from pathlib import Path

from kvdepot.tiers.memory import MemoryTier

class Hanging(MemoryTier):
    def __init__(self, pool, flag):
        super().__init__(pool, 1 << 30)
        self.flag = Path(flag)

    def wait(self):
        while self.flag.exists():
            time.sleep(0.01)

    def contains(self, keys):
        self.wait()
        return super().contains(keys)

    def write(self, keys, seals, extents):
        self.wait()
        return super().write(keys, seals, extents)

    def read(self, keys, extents):
        self.wait()
        return super().read(keys, extents)

    def probe(self):
        self.wait()

def open_tier(url, pool):
    return Hanging(pool, url.path)
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a third party's tier that hangs while a file exists. Return the file."""
    package = tmp_path / "installed"
    information = package / "hanging_tier-1.0.dist-info"
    information.mkdir(parents=True)
    (package / "hanging_tier.py").write_text(HANGING)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging-tier\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[kvdepot.tiers]\nhanging = hanging_tier:open_tier\n")
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    return tmp_path / "hangs"


@pytest.mark.promise(25, 31)
def test_a_tier_that_hangs_costs_a_lookup_its_deadline_once_and_then_nothing(make: MakeNode, hanging: Path) -> None:
    node = make(f"hanging://{hanging}")
    engine = node.spawn()
    engine.ask("store 1 8")
    node.lose_the_pool()
    engine.ask("store 2 4")
    node.settle()
    hanging.touch()
    began = time.monotonic()
    assert find(engine, 2, 8) == 4
    assert DEADLINE_SECONDS * 0.9 < time.monotonic() - began < DEADLINE_SECONDS + 10
    wait_until(lambda: node.tier().state == "open")
    began = time.monotonic()
    for _ in range(20):
        assert find(engine, 2, 8) == 4
        engine.expect("4", "store 3 4")
    assert time.monotonic() - began < 10 * DEADLINE_SECONDS, "a tier that is suspended costs nothing"  # of 20
    hanging.unlink()
    wait_until(lambda: node.tier().state == "closed", 10)
    assert find(engine, 2, 8) == 4


def test_a_depot_stops_in_time_while_a_tier_hangs(make: MakeNode, hanging: Path) -> None:
    node = make(f"hanging://{hanging}")
    engine = node.spawn()
    hanging.touch()
    engine.ask("store 1 8")
    assert node.depot.terminate(15) == 0


def test_a_depot_that_is_stopped_writes_what_waits_to_be_written(make: MakeNode, tmp_path: Path) -> None:
    node = make(disk(tmp_path))
    engine = node.spawn()
    engine.ask("store 1 16")
    os.kill(node.depot.pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{node.depot.pid}/exe").exists(), 10)
    node.depot.kill()
    for path in node.depot.pool_directory.glob("*"):
        path.unlink()
    node.depot.start()
    wait_until(lambda: len(node.depot.status().contexts) == 2)
    assert find(engine, 1, 16) == 16
