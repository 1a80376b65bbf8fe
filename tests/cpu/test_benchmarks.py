"""Benchmarks with the engine model run: their figures are for people."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_kill_of_the_depot_is_drawn_with_the_requests_around_it(tmp_path: Path) -> None:
    plot = tmp_path / "kill.svg"
    command = [sys.executable, str(_BENCHMARKS / "kill.py"), "--seconds", "5", "--kill", "2", "--away", "0.5"]
    done = subprocess.run([*command, "--plot", str(plot)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "; 0 bytes wrong" in done.stdout
    texts = [text.text for text in ET.fromstring(plot.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"kill -9 of the depot", "a new depot answers", "without a depot", "with a depot"} <= set(texts)
