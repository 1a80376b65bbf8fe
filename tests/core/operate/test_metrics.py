"""Metrics count what happened, and dashboard and alerts use only metrics that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvdepot.features.blend.messages import SEGMENT, BlendLookup, NoteContents, ReportBlend
from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.status import describe_status
from kvdepot.wire import messages as m
from support.peer import SPEC, Peer, prompt, registration

pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

from prometheus_client.parser import text_string_to_metric_families

from kvdepot.operate.metrics import render_metrics

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\bkvdepot_[a-z_]+")


def samples(depot: DepotProcess) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(render_metrics(depot.status()).decode())
        for sample in family.samples
    }


def test_workers_are_counted_by_their_engine_s_kind(depot: DepotProcess, peer: Peer) -> None:
    others = [
        Peer(depot, registration(replace(SPEC, format=text), instance=text))
        for text in ("vllm 0.32 layout", "sglang 0.5.23 nhd cpu", "sglang 0.5.24 nhd cpu")
    ]
    found = samples(depot)
    for other in others:
        other.close()
    assert {name: value for name, value in found.items() if name.startswith("kvdepot_workers[")} == {
        "kvdepot_workers[sglang]": 2,
        "kvdepot_workers[test]": 1,
        "kvdepot_workers[vllm]": 1,
    }


def test_tokens_bytes_and_latencies_are_told_apart(depot: DepotProcess, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    peer.find(prompt(5, "a"))
    found = samples(depot)
    assert found["kvdepot_lookup_tokens_total[default]"] == 5 * 64
    assert found["kvdepot_lookup_hit_tokens_total[pool][default]"] == 3 * 64
    assert found["kvdepot_lookup_hit_tokens_total[tier][default]"] == 0
    assert found["kvdepot_store_bytes_total[none]"] == 3 * 4 * 64
    assert found["kvdepot_request_seconds_count[lookup]"] == 1
    assert found["kvdepot_request_seconds_bucket[+Inf][lookup]"] == 1
    assert found["kvdepot_request_seconds_sum[lookup]"] > 0
    assert found["kvdepot_store_seconds_count"] == 1
    assert found["kvdepot_loop_turn_seconds_count"] > 2
    bucket = re.compile(r"kvdepot_request_seconds_bucket\[.*\]\[lookup\]")
    buckets = [value for name, value in found.items() if bucket.fullmatch(name)]
    assert len(buckets) == 24
    assert buckets == sorted(buckets)


def test_evicted_chunks_are_counted_with_their_age() -> None:
    with DepotProcess(pool_size="1MiB") as depot:
        peer = Peer(depot, registration(instance="engine"))
        for number in range(30):
            assert peer.store(prompt(20, str(number))) == 20
        found = samples(depot)
        assert found["kvdepot_chunks_evicted_total"] >= 30 * 20 - 256 > 0
        assert found["kvdepot_eviction_age_seconds_count"] == found["kvdepot_chunks_evicted_total"]
        peer.close()


def test_retrieved_bytes_are_counted(depot: DepotProcess, peer: Peer) -> None:

    peer.store(prompt(3, "a"))
    reply = peer.ask(m.PrepareRetrieve(peer.context, "r", prompt(3, "a").digests, 0, (3,)))
    assert isinstance(reply, m.RetrievePlan)
    assert samples(depot)["kvdepot_retrieve_bytes_total[none]"] == 3 * 4 * 64
    assert "reads    1 retrieve; 3 chunks, 768 B" in describe_status(depot.status()).splitlines()


def test_blends_are_counted(depot: DepotProcess, peer: Peer) -> None:
    peer.store(prompt(3, "a"))
    segments = b"".join(SEGMENT.pack(bytes([number]) * 16, 20 * number, 20) for number in range(5))
    peer.ask(NoteContents(peer.context, prompt(3, "a").digests, segments))
    assert "blends" not in describe_status(depot.status())
    peer.ask(BlendLookup(peer.context, "r", segments + SEGMENT.pack(bytes(16), 100, 20)))
    found = samples(depot)
    assert found["kvdepot_blend_lookups_total"] == 1
    assert found["kvdepot_blend_segments_asked_total"] == 6
    assert found["kvdepot_blend_segments_found_total"] == 6
    assert found["kvdepot_blend_runs_total"] == 2
    assert found["kvdepot_blend_tokens_found_total"] == 120
    assert found["kvdepot_blend_index_segments"] == 5
    assert "blends   1; 6 of 6 segments found, 120 tokens in 2 runs" in describe_status(depot.status()).splitlines()
    peer.ask(m.Release(peer.context, (1,)))
    assert "blended" not in describe_status(depot.status())
    peer.ask(m.Release(peer.context, (2,)))
    peer.ask(ReportBlend(peer.context, 5102, 900))
    found = samples(depot)
    assert found["kvdepot_blends_total"] == 1
    assert found["kvdepot_blend_reused_tokens_total"] == 5102
    assert found["kvdepot_blend_recomputed_tokens_total"] == 900
    line = "blended  1 prompt; 5,102 tokens reused, 900 computed again"
    assert line in describe_status(depot.status()).splitlines()


def test_estimates_of_other_pool_sizes_come_with_the_status(depot: DepotProcess, peer: Peer) -> None:
    for number in range(40):
        peer.store(prompt(20, str(number)))
        peer.find(prompt(20, str(number)))
    found = samples(depot)
    assert found["kvdepot_estimated_lookup_chunks_total"] > 0
    assert found["kvdepot_estimated_hit_chunks_total[4]"] == found["kvdepot_estimated_lookup_chunks_total"]


# --- dashboard and alerts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed() -> Iterator[dict[str, set[str]]]:
    """Labels of every metric that a depot with a tier and some traffic has, by name."""
    with DepotProcess("--tier", "memory://?capacity=1MiB", "--quota", "default=1MiB") as depot:
        peer = Peer(depot, registration(instance="engine"))
        peer.store(prompt(3, "a"))
        peer.find(prompt(3, "a"))
        text = render_metrics(depot.status()).decode()
        peer.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    yield labels


def expressions() -> list[tuple[str, str]]:
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana/kvdepot.json").read_text())
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    rules = (DEPLOY / "prometheus/kvdepot-alerts.yml").read_text()
    names = re.findall(r"- alert: (\w+)", rules)
    return found + list(zip(names, map(json.loads, re.findall(r"expr: (.+)", rules)), strict=True))


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_dashboard_and_alerts_ask_for_what_there_is(where: str, expression: str, exposed: dict[str, set[str]]) -> None:
    names = [name for name in NAME.findall(expression) if name != "kvdepot_socket"]  # a label of pods
    assert names or "up{" in expression, where
    for name in names:
        assert name in exposed, f"{where}: no metric {name}"
    allowed = {"instance", "kvdepot_socket", *(label for name in names for label in exposed[name])}
    for labels in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", expression):
        assert set(labels.split(", ")) <= allowed, where
    assert expression.count("(") == expression.count(")")


def test_each_counter_is_there_from_the_start_with_a_sentence_about_it() -> None:
    with DepotProcess("--tier", "memory://?capacity=1MiB") as depot:
        text = render_metrics(depot.status()).decode()
    helps = dict(re.findall(r"^# HELP kvdepot_(\w+)_total (.*)$", text, re.MULTILINE))
    assert all(name.removeprefix("tier_") != sentence for name, sentence in helps.items())
    for name in ("lookups_without_name", "promotions_refused", "tiers_failed", "flights", "event_batches"):
        assert f"\nkvdepot_{name}_total 0.0\n" in text
