# pyright: basic, reportMissingImports=false
"""Which tokens policies choose, given made-up scores, and which engines are refused."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `tox r -e torch` has it")

from kvdepot_vllm.blend import why_not
from kvdepot_vllm.blend.policies import POLICIES, Budget

RUNS = [(10, 110), (200, 232), (300, 400)]
POSITIONS = torch.cat([torch.arange(begin, end) for begin, end in RUNS])


class Made:
    """Made-up scores, each of them large around one position."""

    def __init__(self, wrong: int = 350, asked: int = 350, question_tokens: int = 20) -> None:
        self.wrong, self.asked, self.question_tokens = wrong, asked, question_tokens

    def deviation(self) -> Any:
        return 1.0 + 99.0 * ((POSITIONS - self.wrong).abs() < 3)

    def attention(self) -> Any:
        assert self.question_tokens, "there is no question"
        return 0.01 + 0.99 * ((POSITIONS - self.asked).abs() < 3)


def choose(policy: str, budget: Budget | None = None, **scores: int) -> list[int]:
    return POLICIES[policy](RUNS, budget or Budget(0.3), Made(**scores)).tolist()


def test_none_chooses_nothing_and_all_everything() -> None:
    assert choose("none") == []
    assert choose("all") == POSITIONS.tolist()


def test_heads_are_the_first_tokens_of_each_run_and_share_what_short_runs_leave() -> None:
    assert choose("heads", Budget(0.3)) == [*range(10, 33), *range(200, 223), *range(300, 324)]
    assert choose("heads", Budget(0.9)) == [*range(10, 98), *range(200, 232), *range(300, 389)]


@pytest.mark.parametrize("policy", ["deviation", "query", "mixkq"])
def test_grains_begin_with_their_run_and_the_best_are_chosen(policy: str) -> None:
    chosen = choose(policy, Budget(0.0, run_tokens=11))
    assert set(range(348, 364)) <= set(chosen)  # the fourth grain of the third run
    assert len(chosen) == 48


def test_heads_take_at_most_half_of_the_budget_of_mixkq() -> None:
    chosen = set(choose("mixkq", Budget(0.0, run_tokens=21)))  # 63 tokens
    heads = [set(range(begin, begin + 16)) for begin, _ in RUNS]
    assert sum(head <= chosen for head in heads) == 2
    assert set(range(348, 364)) <= chosen


@pytest.mark.parametrize("question_tokens", [0, 257])
def test_without_a_short_question_mixkq_ranks_by_deviation_alone(question_tokens: int) -> None:
    chosen = choose("mixkq", Budget(0.15), wrong=220, asked=350, question_tokens=question_tokens)
    assert set(range(216, 232)) <= set(chosen)


@pytest.mark.parametrize(("ratio", "run_tokens", "tokens"), [(0.0, 16, 48), (0.5, 16, 116), (0.0, 100, 232)])
def test_the_budget_is_a_share_with_a_floor_for_each_run(ratio: float, run_tokens: int, tokens: int) -> None:
    assert Budget(ratio, run_tokens).tokens(RUNS) == tokens


Change = Callable[[Any, Any], None]


def group(kind: str) -> Any:
    return SimpleNamespace(kv_cache_spec=kind)


REFUSED: dict[str, Change] = {
    "kind sliding_window": lambda config, cache: setattr(cache, "kv_cache_groups", [group("sliding_window")]),
    "2 KV cache groups": lambda config, cache: setattr(cache, "kv_cache_groups", [group("full_attention")] * 2),
    r"quantized \(fp8\)": lambda config, cache: setattr(config.cache_config, "cache_dtype", "fp8"),
    "encoder-decoder": lambda config, cache: setattr(config.model_config, "is_encoder_decoder", True),
    "images or sound": lambda config, cache: setattr(config.model_config, "is_multimodal_model", True),
    "LoRA": lambda config, cache: setattr(config, "lora_config", object()),
    "pipeline stages": lambda config, cache: setattr(config.parallel_config, "pipeline_parallel_size", 2),
    "split over devices": lambda config, cache: setattr(config.parallel_config, "decode_context_parallel_size", 2),
    "data parallel": lambda config, cache: setattr(config.parallel_config, "data_parallel_size", 2),
    "experts": lambda config, cache: setattr(config.parallel_config, "use_sequence_parallel_moe", True),
}


@pytest.mark.parametrize("reason", [None, *REFUSED])
def test_engines_that_cannot_blend_are_named_with_the_reason(reason: str | None) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
    )
    cache = SimpleNamespace(kv_cache_groups=[group("mla_attention")])
    if reason is not None:
        REFUSED[reason](config, cache)
    why = why_not(config, cache, str)
    assert (why is None) == (reason is None)
    assert re.search(reason or "", why or "")
