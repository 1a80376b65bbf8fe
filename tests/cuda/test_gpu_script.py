"""`benchmarks/devices/cuda_gpu.py`, the plan for a GPU, without a device: every phase ends without finding a fault."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "devices" / "cuda_gpu.py"
NEEDS_A_DEVICE = ("captures",)
NEEDS_AN_ENGINE = ("kinds", "sleep", "sglang", "served", "kills", "shared")  # rehearsed in the engines' environments
PHASES = (
    "machine",
    "bytes",
    "ranks",
    "full",
    "order",
    "stress",
    "conformance",
    "interference",
    "retrieve",
    "copies",
    "sums",
    *NEEDS_A_DEVICE,
    *NEEDS_AN_ENGINE,
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, str(SCRIPT), "--fake", "--out", str(out)]
    subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL)
    assert "| right |" in (out / "cuda_gpu.md").read_text()
    return [json.loads(line) for line in (out / "cuda_gpu.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_ends_and_the_fake_does_all_but_what_needs_a_device(phase: str, findings: list[dict[str, Any]]) -> None:
    *found, end = [line for line in findings if line["phase"] == phase]
    assert end["status"] == "ok", [*found, end]
    assert found
    assert any(line["what"] == "skipped" for line in found) == (phase in NEEDS_A_DEVICE + NEEDS_AN_ENGINE)
    assert not any(line["is_a_gpu"] for line in [*found, end])
    assert all(line["settled"] for line in found if "settled" in line)
