"""Shows the progress of a demo or a replay in at most 80 columns: its steps, and the requests that each fleet served.

Both name their steps and add reports to lanes. On a terminal with rich (`kvdepot[cli]`), a thread draws them eight
times a second. Elsewhere each step is printed as a line, and each lane once a second if it changed.
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvdepot.lab.engine_model import RequestReport
from kvdepot.lab.totals import Totals


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
