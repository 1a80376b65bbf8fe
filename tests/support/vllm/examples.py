"""Runs the examples as a user does, with a tiny model."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
OPTIONS = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
SERVE = Path(__file__).with_name("serve.py")


def run(*command: str, **variables: str) -> str:
    """Run an example and return its output. All its processes have ended, even after a timeout."""
    with subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=500)  # pytest ends the whole run after 600
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, (output + errors)[-6000:]
    return output


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            for number in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
