"""Benchmarks run. Tests only check that they still fit the code; their figures are for people."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(_BENCHMARKS / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_table_is_read_back() -> None:
    assert re.match(r"5000 entries in [\d.]+ s, \d+ steps", run("depot/restore.py", "--entries", "5000"))


@pytest.mark.slow
def test_a_slow_tier_is_beside_lookups() -> None:
    printed = run("tiers/slow_tier.py", "--rounds", "2", "--seconds", "0.3")
    waited = re.match(r"(\d+) lookups waited for the tier", printed)
    assert waited
    assert int(waited[1]) > 0


@pytest.mark.slow
def test_a_disk_tier_is_listed_beside_questions(tmp_path: Path) -> None:
    printed = run("tiers/disk_index.py", "--entries", "1000", "--rounds", "2", str(tmp_path))
    assert printed.startswith("1000 entries: plain walk ")
    answered = re.search(r"(\d+) questions for 512 keys answered meanwhile", printed)
    assert answered
    assert int(answered[1]) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_server_is_measured() -> None:
    printed = run("depot/server.py", "--entries", "5000", "--seconds", "0.3")
    assert re.search(r"5,100 entries: \d+ bytes each", printed)


@pytest.mark.slow
def test_the_text_of_a_prompt_is_found_at_other_positions() -> None:
    assert re.search(
        r"16,391 tokens: .* 9\d% found in \d+ runs", run("blend/blend_lookup.py", "--tokens", "16384", "--rounds", "3")
    )


@pytest.mark.slow
def test_the_traffic_of_a_node_is_measured() -> None:
    printed = run("depot/node.py", "--entries", "8000", "--chunk-tokens", "64", "--seconds", "0.5")
    assert re.search(r"requests a second of 125 chunks, 0\.\d+ of them found: [\d.]+ of a core", printed)
    assert "after a kill, a new server has a million entries" in printed


@pytest.mark.slow
def test_the_requests_of_a_model_are_measured() -> None:
    printed = run("depot/node.py", "--entries", "8000", "--requests", "2", "--models", "70B, TP 8")
    assert len(re.findall(r"\| [\d,]+ \([\d.]+ ms\)", printed)) == 3
