"""`benchmarks/cuda_gpu.py` without a device: every step ends, what fails is reported, and the rest goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda_gpu.py"
STEPS = {
    "environment": "ok", "raw_ipc": "skipped", "patterned": "ok", "copies": "ok", "interference": "skipped",
    "contexts": "skipped", "registration": "ok", "latency": "ok", "retrieve": "ok", "conformance": "skipped",
}  # fmt: skip


def run(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[list[dict[str, Any]], str]:
    """Return what it wrote: the lines, and the tables."""
    done = subprocess.run(
        [sys.executable, str(script), "--fake", "--out", str(out), *arguments],
        check=False, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "cuda_gpu.jsonl").read_text().splitlines()]
    return lines, (out / "cuda_gpu.md").read_text()


def test_every_step_ends_and_what_the_fake_can_do_is_done(tmp_path: Path) -> None:
    lines, tables = run(tmp_path)
    assert {line["step"]: line["status"] for line in lines if "status" in line} == STEPS
    assert not any("failed" in line and line["failed"] for line in lines)
    assert not any(line["is_a_gpu"] for line in lines)
    moved = [line for line in lines if line.get("what") == "bytes" and "right" in line]
    assert len(moved) == 3
    assert all(line["stored"] and line["retrieved"] and line["right"] for line in moved)
    assert [line["kernel_loaded"] for line in moved] == [False, False, True]
    found = {line["what"] for line in lines if "what" in line and "skipped" not in line}
    assert {"copies", "thresholds", "registration", "one block", "10,000 tokens"} <= found
    assert all("reason" in line for line in lines if line.get("status") == "skipped")
    assert "No GPU is behind these figures" in tables
    assert all(f"| {step} | {status} |" in tables for step, status in STEPS.items())


def test_a_step_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    source = SCRIPT.read_text()
    before = '    """What machine this is."""\n'
    assert source.count(before) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(
        source.replace(before, before + '    emit("first", value=1)\n    raise RuntimeError("no luck")\n')
    )
    lines, tables = run(tmp_path, "--only", "environment,registration", script=broken)
    first, second = (line for line in lines if "status" in line)
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: no luck")
    assert second["status"] == "ok"
    assert any(line.get("what") == "first" for line in lines), "what was measured before is kept"
    assert "no luck" in tables


@pytest.mark.parametrize(("seconds", "limit", "status"), [("1", "40", "skipped"), ("500", "0.2", "timed out")])
def test_a_step_is_bounded_in_time(seconds: str, limit: str, status: str, tmp_path: Path) -> None:
    """There is no time for another one, or it takes longer than it may; what it started is gone."""
    source = SCRIPT.read_text()
    assert source.count('"latency": (latency, 60)') == 1
    changed = tmp_path / "changed.py"
    changed.write_text(
        source.replace('"latency": (latency, 60)', f'"latency": (latency, {limit})').replace("limit < 5", "limit < 0.1")
        if status == "timed out"
        else source
    )
    lines, _ = run(tmp_path, "--only", "latency", "--seconds", seconds, script=changed)
    assert lines[-1]["status"] == status
    assert lines[-1]["reason"]
