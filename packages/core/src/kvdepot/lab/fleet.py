"""A depot and some engines as processes of their own, for the demo and the replay.

`python -m kvdepot.lab.fleet` is one engine process: it reads requests as JSON lines and answers each with a report.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

import msgspec

from kvdepot.config import format_size
from kvdepot.errors import KVDepotError
from kvdepot.index.eviction import AUTO
from kvdepot.keys import Namespace
from kvdepot.lab.dependent import DependentDepot
from kvdepot.lab.engine_model import EngineModel, Geometry, RequestReport
from kvdepot.pool.size import available_memory_bytes
from kvdepot.processes import be_a_child, interrupts_blocked

_START_SECONDS: Final = 30.0  # a depot starts in 0.3 s; engines that start beside it on a busy machine delay it


class EngineStart(msgspec.Struct, frozen=True):
    """The first message to an engine process."""

    instance: str
    url: str
    geometry: Geometry
    num_blocks: int
    chunk_tokens: int | None = None
    has_depot: bool = True  # False: it serves without waiting for one; without one at `url`, all requests are misses
    tokens_per_second: float | None = None  # as in `EngineModel`


class Prompt(msgspec.Struct, frozen=True):
    """A request. Its tokens are `(seed, length)` segments; equal seeds mean equal tokens."""

    request_id: str
    segments: tuple[tuple[int, int], ...]  # none: only wait until the engine's scheduler and worker have their depot
    abandon: bool = False  # drop the request after its lookup


class Served(msgspec.Struct, frozen=True):
    """The answer of an engine process: a report or an error."""

    request_id: str
    report: RequestReport = RequestReport(prompt_tokens=0)
    error: str = ""


def tokens_of(segments: Iterable[tuple[int, int]]) -> list[int]:
    """Return the tokens of a prompt."""
    import numpy as np

    tokens: list[int] = []
    for seed, length in segments:
        tokens += np.random.default_rng(seed).integers(0, 128_000, length).tolist()
    return tokens


class FleetEngine:
    """One engine in a process of its own; it starts in the background. `serve` is for one thread at a time."""

    def __init__(self, settings: EngineStart) -> None:
        self.instance = settings.instance
        with interrupts_blocked():
            command = [sys.executable, "-m", "kvdepot.lab.fleet", str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._send(settings)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the engine serves.

        Raises:
            KVDepotError: the engine could not start, or found no depot.
        """
        self._receive("")

    def serve(self, prompt: Prompt) -> RequestReport:
        """Serve one request.

        Raises:
            KVDepotError: the engine failed or is gone.
        """
        self._send(prompt)
        return self._receive(prompt.request_id)

    def kill(self) -> None:
        """End the process now; callers that wait for its answer get an error."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _send(self, message: EngineStart | Prompt) -> None:
        try:
            self._requests.write(msgspec.json.encode(message) + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            raise KVDepotError(f"engine {self.instance} is gone (status {self._process.poll()})") from None

    def _receive(self, request_id: str) -> RequestReport:
        line = self._answers.readline()
        if not line:
            raise KVDepotError(f"engine {self.instance} is gone (status {self._process.wait(5)})")
        answer = msgspec.json.decode(line, type=Served)
        if answer.request_id != request_id or answer.error:
            raise KVDepotError(f"engine {self.instance}: {answer.error or answer.request_id}")
        return answer.report


def start_engines(settings: Iterable[EngineStart]) -> list[FleetEngine]:
    """Start engines side by side, and return them when all of them serve.

    Raises:
        KVDepotError: one could not start, or found no depot.
    """
    engines: list[FleetEngine] = []
    try:
        for each in settings:
            engines.append(FleetEngine(each))  # one by one: an error or Ctrl-C must end those before it
        for engine in engines:
            engine.wait_until_ready()
    except BaseException:
        for engine in engines:
            engine.kill()
            engine.close()
        raise
    return engines


class Fleet:
    """One depot and several engines, stopped and removed together.

    Args:
        geometry: the KV cache of the engines' model.
        num_engines: engines that share the depot.
        pool_bytes: size of the depot's pool.
        engine_cache_bytes: size of the KV cache of each engine.
        policy: the eviction policy of the depot's pool.
        chunk_tokens: None for the default.
        num_alone: further engines, which have no depot.
        tokens_per_second: the speed of each engine, as in `EngineModel`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_engines: int,
        pool_bytes: int,
        engine_cache_bytes: int,
        policy: str = AUTO,
        chunk_tokens: int | None = None,
        num_alone: int = 0,
        tokens_per_second: float | None = None,
    ) -> None:
        needed = pool_bytes + (num_engines + num_alone) * engine_cache_bytes
        if needed > available_memory_bytes():
            raise KVDepotError(
                f"needs {format_size(needed)} of memory, {format_size(available_memory_bytes())} are free:"
                " choose a smaller --pool-size"
            )
        self.depot = DependentDepot("--policy", policy, pool_size=str(pool_bytes), log_level="error")
        num_blocks = engine_cache_bytes // geometry.block_size_bytes
        nowhere = str(self.depot.directory / "none")
        try:
            engines = start_engines(
                EngineStart(
                    f"engine-{number}",
                    self.depot.url if number < num_engines else nowhere,
                    geometry,
                    num_blocks,
                    chunk_tokens,
                    number < num_engines,
                    tokens_per_second,
                )
                for number in range(num_engines + num_alone)
            )
        except BaseException:
            self.depot.close()
            raise
        self.engines, self.alone = engines[:num_engines], engines[num_engines:]

    def run(
        self,
        conversations: Sequence[Sequence[Prompt]],
        on_report: Callable[[int, Prompt, RequestReport], None],
        engines: Sequence[FleetEngine] | None = None,
    ) -> None:
        """Serve every prompt: one conversation's in order, the conversations side by side on all engines.

        Args:
            conversations: the prompts.
            on_report: called with the engine's number, the prompt and its report, by one thread at a time.
            engines: the engines to use; None for those that share the depot.

        Raises:
            KVDepotError: an engine failed. An exception of `on_report` is raised, too.
        """
        engines = self.engines if engines is None else engines
        ready: queue.Queue[tuple[int, int] | None] = queue.Queue()
        lock = threading.Lock()
        left = sum(len(conversation) for conversation in conversations)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            nonlocal left
            while (item := ready.get()) is not None:
                conversation, turn = item
                prompt = conversations[conversation][turn]
                try:
                    report = engines[number].serve(prompt)
                    with lock:
                        left -= 1
                        on_report(number, prompt, report)
                except BaseException as error:
                    with lock:
                        errors.append(error)
                        left = 0
                if left <= 0:
                    for _ in engines:
                        ready.put(None)
                elif turn + 1 < len(conversations[conversation]):
                    ready.put((conversation, turn + 1))

        for number, conversation in enumerate(conversations):
            if conversation:
                ready.put((number, 0))
        if left:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(len(engines))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def wait_until_connected(self) -> None:
        """Wait until the engines that share the depot have it back, after it was started again.

        Raises:
            KVDepotError: an engine found no depot, or is gone.
        """
        for engine in self.engines:
            engine.serve(Prompt("connect", ()))

    def close(self) -> None:
        """End every process and remove their files."""
        for engine in (*self.engines, *self.alone):
            engine.close()
        self.depot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # Ctrl-C: threads may wait for answers
            for engine in (*self.engines, *self.alone):
                engine.kill()
        self.close()


