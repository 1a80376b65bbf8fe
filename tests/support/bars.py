"""Draws SVGs of measurements as bars, for the benchmarks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from kvdepot_plan.plot import begin_svg

_WIDTH: Final = 720
_LETTER: Final = 7  # width of a wide letter
_COLORS: Final = ("#1b6fb5", "#c4572c")  # ours, and others'


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its length, and the single measurements behind it, if they are to be drawn."""

    label: str
    value: float
    text: str  # the value as text
    is_ours: bool  # with a depot, or kvdepot's own figure
    points: tuple[float, ...] = ()


def bars_as_svg(title: str, bars: Sequence[Bar]) -> str:
    """Return an SVG of bars from zero, one below the other, in two colours: by `is_ours`."""
    left, right, top, row = 20 + _LETTER * max(len(bar.label) for bar in bars), 90, 40, 30
    floor = top + row * len(bars)
    longest = max(max(bar.value, *bar.points) if bar.points else bar.value for bar in bars)
    step = next(size * 10**power for power in range(-3, 7) for size in (1, 2, 5) if longest / (size * 10**power) <= 6)
    num_steps = math.ceil(longest / step)

    def x(value: float) -> float:
        return left + value / (num_steps * step) * (_WIDTH - left - right)

    parts = begin_svg(_WIDTH, floor + 30, title)
    for number in range(num_steps + 1):
        place = x(number * step)
        parts.append(f'<path d="M{place:.1f} {top - 6}V{floor}" class="grid"/>')
        parts.append(f'<text x="{place:.1f}" y="{floor + 18}" text-anchor="middle">{number * step:,g}</text>')
    for number, bar in enumerate(bars):
        color, middle = _COLORS[not bar.is_ours], top + row * (number + 0.5) - 3
        parts.append(f'<text x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(bar.label)}</text>')
        line = f'd="M{left} {middle:.1f}H{x(bar.value):.1f}" stroke="{color}" stroke-width="18"'
        parts.append(f'<path {line} opacity="{0.35 if bar.points else 0.75}"/>')
        for place, point in enumerate(bar.points):
            height = middle - 6 + 12 * place / max(1, len(bar.points) - 1)
            parts.append(f'<circle cx="{x(point):.1f}" cy="{height:.1f}" r="1.8" fill="{color}"/>')
        end = x(max(bar.value, *bar.points) if bar.points else bar.value) + 8
        parts.append(f'<text x="{end:.1f}" y="{middle + 4:.1f}" font-weight="bold">{escape(bar.text)}</text>')
    return "\n".join([*parts, "</svg>", ""])
