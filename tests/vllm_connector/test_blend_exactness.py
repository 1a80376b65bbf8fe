"""Two real engines at one depot blend more than a hundred prompts, and exact requests get exact answers.

This holds after preemptions, after a restart of the depot, and in the engine that did not blend.
"""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, Prompt, connector, prompts

DOCUMENTS = prompts(5, 160, seed=90)
SYSTEM, OTHER = (prompts(1, count, seed=seed)[0] for count, seed in ((20, 91), (76, 92)))
SOURCE = [*SYSTEM, *chain(*DOCUMENTS), *OTHER]
NUM_PROMPTS = 27
AT_ONCE = 3  # more would not leave the blocks that a blend needs
SAME = 8  # tokens that must be equal; later ones may differ, as other batches round their sums differently

# Here a blend must not be declined because of a busy machine or a short prompt.
PAYS = "import kvdepot_vllm.blend.planning as planning\nplanning._LEAST_GAIN = -1000\nresult = None"
UNTAINTED = "import kvdepot_vllm.blend.planning as planning\nplanning.taint = lambda *_: None\nresult = None"

SERVE = """
from vllm import SamplingParams

def serve(requests, max_tokens, num_free):
    engine, found, names = llm.llm_engine, {}, []
    def step():
        for output in engine.step():
            said = (output.kv_transfer_params or {}).get("kvdepot", {}).get("blend")
            found[output.request_id] = list(output.outputs[0].token_ids), said is not None
    for tokens, wish in requests:  # each begins once the one before has its first token
        child.num_requests += 1
        names.append(f"mixed-{child.num_requests}")
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvdepot": wish}},
        )
        engine.add_request(names[-1], {"prompt_token_ids": tokens}, sampling)
        while names[-1] not in found:
            step()
    pool = child.core.scheduler.kv_cache_manager.block_pool
    taken = [] if num_free is None else pool.get_new_blocks(pool.get_num_free_blocks() - num_free)
    while engine.has_unfinished_requests():
        step()
    child.drain()
    pool.free_blocks(taken)
    return [found[name] for name in names]
"""


def moved() -> list[Prompt]:
    """Return prompts that each have three of the documents in an order of their own, and their own question."""
    rng, questions = random.Random(93), prompts(NUM_PROMPTS, 30, seed=94)
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < NUM_PROMPTS:
        orders[tuple(rng.sample(range(len(DOCUMENTS)), 3))] = None
    return [
        [*SYSTEM, *chain(*(DOCUMENTS[number] for number in order)), *question]
        for order, question in zip(orders, questions, strict=True)
    ]


class Pair:
    """Two engines, the prompts, and their exact answers."""

    def __init__(self, engines: tuple[Engine, Engine], answers: list[list[int]]) -> None:
        self.engines, self.prompts, self.answers, self.num_blends = engines, moved(), answers, 0

    def ask(
        self,
        engine: Engine,
        wanted: list[int],
        wishes: list[dict[str, Any]],
        max_tokens: int = SAME,
        num_free: int | None = None,
    ) -> list[tuple[list[int], bool]]:
        """Serve prompts at once, each with a wish. Return the tokens of each, and whether it was blended.

        With `num_free`, take all free blocks but these away once all have begun.
        """
        requests = [(self.prompts[number], wish) for number, wish in zip(wanted, wishes, strict=True)]
        return engine.execute(SERVE + f"result = serve({requests}, {max_tokens}, {num_free})")

    def serve(self, engine: Engine, wanted: list[int], wishes: list[dict[str, Any]], **limits: int) -> None:
        """Do the same, and fail unless exact requests get exact answers."""
        found = self.ask(engine, wanted, wishes, **limits)
        for number, wish, (tokens, has_blended) in zip(wanted, wishes, found, strict=True):
            self.num_blends += has_blended
            assert wish is BLEND or not has_blended
            assert wish is BLEND or tokens[:SAME] == self.answers[number], number

    def blend_then_ask(self) -> None:
        """Blend every prompt in each engine. Ask for it exactly, there at once and later in the other engine."""
        for engine, other in (self.engines, self.engines[::-1]):
            engine.reset()
            engine.generate([SOURCE])
            for some in GROUPS:
                engine.reset()
                self.serve(engine, some, [BLEND] * AT_ONCE)
                self.serve(engine, some, [EXACT] * AT_ONCE)
            other.reset()
            for some in GROUPS:
                self.serve(other, some, [EXACT] * AT_ONCE)


GROUPS = [[*range(first, first + AT_ONCE)] for first in range(0, NUM_PROMPTS, AT_ONCE)]
BLEND: dict[str, Any] = {"blend": {"policy": "none"}}  # without recomputation, so that all KV that could differ does
EXACT: dict[str, Any] = {"store": False}  # otherwise the next blend would find the whole prompt


@pytest.fixture(scope="module")
def pair(depot: DepotProcess, model: MakeModel) -> Iterator[Pair]:
    options: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 80,
        "max_model_len": 1024,
        "max_tokens": SAME,
    }
    config = connector(depot.url, blend="request", blend_min_tokens=64)
    with (
        Engine(model("eight-heads"), config, reference=moved(), **options) as first,  # two layers: the fewest that mix
        Engine(model("eight-heads"), config, **options) as second,
    ):
        for engine in (first, second):
            engine.execute(PAYS)
        yield Pair((first, second), first.reference)


@pytest.mark.promise(76)
def test_exact_requests_are_exact_behind_a_hundred_blends(pair: Pair, depot: DepotProcess) -> None:
    """Two engines blend. Some blends are preempted, and half of them come after a restart of the depot."""
    pair.blend_then_ask()
    preempt(pair)
    depot.kill()
    depot.start()
    for engine in pair.engines:
        engine.execute("child.wait_for_the_depot()")
    pair.blend_then_ask()
    assert pair.num_blends >= 100
    wait_until(lambda: depot.status().num_leases == 0)


def preempt(pair: Pair) -> None:
    """Serve three prompts at once, whose answers need more blocks than are free, so that the last ones are preempted.
    Then ask for each exactly."""
    for engine in pair.engines:
        engine.reset()
        engine.generate([SOURCE])
        before = pair.num_blends
        for three in GROUPS[:2]:
            pair.serve(engine, three, [EXACT, BLEND, BLEND], max_tokens=80, num_free=3)
            pair.serve(engine, three, [EXACT] * 3)
        assert pair.num_blends > before
        assert engine.ask("metrics")["vllm:num_preemptions"] > 0


def test_without_the_taint_exact_requests_get_what_was_blended(pair: Pair) -> None:
    """This shows that the previous test can fail."""
    engine = pair.engines[0]
    engine.execute(UNTAINTED)
    engine.reset()
    engine.generate([SOURCE])
    num_wrong = 0
    for some in GROUPS:
        engine.reset()
        pair.ask(engine, some, [BLEND] * AT_ONCE)
        found = pair.ask(engine, some, [EXACT] * AT_ONCE)
        num_wrong += sum(tokens != pair.answers[number] for number, (tokens, _) in zip(some, found, strict=True))
    assert num_wrong > 0