def main() -> None:
    """Run one engine until the input or the thread that started this process ends."""
    be_a_child(int(sys.argv[1]))
    logging.getLogger("kvdepot").setLevel(logging.ERROR)  # the terminal belongs to the process that started the fleet
    line = sys.stdin.buffer.readline()
    if not line:
        return
    settings = msgspec.json.decode(line, type=EngineStart)
    try:
        engine = EngineModel(
            settings.instance,
            settings.geometry,
            settings.num_blocks,
            Namespace(settings.geometry.name),
            url=settings.url,
            chunk_tokens=settings.chunk_tokens,
            tokens_per_second=settings.tokens_per_second,
        )
        if settings.has_depot:
            engine.wait_until_connected(_START_SECONDS)
    except KVDepotError as error:
        _say(Served("", error=str(error)))
        return
    _say(Served(""))
    for line in sys.stdin.buffer:
        prompt = msgspec.json.decode(line, type=Prompt)
        try:
            if prompt.segments:
                work = engine.abandon if prompt.abandon else engine.serve
                report = work(prompt.request_id, tokens_of(prompt.segments))
            else:
                engine.wait_until_connected(_START_SECONDS)
                report = RequestReport(prompt_tokens=0)
            answer = Served(prompt.request_id, report)
        except KVDepotError as error:
            answer = Served(prompt.request_id, error=str(error))
        _say(answer)
    engine.close()


def _say(answer: Served) -> None:
    os.write(1, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
