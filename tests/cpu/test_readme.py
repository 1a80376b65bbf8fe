"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.testing.processes import DepotProcess


@pytest.mark.promise(6)
def test_the_example_runs_as_it_stands() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    with DepotProcess() as depot:
        here = code.replace('dtype="bfloat16")', f'dtype="bfloat16", url={depot.url!r})')
        here = here.replace('"engine-0")', f'"engine-0", url={depot.url!r})')
        result = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "True\n15 True\n", result.stderr
