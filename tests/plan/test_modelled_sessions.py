"""A replay of agents in modelled time, whose traffic is that of the benchmark of policies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_sessions_end_nearly_all_waits_of_agents_for_a_tier() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "depot" / "modelled_sessions.py"
    command = [sys.executable, str(script), "--sessions", "60", "--open", "12"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    without, named = map(json.loads, printed)
    assert named["wait_p99_ms"] <= 0.2 * without["wait_p99_ms"]
    assert named["pool_hit_share"] >= without["pool_hit_share"] + 0.1
    assert 0 < named["largest_retained_of_a_quota"] <= 0.5
    assert named["waits"]["all"][1] == 0, "a turn waited although all of its session was retained"
