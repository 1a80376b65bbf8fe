"""`benchmarks/cuda_gpu.py`, the plan for a GPU, without a device: every phase ends, and finds no fault."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda_gpu.py"
NEEDS_A_DEVICE = {"captures"}


def run(out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--fake", "--out", str(out)]
    subprocess.run(command, check=True, timeout=500, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "cuda_gpu.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_phase_ends_and_the_fake_does_all_but_what_needs_a_device(tmp_path: Path) -> None:
    found = run(tmp_path)
    ends = {line["phase"]: line["status"] for line in found if line["what"] == "end"}
    assert len(ends) == 10
    assert set(ends.values()) == {"ok"}, [line for line in found if line["what"] in ("end", "failed", "tests")]
    assert {line["phase"] for line in found if line["what"] == "skipped"} == NEEDS_A_DEVICE
    assert {line["phase"] for line in found if line["what"] != "end"} == set(ends)
    assert not any(line["is_a_gpu"] for line in found)
    rows = [line for line in found if line["what"] == "bytes"]
    assert [(row["mode"], row["kernel"]) for row in rows] == [("direct", False)] * 2 + [("direct", True)] + [
        ("ipc", False)
    ] * 2
    assert all(line["settled"] for line in found if "settled" in line)
