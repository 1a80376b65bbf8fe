# pyright: basic
"""Measures SGLang's server with SGLang's own client: `python benchmarks/engine/sglang_serve.py` in tox's `sglang`.

The client is `sglang.benchmark.serving` (`bench_serving`) with its dataset `generated-shared-prefix`. The engine's
cache is too small for all prefixes, so an engine alone computes them again. Two servers, with and without a depot, get
the same requests in passes, one server after the other. In the first pass the depot is empty. Prints mean, median and
p99 of the time to the first token, and their ratios to the server without a depot in the same pass.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess, wait_until
from support.sglang.engines import ENVIRONMENT, linker

MODELS = Path(__file__).parents[2] / "tests" / "support" / "vllm" / "models.py"
METRICS = ("mean", "median", "p99")
START_SECONDS = 300.0
CLIENT_SECONDS = 600.0
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --disable-cuda-graph"
    " --mem-fraction-static 0.9 --page-size 64 --context-length 8192 --sleep-on-idle --skip-server-warmup"
)


@contextlib.contextmanager
def server(model: Path, max_tokens: int, options: dict[str, Any], log: Path) -> Generator[tuple[int, Any]]:
    """Run SGLang's server. Yield its port and a function that waits until it answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    command += [*FLAGS.split(), "--max-total-tokens", str(max_tokens)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **ENVIRONMENT}
        )

    def answers() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()[-6000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        yield port, lambda: wait_until(answers, START_SECONDS, "SGLang's server")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def send(model: Path, port: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run SGLang's client. Return its report."""
    result = folder / "result.jsonl"
    result.unlink(missing_ok=True)
    flags = {
        "backend": "sglang",
        "host": "127.0.0.1",
        "port": port,
        "model": model,
        "tokenizer": model,
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": options.prefixes,
        "gsp-prompts-per-group": options.prompts,
        "gsp-system-prompt-len": options.prefix_tokens,
        "gsp-question-len": options.question_tokens,
        "gsp-output-len": options.output_tokens,
        "max-concurrency": options.at_once,
        "seed": options.seed,
        "warmup-requests": 1,
        "output-file": result,
    }
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--tokenize-prompt", "--disable-tqdm"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=CLIENT_SECONDS,
        env={**os.environ, **ENVIRONMENT, "HOME": str(folder)},  # the client keeps its generated data there
        check=False,
    )
    if done.returncode or not result.exists():
        raise SystemExit(f"the client: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    said = json.loads(result.read_text().splitlines()[-1])
    wanted = options.prefixes * options.prompts
    if said["completed"] != wanted:
        raise SystemExit(f"{said['completed']} of {wanted} requests completed")
    return {name: said[f"{name}_ttft_ms"] for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol")
    parser.add_argument("--cache-tokens", type=int, default=8192, help="of each engine's own cache")
    parser.add_argument("--prefixes", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4, help="of each prefix")
    parser.add_argument("--prefix-tokens", type=int, default=1400)
    parser.add_argument("--question-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wait", action="store_true", help="for a line on standard input, before the first pass")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = subprocess.run(
            [sys.executable, str(MODELS), str(folder), options.model, "0"], check=True, capture_output=True, text=True
        )
        model = Path(made.stdout.split()[-1])
        depot = stack.enter_context(DepotProcess(pool_size="2GiB", new_session=True))
        setups = {"without": {}, "depot": linker(depot.url)}
        servers = {
            name: stack.enter_context(server(model, options.cache_tokens, given, folder / f"{name}.log"))
            for name, given in setups.items()
        }
        for _, wait in servers.values():
            wait()
        print("ready", flush=True)
        if options.wait:
            sys.stdin.readline()
        for number in range(options.passes):
            found = {name: send(model, port, options, folder) for name, (port, _) in servers.items()}
            for name, times in found.items():
                cells = (f"{m} {times[m]:7.0f} ms ({times[m] / found['without'][m]:.2f})" for m in METRICS)
                print(f"pass {number + 1}, {name:8} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
