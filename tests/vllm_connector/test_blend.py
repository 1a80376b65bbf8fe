"""Blend in a real engine: text is reused at any position, and nobody takes blended KV for exact."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens

DOCUMENTS = prompts(4, 500, seed=80)
SYSTEM, QUESTION, OTHER = (prompts(1, count, seed=seed)[0] for count, seed in ((20, 81), (30, 82), (25, 83)))
SOURCE = [*SYSTEM, *chain(*DOCUMENTS), *OTHER]
MOVED = [*SYSTEM, *chain(*reversed(DOCUMENTS)), *QUESTION]


def blended(output: dict[str, Any]) -> dict[str, Any] | None:
    """What an output says about its blend."""
    return ((output["params"] or {}).get("kvdepot") or {}).get("blend")


@pytest.fixture(scope="module")
def engine(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    with Engine(
        model("gqa"), connector(depot.url, blend="request"), reference=[SOURCE, MOVED], max_num_seqs=32
    ) as engine:
        assert tokens(engine.generate([SOURCE])) == [engine.reference[0]]
        yield engine


def test_documents_in_another_order_are_reused(engine: Engine) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": True}})
    said = blended(output)
    assert said is not None, engine.log()[-5000:]
    assert said["policy"] == "mixkq"
    assert said["reused_tokens"] + said["recomputed_tokens"] > 1500
    assert output["cached"] > 1500


def test_everything_recomputed_is_a_full_prefill(engine: Engine) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "all"}}})
    said = blended(output)
    assert said is not None
    assert said["reused_tokens"] == 0
    assert output["tokens"] == engine.reference[1]


def test_an_exact_request_behind_a_blended_one_is_exact(engine: Engine) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "none"}}})
    assert blended(output) is not None
    exact = engine.generate([MOVED])
    assert tokens(exact) == [engine.reference[1]]
    assert cached(exact)[0] <= 128  # nothing behind the system prompt
    engine.reset()
    assert tokens(engine.generate([MOVED])) == [engine.reference[1]]


def test_without_taint_blended_kv_would_be_taken_for_exact(engine: Engine) -> None:
    """The test before this one can fail: what it shows is due to the taint."""
    engine.reset()
    engine.execute(
        "import kvdepot_vllm.blend.planning as planning\n"
        "planning.untouched, planning.taint = planning.taint, lambda *_: None\nresult = None"
    )
    try:
        (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "none"}}})
        assert blended(output) is not None
        assert cached(engine.generate([MOVED]))[0] > 1500
    finally:
        engine.execute(
            "import kvdepot_vllm.blend.planning as planning\nplanning.taint = planning.untouched\nresult = None"
        )
        engine.reset()
