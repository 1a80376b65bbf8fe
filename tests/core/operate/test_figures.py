"""A figure of the status is declared once: metrics, commands, page and OpenAPI document have the same ones."""

import re
from importlib import import_module, resources

import pytest
from msgspec import Struct

from kvdepot.counting import depot_counter
from kvdepot.operate.status import describe_status
from kvdepot.wire.status import (
    ContextStatus,
    DepotStatus,
    DeviceStatus,
    Figure,
    GenerationStatus,
    PoolEstimate,
    TenantStatus,
    TierStatus,
    figures_of,
)

pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

from kvdepot.operate.metrics import render_metrics

KINDS: list[type[Struct]] = [DepotStatus, TenantStatus, GenerationStatus, DeviceStatus, PoolEstimate, TierStatus]
FIGURES = [each for kind in KINDS for each in figures_of(kind)]
STATUS = DepotStatus(
    num_leases=7,
    recovering=True,
    tenants={"a": TenantStatus(used_bytes=7), "b": TenantStatus(used_bytes=7, quota_bytes=8, lookup_tokens=9)},
    devices={"cpu": DeviceStatus()},
    tiers=[TierStatus(name="t", state="open", num_hung_calls=7)],
    generations=[GenerationStatus(lineage="1", name="w", models=[], num_schedulers=0, used_bytes=7, is_outdated=False)],
    estimates=[PoolEstimate(scale=0.5, pool_bytes=1, hit_chunks=7)],
)
METRICS = render_metrics(STATUS).decode()


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.metric for figure in FIGURES])
def test_a_figure_is_a_metric(figure: Figure) -> None:
    name = figure.metric + "_total" * figure.is_total
    assert f"# HELP kvdepot_{name} {figure.text}\n" in METRICS
    assert f"# TYPE kvdepot_{name} {'counter' if figure.is_total else 'gauge'}\n" in METRICS
    assert re.search(rf"^kvdepot_{name}[ {{]", METRICS, re.MULTILINE) or figure.field == "retained_bytes"


def test_a_value_that_is_not_there_is_not_exported() -> None:
    assert "kvdepot_leases 7.0\n" in METRICS
    assert "kvdepot_recovering 1.0\n" in METRICS
    assert 'kvdepot_tenant_used_bytes{tenant="a"} 7.0\n' in METRICS
    assert 'kvdepot_tenant_quota_bytes{tenant="a"}' not in METRICS
    assert 'kvdepot_tenant_quota_bytes{tenant="b"} 8.0\n' in METRICS
    assert "kvdepot_tenant_retained_bytes{" not in METRICS, "no sessions"
    assert re.findall(r"kvdepot_lookup_(?:hit_)?tokens_total{(.*)} ", METRICS) == [
        'tenant="b"',
        'source="pool",tenant="b"',
        'source="tier",tenant="b"',
    ]


def test_the_command_shows_each_figure_on_request() -> None:
    lines = describe_status(STATUS, verbose=True).split("\n\n")[-1].splitlines()
    for each in figures_of(DepotStatus):
        (line,) = (line for line in lines if line.startswith(f"{each.metric} "))
        assert line.endswith(f"  {each.text}")
    assert "leases                     7             Leases held by requests" in lines
    assert not [line for line in describe_status(STATUS).splitlines() if line.endswith("Leases held by requests")]


def test_the_page_asks_for_fields_that_there_are() -> None:
    import_module("kvdepot.server.app")  # which declares the depot's counters
    page = (resources.files("kvdepot.operate") / "page.html").read_text()
    rows = {*TenantStatus.__struct_fields__, *TierStatus.__struct_fields__}
    for name, known in (
        ("s", {*DepotStatus.__struct_fields__}),
        ("t", rows),
        ("c", {*ContextStatus.__struct_fields__}),
        ("e", {*PoolEstimate.__struct_fields__}),
        ("s.counters", {*depot_counter.texts}),
    ):
        asked = set(re.findall(rf"\b(?<!\.){re.escape(name)}\.(\w+)", page))
        assert asked, name
        assert asked <= known, name
    assert set(re.findall(r'sum\(s\.devices, "(\w+)"\)', page)) == {*DeviceStatus.__struct_fields__}
