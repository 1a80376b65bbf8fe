"""A node in real time: engines in processes under load, a depot that is killed and stopped, and an audit at the end.

Engines serve prompts that share prefixes and verify every byte that they retrieve. The events are made as for `World`,
but happen to real processes, so a history cannot be repeated.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvdepot.client.operator import ask_depot
from kvdepot.errors import KVDepotError, RemoteError
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry
from kvdepot.lab.fleet import EngineStart, FleetEngine, Prompt, start_engines
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from simulation.node import Node, random_event

_WEIGHTS: Final = {"kill": 4, "stop": 3, "kill_server": 2, "stop_server": 2, "clear": 1, "damage": 4}
_DEADLINE_SECONDS: Final = 2.0  # the engines': the clients' default
_SLACK_SECONDS: Final = 3.0  # for a machine whose cores are all busy
_HANG_SECONDS: Final = 30.0
_GEOMETRY: Final = Geometry("8B GQA, 2 of 32 layers", 2, GEOMETRY_8B.num_kv_heads, GEOMETRY_8B.head_dim)
_NUM_CONVERSATIONS: Final = 24
_MAXIMUM_TURNS: Final = 6
_POOL_BYTES: Final = 192 << 20  # holds about half of all conversations, so that it always evicts
_DISK_BYTES: Final = 320 << 20  # holds most conversations, so that it also evicts
_ENGINE_CACHE_BYTES: Final = 48 << 20
_LEAKED_MEMORY_BYTES: Final = 64 << 20


class _Driver:
    """Keeps one engine busy, and replaces it when it is killed."""

    def __init__(self, node: "Processes", number: int) -> None:
        self._node = node
        self._number = number
        self.engine: FleetEngine | None = None
        self.busy_since = 0.0
        self.was_stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        rng, count = random.Random(f"{self._node.seed} engine {self._number}"), 0
        while not self._node.is_over:
            try:
                if self.engine is None:
                    self.engine = self._node.start_engine(f"engine-{self._number}")
                count += 1
                conversation, num_turns = rng.randrange(_NUM_CONVERSATIONS), rng.randint(1, _MAXIMUM_TURNS)
                self.was_stopped = False
                self.busy_since = time.monotonic()
                self._node.serve(self, _prompt(conversation, num_turns, f"{self._number}-{count}", rng.random() < 0.1))
            except KVDepotError:
                self._node.count("engines_lost")
                self.close()
            finally:
                self.busy_since = 0.0

    def signal(self, number: int) -> bool:
        """Send a signal. Return False if there is no engine."""
        engine = self.engine
        if engine is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, number)
        return engine is not None

    def close(self) -> None:
        """Let the engine leave in order."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


