"""The example with a prefill engine, a decode engine and a proxy, as a user runs it."""

import os
import re
import signal
import subprocess
from pathlib import Path

from kvdepot.lab.processes import wait_until
from support.vllm.engines import MakeModel
from support.vllm.examples import ENVIRONMENT, EXAMPLES, OPTIONS, SERVE, free_port, run


def command(model: Path) -> list[str]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items() if key != "enforce_eager"]
    return ["bash", str(EXAMPLES / "disaggregated" / "serve.sh"), str(model), *flags, "--enforce-eager"]


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [found for child in children for found in descendants(child)]


def engine_at(script: int, port: int) -> int:
    """Return the engine that listens there, among the processes of the example."""
    for pid in descendants(script):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--kv-transfer-config" in arguments and str(port).encode() in arguments:
            return pid
    raise AssertionError("no such engine")


def test_prefill_and_decode_engines_share_a_depot(model: MakeModel) -> None:
    output = run(*command(model("gqa")), PORT=str(free_port(3)), POOL_SIZE="128MiB", **SERVE)
    for name in ("prefill first", "both at once", "without the prefill engine"):
        (answer,) = re.findall(rf"^{name}: (.*?\[DONE\])", output, re.MULTILINE | re.DOTALL)
        assert answer.count('"text"') >= 4
    (loaded,) = re.findall(r"decode engine loaded: ([\d.]+)", output)
    assert float(loaded) in (692 + 640, 692 + 692), "at once, the last 53 tokens may be computed as quickly"


def test_the_example_ends_with_one_line_when_a_worker_of_the_decode_engine_dies(
    model: MakeModel, tmp_path: Path
) -> None:
    port, output, errors = free_port(3), tmp_path / "output", tmp_path / "errors"
    variables = {"PORT": str(port), "POOL_SIZE": "128MiB", "TMPDIR": str(tmp_path), **SERVE}
    with output.open("wb") as out, errors.open("wb") as err:
        script = subprocess.Popen(
            command(model("gqa")), env={**os.environ, **ENVIRONMENT, **variables}, stdout=out, stderr=err
        )
    try:
        wait_until(lambda: b"prefill first:" in output.read_bytes(), 240)
        for pid in descendants(engine_at(script.pid, port + 2)):
            os.kill(pid, signal.SIGILL)
        assert script.wait(120) == 1
    finally:
        script.terminate()  # its trap ends the rest
        script.wait(60)
    last = errors.read_text().splitlines()[-1]
    assert re.fullmatch(r"the decode-engine ended with status \d+; the end of its log, \S+, says why", last)
    assert "Traceback" not in errors.read_text()
