"""Load on engines while processes are killed and stopped at random, then an audit.

Engines serve prompts that share prefixes and verify every byte that they retrieve. From a seed, the soak kills and
stops engines and the depot, abandons requests, clears the cache, and damages files of a tier on disk. At the end
nothing may be wrong, late or left over.
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
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry, RequestReport
from kvdepot.lab.fleet import EngineStart, FleetEngine, Prompt, start_engines
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import operations as o

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

    def __init__(self, soak: "Soak", number: int) -> None:
        self._soak = soak
        self._number = number
        self._random = random.Random(f"{soak.seed} engine {number}")
        self.engine: FleetEngine | None = None
        self.busy_since = 0.0
        self.was_stopped = False
        self._thread = threading.Thread(target=self._run, name=f"soak-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        count = 0
        while not self._soak.is_over:
            try:
                if self.engine is None:
                    self.engine = self._soak.start_engine(f"engine-{self._number}")
                count += 1
                prompt = self._soak.prompt(self._random, f"{self._number}-{count}")
                self.was_stopped = False
                self.busy_since = time.monotonic()
                report = self.engine.serve(prompt)
                self._soak.take(report, timed=not self.was_stopped)
            except KVDepotError:
                self._soak.count("engines_lost")
                self._drop()
            finally:
                self.busy_since = 0.0

    def _drop(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """Let the engine leave in order."""
        self._drop()


class Soak:
    """One run.

    Args:
        seconds: duration of the load, without the audit after it.
        num_engines: number of engine processes, each with a scheduler and a worker.
        seed: seed of prompts and kills.
        verify: value of `kvdepot serve --verify`.
        disk: folder of a tier below the pool. The pool then holds a third of the requested prompts.
        say: receives lines about the progress.
    """

    def __init__(
        self,
        seconds: float,
        num_engines: int,
        seed: int,
        verify: str = "off",
        disk: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.seed = seed
        self.is_over = False
        self._seconds = seconds
        self._say = say
        self._random = random.Random(f"{seed} chaos")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
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

    def prompt(self, rng: random.Random, request_id: str) -> Prompt:
        """Return a turn of a conversation. One in ten is abandoned after its lookup."""
        return _prompt(
            rng.randrange(_NUM_CONVERSATIONS), rng.randint(1, _MAXIMUM_TURNS), request_id, rng.random() < 0.1
        )

    def count(self, name: str, amount: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._counts[name] += amount

    def take(self, report: RequestReport, *, timed: bool) -> None:
        """Count a request. `timed` says that its engine was not stopped in the meantime."""
        waits = (report.lookup_seconds, report.retrieve_seconds, report.store_seconds)
        with self._lock:
            self._counts["requests"] += 1
            self._counts["verified_bytes"] += report.verified_bytes
            self._counts["wrong_bytes"] += report.wrong_bytes
            self._counts["retrieved_tokens"] += report.own_tokens + report.shared_tokens
            self._counts["prompt_tokens"] += report.prompt_tokens
            if timed:
                self._longest_wait = max(self._longest_wait, *waits)
                self._counts["waits_over_a_deadline"] += sum(w > _DEADLINE_SECONDS + _SLACK_SECONDS for w in waits)

    def run(self) -> dict[str, Any]:
        """Run the soak and return the numbers. `failures` names those that should be 0 and are not."""
        try:
            started = time.monotonic()
            for driver in self._drivers:
                driver.start()
            next_word = started + 10
            while (rest := started + self._seconds - time.monotonic()) > 0:
                time.sleep(min(rest, self._random.uniform(0.2, 1.2)))  # noqa: TID251  # the pace of the disturbances
                self._disturb()
                self._look_for_hangs()
                if time.monotonic() > next_word:
                    next_word += 10
                    self._say(self._line(time.monotonic() - started))
            self.is_over = True
            for driver in self._drivers:
                if not driver.join(_HANG_SECONDS):
                    self._counts["hangs"] += 1
            return self._audit(time.monotonic() - started)
        finally:
            self.is_over = True
            for driver in self._drivers:
                if driver.engine is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(driver.engine.pid, signal.SIGKILL)
                driver.close()
            self._depot.close()

    # --- disturbances ---------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        what = self._random.choices(
            ("kill an engine", "stop an engine", "kill the depot", "stop the depot", "clear", "damage a file"),
            (4, 3, 2, 2, 1, 4 if self._disk else 0),
        )[0]
        driver = self._random.choice(self._drivers)
        engine = driver.engine
        seconds = self._random.uniform(0.05, 1.5 * _DEADLINE_SECONDS)
        if "engine" in what and engine is None:
            return
        self._counts[what] += 1
        if what == "kill the depot":
            self._depot.kill()
            self._depot.start()
        elif what == "stop the depot":
            self._depot.signal(signal.SIGSTOP)
            time.sleep(seconds)  # noqa: TID251  # how long it stays stopped
            self._depot.signal(signal.SIGCONT)
        elif what == "damage a file":
            self._damage()
        elif what == "clear":
            with contextlib.suppress(KVDepotError):
                ask_depot(o.Clear(), self._depot.url)
        elif engine is not None:
            with contextlib.suppress(ProcessLookupError):
                if what == "kill an engine":
                    os.kill(engine.pid, signal.SIGKILL)
                else:
                    driver.was_stopped = True
                    os.kill(engine.pid, signal.SIGSTOP)
                    time.sleep(seconds)  # noqa: TID251
                    driver.was_stopped = True
                    os.kill(engine.pid, signal.SIGCONT)

    def _damage(self) -> None:
        """Flip a bit of a random entry on disk, or truncate it."""
        assert self._disk is not None
        files = [path for path in self._disk.glob("*/*/*/*") if path.suffix != ".tmp"]
        with contextlib.suppress(OSError, IndexError):
            path = self._random.choice(files)
            size = path.stat().st_size
            if self._random.random() < 0.3:
                os.truncate(path, self._random.randrange(size))
                return
            with path.open("r+b") as file:
                file.seek(self._random.randrange(size))
                value = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([value[0] ^ 1 << self._random.randrange(8)]))

    def _look_for_hangs(self) -> None:
        for driver in self._drivers:
            since, engine = driver.busy_since, driver.engine
            if since and engine is not None and time.monotonic() - since > _HANG_SECONDS:
                self.count("hangs")
                os.kill(engine.pid, signal.SIGKILL)

    def _line(self, seconds: float) -> str:
        c = self._counts
        return (
            f"{seconds:5.0f} s  {c['requests']:6d} requests  {c['verified_bytes'] / 1e9:7.1f} GB verified"
            f"  {c['wrong_bytes']} wrong  {c['kill an engine']} engines and {c['kill the depot']} depots killed"
        )

    # --- audit ----------------------------------------------------------------------------------------------------

    def _audit(self, seconds: float) -> dict[str, Any]:
        auditor = self.start_engine("auditor")
        for conversation in range(_NUM_CONVERSATIONS):
            self.take(auditor.serve(_prompt(conversation, _MAXIMUM_TURNS, f"audit-{conversation}")), timed=True)
        auditor.close()
        for driver in self._drivers:
            driver.close()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._is_at_rest(), 15, "the depot to come to rest")
        status = self._depot.status()
        with contextlib.suppress(RemoteError):  # the audit counts entries that a suspended tier keeps
            ask_depot(o.Clear(), self._depot.url, _HANG_SECONDS)
        cleared = self._depot.status()
        with contextlib.suppress(AssertionError):  # the depot notices the end of a command with a delay
            wait_until(lambda: _resources(self._depot.pid)[0] <= self._fresh_descriptors, 5, "descriptors to be closed")
        descriptors, memory = _resources(self._depot.pid)
        must_be_zero = {
            "wrong_bytes": self._counts["wrong_bytes"],
            "hangs": self._counts["hangs"],
            "waits_over_a_deadline": self._counts["waits_over_a_deadline"],
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
            "seed": self.seed,
            "seconds": round(seconds, 1),
            "engines": len(self._drivers),
            **{name: self._counts[name] for name in sorted(self._counts)},
            "hit_rate": round(self._counts["retrieved_tokens"] / max(1, self._counts["prompt_tokens"]), 3),
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