class Processes(Node):
    """One depot and engines, each a process.

    Args:
        seed: seed of the prompts.
        num_engines: number of engine processes, each with a scheduler and a worker.
        verify: value of `kvdepot serve --verify`.
        disk: folder of a tier below the pool. The pool then holds a third of the requested prompts.
        say: receives each event in words.
    """

    def __init__(
        self, seed: int, num_engines: int, verify: str, disk: Path | None, say: Callable[[str], object] | None = None
    ) -> None:
        super().__init__(say)
        self.seed = seed
        self.is_over = False
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._longest_wait = 0.0
        self._disk = disk
        options = [f"--tier=disk://{disk.absolute()}?capacity={_DISK_BYTES}"] if disk else []
        pool_bytes = _POOL_BYTES // 2 if disk else _POOL_BYTES
        self._depot = DepotProcess("--verify", verify, *options, pool_size=str(pool_bytes), log_level="error")
        self._fresh_descriptors, self._fresh_memory = _resources(self._depot.pid)
        self._drivers = [_Driver(self, number) for number in range(num_engines)]

    def start_engine(self, instance: str) -> FleetEngine:
        """Start one engine process."""
        num_blocks = _ENGINE_CACHE_BYTES // _GEOMETRY.block_size_bytes
        return start_engines([EngineStart(instance, self._depot.url, _GEOMETRY, num_blocks)])[0]

    def count(self, name: str, amount: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self.counts[name] += amount

    def serve(self, driver: _Driver, prompt: Prompt) -> None:
        """Let an engine serve a prompt. Its waits count if it was not stopped in the meantime."""
        assert driver.engine is not None
        report = driver.engine.serve(prompt)
        waits = (report.lookup_seconds, report.retrieve_seconds, report.store_seconds)
        with self._lock:
            self.counts["requests"] += 1
            self.counts["verified_bytes"] += report.verified_bytes
            self.counts["wrong_bytes"] += report.wrong_bytes
            self.counts["retrieved_tokens"] += report.own_tokens + report.shared_tokens
            self.counts["prompt_tokens"] += report.prompt_tokens
            if not driver.was_stopped:
                self._longest_wait = max(self._longest_wait, *waits)
                self.counts["waits_over_a_deadline"] += sum(w > _DEADLINE_SECONDS + _SLACK_SECONDS for w in waits)

    def look_for_hangs(self) -> None:
        """Kill engines that have been busy with one request for too long."""
        for driver in self._drivers:
            since = driver.busy_since
            if since and time.monotonic() - since > _HANG_SECONDS and driver.signal(signal.SIGKILL):
                self.count("hangs")

    def close(self) -> None:
        """Kill everything."""
        self.is_over = True
        for driver in self._drivers:
            driver.signal(signal.SIGKILL)
            driver.close()
        self._depot.close()

    # --- events ---------------------------------------------------------------------------------------------------

    def on_kill(self, a: int, b: int, c: int) -> str | None:
        return "an engine is killed" if self._drivers[a % len(self._drivers)].signal(signal.SIGKILL) else None

    def on_stop(self, a: int, b: int, c: int) -> str | None:
        driver = self._drivers[a % len(self._drivers)]
        driver.was_stopped = True
        if not driver.signal(signal.SIGSTOP):
            return None
        _stay_stopped(b)
        driver.was_stopped = True
        driver.signal(signal.SIGCONT)
        return "an engine was stopped"

    def on_kill_server(self, a: int, b: int, c: int) -> str | None:
        self._depot.kill()
        self._depot.start()
        return "the depot was killed and started"

    def on_stop_server(self, a: int, b: int, c: int) -> str | None:
        self._depot.signal(signal.SIGSTOP)
        _stay_stopped(b)
        self._depot.signal(signal.SIGCONT)
        return "the depot was stopped"

    def on_clear(self, a: int, b: int, c: int) -> str | None:
        with contextlib.suppress(KVDepotError):
            ask_depot(o.Clear(), self._depot.url)
        return "the cache is cleared"

    def on_damage(self, a: int, b: int, c: int) -> str | None:
        """Flip a bit of an entry on disk, or truncate it."""
        if self._disk is None:
            return None
        files = [path for path in self._disk.glob("*/*/*/*") if path.suffix != ".tmp"]
        with contextlib.suppress(OSError, IndexError, ZeroDivisionError):
            path = files[(a << 8 | b) % len(files)]
            place = (b << 16 | c << 8 | a) % path.stat().st_size
            if c % 10 < 3:
                os.truncate(path, place)
                return "an entry on disk is cut off"
            with path.open("r+b") as file:
                file.seek(place)
                value = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([value[0] ^ 1 << c % 8]))
            return "an entry on disk is damaged"
        return None

    # --- the audit ------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """End the load and return the numbers. `failures` names those that should be 0 and are not."""
        self.is_over = True
        for driver in self._drivers:
            driver.thread.join(_HANG_SECONDS)
            self.counts["hangs"] += driver.thread.is_alive()
        auditor, self._drivers[0].was_stopped = self._drivers[0], False
        auditor.close()
        auditor.engine = self.start_engine("auditor")
        for conversation in range(_NUM_CONVERSATIONS):
            self.serve(auditor, _prompt(conversation, _MAXIMUM_TURNS, f"audit-{conversation}"))
        for driver in self._drivers:
            driver.close()
        with contextlib.suppress(AssertionError):
            wait_until(self._is_at_rest, 15, "the depot to come to rest")
        status = self._depot.status()
        with contextlib.suppress(RemoteError):  # the audit counts entries that a suspended tier keeps
            ask_depot(o.Clear(), self._depot.url, _HANG_SECONDS)
        cleared = self._depot.status()
        with contextlib.suppress(AssertionError):  # the depot notices the end of a command with a delay
            wait_until(lambda: _resources(self._depot.pid)[0] <= self._fresh_descriptors, 5, "descriptors to be closed")
        descriptors, memory = _resources(self._depot.pid)
        must_be_zero = {
            "wrong_bytes": self.counts["wrong_bytes"],
            "hangs": self.counts["hangs"],
            "waits_over_a_deadline": self.counts["waits_over_a_deadline"],
            "entries_corrupt": status.counters.get("entries_corrupt", 0),
            "sessions_left": status.num_sessions,
            "leases_left": status.num_leases,
            "tickets_left": status.num_tickets,
            "flights_left": status.num_flights,
            "quarantined_bytes_left": status.quarantined_bytes,
            "tier_bytes_left_to_write": sum(tier.queued_write_bytes for tier in status.tiers),
            "tiers_left_alone": sum(tier.state != "closed" for tier in status.tiers),
            "tier_entries_leaked": sum(tier.num_entries for tier in cleared.tiers),
            "pool_bytes_leaked": cleared.pool_used_bytes,
            "entries_leaked": cleared.num_entries,
            "chunks_leaked": cleared.num_chunks,
            "descriptors_leaked": max(0, descriptors - self._fresh_descriptors),
        }
        failures = [name for name, value in must_be_zero.items() if value]
        if memory - self._fresh_memory > _LEAKED_MEMORY_BYTES:
            failures.append("memory_growth_bytes")
        return {
            **{name: self.counts[name] for name in sorted(self.counts)},
            "hit_rate": round(self.counts["retrieved_tokens"] / max(1, self.counts["prompt_tokens"]), 3),
            "entries_promoted_since_the_last_kill": status.counters.get("entries_promoted", 0),
            "flights_joined_since_the_last_kill": status.counters.get("flights_joined", 0),
            "longest_wait_seconds": round(self._longest_wait, 2),
            "memory_growth_bytes": memory - self._fresh_memory,
            **must_be_zero,
            "failures": failures,
        }

    def _is_at_rest(self) -> bool:
        status = self._depot.status()
        waiting = sum(tier.queued_write_bytes + tier.num_hung_calls for tier in status.tiers)
        return not (
            waiting or status.num_sessions or status.num_leases or status.num_tickets or status.quarantined_bytes
        )


