"""Blending in real engines on CPU: the self-test of every kind of model, and recomputation compared with a prefill."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.vllm.engines import Engine, MakeModel

SETUP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
torch.set_num_threads(1)
from dataclasses import asdict
from kvdepot_vllm.blend import setup as tests
from kvdepot_vllm.blend.blender import choose
from kvdepot_vllm.blend.policies import Budget
from support.vllm.blending import Bench, Piece, blender_of

def tested(blender):
    blocks = range(1, 1 + tests.blocks_needed(blender.block_tokens))
    pages = [layer.module.kv_cache.clone() for layer in blender.layers]
    found = tests.self_test(blender, list(blocks), 2000, 4096)
    same = all(torch.equal(layer.module.kv_cache, page) for layer, page in zip(blender.layers, pages))
    return asdict(found) | {{"ok": not found.why, "restored": same}}

blender = blender_of(llm)
"""
TEST = SETUP + "result = tested(blender)"


@pytest.fixture(scope="module")
def run(model: MakeModel) -> Iterator[Callable[[str], Any]]:
    """Run code in an engine with grouped queries, with access to its blender."""
    with Engine(model("gqa"), None, max_num_seqs=4, enable_prefix_caching=False) as engine:
        yield lambda code: engine.execute(SETUP + code)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa", {"dtype": "bfloat16"}),
        ("qk-norm", {}),
        ("yarn", {"dtype": "bfloat16"}),
        ("scaled", {}),
        ("partial", {}),
        ("mla-yarn", {}),
    ],
)
def test_models_whose_kv_depends_on_distances_pass(name: str, options: dict[str, Any], model: MakeModel) -> None:
    with Engine(model(name), None, enable_prefix_caching=False, **options) as engine:
        found = engine.execute(TEST)
    assert found["ok"], found
    assert found["restored"]
    assert found["unrotated_error"] > 0.5  # otherwise K would pass without our rotation


def test_a_model_with_learned_positions_is_refused(model: MakeModel) -> None:
    with Engine(model("learned"), None, enable_prefix_caching=False) as engine:
        found = engine.execute(TEST)
    assert "V depends on the position" in found["why"]
    assert found["restored"]


WRONG = {
    "the other way": "layer.rotation = Rotation(rotation.table * torch.tensor([1, -1])[:, None], rotation.is_neox)",
    "by angles that are a hundredth too small": "layer.rotation = Rotation(by(0.99), rotation.is_neox)",
    "not at all": "layer.rotation = None",
}


@pytest.mark.parametrize("how", WRONG)
def test_k_that_is_turned_wrongly_is_refused(how: str, run: Callable[[str], Any]) -> None:
    found = run(f"""
from kvdepot_vllm.blend.layers import Rotation
rotation = blender.layers[0].rotation
def by(factor):
    angles = torch.outer(factor * torch.arange(8192), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    return torch.stack([angles.cos(), angles.sin()], 1)
assert torch.allclose(rotation.table, by(1.0), atol=0.01)
for layer in blender.layers:
    {WRONG[how]}
result = tested(blender)
""")
    assert "K does not turn as expected" in found["why"]
    assert found["restored"]


BLEND = """
bench = Bench(blender, 1024)
generator = torch.Generator().manual_seed(3)
draw = lambda count: torch.randint(5, 2000, (count,), generator=generator).tolist()
system, documents, question = draw(30), [draw(210), draw(150), draw(77)], draw(20)
bench.store(draw(11) + documents[0] + documents[1] + documents[2])
starts = [11, 221, 371]
prompt, pieces = list(system), []
for number in (2, 0, 1):
    pieces.append(Piece(starts[number], len(prompt), len(documents[number])))
    prompt += documents[number] + draw(3)
prompt += question
def blend(policy, ratio=0.15, run_tokens=16):
    return bench.blend(prompt, pieces, len(question), policy, Budget(ratio, run_tokens))[-1].log_softmax(-1)
def divergence(policy, **budget):
    got = blend(policy, **budget)
    full = bench.logits(prompt, 0)[-1].log_softmax(-1)
    return float((full.exp() * (full - got)).sum())
"""


def test_recomputing_everything_is_a_full_prefill(run: Callable[[str], Any]) -> None:
    assert run(BLEND + "result = divergence('all')") < 1e-3
    assert run(BLEND + "result = divergence('none')") > 1e-2  # otherwise this shows nothing


@pytest.mark.parametrize("policy", ["heads", "deviation", "query", "mixkq"])
def test_a_policy_recomputes_its_share_and_helps(policy: str, run: Callable[[str], Any]) -> None:
    none, some, chosen = run(
        BLEND
        + f"""
none, some = divergence('none'), divergence({policy!r}, ratio=0.5)
end = len(prompt) - len(question)
runs = [(piece.target, piece.target + piece.length) for piece in pieces]
chosen = choose(blender, {policy!r}, torch.tensor(prompt), runs, bench.target, (end, len(prompt)))
result = none, some, chosen.tolist()
"""
    )
    assert some < none
    assert chosen == sorted(set(chosen))
    assert 0.15 * 437 <= len(chosen) <= 0.15 * 437 + 16


def test_scattered_tokens_in_many_rows_and_slices_equal_one_prefill(run: Callable[[str], Any]) -> None:
    """A batch of this engine has four rows, and every third token is a row."""
    assert (
        run("""
bench = Bench(blender, 512)
tokens = torch.randint(5, 2000, (300,), generator=torch.Generator().manual_seed(4))
bench.store(tokens.tolist())
slots = blender.slots(bench.source, torch.arange(300))
before = [layer.rows(slots) for layer in blender.layers]
third = torch.arange(0, 300, 3)
blender.move(slots[third], slots[third], third, third + 50)  # wrong now
blender.recompute(tokens, third[:40], bench.source)
blender.recompute(tokens, third[40:], bench.source)
after = [layer.rows(slots) for layer in blender.layers]
result = max(float((a - b).abs().max()) for pair in zip(before, after) for a, b in zip(*pair))
""")
        < 1e-4
    )
