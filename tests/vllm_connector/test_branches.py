"""Agents that branch off a history, on a model with recurrent states. VLLM hands out one state per prompt."""

from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, Prompt, cached, connector, prompts, tokens

pytestmark = pytest.mark.slow

BLOCK = 256  # tokens between two states of this model
TURNS = (400, 700, 1000, 1300)  # lengths of a growing history, turn by turn
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",  # vLLM's default depends on the CPU, and determines the block size
    "kv_cache_memory_bytes": 256 << 20,
    "max_tokens": 4,
}


def branches_of(history: Prompt, *places: int) -> list[Prompt]:
    """Return prompts that branch off a history at these places. Each ends in its own way."""
    rests = prompts(len(places), 40, seed=91)
    return [history[:place] + rest for place, rest in zip(places, rests, strict=True)]


def reused(engine: Engine, wanted: list[Prompt]) -> list[int]:
    """Serve prompts one after the other, each only from the depot. Check their tokens, and return the reused tokens."""
    found: list[int] = []
    for prompt in wanted:
        outputs = engine.generate([prompt])
        engine.reset()
        assert tokens(outputs) == [engine.reference[ALL.index(prompt)]]
        found += cached(outputs)
    return found


HISTORY, LONG = prompts(1, TURNS[-1], seed=90)[0], prompts(1, 1090, seed=92)[0]
GROWN = [HISTORY[:length] for length in TURNS]
AT_TURNS = branches_of(HISTORY, *TURNS[:-1])
WITHIN_TURNS = branches_of(HISTORY, 200, 690, 1150, 1290)
OF_ONE_PROMPT = branches_of(LONG, 500, 760, 1023, 1024, 1090)
ALL = [*GROWN, *AT_TURNS, *WITHIN_TURNS, LONG, *OF_ONE_PROMPT]


@pytest.mark.promise(17)
def test_a_branch_goes_on_from_the_last_state_before_it(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("recurrent"), connector(depot.url), reference=ALL, **OPTIONS) as engine:
        ends = [length // BLOCK * BLOCK for length in TURNS]
        assert reused(engine, GROWN) == [0, *ends[:-1]], "each turn goes on from the one before"
        assert reused(engine, AT_TURNS) == ends[:-1], "an earlier turn is a place to branch"
        assert reused(engine, WITHIN_TURNS) == [0, 512, 768, 1280], "within a turn, the end of the one before it is"
        assert reused(engine, [LONG]) == [0]
        assert reused(engine, OF_ONE_PROMPT) == [0, 0, 0, 1024, 1024], "one prompt has a state at its end alone"
