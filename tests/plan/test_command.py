"""`kvdepot replay` as a user runs it."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdepot.operate.cli import make_parser
from support.commands import run_kvdepot

ROOT = Path(__file__).parents[2]


def run_json(*arguments: str) -> Any:
    result = run_kvdepot(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """Run a command that fails. Return its one line on standard error."""
    result = run_kvdepot(*arguments)
    assert (result.returncode > 0, result.stderr.count("\n")) == (True, 1), result.stderr
    return result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Conversations of three turns each that share a system prompt."""
    lines: list[str] = []
    for turn in range(1, 4):
        for conversation in range(20):
            ids = [0, 1, *(1000 * conversation + 10 + place for place in range(turn * 3))]
            request = {"timestamp": len(lines), "input_length": 512 * len(ids), "output_length": 10, "hash_ids": ids}
            lines.append(json.dumps(request))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
def test_a_trace_is_replayed_with_real_bytes(trace: str) -> None:
    summary = run_json("replay", trace, "--pool-size", "64MiB", "--policy", "arc")
    assert summary["num_requests"] == 60
    assert summary["wrong_bytes"] == 0
    assert summary["verified_bytes"] > 0
    assert summary["hit_rate"] > 0.4


def test_a_simulation_tells_hit_rate_by_pool_size_for_each_policy(trace: str) -> None:
    table = run_json("replay", trace, "--simulate", "--pool-size", "1GiB,64GiB")
    assert {row["policy"] for row in table["rows"]} >= {"lru", "arc", "belady", "unlimited"}
    assert all(0 <= row["hit_rate"] <= 1 for row in table["rows"])


def test_a_trace_that_is_none_is_an_error_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("no trace\n")
    assert "line 1" in refused("replay", str(path), "--simulate")


def test_the_sample_trace_is_the_generated_one_and_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "depot"), *sys.path])  # its neighbours
    trace = ROOT / "examples" / "trace.jsonl"
    script = ROOT / "benchmarks" / "depot" / "sample_trace.py"
    assert runpy.run_path(str(script))["sample"]() == trace.read_text()
    done = run_kvdepot("replay", str(trace), "--simulate")
    assert done.returncode == 0, done.stderr
    assert "300 requests" in done.stdout
    assert "recommended: --policy" in done.stdout


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(trace: str, tmp_path: Path) -> None:
    said = refused("replay", trace, "--simulate", "--plot", str(tmp_path / "missing" / "x.svg"))
    assert "its folder does not exist or cannot be written" in said
    said = refused("replay", trace, "--simulate", "--pool-size", "0")
    assert "a pool of 0 bytes: give a size above 0" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--requests", "-4"], "is not a whole number from 1 to"),
        (["--session-ends", "inf"], "is not a number of at most"),
        (["--session-ends", "nan"], "is not a number of at most"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_one_line(arguments: list[str], reason: str, trace: str) -> None:
    assert reason in refused("replay", trace, *arguments)


def test_it_takes_the_flags_of_every_command_and_says_in_a_sentence_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in ("--dir", "--url"):
        assert make_parser().parse_args(["replay", "TRACE", flag, "/x"]).directory == Path("/x")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["replay", "--help"])
    assert capsys.readouterr().out.split("\n\n")[1].endswith(".")


def test_the_cost_of_a_tier_is_told_for_both_demotions(trace: str) -> None:
    cost = run_json("tier", "cost", "s3://bucket/kv", trace, "--nodes", "2", "--prices", "put=1")
    assert [bill["demote"] for bill in cost["bills"]] == ["store", "reuse"]
    assert cost["prices"]["put"] == 1.0
    assert cost["bills"][0]["puts"] > cost["bills"][1]["puts"] > 0
    assert "name one" in refused("tier", "cost", "s3://bucket/kv", trace, "--routing", "random,sticky")
