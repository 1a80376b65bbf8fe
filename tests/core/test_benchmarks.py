"""Benchmarks run: their figures are for people, that they still fit the code is for tests."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(_BENCHMARKS / name), *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_loop(printed: str, num_kinds: int) -> None:
    turns = [int(number) for number in re.findall(r"(\d+) turns  p99 ", printed)]
    assert len(turns) == num_kinds
    assert min(turns) > 0
    total = re.findall(r"^\d+ of ([\d,]+) turns took more than 20 ms$", printed, re.MULTILINE)
    assert [f"{sum(turns):,}"] == total


def test_the_loop_s_turns_are_counted() -> None:
    printed = run("loop.py", "--entries", "4000", "--seconds", "0.2")
    check_loop(printed, 27 if find_spec("uvicorn") and find_spec("prometheus_client") else 26)
    assert "2000 of 2000 chunks came from a tier" in printed
    assert "500 of 500 chunks came from a disk" in printed


def test_a_part_of_it_is_run_alone() -> None:
    printed = run("loop.py", "--entries", "400", "--only", "caches", "--policy", "arc")
    check_loop(printed, 2)
    assert printed.startswith("first stores of 20 caches ")


def test_a_table_is_read_back() -> None:
    assert re.match(r"5000 entries in [\d.]+ s, \d+ steps", run("restore.py", "--entries", "5000"))


def test_a_slow_tier_is_beside_lookups() -> None:
    printed = run("slow_tier.py", "--rounds", "2", "--seconds", "0.3")
    waited = re.match(r"(\d+) lookups waited for the tier", printed)
    assert waited
    assert int(waited[1]) > 0


def test_a_disk_tier_is_listed_beside_questions(tmp_path: Path) -> None:
    printed = run("disk_index.py", "--entries", "1000", "--rounds", "2", str(tmp_path))
    assert printed.startswith("1000 entries: plain walk ")
    answered = re.search(r"(\d+) questions for 512 keys answered meanwhile", printed)
    assert answered
    assert int(answered[1]) > 0
    assert not list(tmp_path.iterdir())
