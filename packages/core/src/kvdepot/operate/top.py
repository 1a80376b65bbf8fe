"""`kvdepot top`: shows the status of a depot in a terminal, live. Needs `pip install 'kvdepot[cli]'`."""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvdepot.config import format_size
from kvdepot.counting import Counts
from kvdepot.errors import DepotUnavailable, printable
from kvdepot.operate.status import describe_tier_size
from kvdepot.wire.status import DepotStatus, DeviceStatus

_SHADES: Final = " ░▒▓█"
_MAP_WIDTH: Final = 48  # half of `extents.NUM_REGIONS`: the map takes two lines, each far below 80 columns
_LEAST_CHUNKS: Final = 1000  # estimates of fewer looked-up chunks are too rough to show


def run_top(ask: Callable[[], DepotStatus], *, interval_seconds: float = 1.0, num_frames: int | None = None) -> None:
    """Draw until interrupted, or `num_frames` times; by default once if standard output is not a terminal.

    Raises:
        DepotUnavailable: no depot answers at the start. Later, `run_top` waits for it.
    """
    before, at = ask(), time.monotonic()
    if not sys.stdout.isatty() and num_frames is None:
        Console().print(draw(before, before, 0.0))
        return
    drawn = 1
    with Live(draw(before, before, 0.0), auto_refresh=False, screen=num_frames is None) as live:
        live.refresh()
        while num_frames is None or drawn < num_frames:
            time.sleep(interval_seconds)
            try:
                status = ask()
            except DepotUnavailable as error:
                live.update(Text(printable(str(error)), style="red"), refresh=True)
            else:
                now = time.monotonic()
                same = status.epoch == before.epoch
                live.update(draw(status, before if same else status, now - at), refresh=True)
                before, at = status, now
            drawn += 1


def draw(status: DepotStatus, before: DepotStatus, seconds: float) -> Group:
    """Return one frame, made of the status now and the status `seconds` ago."""
    columns = Columns([_summary(status, before, seconds), _pool(status)], expand=True)
    parts: list[Any] = [_title(status), columns]
    parts += [table for table in (_engines(status), _tenants(status), _tiers(status)) if table.row_count]
    if status.events:
        lines = [_plain(f"{ago:6.0f} s ago  {text}") for ago, text in reversed(status.events[-6:])]
        parts.append(Panel(Text("\n").join(lines), title="events", title_align="left"))
    return Group(*parts)


def _title(status: DepotStatus) -> Text:
    state = "reading back" if status.recovering else "draining" if status.draining else "serving"
    title = Text(f"kvdepot {status.server_version}  ", style="bold")
    title.append(state, style="green" if state == "serving" else "yellow")
    title.append(f"  process {status.pid}, up {status.uptime_seconds:.0f} s, policy {status.policy}", style="dim")
    return title


def _summary(status: DepotStatus, before: DepotStatus, seconds: float) -> Table:
    counters, earlier = Counts(status.counters), Counts(before.counters)

    def gained(name: str) -> int:
        return counters[name] - earlier[name]

    def moved(bytes_of: Callable[[DeviceStatus], int]) -> float:
        gained = sum(map(bytes_of, status.devices.values())) - sum(map(bytes_of, before.devices.values()))
        return gained / seconds / 1e9 if seconds else 0.0

    asked, hit = gained("lookup_chunks"), gained("lookup_chunks_hit")
    all_asked, all_hit = counters["lookup_chunks"], counters["lookup_chunks_hit"]
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("hit rate", _share(hit, asked) if asked else _share(all_hit, all_asked))
    table.add_row("since the start", _share(all_hit, all_asked))
    table.add_row("lookups", f"{gained('lookups') / seconds:,.0f} /s" if seconds else "-")
    table.add_row("retrieve", f"{moved(lambda device: device.retrieved_bytes):.2f} GB/s")
    table.add_row("store", f"{moved(lambda device: device.stored_bytes):.2f} GB/s")
    table.add_row("evicted", f"{gained('chunks_evicted') / seconds:,.0f} chunks/s" if seconds else "-")
    if counters["blend_lookups"]:
        table.add_row("blends", f"{counters['blends']:,} of {counters['blend_lookups']:,} lookups")
        reused, again = counters["blend_reused_tokens"], counters["blend_recomputed_tokens"]
        table.add_row("", f"{reused:,} tokens reused, {again:,} computed again")
    table.add_row("leases, stores", f"{status.num_leases:,}, {status.num_tickets:,}")
    return table


def _pool(status: DepotStatus) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    used = f"{format_size(status.pool_used_bytes)} of {format_size(status.pool_size_bytes)}"
    table.add_row("pool", used)
    table.add_row("", ProgressBar(status.pool_size_bytes, status.pool_used_bytes, width=_MAP_WIDTH))
    cells = pool_map(status)
    for start in range(0, len(cells), _MAP_WIDTH):
        table.add_row("map" if not start else "", Text(cells[start : start + _MAP_WIDTH], style="cyan"))
    table.add_row("index", f"{status.num_entries:,} of {status.max_entries:,} entries")
    if status.estimated_chunks >= _LEAST_CHUNKS:
        rates = [f"{e.scale:g}x {e.hit_chunks / status.estimated_chunks:.0%}" for e in status.estimates]
        table.add_row("pool alone", ", ".join(rates))
    return table


def pool_map(status: DepotStatus) -> str:
    """Return one character per region of the pool; darker is fuller."""
    region = status.pool_size_bytes / max(1, len(status.pool_regions))
    darkest = len(_SHADES) - 1
    return "".join(
        _SHADES[min(darkest, 1 + int(used / region * darkest))] if used else " " for used in status.pool_regions
    )


def _engines(status: DepotStatus) -> Table:
    table = _table("engine", "role", "model", "device", "per token", "leases", "stores")
    for context in status.contexts:
        role = f"worker {context.rank} of {context.world_size}" if context.world_size > 1 else context.role
        model = context.model.rstrip("/").rpartition("/")[2]  # a whole path would leave no room for the rest
        token = format_size(context.bytes_per_token) if context.bytes_per_token else "-"
        table.add_row(
            *map(_plain, (context.instance, role, model, context.device or "-")),
            token,
            str(context.num_leases),
            str(context.num_tickets),
        )
    return table


def _tenants(status: DepotStatus) -> Table:
    table = _table("tenant", "in the pool", "quota", "hit rate")
    for name, usage in sorted(status.tenants.items()):
        hit = usage.pool_hit_tokens + usage.tier_hit_tokens
        quota = format_size(usage.quota_bytes) if usage.quota_bytes else "-"
        table.add_row(_plain(name), format_size(usage.used_bytes), quota, _share(hit, usage.lookup_tokens or 0))
    return table


def _tiers(status: DepotStatus) -> Table:
    table = _table("tier", "holds", "waits", "read", "written", "state")
    for tier in status.tiers:
        state = "in use" if tier.state == "closed" else f"suspended: {tier.why_open}"
        counters = Counts(tier.counters)
        table.add_row(
            _plain(tier.name),
            describe_tier_size(tier),
            format_size(tier.queued_write_bytes),
            format_size(counters["read_bytes"]),
            format_size(counters["written_bytes"]),
            _plain(state),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(expand=True, box=None, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _plain(text: str) -> Text:
    """Return untrusted text, made safe for a terminal."""
    return Text(printable(text))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
