"""The examples do what they say, with a tiny model."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from kvdepot.lab.processes import DepotProcess
from kvdepot.pool.found import find_pools
from support.vllm.engines import MakeModel

EXAMPLES = Path(__file__).parents[2] / "examples" / "vllm"
OPTIONS = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
ENVIRONMENT = {
    **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}  # fmt: skip


def run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_one_engine_and_then_two(depot: DepotProcess, model: MakeModel) -> None:
    arguments = [str(model("gqa")), "--url", depot.url, "--options", json.dumps(OPTIONS)]
    output = run(sys.executable, str(EXAMPLES / "two_engines.py"), *arguments)
    assert re.findall(r"(\d+) of \d+ tokens reused", output) == ["0", "896", "896", "896"]


def test_a_prompt_outlives_its_engine_and_the_example_leaves_no_memory(model: MakeModel) -> None:
    before = {pool.directory for pool in find_pools()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items() if key != "enforce_eager"]
    output = run(
        "bash", str(EXAMPLES / "serve.sh"), str(model("gqa")), *flags, "--enforce-eager",
        PORT=str(port), POOL_SIZE="128MiB",
        VLLM_SERVE=f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )  # fmt: skip
    first, second = re.findall(r"engine answers: (\{.*\})", output)
    assert not re.search(r'"cached_tokens":\s*[1-9]', first)
    assert re.findall(r'"cached_tokens":\s*(\d+)', second) == ["640"]
    counters = dict(re.findall(r"^(vllm:kvdepot_\w+_total)\{.*\} ([\d.e+]+)$", output, re.MULTILINE))
    assert float(counters["vllm:kvdepot_hit_tokens_total"]) == 640
    assert {pool.directory for pool in find_pools()} <= before
