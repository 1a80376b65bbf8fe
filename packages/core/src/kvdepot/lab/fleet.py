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
from types import TracebackType
from typing import Final, Self

import msgspec

from kvdepot.config import format_size
from kvdepot.errors import KVDepotError
from kvdepot.keys import Namespace
from kvdepot.lab.engine_model import EngineModel, Geometry, RequestReport
from kvdepot.lab.processes import DepotProcess
from kvdepot.pool.room import available_memory_bytes
from kvdepot.processes.children import be_a_child, interrupts_blocked

_START_SECONDS: Final = 30.0


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine process is told first."""

    instance: str
    url: str
    geometry: Geometry
    num_blocks: int
    chunk_tokens: int | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A request: its tokens as `(seed, length)` segments, the same seed always meaning the same tokens."""

    request_id: str
    segments: tuple[tuple[int, int], ...]
    abandon: bool = False  # give it up after its lookup


class Answer(msgspec.Struct, frozen=True):
    """What an engine process says: a report, or why it has none."""

    request_id: str
    report: RequestReport | None = None
    error: str = ""


def tokens_of(segments: Iterable[tuple[int, int]]) -> list[int]:
    """Return the tokens of a prompt."""
    import numpy as np

    tokens: list[int] = []
    for seed, length in segments:
        tokens += np.random.default_rng(seed).integers(0, 128_000, length).tolist()
    return tokens


class EngineProcess:
    """One engine in a process of its own; `serve` is for one thread at a time."""

    def __init__(self, settings: EngineSettings) -> None:
        self.instance = settings.instance
        with interrupts_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvdepot.lab.fleet", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        try:
            self._send(settings)
            self._receive("")
        except BaseException:  # Ctrl-C while it starts
            self._process.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def serve(self, prompt: Prompt) -> RequestReport:
        """Serve one request.

        Raises:
            KVDepotError: the engine failed or is gone.
        """
        self._send(prompt)
        answer = self._receive(prompt.request_id)
        if answer.report is None:
            raise KVDepotError(f"{self.instance}: request {prompt.request_id} failed: {answer.error}")
        return answer.report

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, message: EngineSettings | Prompt) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise KVDepotError(f"engine {self.instance} is gone (status {self._process.poll()})") from None

    def _receive(self, request_id: str) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KVDepotError(f"engine {self.instance} is gone (status {self._process.wait(5)})")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.request_id != request_id or answer.error:
            raise KVDepotError(f"engine {self.instance}: {answer.error or answer.request_id}")
        return answer


class Fleet:
    """One depot and several engines, stopped and removed together."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_engines: int,
        pool_bytes: int,
        engine_cache_bytes: int,
        policy: str = "lru",
        chunk_tokens: int | None = None,
    ) -> None:
        needed = pool_bytes + num_engines * engine_cache_bytes
        if needed > available_memory_bytes():
            raise KVDepotError(
                f"needs {format_size(needed)} of memory, {format_size(available_memory_bytes())} are free:"
                " choose a smaller --pool-size"
            )
        self.geometry = geometry
        self.pool_bytes = pool_bytes
        self.engines: list[EngineProcess] = []
        self.depot = DepotProcess("--policy", policy, pool_size=str(pool_bytes), log_level="error")
        try:
            num_blocks = engine_cache_bytes // geometry.block_size_bytes
            for number in range(num_engines):
                settings = EngineSettings(f"engine-{number}", self.depot.url, geometry, num_blocks, chunk_tokens)
                self.engines.append(EngineProcess(settings))
        except BaseException:
            self.close()
            raise

    def run(
        self, conversations: Sequence[Sequence[Prompt]], on_report: Callable[[int, Prompt, RequestReport], None]
    ) -> None:
        """Serve every prompt: those of one conversation in order, the conversations side by side on all engines.

        `on_report` is called with the engine's number, the prompt and its report, by one thread at a time.

        Raises:
            KVDepotError: an engine failed.
        """
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
                    report = self.engines[number].serve(prompt)
                except BaseException as error:
                    with lock:
                        errors.append(error)
                        left = 0
                else:
                    with lock:
                        left -= 1
                        on_report(number, prompt, report)
                if left <= 0:
                    for _ in self.engines:
                        ready.put(None)
                elif turn + 1 < len(conversations[conversation]):
                    ready.put((conversation, turn + 1))

        for number, conversation in enumerate(conversations):
            if conversation:
                ready.put((number, 0))
        if left:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self.engines))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End every process and remove what they left."""
        for engine in self.engines:
            engine.close()
        self.depot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """Be one engine until the input or the thread that started this process ends."""
    be_a_child(int(sys.argv[1]))
    logging.getLogger("kvdepot").setLevel(logging.ERROR)  # the terminal belongs to whoever started the fleet
    line = sys.stdin.buffer.readline()
    if not line:
        return
    settings = msgspec.json.decode(line, type=EngineSettings)
    try:
        engine = EngineModel(
            settings.instance, settings.geometry, settings.num_blocks, Namespace(settings.geometry.name),
            url=settings.url, chunk_tokens=settings.chunk_tokens,
        )  # fmt: skip
        engine.wait_until_connected(_START_SECONDS)
    except KVDepotError as error:
        _say(Answer("", error=str(error)))
        return
    _say(Answer(""))
    for line in sys.stdin.buffer:
        prompt = msgspec.json.decode(line, type=Prompt)
        try:
            work = engine.abandon if prompt.abandon else engine.serve
            answer = Answer(prompt.request_id, work(prompt.request_id, tokens_of(prompt.segments)))
        except KVDepotError as error:
            answer = Answer(prompt.request_id, error=str(error))
        _say(answer)
    engine.close()


def _say(answer: Answer) -> None:
    os.write(1, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
