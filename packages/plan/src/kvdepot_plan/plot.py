"""Draws SVGs of curves, as in `kvdepot replay TRACE --simulate --plot FILE`."""

import math
from collections.abc import Callable, Sequence
from typing import Final
from xml.sax.saxutils import escape
from zlib import crc32

from kvdepot.config import format_size

# Pixels. The margins hold the labels of the axes and the title; the right one is as wide as the legend.
_WIDTH: Final = 720
_HEIGHT: Final = 400
_LEFT: Final = 60
_TOP: Final = 40
_BOTTOM: Final = 60
_STEPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LETTER: Final = 7  # width of a wide letter
_COLORS: Final = (
    "#1b6fb5",
    "#c4572c",
    "#2e8b57",
    "#8e5ea2",
    "#777777",
    "#c9a227",
    "#17a2b8",
    "#d46a9f",
    "#5b4636",
    "#a3b18a",
)


_DASHES: Final = ("none", "8 4", "2 4")
_STYLE: Final = """<style>
text { fill: #123 } .paper { fill: #fff } .grid { stroke: #ddd } .shade { fill: #eee } .mark { stroke: #222 }
@media (prefers-color-scheme: dark) { text { fill: #e2eaf2 } .paper { fill: #0d1117 } .grid { stroke: #30363d }
.shade { fill: #21262d } .mark { stroke: #c9d1d9 } }
</style>"""


def begin_svg(width: int, height: int, title: str, left: int = 12) -> list[str]:
    """Return the first lines of an SVG with a title, for light and dark pages. The caller ends it with `</svg>`.

    Its classes are `grid` and `mark` for strokes, and `shade` for areas.
    """
    font = 'font-family="sans-serif" font-size="12"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font} role="img">',
        _STYLE,
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>',
    ]


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name, the same one in every picture unless two of its names would have one."""
    chosen: dict[str, str] = {}
    for name in names:
        start = crc32(name.encode())
        shifted = [_COLORS[(start + number) % len(_COLORS)] for number in range(len(_COLORS))]
        chosen[name] = next((color for color in shifted if color not in chosen.values()), shifted[0])
    return chosen


def curves_as_svg(
    title: str,
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    label: str = "size of the pool",
    text: Callable[[float], str] = lambda size: format_size(int(size)),
    scale: Callable[[float], float] = math.log,
    height_text: Callable[[float], str] = "{:.0%}".format,
) -> str:
    """Return an SVG of rates or times as curves over pool sizes or other values.

    Args:
        title: text above the picture.
        curves: names with their points, `(value, rate)`, in the order of values.
        label: text below the picture: the meaning of the values.
        text: formats a value.
        scale: maps a value to its distance on the axis.
        height_text: formats a rate or a time.
    """
    sizes = sorted({size for _, points in curves for size, _ in points})
    most = max((rate for _, points in curves for _, rate in points), default=0.0)
    step = next(step for step in _STEPS if most <= 5 * step or step == _STEPS[-1])
    num_steps = max(1, math.ceil(round(most / step, 6)))
    top = step * num_steps
    right = 40 + _LETTER * max(len(name) for name, _ in curves)
    low = scale(sizes[0])
    span = scale(sizes[-1]) - low or 1.0

    def x(size: float) -> float:
        return _LEFT + (scale(size) - low) / span * (_WIDTH - _LEFT - right)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = begin_svg(_WIDTH, _HEIGHT, title, _LEFT)
    for number in range(num_steps + 1):
        rate = step * number
        parts.append(
            f'<path d="M{_LEFT} {y(rate):.1f}H{_WIDTH - right}" class="grid"/>'
            f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{height_text(rate)}</text>'
        )
    for size in sizes:
        parts.append(
            f'<path d="M{x(size):.1f} {_TOP}V{_HEIGHT - _BOTTOM}" class="grid"/>'
            f'<text x="{x(size):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{text(size)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - right) / 2:.0f}" y="{_HEIGHT - 16}" text-anchor="middle">{escape(label)}</text>'
    )
    colors = colors_of([name for name, _ in curves])
    # Whole lines first: the gaps of dashed ones then show the curves that they cover.
    for number, (name, points) in sorted(enumerate(curves), key=lambda item: item[0] % len(_DASHES)):
        places = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in points)
        line = f'stroke="{colors[name]}" stroke-width="2" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        parts.append(f'<polyline points="{places}" fill="none" {line}/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{colors[name]}"/>' for size, rate in points
        ]
        parts.append(
            f'<path d="M{_WIDTH - right + 12} {_TOP + 8 + 18 * number}h16" {line}/>'
            f'<text x="{_WIDTH - right + 34}" y="{_TOP + 12 + 18 * number}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
