"""`benchmarks/engine/sglang_decoders.py`, SGLang's part of the plan for a GPU, on a CPU: it finds no fault."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine" / "sglang_decoders.py"


@pytest.mark.slow
def test_loads_beside_decoders_change_no_token() -> None:
    command = [sys.executable, str(SCRIPT), "--fake", "--kinds", "--kills", "1"]
    done = subprocess.run(command, check=True, timeout=900, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    assert [line["right"] for line in found if line["what"] in ("kind", "kills")] == [True, True]
    assert [line["loaded"] > 0 for line in found if line["what"] == "round"] == [False, False, True]
