"""Real engines for tests: each vLLM in a child process, with a bounded wait for every answer."""

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, Self

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire.status import DepotStatus
from support.nursery import Fork, Nursery

Prompt = list[int]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # two ranks compile their embedding, for 20 CPU seconds
    "NUMBA_NUM_THREADS": "1",  # the drafter of n-grams waits for a second thread in a loop
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
}


PROFILE = """
from vllm.v1.worker.cpu_worker import CPUWorker
measure = CPUWorker.determine_available_memory
CPUWorker.determine_available_memory = lambda worker: worker.model_runner.profile_run() or measure(worker)
"""
"""Makes vLLM on CPU create the buffers of a pipeline's stages. Without compilation it skips this run, and fails."""

_SOURCES = """
from prometheus_client import REGISTRY
result = {
    sample.labels["source"]: sample.value
    for metric in REGISTRY.collect()
    for sample in metric.samples
    if sample.name == "vllm:prompt_tokens_cached_by_source_total" and sample.value
}
"""


class MakeModel(Protocol):
    """Makes a tiny model unless it exists, and returns its path."""

    def __call__(self, name: str, seed: int = 0) -> Path: ...


class RunCode(Protocol):
    """Runs Python code in a process that has vLLM, and returns its output."""

    def __call__(self, code: str, *arguments: str, given: str = "") -> str: ...


def prompts(count: int, num_tokens: int = 700, seed: int = 0, shared: int = 0) -> list[Prompt]:
    """Return random prompts whose first `shared` tokens are the same."""
    source = random.Random(seed)
    start = [source.randrange(5, 2000) for _ in range(shared)]
    return [start + [source.randrange(5, 2000) for _ in range(num_tokens - shared)] for _ in range(count)]


def connector(url: str, *, by_module: bool = False, **settings: Any) -> dict[str, Any]:
    """Return a `--kv-transfer-config`. Its default deadline holds on a busy machine."""
    settings = {"deadline_seconds": 30.0, **settings}
    return {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvdepot.url": url, **{f"kvdepot.{key}": v for key, v in settings.items()}},
        **({"kv_connector_module_path": "kvdepot_vllm.connector"} if by_module else {}),
    }


class Engine:
    """A vLLM with the connector.

    Args:
        model: directory of the model.
        config: the `--kv-transfer-config`, None for no connector.
        reference: prompts that the same model serves first without a connector. The answers are in `reference`.
            Prompts already served with the same options are not computed again.
        environment: further environment variables.
        multiprocessing: whether the engine core has its own process.
        options: options of `vllm.LLM`.

    An engine imports everything itself if there is no nursery, or if it runs in one process with an `environment`.
    """

    nursery: ClassVar[Nursery | None] = None
    _references: ClassVar[dict[str, list[int]]] = {}

    def __init__(
        self,
        model: Path,
        config: dict[str, Any] | None,
        *,
        reference: list[Prompt] | None = None,
        max_tokens: int = 16,
        environment: dict[str, str] | None = None,
        multiprocessing: bool = False,
        **options: Any,
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the engine
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
            **(environment or {}),
        }
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        script = Path(__file__).with_name("engine_child.py")
        self._process: Fork | subprocess.Popen[bytes]
        if self.nursery is not None and (multiprocessing or not environment):
            self._process = self.nursery.fork(script, environment=variables, stderr=self._log.fileno())
        else:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=variables,
                start_new_session=True,
            )
        self.max_tokens = max_tokens
        circumstances = [str(model), max_tokens, environment, multiprocessing, {**options, "expects_depot": None}]
        keys = [json.dumps([*circumstances, prompt], sort_keys=True) for prompt in reference or []]
        missing = {
            key: prompt for key, prompt in zip(keys, reference or [], strict=True) if key not in self._references
        }
        try:
            answer = self.ask(
                "start",
                300,
                model=str(model),
                connector=config,
                reference=list(missing.values()),
                max_tokens=max_tokens,
                **options,
            )
        except BaseException:
            self.close()
            raise
        self._references.update((key, output["tokens"]) for key, output in zip(missing, answer["outputs"], strict=True))
        self.reference = [self._references[key] for key in keys]

    @property
    def pid(self) -> int:
        """The PID of the process."""
        return self._process.pid

    def ask(self, op: str, timeout_seconds: float = 120, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self.answer(timeout_seconds)

    def send(self, op: str, **arguments: Any) -> None:
        """Send a command. `answer` returns its answer later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_seconds: float = 120) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            what = "ended" if ready else f"did not answer within {timeout_seconds} s"
            log = self.log()
            self.close()
            raise AssertionError(f"the engine {what}:\n{log[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self.log()[-6000:]}")
        return answer

    def generate(self, wanted: list[Prompt], **options: Any) -> list[dict[str, Any]]:
        """Serve prompts and wait for all stores. Return tokens and the number of cached tokens of each prompt."""
        return self.ask("generate", prompts=wanted, max_tokens=self.max_tokens, **options)["outputs"]

    def execute(self, code: str) -> Any:
        """Run test code in the engine's process and return its variable `result`."""
        return self.ask("execute", code=code)["result"]

    def hit_sources(self) -> dict[str, float]:
        """Return the number of cached prompt tokens so far by their source, as vLLM counts them."""
        return self.execute(_SOURCES)

    def reset(self, *, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.ask("reset", connector=connector)["done"], "vLLM's cache could not be reset: blocks are held"

    def log(self) -> str:
        """Return the engine's output so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Kill the engine and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until_stored(engine: Engine, depot: DepotProcess, seed: int) -> None:
    """Serve short prompts until one is in the depot: an engine core and workers in their own processes connect late."""
    before = depot.status().num_chunks
    for number in range(40):
        engine.generate(prompts(1, 200, seed=seed + number))
        if depot.status().num_chunks > before:
            break
    wait_until(lambda: depot.status().num_chunks > before, 60, "a prompt of an engine in the depot")
    wait_until(lambda: depot.status().num_tickets == 0, 60, "no store is under way")


def generate_until_stored(
    engine: Engine, prompts: list[Prompt], depot: DepotProcess, num_chunks: int
) -> tuple[list[dict[str, Any]], DepotStatus]:
    """Serve prompts until the depot has `num_chunks` and no store is under way. Return the last outputs and the status.

    If a busy machine keeps the depot from answering in time, an engine correctly runs without it.
    """
    for _ in range(10):
        outputs = engine.generate(prompts)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: depot.status().num_chunks >= num_chunks and not depot.status().num_tickets, 20)
            return outputs, depot.status()
        engine.reset()
    raise AssertionError(f"after ten times {depot.status().num_chunks} of {num_chunks} chunks are in the depot")


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of each output."""
    return [output["tokens"] for output in outputs]


def cached(outputs: list[dict[str, Any]]) -> list[int]:
    """Return the number of cached prompt tokens of each output."""
    return [output["cached"] for output in outputs]
