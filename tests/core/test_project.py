"""The project's own rules that no linter checks."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def test_every_benchmark_is_in_the_table() -> None:
    folder = ROOT / "benchmarks"
    listed = re.findall(r"`(\w+/\w+\.py)`", (folder / "README.md").read_text())
    assert sorted(set(listed)) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
