"""Two engines that get the same prompt compute it once."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens, wait_until_stored

LONG = prompts(3, 19 * 128 + 1, seed=70)  # whole blocks and the last token, which is always computed
SHORT = prompts(4, 700, seed=71)


@pytest.fixture(scope="module")
def first(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    """An engine whose core has its own process, which continues after an answer like a server's."""
    with Engine(
        model("gqa"),
        connector(depot.url),
        reference=LONG + SHORT,
        max_tokens=4,
        max_num_batched_tokens=512,
        multiprocessing=True,
    ) as engine:
        wait_until_stored(engine, depot, seed=73)
        yield engine


@pytest.fixture(scope="module")
def second(depot: DepotProcess, model: MakeModel) -> Iterator[Engine]:
    with Engine(model("gqa"), connector(depot.url), max_tokens=4, max_num_batched_tokens=512) as engine:
        yield engine


@pytest.mark.promise(75)
def test_a_prompt_that_two_engines_get_at_once_is_computed_once(
    first: Engine, second: Engine, depot: DepotProcess
) -> None:
    computed: list[float] = []  # computed tokens, in units of one prompt
    for number, prompt in enumerate(LONG):
        first.send("generate", prompts=[prompt] * 4, max_tokens=first.max_tokens)
        second.send("generate", prompts=[prompt] * 4, max_tokens=first.max_tokens)
        outputs = first.answer()["outputs"] + second.answer()["outputs"]
        assert tokens(outputs) == [first.reference[number]] * 8
        assert min(cached(outputs)) == 0
        computed.append(sum(len(prompt) - each for each in cached(outputs)) / len(prompt))
    assert min(computed) <= 1.1, "on a busy machine an engine may find that it is quicker alone, but not each time"
    assert depot.status().counters["flights_joined"] > 0


@pytest.mark.parametrize("multiprocessing", [True, False], ids=["own processes", "in process"])
@pytest.mark.promise(75)
def test_a_prompt_of_one_step_is_computed_once_though_a_store_finds_room_for_a_third_of_it(
    multiprocessing: bool, depot: DepotProcess, model: MakeModel
) -> None:
    """By VLLM's default, the step that computes the whole prompt is the last one with its request."""
    given = prompts(3, 12 * 128 + 1, seed=81 + multiprocessing)
    config = connector(depot.url, max_pinned_share=0.04)  # of 128 blocks
    options: dict[str, Any] = {"max_tokens": 1, "multiprocessing": multiprocessing}
    one = Engine(model("gqa"), config, reference=given, **options)
    with one, Engine(model("gqa"), config, **options) as other:
        wait_until_stored(one, depot, seed=83)
        computed: list[float] = []
        for number, prompt in enumerate(given):
            before = depot.status().num_chunks
            for engine in (one, other):
                engine.send("generate", prompts=[prompt] * 4, max_tokens=1)
            outputs = one.answer()["outputs"] + other.answer()["outputs"]
            assert tokens(outputs) == [one.reference[number]] * 8
            computed.append(sum(len(prompt) - each for each in cached(outputs)) / len(prompt))
            wait_until(lambda before=before: depot.status().num_chunks == before + 12, 30, "all chunks in the depot")
        assert min(computed) <= 1.1, computed


@pytest.mark.parametrize("name", ["short-windows", "recurrent"])
@pytest.mark.promise(75)
def test_a_prompt_of_a_hybrid_model_is_computed_once(name: str, depot: DepotProcess, model: MakeModel) -> None:
    """The last chunk ends at token 1,536, whether chunks have 128 tokens or 256.

    If its core has its own process, vLLM ends a step at a multiple of 128 even if states are kept at multiples of 256.
    """
    given = prompts(3, 1600, seed=76)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 512, "max_tokens": 4}
    options |= {"dtype": "bfloat16"} if name == "recurrent" else {}
    one = Engine(model(name), connector(depot.url), reference=given, multiprocessing=True, **options)
    with one, Engine(model(name), connector(depot.url), **options) as other:
        one.generate(prompts(1, 700, seed=77))
        found: list[int] = []
        for number, prompt in enumerate(given):
            one.send("generate", prompts=[prompt], max_tokens=one.max_tokens)
            other.send("generate", prompts=[prompt], max_tokens=one.max_tokens)
            outputs = one.answer()["outputs"] + other.answer()["outputs"]
            assert tokens(outputs) == [one.reference[number]] * 2
            found.append(sum(cached(outputs)))
        assert max(found) == 1536, "on a busy machine an engine may find that it is quicker alone, but not each time"


