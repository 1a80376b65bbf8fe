"""Plots times to the first token around a kill of the depot: `python benchmarks/depot/kill.py --plot FILE`.

Two engines share a depot, two others have none, and each serves one prompt after the other: a random turn of a random
conversation. After `--kill` seconds the depot gets SIGKILL, and `--away` seconds later it is started again. No model
runs: a pause of 50 µs stands for computing a prompt token. The KV cache, the copies and the kill are real, and every
byte that comes back is compared.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kvdepot.lab.demo import make_conversations
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry
from kvdepot.lab.fleet import Fleet, FleetEngine, Prompt
from kvdepot_plan.plot import begin_svg

_GEOMETRY = Geometry("8B GQA, 2 of 32 layers", 2, GEOMETRY_8B.num_kv_heads, GEOMETRY_8B.head_dim)
_TOKENS_PER_SECOND = 20_000.0
_NUM_CONVERSATIONS = 24
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 360, 72, 66, 44
_COLORS = {"without": "#c4572c", "depot": "#1b6fb5"}
_NAMES = {"without": "without a depot", "depot": "with a depot"}
_TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


@dataclass(frozen=True, slots=True)
class Point:
    """One request: its start in seconds since the load began, and its time to the first token."""

    side: str
    seconds: float
    first_token_ms: float
    wrong_bytes: int


def drive(
    engine: FleetEngine,
    side: str,
    number: int,
    conversations: list[list[Prompt]],
    began: float,
    end: float,
    points: list[Point],
) -> None:
    """Serve prompts on one engine until `end`."""
    rng = random.Random(number)
    count = 0
    while (now := time.monotonic() - began) < end:
        prompt = rng.choice(rng.choice(conversations))
        report = engine.serve(Prompt(f"{side}-{number}-{count}", prompt.segments))
        points.append(Point(side, now, 1e3 * report.first_token_seconds, report.wrong_bytes))
        count += 1


def measure(seconds: float, kill: float, away: float) -> tuple[list[Point], float, float]:
    """Return every request, and the times when the depot was killed and when it answered again."""
    points: list[Point] = []
    conversations = make_conversations(_NUM_CONVERSATIONS)
    with Fleet(
        _GEOMETRY,
        num_engines=2,
        num_alone=2,
        pool_bytes=1 << 30,
        engine_cache_bytes=64 << 20,
        tokens_per_second=_TOKENS_PER_SECOND,
    ) as fleet:
        sides = [("depot", engine) for engine in fleet.engines] + [("without", engine) for engine in fleet.alone]
        with ThreadPoolExecutor(len(sides)) as pool:
            began = time.monotonic()
            loads = [
                pool.submit(drive, engine, side, number, conversations, began, seconds, points)
                for number, (side, engine) in enumerate(sides)
            ]
            time.sleep(kill)
            killed = time.monotonic() - began
            fleet.depot.kill()
            time.sleep(away)
            fleet.depot.start()
            back = time.monotonic() - began
            for load in loads:
                load.result()
    return points, killed, back


def draw(points: Sequence[Point], seconds: float, killed: float, back: float) -> str:
    """Return the picture. The time to the first token has a logarithmic scale."""
    low = _TICKS_MS[0]
    longest = max(point.first_token_ms for point in points)
    high = min((tick for tick in _TICKS_MS if tick >= longest), default=longest)

    def x(value: float) -> float:
        return _LEFT + value / seconds * (_WIDTH - _LEFT - 16)

    def y(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    floor = _HEIGHT - _BOTTOM
    shade = f'x="{x(killed):.1f}" y="{_TOP}" width="{x(back) - x(killed):.1f}" height="{floor - _TOP}"'
    parts = [
        *begin_svg(_WIDTH, _HEIGHT, "Time to the first token of each request"),
        f'<rect {shade} class="shade"/>',
    ]
    for tick in (tick for tick in _TICKS_MS if low <= tick <= high):
        below = "≤ " if tick == low else ""  # where all faster requests are, too
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - 16}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{below}{tick:,} ms</text>')
    for second in range(0, int(seconds) + 1, 5):
        parts.append(f'<text x="{x(second):.1f}" y="{floor + 18}" text-anchor="middle">{second} s</text>')
    for side, color in _COLORS.items():
        dots = "".join(
            f"M{x(point.seconds):.1f} {y(point.first_token_ms):.1f}h0" for point in points if point.side == side
        )
        parts.append(
            f'<path d="{dots}" stroke="{color}" stroke-width="4" stroke-linecap="round" stroke-opacity="0.6"/>'
        )
    for place, text in ((killed, "kill -9 of the depot"), (back, "a new depot answers")):
        parts.append(f'<path d="M{x(place):.1f} {_TOP - 6}V{floor}" class="mark" stroke-dasharray="4 3"/>')
        anchor = "end" if place == killed else "start"
        parts.append(f'<text x="{x(place):.1f}" y="{_TOP - 12}" text-anchor="{anchor}">{text}</text>')
    for number, (side, name) in enumerate(_NAMES.items()):
        left = _LEFT + 170 * number
        parts.append(
            f'<circle cx="{left + 6}" cy="{_HEIGHT - 10}" r="4" fill="{_COLORS[side]}"/>'
            f'<text x="{left + 16}" y="{_HEIGHT - 6}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--kill", type=float, default=20.0)
    parser.add_argument("--away", type=float, default=6.0)
    parser.add_argument("--plot", type=Path, help="the SVG to write")
    parser.add_argument("--json", type=Path, help="write every request here")
    arguments = parser.parse_args()
    points, killed, back = measure(arguments.seconds, arguments.kill, arguments.away)
    phases = (("cold", 0.0, killed / 2), ("warm", killed / 2, killed), ("killed", killed, back), ("back", back, 1e9))
    print(f"{'':16} {'requests':>8} {'median':>9} {'longest':>9}")
    for side, name in _NAMES.items():
        for phase, start, end in phases:
            values = [point.first_token_ms for point in points if point.side == side and start <= point.seconds < end]
            if values:
                longest = f"{max(values):>6,.0f} ms"
                print(f"{name:16} {phase:7} {len(values):>6} {statistics.median(values):>6,.0f} ms {longest}")
    wrong = sum(point.wrong_bytes for point in points)
    print(f"killed at {killed:.1f} s, back at {back:.1f} s; {wrong} bytes wrong")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(point) for point in points]))
    if arguments.plot:
        arguments.plot.write_text(draw(points, arguments.seconds, killed, back))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
