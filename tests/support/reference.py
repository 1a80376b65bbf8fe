"""Writes docs/reference/depot.md from the declarations in the code: `python -m support.reference` in `tests/`.

Engines' counters are read from the sources of their packages, because importing those needs the engine.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields
from prometheus_client.parser import text_string_to_metric_families

from kvdepot.config import ServerConfig, default_directory, settings_in
from kvdepot.counting import depot_counter
from kvdepot.operate.metrics import render_metrics
from kvdepot.operate.serve import ProcessConfig
from kvdepot.server.feature import ENTRY_POINT_GROUP
from kvdepot.wire.operation import body_type, known_operations
from kvdepot.wire.status import (
    ContextStatus,
    DepotStatus,
    DeviceStatus,
    GenerationStatus,
    HistogramStatus,
    PoolEstimate,
    TenantStatus,
    TierStatus,
    figures_of,
)

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "depot.md"

_INTRODUCTION: Final = """\
# Settings, metrics and HTTP

Written from the declarations in the code by `python -m support.reference`, in the folder `tests`.
[Operating](../operating.md) says which of them to watch.

## Settings

Flags of `kvdepot serve`. `--pool-size` is `pool_size` in the file of `--config`, and `KVDEPOT_POOL_SIZE` in the
environment.

"""

_METRICS: Final = """
## Metrics

Names begin with `kvdepot_`. Counters end with `_total`, and are 0 from the start.

"""

_HTTP: Final = """
## HTTP

With the fields of a JSON body, those in brackets optional. [Operating](../operating.md#http) has the paths that need no
token, and `GET /openapi.json` the types.

"""

TIERS: Final = ("core/src/kvdepot/tiers", "mooncake")
_ENGINES: Final = {
    "vLLM": ("vllm:kvdepot_..._total", "vllm_connector", "engine_counter"),
    "SGLang": ("sglang:kvdepot_..._total", "sglang_linker", "linker_counter"),
}


def page() -> str:
    """Return the whole page."""
    text = _INTRODUCTION + _table("flag", settings()) + _METRICS + _table("metric", metrics())
    text += _HTTP + _table("path", sorted(http_paths(), key=lambda row: row[0].split()[::-1]))
    for engine, (name, package, declare) in _ENGINES.items():
        text += f"\n## Counters in {engine}\n\n" + _table(f"`{name}`", sorted(_in_code(declared([package], declare))))
    return text


def settings() -> Iterator[tuple[str, str]]:
    """Yield each flag of `kvdepot serve` with its help."""
    here = str(default_directory())
    for kind in (ServerConfig, ProcessConfig):
        for each in settings_in(kind).values():
            flag = f"`{each.flag} {each.metavar}`" if each.metavar else f"`{each.flag}`"
            yield flag, each.help.replace(here, "$XDG_RUNTIME_DIR/kvdepot, else /tmp/kvdepot-UID")


def metrics() -> Iterator[tuple[str, str]]:
    """Yield each metric with its labels and its description."""
    for family in text_string_to_metric_families(render_metrics(_status_of_everything()).decode()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name.removeprefix("kvdepot_") + "_total" * (family.type == "counter")
        yield (
            f"`{name}`" + " by " * bool(labels) + " and ".join(f"`{label}`" for label in sorted(labels)),
            (family.documentation),
        )


def http_paths() -> Iterator[tuple[str, str]]:
    """Yield each path that needs the token with its summary and the fields of its body."""
    for operation in known_operations():
        for each in operation.endpoints:
            names = [
                f"`{one.encode_name}`" if one.required else f"[`{one.encode_name}`]"
                for one in fields(body_type(operation))
            ]
            body = f": {', '.join(names)}" if each.method == "POST" else ""
            yield f"`{each.method} {each.path}`", each.summary + body


def declared(packages: Iterable[str], declare: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the counters that the sources of packages declare."""
    pattern = re.compile(rf'{declare}\(\s*"(\w+)",\s*"([^"]*)",?\s*\)')
    for package in packages:
        for path in sorted((ROOT / "packages" / package).rglob("*.py")):
            yield from pattern.findall(path.read_text())


def _in_code(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", text) for name, text in rows)


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head} | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    return "\n".join(lines) + "\n"


def _status_of_everything() -> DepotStatus:
    """Return a status in which each metric has a value."""
    import_module("kvdepot.server.app")  # which declares the depot's counters
    for feature in entry_points(group=ENTRY_POINT_GROUP):
        feature.load()  # which declares its counters
    histogram = HistogramStatus(base=1.0, counts=[1], total=1.0)
    return DepotStatus(
        counters=dict.fromkeys(depot_counter.texts, 0),
        counter_texts={**depot_counter.texts},
        tier_counter_texts=dict(declared(TIERS, "tier_counter")),
        contexts=[ContextStatus(context=1, instance="a", role="worker", model="m")],
        latencies={"lookup": histogram, "store": histogram, "loop_turn": histogram},
        eviction_ages=histogram,
        tenants={"a": TenantStatus(**_zeros(TenantStatus))},
        devices={"cpu": DeviceStatus()},
        tiers=[TierStatus(name="t", state="closed", **_zeros(TierStatus))],
        generations=[
            GenerationStatus(lineage="1", name="w", models=[], num_schedulers=0, used_bytes=0, is_outdated=False)
        ],
        estimates=[PoolEstimate(scale=0.5, pool_bytes=1, hit_chunks=0)],
    )


def _zeros(kind: type[Struct]) -> dict[str, Any]:
    return {each.field: 0 for each in figures_of(kind)}


if __name__ == "__main__":
    PAGE.write_text(page())
