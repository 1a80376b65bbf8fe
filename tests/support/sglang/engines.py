"""Real SGLang engines for tests, each in processes of its own, with a bounded wait for every answer."""

import contextlib
import functools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvdepot.lab.processes import wait_until
from support.nursery import Fork, Nursery

Prompt = list[int]

TESTS = Path(__file__).parents[2]

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"}
ENVIRONMENT = {
    **ON_CPU,
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # some models are compiled
    "TOKENIZERS_PARALLELISM": "false",
}
START_SECONDS = 300.0
ANSWER_SECONDS = 120.0


def prompts(count: int, num_tokens: int = 700, seed: int = 0, shared: int = 0) -> list[Prompt]:
    """Return random prompts whose first `shared` tokens are the same."""
    source = random.Random(seed)
    start = [source.randrange(5, 2000) for _ in range(shared)]
    return [start + [source.randrange(5, 2000) for _ in range(num_tokens - shared)] for _ in range(count)]


def linker(url: str, **settings: Any) -> dict[str, Any]:
    """Return the options that give an engine the linker, with deadlines that hold on a busy machine."""
    settings = {"url": url, "deadline_seconds": 30.0, "lookup_seconds": 10.0, **settings}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KVDepotLinker",
            "linker_module_path": "kvdepot_sglang.linker",
            "linker_extra_config": settings,
        },
    }


@dataclass(frozen=True)
class Answer:
    """A request's answer: its tokens, the number of cached prompt tokens, and how many of those came from the depot."""

    tokens: tuple[int, ...]
    cached: int
    from_depot: int
    first_seconds: float
    failed: bool


class Engine:
    """An SGLang engine, on CPU unless `device` among its options says otherwise.

    Args:
        model: folder of the model.
        plugin: module with a plugin of SGLang, in addition to the installed ones.
        options: options of `sglang.Engine`.
    """

    def __init__(self, model: Path, *, plugin: str = "", **options: Any) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the engine
        self._plugins = tempfile.TemporaryDirectory(prefix="kvd-")
        device = options.get("device", "cpu")
        environment = _environment(device)
        if options.get("tp_size", 1) > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(options["tp_size"])))
        if plugin:
            _install(plugin, Path(self._plugins.name))
        script = Path(__file__).with_name("engine_child.py")
        self._process: Fork | subprocess.Popen[bytes]
        if device == "cpu":
            self._process = nursery().fork(
                script, self._plugins.name, environment=environment, stderr=self._log.fileno()
            )
        else:  # a fork of a process that has asked the driver for devices has none
            self._process = subprocess.Popen(
                [sys.executable, str(script), self._plugins.name],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        self._send({"model_path": str(model), "port": _free_port(), **options})

    def wait_until_ready(self) -> Self:
        """Wait until the engine has started. Several engines can start at the same time.

        Raises:
            AssertionError: the engine ended or hangs. The text has the end of its log.
        """
        self._receive(START_SECONDS)
        return self

    def generate(self, *wanted: Prompt, max_tokens: int = 4, **request: Any) -> list[Answer]:
        """Serve prompts at the same time."""
        self._send({"do": "generate", "prompts": list(wanted), "max_tokens": max_tokens, **request})
        return _answers(self._receive(ANSWER_SECONDS)["answers"])

    def each(self, wanted: list[Prompt], **request: Any) -> list[Answer]:
        """Serve prompts one after the other."""
        return [self.generate(prompt, **request)[0] for prompt in wanted]

    def beside(
        self, decoders: list[Prompt], arrivals: list[Prompt], max_tokens: int, pause: float
    ) -> tuple[list[Answer], list[Answer]]:
        """Decode for some prompts, while others arrive after pauses, one after the other. An arrival gets one token."""
        self._send(
            {"do": "beside", "decoders": decoders, "arrivals": arrivals, "max_tokens": max_tokens, "pause": pause}
        )
        told = self._receive(4 * ANSWER_SECONDS)
        return _answers(told["answers"]), _answers(told["arrivals"])

    def flush(self) -> None:
        """Flush the engine's own cache. The engine refuses that while stores are under way, so try again."""

        def is_flushed() -> bool:
            self._send({"do": "flush"})
            return self._receive(ANSWER_SECONDS)["ok"]

        wait_until(is_flushed, 60, "flush_cache succeeds")

    def update_weights(self, model: Path, way: str) -> None:
        """Give the engine the weights of another model, "from_disk" or "from_tensors", and empty its own cache."""
        self._send({"do": f"update_{way}", "model": str(model)})
        if not self._receive(ANSWER_SECONDS)["ok"]:
            self.flush()  # the answer asks for it: SGLang did not flush while stores were under way

    def log(self) -> str:
        """Return the engine's log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill all processes of the engine, as in a crash. A second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def _receive(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"no answer within {seconds} s: {self.log()[-4000:]}")
        line = self._process.stdout.readline()
        assert line, f"the engine ended: {self.log()[-4000:]}"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                file.close()
        self._plugins.cleanup()


def _answers(told: list[dict[str, Any]]) -> list[Answer]:
    return [Answer(tokens=tuple(each.pop("tokens")), **each) for each in told]


@functools.cache
def nursery() -> Nursery:
    """Return the process that has imported SGLang. It ends with this process."""
    return Nursery("support.sglang.engine_child", environment=_environment())


def _environment(device: str = "cpu") -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {name: value for name, value in ENVIRONMENT.items() if device == "cpu" or name not in ON_CPU}
    found = {**os.environ, **own, "PYTHONPATH": path}
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def _install(plugin: str, folder: Path) -> None:
    """Register a plugin for SGLang in a folder on `PYTHONPATH`."""
    facts = folder / f"{plugin.replace('.', '_')}-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (facts / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = {plugin}:register\n")


def _free_port() -> int:
    """Return a random multiple of 100 as port. SGLang derives the ports of its processes from it."""
    return 20_000 + random.SystemRandom().randrange(400) * 100


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    """Return the tokens of each answer."""
    return [each.tokens for each in answers]