def _stay_stopped(b: int) -> None:
    time.sleep(0.05 + b / 256 * 1.5 * _DEADLINE_SECONDS)  # noqa: TID251  # how long a process stays stopped


def _prompt(conversation: int, num_turns: int, request_id: str, abandon: bool = False) -> Prompt:
    """Return a conversation so far: one of three system prompts, then turns. A conversation's tokens never change."""
    sizes = random.Random(conversation)
    turns = [(1000 + conversation * 10 + turn, sizes.randrange(100, 500)) for turn in range(_MAXIMUM_TURNS)]
    return Prompt(request_id, ((conversation % 3, 640), *turns[:num_turns]), abandon)


def _resources(pid: int) -> tuple[int, int]:
    """Return the open descriptors of a process, and its resident bytes without shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")}
    return len(os.listdir(f"/proc/{pid}/fd")), int(fields["RssAnon"]) * 1024


def run_in_real_time(node: Processes, seconds: float) -> dict[str, Any]:
    """Disturb a node about once a second, then return the numbers of its audit with the number of each event."""
    rng, happened = random.Random(f"{node.seed} chaos"), Counter[str]()
    started = time.monotonic()
    try:
        while (rest := started + seconds - time.monotonic()) > 0:
            time.sleep(min(rest, rng.uniform(0.2, 1.2)))  # noqa: TID251  # the pace of the disturbances
            (name,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            happened[name] += node.do(random_event(rng, name))
            node.look_for_hangs()
        seconds = time.monotonic() - started
        return {"seed": node.seed, "seconds": round(seconds, 1), "events": dict(happened), **node.finish()}
    finally:
        node.close()
