"""`benchmarks/devices/vllm_cuda.py`, vLLM's part of the plan for a GPU, on a CPU: no part finds a fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "devices" / "vllm_cuda.py"
PARTS = {
    "kinds": {"kind"},
    "kills": {"kills"},
    "large": {"first token", "decode", "metrics"},
    "sleep": {"night", "slept"},
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_finds_no_fault_on_a_cpu(part: str) -> None:
    if part == "sleep" and "KVDEPOT_NEXT_VLLM" not in os.environ:
        pytest.skip("sleep needs vLLM 0.33")
    command = [sys.executable, str(SCRIPT), "--fake", "--only", part]
    done = subprocess.run(command, check=True, timeout=900, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    assert {line["what"] for line in found} >= PARTS[part]
    assert not [line for line in found if line["what"] == "failed" or line.get("right") is False]
