"""Benchmarks with the engine model run. Their figures are for people."""

import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_bars_of_the_performance_page_are_drawn_from_its_tables() -> None:
    command = [sys.executable, str(_BENCHMARKS / "pictures" / "pictures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_times_to_the_first_token_are_drawn_with_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(_BENCHMARKS / "depot"), *sys.path])  # its neighbours
    draw = runpy.run_path(str(_BENCHMARKS / "engine" / "vllm_cpu.py"))["draw"]
    rows = [
        {"no cache": {"first_token_seconds": seconds}, "hit": {"first_token_seconds": seconds / 10}}
        for seconds in (0.8, 0.9, 1.1)
    ]
    root = ET.fromstring(draw(rows))
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"computed, no depot", "from the depot", "900 ms", "90 ms"} <= texts
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 6
    assert len({circle.get("cx") for circle in circles}) == 6


@pytest.mark.slow
def test_a_kill_of_the_depot_is_drawn_with_the_requests_around_it(tmp_path: Path) -> None:
    plot = tmp_path / "kill.svg"
    command = [sys.executable, str(_BENCHMARKS / "depot" / "kill.py"), "--seconds", "5", "--kill", "2", "--away", "0.5"]
    done = subprocess.run([*command, "--plot", str(plot)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "; 0 bytes wrong" in done.stdout
    texts = [text.text for text in ET.fromstring(plot.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"kill -9 of the depot", "a new depot answers", "without a depot", "with a depot"} <= set(texts)