def test_an_engine_that_is_asked_right_after_another_finds_every_whole_chunk(first: Engine, second: Engine) -> None:
    found: list[int] = []
    for number, prompt in enumerate(SHORT, len(LONG)):
        assert tokens(first.generate([prompt])) == [first.reference[number]]
        outputs = second.generate([prompt])
        assert tokens(outputs) == [first.reference[number]]
        found += cached(outputs)
    assert found.count(640) >= len(SHORT) - 1, found


def test_a_prefill_engine_hands_over_to_a_decode_engine(first: Engine, second: Engine, depot: DepotProcess) -> None:
    """By the parameters that vLLM's proxies relay from one engine's answer to the other engine."""
    for prompt in prompts(2, 700, seed=74):
        loaded = depot.status().counters["retrieve_chunks_hit"]
        asked = first.ask("generate", prompts=[prompt], max_tokens=1, params={"do_remote_decode": True})
        (prefilled,) = asked["outputs"]
        assert prefilled["params"]["kvdepot"]["num_tokens"] == 700
        (decoded,) = second.generate([prompt], params=prefilled["params"])
        assert decoded["tokens"][:1] == prefilled["tokens"]
        assert depot.status().counters["retrieve_chunks_hit"] == loaded + 6, "vLLM tells the other engine's cache hits"


@pytest.mark.parametrize(
    ("name", "options", "num_tokens"),
    [
        ("windows", {}, 700),
        # States are at multiples of a block, whose size depends on the CPU. A prompt's last one is at a multiple of 64.
        ("recurrent", {"dtype": "bfloat16", "prefix_match_unit": 64}, 640),
    ],
)
def test_a_hybrid_engine_hands_over_the_last_incomplete_chunk(
    name: str, options: dict[str, Any], num_tokens: int, depot: DepotProcess, model: MakeModel
) -> None:
    given = prompts(2, 700, seed=78)
    options = {"kv_cache_memory_bytes": 256 << 20, "max_tokens": 4, **options}
    prefill = Engine(model(name), connector(depot.url), reference=given, **options)
    with prefill, Engine(model(name), connector(depot.url), **options) as decode:
        for number, prompt in enumerate(given):
            loaded = depot.status().counters.get("retrieve_chunks_hit", 0)
            chunk_tokens = [each.chunk_tokens for each in depot.status().contexts if each.role == "worker"][-1]
            asked = prefill.ask("generate", prompts=[prompt], max_tokens=1, params={"do_remote_decode": True})
            (prefilled,) = asked["outputs"]
            assert prefilled["params"]["kvdepot"]["num_tokens"] == num_tokens
            assert tokens(decode.generate([prompt], params=prefilled["params"])) == [prefill.reference[number]]
            assert depot.status().counters["retrieve_chunks_hit"] == loaded + -(-num_tokens // chunk_tokens)


def test_a_decode_engine_that_is_asked_first_waits_for_the_prefill_engine(
    first: Engine, second: Engine, depot: DepotProcess
) -> None:
    for prompt in prompts(2, 700, seed=75):
        params = {"do_remote_prefill": True, "kvdepot": {"wait_ms": 30_000}}
        asked = depot.status().counters["lookups"]
        second.send("generate", prompts=[prompt], max_tokens=second.max_tokens, params=params)
        wait_until(lambda asked=asked: depot.status().counters["lookups"] > asked + 2)
        (prefilled,) = first.ask("generate", prompts=[prompt], max_tokens=1)["outputs"]
        (decoded,) = second.answer()["outputs"]
        assert (prefilled["cached"], decoded["cached"]) == (0, 640)
        assert decoded["tokens"][:1] == prefilled["tokens"]


def test_an_engine_that_is_killed_while_it_computes_costs_no_request(
    depot: DepotProcess, model: MakeModel, first: Engine
) -> None:
    (prompt,) = prompts(1, 2500, seed=72)
    with Engine(
        model("gqa"), connector(depot.url), reference=[prompt], max_tokens=4, max_num_batched_tokens=128
    ) as doomed:
        before = depot.status().counters["flights"]
        doomed.send("generate", prompts=[prompt], max_tokens=1)
        wait_until(lambda: depot.status().counters["flights"] > before, 60, "the prompt is announced")
        first.send("generate", prompts=[prompt], max_tokens=first.max_tokens)
        doomed.close()
        (output,) = first.answer()["outputs"]
        assert output["tokens"] == doomed.reference[0]
    wait_until(lambda: depot.status().num_leases == 0, what="leases")
