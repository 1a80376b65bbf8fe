"""Shows the progress of a demo or a replay in at most 80 columns: its steps, and the requests that each fleet served.

Both name their steps and add reports to lanes. On a terminal with rich (`kvdepot[cli]`), a thread draws them eight
times a second. Elsewhere each step is printed as a line, and each lane once a second if it changed.
"""

import statistics
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from kvdepot.config import format_size
from kvdepot.lab.engine_model import RequestReport

SOURCES = {
    "device": "engine's own cache",
    "own": "depot, its own",
    "shared": "depot, another's",
    "computed": "computed",
}
"""Where the tokens of prompts came from: parts of the names of a report's fields, with words for people."""


class Lane:
    """The requests of one fleet; at most 17 characters of `name` are shown.

    Attributes:
        seconds: the time from the start to the last report.
    """

    def __init__(self, name: str, num_requests: int) -> None:
        self.name = name
        self.num_requests = num_requests
        self.reports: list[RequestReport] = []
        self.seconds = 0.0
        self._started = time.monotonic()

    def add(self, report: RequestReport) -> None:
        """Count one request."""
        self.reports.append(report)
        self.seconds = time.monotonic() - self._started

    def total(self, field: str) -> int:
        """Return the sum of a field of all reports."""
        return sum(getattr(report, field) for report in self.reports)

    def share(self, source: str) -> float:
        """Return the share of the prompt tokens that came from one of `SOURCES`."""
        return self.total(f"{source}_tokens") / max(1, self.total("prompt_tokens"))

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return 1 - self.share("computed") if self.reports else 0.0

    @property
    def first_token_seconds(self) -> float:
        """Median time to the first token."""
        return _quantile((report.first_token_seconds for report in self.reports), 0.5)

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Requests, share of the prompt tokens that was computed, median time to the first token, seconds."""
        computed = f"{self.share('computed'):.0%}" if self.reports else "-"
        first = f"{self.first_token_seconds * 1e3:.0f} ms" if self.reports else "-"
        return f"{len(self.reports)}/{self.num_requests}", computed, first, f"{self.seconds:.1f} s"

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, for JSON. Times are in milliseconds, rates in bytes per second."""
        stores = [report for report in self.reports if report.stored_bytes]
        retrieves = [report for report in self.reports if report.retrieved_bytes]
        lookups = [report.lookup_seconds for report in self.reports]
        stored, retrieved = self.total("stored_bytes"), self.total("retrieved_bytes")
        return {
            "num_requests": len(self.reports),
            "prompt_tokens": self.total("prompt_tokens"),
            "hit_rate": round(self.hit_rate, 4),
            "hit_rate_by_source": {source: round(self.share(source), 4) for source in SOURCES if source != "computed"},
            "verified_bytes": self.total("verified_bytes"),
            "wrong_bytes": self.total("wrong_bytes"),
            "stored_bytes": stored,
            "retrieved_bytes": retrieved,
            "store_bytes_per_second": round(stored / sum(each.store_seconds for each in stores)) if stores else 0,
            "retrieve_bytes_per_second": (
                round(retrieved / sum(each.retrieve_seconds for each in retrieves)) if retrieves else 0
            ),
            "compute_seconds": round(self.total("compute_seconds"), 3),
            "first_token_p50_ms": round(self.first_token_seconds * 1e3, 3),
            "lookup_p50_ms": round(_quantile(lookups, 0.5) * 1e3, 3),
            "lookup_p99_ms": round(_quantile(lookups, 0.99) * 1e3, 3),
            "retrieve_p50_ms": round(_quantile((each.retrieve_seconds for each in retrieves), 0.5) * 1e3, 3),
        }

    def describe(self) -> str:
        """Return the sums as text."""
        sums = self.as_dict()
        lines = [
            f"{len(self.reports)} requests, {sums['prompt_tokens']:,} prompt tokens, {self.hit_rate:.1%} not computed:"
        ]
        for source, name in SOURCES.items():
            lines.append(f"  {name:20}{self.share(source):7.1%}  {'█' * round(self.share(source) * 40)}")
        lines += [
            f"stored     {format_size(sums['stored_bytes']):>10} at {sums['store_bytes_per_second'] / 1e9:.1f} GB/s",
            f"retrieved  {format_size(sums['retrieved_bytes']):>10}"
            + f" at {sums['retrieve_bytes_per_second'] / 1e9:.1f} GB/s,"
            + f" half of the retrieves within {sums['retrieve_p50_ms']:.1f} ms",
            f"lookups    {sums['lookup_p50_ms']:.2f} ms (p50), {sums['lookup_p99_ms']:.2f} ms (p99)",
            f"verified   {format_size(sums['verified_bytes']):>10} by their keys: {sums['wrong_bytes']} bytes wrong",
        ]
        return "\n".join(lines)


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    if share == 0.5 and ordered:
        return statistics.median(ordered)
    return ordered[int(len(ordered) * share)] if ordered else 0.0


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
                if lane.reports and self._said.get(lane.name) != line:
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
            bar = ProgressBar(lane.num_requests, len(lane.reports), width=25)
            table.add_row(lane.name, bar, requests, computed, first)
        if not self._text:
            return table
        self._spinner.update(text=f"{self._text}  [dim]{time.monotonic() - self._started:.1f} s[/]")
        return Group(table, self._spinner)
