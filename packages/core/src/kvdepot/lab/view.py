"""Shows the progress of a demo or a replay in at most 80 columns: its steps, and the requests that each fleet served.

Both name their steps and add reports to lanes. On a terminal with rich (`kvdepot[cli]`), a thread draws them eight
times a second. Elsewhere each step is printed as a line, and each lane once a second if it changed.
"""

import statistics
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvdepot.config import format_size
from kvdepot.lab.engine_model import RequestReport

SOURCES = ("device", "own", "shared", "computed")
_SOURCE_NAMES = {
    "device": "engine's own cache",
    "own": "depot, its own",
    "shared": "depot, another's",
    "computed": "computed",
}


@dataclass(slots=True)
class Totals:
    """Sums over many requests."""

    num_requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    stored_bytes: int = 0
    retrieved_bytes: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0
    store_seconds: float = 0.0
    retrieve_seconds: float = 0.0
    lookups: list[float] = field(default_factory=list[float])
    retrieves: list[float] = field(default_factory=list[float])
    first_tokens: list[float] = field(default_factory=list[float])
    compute_seconds: float = 0.0

    def add(self, report: RequestReport) -> None:
        """Count one request."""
        self.num_requests += 1
        for source in SOURCES:
            self.tokens[source] += getattr(report, f"{source}_tokens")
        self.stored_bytes += report.stored_bytes
        self.retrieved_bytes += report.retrieved_bytes
        self.verified_bytes += report.verified_bytes
        self.wrong_bytes += report.wrong_bytes
        self.lookups.append(report.lookup_seconds)
        self.first_tokens.append(report.first_token_seconds)
        self.compute_seconds += report.compute_seconds
        if report.stored_bytes:
            self.store_seconds += report.store_seconds
        if report.retrieved_bytes:
            self.retrieve_seconds += report.retrieve_seconds
            self.retrieves.append(report.retrieve_seconds)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens."""
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return 1 - self.tokens["computed"] / self.num_tokens if self.num_tokens else 0.0

    @property
    def first_token_seconds(self) -> float:
        """Median time to the first token."""
        return _quantile(self.first_tokens, 0.5)

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, for JSON. Times are in milliseconds, rates in bytes per second."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.num_tokens,
            "hit_rate": round(self.hit_rate, 4),
            "hit_rate_by_source": {
                source: round(self.tokens[source] / max(1, self.num_tokens), 4) for source in SOURCES[:3]
            },
            "verified_bytes": self.verified_bytes,
            "wrong_bytes": self.wrong_bytes,
            "stored_bytes": self.stored_bytes,
            "retrieved_bytes": self.retrieved_bytes,
            "store_bytes_per_second": round(self.stored_bytes / self.store_seconds) if self.store_seconds else 0,
            "retrieve_bytes_per_second": (
                round(self.retrieved_bytes / self.retrieve_seconds) if self.retrieve_seconds else 0
            ),
            "compute_seconds": round(self.compute_seconds, 3),
            "first_token_p50_ms": round(self.first_token_seconds * 1e3, 3),
            "lookup_p50_ms": round(_quantile(self.lookups, 0.5) * 1e3, 3),
            "lookup_p99_ms": round(_quantile(self.lookups, 0.99) * 1e3, 3),
            "retrieve_p50_ms": round(_quantile(self.retrieves, 0.5) * 1e3, 3),
        }

    def describe(self) -> str:
        """Return the sums as text."""
        total = max(1, self.num_tokens)
        numbers = self.as_dict()
        lines = [f"{self.num_requests} requests, {self.num_tokens:,} prompt tokens, {self.hit_rate:.1%} not computed:"]
        for source in SOURCES:
            share = self.tokens[source] / total
            lines.append(f"  {_SOURCE_NAMES[source]:20}{share:7.1%}  {'█' * round(share * 40)}")
        lines += [
            f"stored     {format_size(self.stored_bytes):>10} at {numbers['store_bytes_per_second'] / 1e9:.1f} GB/s",
            (
                f"retrieved  {format_size(self.retrieved_bytes):>10}"
                f" at {numbers['retrieve_bytes_per_second'] / 1e9:.1f} GB/s,"
                f" half of the retrieves within {numbers['retrieve_p50_ms']:.1f} ms"
            ),
            f"lookups    {numbers['lookup_p50_ms']:.2f} ms (p50), {numbers['lookup_p99_ms']:.2f} ms (p99)",
            f"verified   {format_size(self.verified_bytes):>10} against their keys: {self.wrong_bytes} bytes wrong",
        ]
        return "\n".join(lines)


def _quantile(values: list[float], share: float) -> float:
    if not values:
        return 0.0
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@dataclass(slots=True)
class Lane:
    """The requests of one fleet; at most 17 characters of `name` are shown."""

    name: str
    num_requests: int
    totals: Totals = field(default_factory=Totals)
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # until the last report

    def add(self, report: RequestReport) -> None:
        """Count one request."""
        self.totals.add(report)
        self.seconds = time.monotonic() - self.started

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Requests, share of the prompt tokens that was computed, median time to the first token, seconds."""
        totals = self.totals
        computed = f"{1 - totals.hit_rate:.0%}" if totals.num_requests else "-"
        first = f"{totals.first_token_seconds * 1e3:.0f} ms" if totals.num_requests else "-"
        return f"{totals.num_requests}/{self.num_requests}", computed, first, f"{self.seconds:.1f} s"


