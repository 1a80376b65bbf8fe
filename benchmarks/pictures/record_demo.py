"""Records the demo as an animated SVG: `uv run --with pyte benchmarks/pictures/record_demo.py docs/pictures/demo.svg`.

Runs the demo in a terminal of 80 columns and draws its screens with their times, at most five a second. A line that
stays is drawn once. Viewers without animations show the last screen. Run it on a quiet machine.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.terminal import run_in_terminal

_COLUMNS = 80
_STEP_SECONDS = 0.2
_REST_SECONDS = 8.0  # the last screen stays
_CELL = (8.0, 18.0)
_MARGIN = 16.0
_COLORS = {"default": "#d8dee9", "green": "#8fd18a", "3a3a3a": "#4c566a"}
_PROMPT = "$ kvdepot demo\r\n"

Run = tuple[int, str, str, bool]  # column, text, color, bold
Line = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """A line of the screen, from `start` to `end` in seconds."""

    row: int
    line: Line
    start: float
    end: float


def read_line(screen: Any, row: int) -> Line:
    """Return the words of a line. A word ends where the color changes or two spaces follow."""
    runs: list[list[Any]] = []
    cells = screen.buffer[row]
    for column in range(_COLUMNS):
        cell = cells[column]
        if runs and runs[-1][2:] == [cell.fg, cell.bold] and runs[-1][0] + len(runs[-1][1]) == column:
            runs[-1][1] += cell.data
        else:
            runs.append([column, cell.data, cell.fg, cell.bold])
    words: list[Run] = []
    for start, text, color, bold in runs:
        place = 0
        for word in text.split("  "):
            stripped = word.strip()
            if stripped:
                words.append((start + place + word.index(stripped), stripped, color, bold))
            place += len(word) + 2
    return tuple(words)


def lines_over_time(outputs: Sequence[tuple[float, str]]) -> tuple[list[Shown], float, int]:
    """Return every line with its time, the length of the recording in seconds, and the number of rows."""
    pyte: Any = importlib.import_module("pyte")
    screen = pyte.Screen(_COLUMNS, 60)
    stream = pyte.Stream(screen)
    stream.feed(_PROMPT)
    shown: list[Shown] = []
    since: dict[int, tuple[Line, float]] = {}
    end = outputs[-1][0]

    def look(now: float) -> None:
        for row in range(screen.lines):
            line = read_line(screen, row)
            before, start = since.get(row, ((), 0.0))
            if line != before:
                if before:
                    shown.append(Shown(row, before, start, now))
                since[row] = (line, now)

    look(0.0)
    place, now = 0, 0.0
    while place < len(outputs):
        now += _STEP_SECONDS
        while place < len(outputs) and outputs[place][0] <= now:
            stream.feed(outputs[place][1])
            place += 1
        look(min(now, end))
    total = end + _REST_SECONDS
    shown += [Shown(row, line, start, total) for row, (line, start) in since.items() if line]
    return shown, total, max(each.row for each in shown) + 1


def draw(shown: Sequence[Shown], total: float, num_rows: int) -> str:
    """Return the animation."""
    width, height = 2 * _MARGIN + _COLUMNS * _CELL[0], 2 * _MARGIN + num_rows * _CELL[1]
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" fill="#d8dee9"'
            ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13">'
        ),
        "<title>kvdepot demo</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1b1f27"/>',
    ]
    for each in shown:
        y = _MARGIN + (each.row + 0.75) * _CELL[1]
        words = "".join(draw_word(word) for word in each.line)
        stays = each.end == total
        hidden = "" if stays else ' visibility="hidden"'
        times = f"0;{each.start / total:.4f}" + ("" if stays else f";{each.end / total:.4f}")
        values = "hidden;visible" + ("" if stays else ";hidden")
        blink = (
            f'<animate attributeName="visibility" values="{values}" keyTimes="{times}" dur="{total:.1f}s"'
            ' calcMode="discrete" repeatCount="indefinite"/>'
        )
        always = stays and each.start == 0
        parts.append(f'<text y="{y:.1f}"{hidden}>{words}{"" if always else blink}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_word(word: Run) -> str:
    """Return one word with an explicit length, as fonts differ."""
    column, text, color, bold = word
    fill = "" if color == "default" else f' fill="{_COLORS.get(color, "#" + color)}"'
    weight = ' font-weight="bold"' if bold else ""
    length = f' textLength="{len(text) * _CELL[0]:.0f}"' if len(text) > 1 else ""
    return f'<tspan x="{_MARGIN + column * _CELL[0]:.0f}"{length}{fill}{weight}>{escape(text)}</tspan>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the SVG to write")
    recorded = run_in_terminal([sys.executable, "-m", "kvdepot", "demo"], columns=_COLUMNS)
    if recorded.status:
        print(recorded.text)
        return 1
    shown, total, num_rows = lines_over_time(recorded.outputs)
    path = parser.parse_args().path
    path.write_text(draw(shown, total, num_rows))
    print(f"{path}: {total - _REST_SECONDS:.1f} s, {len(shown)} lines, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
