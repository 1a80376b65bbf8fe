"""A missing tool skips its tests here and fails them in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from support.tools import needs_tool, tool_is_missing

@needs_tool(None, "no such-tool")
def test_marked() -> None:
    raise FileNotFoundError("such-tool")

def test_that_asks() -> None:
    tool_is_missing("no other-tool: apt-get install other-tool")
"""


def run_with_ci_as(value: str, folder: Path) -> str:
    (folder / "test_with_tools.py").write_text(TESTS)
    project = Path(__file__).parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(project), str(folder)]
    environment = {**os.environ, "CI": value}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False).stdout


@pytest.mark.parametrize(("ci", "total"), [("", "2 skipped"), ("true", "2 failed")])
def test_without_a_tool_the_tests_are_skipped_with_a_reason_or_fail(ci: str, total: str, tmp_path: Path) -> None:
    output = run_with_ci_as(ci, tmp_path)
    assert total in output
    assert "no other-tool: apt-get install other-tool" in output
