"""The share of right answers of blended prompts in a real engine, with a model that knows which document it reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.nursery import Nursery

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "blend" / "blend_quality.py"


@pytest.fixture(scope="module")
def answers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, float], dict[str, Any]]:
    """Return the shares of right answers by policy and share, to 150 prompts of each kind."""
    path = tmp_path_factory.mktemp("quality") / "rows.json"
    ways = ["--shares", "0.15", "0.3", "--policies", "heads", "deviation", "mixkq"]
    nursery.run(SCRIPT, "--json", str(path), "--cases", "150", *ways)
    return {(row["policy"], row["share"]): row for row in json.loads(path.read_text())["rows"]}


def test_reuse_alone_answers_where_position_is_all(answers: dict[tuple[str, float], dict[str, Any]]) -> None:
    assert answers["none", 0.0]["any"] == 1.0
    assert answers["none", 0.0]["nth"] <= 0.75  # otherwise the other kind of question shows nothing


def test_recomputing_everything_answers_like_a_full_prefill(answers: dict[tuple[str, float], dict[str, Any]]) -> None:
    assert answers["full prefill", 1.0]["nth"] >= 0.995
    assert answers["all", 1.0]["nth"] == pytest.approx(answers["full prefill", 1.0]["nth"], abs=0.005)


def test_the_default_policy_answers_where_context_matters(answers: dict[tuple[str, float], dict[str, Any]]) -> None:
    few, more = answers["mixkq", 0.15]["nth"], answers["mixkq", 0.3]["nth"]
    assert few >= 0.82
    assert more >= 0.9
    assert few >= answers["deviation", 0.15]["nth"] + 0.08
    assert few >= answers["heads", 0.15]["nth"]
    assert more >= answers["heads", 0.3]["nth"]
