"""Prompts with images and embeddings share entries if, and only if, these have the same content."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, Prompt, cached, connector, prompts, tokens
from support.vllm.models import IMAGE_TOKEN

TEXT = prompts(1, 400)[0]
PROMPT: Prompt = [*TEXT[:150], IMAGE_TOKEN, *TEXT[150:250], IMAGE_TOKEN, *TEXT[250:]]
"""The first image lies in the second block of 128 tokens, the other image in the third."""
PAIRS = [[1, 2], [1, 3], [3, 2]]
OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}, "enable_prompt_embeds": True, "max_model_len": 1024}


@pytest.fixture(scope="module")
def engines(depot: DepotProcess, model: MakeModel) -> Iterator[tuple[Engine, Engine]]:
    """An engine with a depot and one without."""
    path = model("images")
    with Engine(path, connector(depot.url), **OPTIONS) as engine, Engine(path, None, **OPTIONS) as alone:
        yield engine, alone


@pytest.mark.slow
@pytest.mark.promise(17, 19)
def test_images_share_up_to_the_first_that_differs(engines: tuple[Engine, Engine]) -> None:
    engine, alone = engines
    expected = [tokens(alone.generate([PROMPT], images=[pair])) for pair in PAIRS]
    assert len({str(each) for each in expected}) == 3, "the images change nothing: the test shows nothing"
    for pair, wanted, shared in zip(PAIRS, expected, [0, 256, 128], strict=True):
        cold = engine.generate([PROMPT], images=[pair])
        assert (tokens(cold), cached(cold)) == (wanted, [shared]), pair
        engine.reset()
    for pair, wanted in zip(PAIRS, expected, strict=True):
        warm = engine.generate([PROMPT], images=[pair])
        assert (tokens(warm), cached(warm)) == (wanted, [384]), pair
        engine.reset()


@pytest.mark.slow
@pytest.mark.promise(17, 19)
def test_embeddings_share_with_equal_ones(engines: tuple[Engine, Engine]) -> None:
    engine, alone = engines
    expected = tokens(alone.generate([], embeddings=[1, 2]))
    assert expected[0] != expected[1], "the embeddings change nothing: the test shows nothing"
    for reuse in (0, 384):
        outputs = engine.generate([], embeddings=[1, 2])
        assert (tokens(outputs), cached(outputs)) == (expected, [reuse, reuse])
        engine.reset()


FEW, MANY = [*range(128)], [*range(256)]
"""The places of token 0 in two prompts of the same embeddings."""


@pytest.mark.slow
@pytest.mark.promise(17, 19, 84)
def test_prompts_that_mix_tokens_and_embeddings_share_only_if_their_tokens_have_the_same_places(
    engines: tuple[Engine, Engine],
) -> None:
    """Regression: token 0 and an embedding had one key, so that a prompt got the KV of another."""
    engine, alone = engines
    few, many = (run_alone(alone, mixed=[places]) for places in (FEW, MANY))
    assert few != many, "the places of tokens change nothing: the test shows nothing"
    for reuse in (0, 384):
        for places, expected in ((FEW, few), (MANY, many)):
            outputs = engine.generate([], mixed=[places])
            assert (tokens(outputs), cached(outputs)) == (expected, [reuse])
            engine.reset()


@pytest.mark.slow
@pytest.mark.promise(84)
def test_blocks_that_vllm_mistakes_for_those_of_a_mixed_prompt_are_not_stored_under_its_key(
    engines: tuple[Engine, Engine],
) -> None:
    """Its own cache has one name for two prompts whose tokens have other places, as long as their ids are 0."""
    engine, alone = engines
    one, other = [*range(64)], [*range(192)]
    expected = run_alone(alone, mixed=[other])
    engine.generate([], mixed=[one])
    mistaken = engine.generate([], mixed=[other])
    assert cached(mistaken) == [384], "vLLM now tells them apart: these tests and the rule that they show can go"
    engine.reset()
    outputs = engine.generate([], mixed=[other])
    assert (tokens(outputs), cached(outputs)) == (expected, [0])


def run_alone(engine: Engine, **what: Any) -> list[list[int]]:
    """Return the tokens of an answer that no earlier prompt has a part in."""
    engine.reset()
    return tokens(engine.generate([], **what))
