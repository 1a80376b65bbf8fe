"""Speculative decoding: the same tokens and as many accepted drafts after a hit as in an engine without a connector.

"draft_model" and "ngram" have no layers in the model's cache that are theirs alone; "eagle" and "mtp" have.
"""

from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens

PROMPTS = prompts(4, 292, seed=60)
FEW = {"ngram": [*range(100, 108)]}  # allowed answer tokens: with few, n-grams repeat themselves


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "mtp"])
@pytest.mark.promise(17)
def test_drafts_are_accepted_after_a_hit_as_without_a_depot(method: str, depot: DepotProcess, model: MakeModel) -> None:
    """Drafters have weights of the model. Without their KV in the depot, their guesses after a hit would be wrong."""
    path = model(method if method in ("eagle", "mtp") else "gqa")
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
    speculative |= {
        "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"model": str(path)},
        "eagle": {"model": str(path / "drafter")},
        "mtp": {},
    }[method]
    options: dict[str, Any] = {"speculative_config": speculative, "kv_cache_memory_bytes": 128 << 20, "max_tokens": 48}
    with Engine(path, None, **options) as engine:
        expected = tokens(engine.generate(PROMPTS, together=False, alphabet=FEW.get(method)))
        drafted, accepted = drafts(engine)
        assert accepted >= 40, "hardly any draft was accepted: the test shows nothing"
    with Engine(path, connector(depot.url), **options) as engine:
        for reuse in (0, 256):
            engine.reset()
            before = drafts(engine)
            outputs = engine.generate(PROMPTS, together=False, alphabet=FEW.get(method))
            assert (tokens(outputs), cached(outputs)) == (expected, [reuse] * 4)
            now = drafts(engine)
            assert now[0] - before[0] == pytest.approx(drafted, rel=0.02)
            assert now[1] - before[1] == pytest.approx(accepted, rel=0.02)


def drafts(engine: Engine) -> tuple[int, int]:
    """Return how many tokens an engine has drafted and accepted."""
    metrics = engine.ask("metrics")
    return metrics["vllm:spec_decode_num_draft_tokens"], metrics["vllm:spec_decode_num_accepted_tokens"]