class View:
    """Shows nothing; the base of the other views."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []

    def step(self, text: str) -> None:
        """Name the step that begins."""

    def lane(self, name: str, num_requests: int) -> Lane:
        """Show a new lane, whose time begins now."""
        self.lanes.append(Lane(name, num_requests))
        return self.lanes[-1]


@contextmanager
def live_view(*, quiet: bool) -> Generator[View]:
    """Show steps and lanes until the context ends; the last drawing stays on the terminal."""
    if quiet:
        yield View()
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        pass
    else:
        console = Console(highlight=False)
        if console.is_terminal:
            drawn = _DrawnView()
            with Live(console=console, get_renderable=drawn.render, refresh_per_second=8):
                yield drawn
                drawn.step("")
            return
    plain = _PlainView()
    thread = threading.Thread(target=plain.run, daemon=True)
    thread.start()
    try:
        yield plain
    finally:
        plain.is_over.set()
        thread.join()


class _PlainView(View):
    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self._said: dict[str, str] = {}

    def step(self, text: str) -> None:
        self._say_lanes()
        print(text, flush=True)

    def run(self) -> None:
        """Print the lanes that changed, each second and at the end."""
        while not self.is_over.wait(1):
            self._say_lanes()
        self._say_lanes()

    def _say_lanes(self) -> None:
        with self._lock:
            for lane in list(self.lanes):
                requests, computed, first, seconds = lane.columns
                line = f"  {lane.name:17} {requests:>8} done, {computed:>4} computed, first token {first:>7}, {seconds}"
                if lane.totals.num_requests and self._said.get(lane.name) != line:
                    self._said[lane.name] = line
                    print(line, flush=True)


class _DrawnView(View):
    def __init__(self) -> None:
        super().__init__()
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._text = ""
        self._started = 0.0

    def step(self, text: str) -> None:
        self._text, self._started = text, time.monotonic()

    def render(self) -> Any:
        """Return the lanes and the step that is under way."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1), expand=False)
        for width in (17, 25, 8, 9, 12):
            table.add_column(width=width, no_wrap=True, justify="left" if width > 12 else "right")
        if self.lanes:
            table.add_row("", "", "requests", "computed", "first token", style="dim")
        for lane in list(self.lanes):
            requests, computed, first, _ = lane.columns
            bar = ProgressBar(lane.num_requests, lane.totals.num_requests, width=25)
            table.add_row(lane.name, bar, requests, computed, first)
        if not self._text:
            return table
        self._spinner.update(text=f"{self._text}  [dim]{time.monotonic() - self._started:.1f} s[/]")
        return Group(table, self._spinner)
