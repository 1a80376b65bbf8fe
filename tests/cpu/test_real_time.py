"""The simulation in real time for half a minute. The nightly run is longer and has another seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
def test_a_run_without_time_is_refused(seconds: str) -> None:
    """Regression: it passed, although nothing had been tried."""
    line = [sys.executable, "-m", "simulation", "--seconds", seconds]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "error: argument --seconds: " in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.promise(24, 25, 29)
def test_half_a_minute_of_load_and_kills_leaves_nothing_wrong_late_or_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulation", "--real-time", "--seconds", "30", "--engines", "2"]
    command += ["--seed", "103", "--disk", str(tmp_path / "tier")]  # every event happens in the first seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    for event in ("kill", "stop", "kill_server", "stop_server", "damage"):
        assert result["events"][event] > 0, f"{event}: never, so the run shows little"
    assert result["requests"] > 50
    assert result["verified_bytes"] > 5 * 10**7
