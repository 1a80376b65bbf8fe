"""Draws SVGs of rates as curves, as in `kvdepot replay TRACE --simulate --plot FILE`."""

import math
from collections.abc import Callable, Sequence
from typing import Final
from xml.sax.saxutils import escape

from kvdepot.config import format_size

# Pixels. The margins hold the labels of the axes and the title; the right one is as wide as the legend.
_WIDTH: Final = 720
_HEIGHT: Final = 400
_LEFT: Final = 60
_TOP: Final = 40
_BOTTOM: Final = 60
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


def curves_as_svg(
    title: str,
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    label: str = "size of the pool",
    text: Callable[[float], str] = lambda size: format_size(int(size)),
    scale: Callable[[float], float] = math.log,
) -> str:
    """Return an SVG of rates as curves over pool sizes or other values.

    Args:
        title: text above the picture.
        curves: names with their points, `(value, rate)`, in the order of values.
        label: text below the picture: the meaning of the values.
        text: formats a value.
        scale: maps a value to its distance on the axis.
    """
    sizes = sorted({size for _, points in curves for size, _ in points})
    most = max((rate for _, points in curves for _, rate in points), default=0.0)
    top = max(0.05, math.ceil(most * 20) / 20)  # the next 5 %
    right = 40 + _LETTER * max(len(name) for name, _ in curves)
    low = scale(sizes[0])
    span = scale(sizes[-1]) - low or 1.0

    def x(size: float) -> float:
        return _LEFT + (scale(size) - low) / span * (_WIDTH - _LEFT - right)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {font} role="img">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for step in range(6):
        rate = top * step / 5
        parts.append(
            f'<path d="M{_LEFT} {y(rate):.1f}H{_WIDTH - right}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>'
        )
    for size in sizes:
        parts.append(
            f'<path d="M{x(size):.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#eee"/>'
            f'<text x="{x(size):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{text(size)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - right) / 2:.0f}" y="{_HEIGHT - 16}" text-anchor="middle">{escape(label)}</text>'
    )
    for number, (name, points) in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        places = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{color}"/>' for size, rate in points]
        parts.append(
            f'<path d="M{_WIDTH - right + 12} {_TOP + 8 + 18 * number}h16" stroke="{color}" stroke-width="2"/>'
            f'<text x="{_WIDTH - right + 34}" y="{_TOP + 12 + 18 * number}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
