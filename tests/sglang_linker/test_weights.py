"""Weights change in running SGLang engines: no stale tokens, and replicas share at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.sglang.engines import Engine, linker, prompts, tokens

pytestmark = pytest.mark.slow

MakeModel = Callable[..., Path]
WANTED = prompts(3, 700, seed=6)


@pytest.fixture(scope="module", params=[1, 2])
def replicas(
    shared_depot: DepotProcess, model: MakeModel, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines with one rank each, then two with two ranks each."""
    settings = linker(shared_depot.url) | {"tp_size": request.param}
    with Engine(model("gqa"), **settings) as one, Engine(model("gqa"), **settings) as two:
        yield one.wait_until_ready(), two.wait_until_ready()


@pytest.mark.promise(80)
@pytest.mark.parametrize(("way", "seed"), [("from_disk", 1), ("from_tensors", 2), ("from_disk", 0)])
def test_replicas_with_the_same_new_weights_share_at_once_and_find_nothing_of_others(
    way: str, seed: int, replicas: tuple[Engine, Engine], shared_depot: DepotProcess, model: MakeModel
) -> None:
    """The last weights equal those at the start, but have another name then."""
    one, two = replicas
    before = tokens(one.each(WANTED))
    assert tokens(two.each(WANTED)) == before
    for each in replicas:
        each.update_weights(model("gqa", seed), way)
    num_chunks = shared_depot.status().num_chunks
    computed = one.each(WANTED)
    assert not any(each.cached for each in computed)
    assert not set(before) & set(tokens(computed)), "the weights are the same"
    wait_until(lambda: shared_depot.status().num_chunks >= num_chunks + 10 * len(WANTED))
    loaded = two.each(WANTED)
    assert tokens(loaded) == tokens(computed)
    assert [each.from_depot for each in loaded] == [640] * len(WANTED)
