"""Blend in a real engine: text is reused at any position, and blended KV is never used as exact."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens, wait_until_stored

DOCUMENTS = prompts(4, 500, seed=80)
SYSTEM, QUESTION, OTHER = (prompts(1, count, seed=seed)[0] for count, seed in ((20, 81), (30, 82), (25, 83)))
SOURCE = [*SYSTEM, *chain(*DOCUMENTS), *OTHER]
MOVED = [*SYSTEM, *chain(*reversed(DOCUMENTS)), *QUESTION]


EXACT: dict[str, Any] = {"kvdepot": {"load": False, "store": False}}  # MOVED itself is never in the depot

SAME = 8  # tokens that must be equal; later ones may differ, as other batches round their sums differently

# A busy machine loads slowly, but must not decline blends for that.
PAYS = "import kvdepot_vllm.blend.planning as planning\nplanning._LEAST_GAIN = -1000\nresult = None"


def blended(output: dict[str, Any]) -> dict[str, Any] | None:
    """Return an output's figures on its blend, None if it was not blended."""
    params: dict[str, dict[str, Any]] = output["params"] or {}
    return params.get("kvdepot", {}).get("blend")


@pytest.fixture(scope="module")
def engine(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    with Engine(
        model("gqa"), connector(depot.url, blend="request"), reference=[SOURCE, MOVED], max_num_seqs=32
    ) as engine:
        engine.execute(PAYS)
        assert tokens(engine.generate([SOURCE])) == [engine.reference[0]]
        yield engine


def test_documents_in_another_order_are_reused(engine: Engine, depot: DepotProcess) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": True}})
    said = blended(output)
    assert said is not None, engine.log()[-5000:]
    assert said["policy"] == "mixkq"
    assert said["reused_tokens"] + said["recomputed_tokens"] > 1500
    assert output["cached"] > 1500
    assert any("blend is on; self-test: keys differ by" in context.remark for context in depot.status().contexts)
    wait_until(lambda: depot.status().counters["blend_reused_tokens"] == said["reused_tokens"])
    assert depot.status().counters["blend_recomputed_tokens"] == said["recomputed_tokens"]


def test_everything_recomputed_is_a_full_prefill(engine: Engine) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "all"}}})
    said = blended(output)
    assert said is not None
    assert said["reused_tokens"] == 0
    assert output["tokens"][:SAME] == engine.reference[1][:SAME]


@pytest.mark.promise(76)
def test_an_exact_request_behind_a_blended_one_is_exact(engine: Engine) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "none"}}})
    assert blended(output) is not None
    exact = engine.generate([MOVED], params=EXACT)
    assert tokens(exact) == [engine.reference[1]]
    assert cached(exact)[0] <= 128  # nothing after the system prompt
    engine.reset()
    exact = engine.generate([MOVED], params={"kvdepot": {"store": False}})
    assert tokens(exact) == [engine.reference[1]]
    assert cached(exact) == [0]


def test_blended_and_exact_requests_share_batches(engine: Engine) -> None:
    engine.reset()
    wanted = [SYSTEM + part + [*chain(*reversed(DOCUMENTS)), *QUESTION] for part in prompts(3, 37, seed=84)]
    asked = engine.ask("generate", prompts=wanted, max_tokens=4, params={"kvdepot": {"blend": {"policy": "heads"}}})
    assert all(blended(output) is not None for output in asked["outputs"])
    engine.send("generate", prompts=[MOVED], max_tokens=4, params={"kvdepot": {"blend": True}})
    assert blended(engine.answer()["outputs"][0]) is not None
    engine.reset()
    assert tokens(engine.generate([SOURCE, MOVED], params=EXACT)) == engine.reference


@pytest.mark.parametrize("wish", [False, {"policy": "no"}, {"ratio": 7}, {"segments": [[5]]}, "yes"])
def test_wishes_that_mean_nothing_fail_no_request(engine: Engine, wish: Any) -> None:
    engine.reset()
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": wish, "store": False}})
    assert (blended(output) is None) == (wish in (False, "yes"))


def test_a_depot_that_is_killed_costs_time_and_no_answer(model: MakeModel, engine: Engine, depot: DepotProcess) -> None:
    """If it is killed between lookup and load, the engine computes the prompt."""
    engine.reset()
    engine.execute(
        "import kvdepot_vllm.blend.planning as planning, os\n"
        "real = planning.Blends.allocated\n"
        f"def killed(*arguments):\n    os.kill({depot.pid}, 9)\n    planning.Blends.allocated = real\n"
        "    return real(*arguments)\n"
        "planning.Blends.allocated = killed\nresult = None"
    )
    (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "none"}}})
    depot.kill()  # the process is dead already
    depot.start()
    assert output["tokens"] == engine.reference[1]
    assert blended(output) is None


def test_two_ranks_choose_and_compute_the_same(model: MakeModel, depot: DepotProcess) -> None:
    with Engine(
        model("gqa"),
        connector(depot.url, blend="always", namespace="two ranks"),  # else it would find the entries of one rank
        max_num_seqs=32,
        max_tokens=SAME,
        tensor_parallel_size=2,
        multiprocessing=True,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as engine:
        wait_until_stored(engine, depot, seed=85)
        before = depot.status().num_chunks
        engine.generate([SOURCE])
        wait_until(lambda: depot.status().num_chunks >= before + 16 and not depot.status().num_tickets, 30)
        exact = tokens(engine.generate([MOVED], params=EXACT))
        engine.reset()
        (output,) = engine.generate([MOVED], params={"kvdepot": {"blend": {"policy": "all"}}})
        assert blended(output) is not None, engine.log()[-4000:]
        assert output["tokens"][:SAME] == exact[0][:SAME]
