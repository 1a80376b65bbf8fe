"""Updates of weights in running engines: no stale tokens, and replicas with equal weights share at once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, Prompt, RunCode, cached, connector, prompts, tokens

pytestmark = pytest.mark.slow

PROMPTS = prompts(2, 300, seed=70)
PRIVATE = {"kvdepot": {"load": False, "store": False}}


@pytest.fixture(scope="module")
def replicas(depot: DepotProcess, model: MakeModel) -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(model("gqa"), connector(depot.url), max_tokens=4) as first,
        Engine(model("gqa"), connector(depot.url), max_tokens=4) as second,
    ):
        yield first, second


def answers(engine: Engine, wanted: list[Prompt]) -> tuple[list[list[int]], list[int]]:
    """Serve prompts. Return their tokens, and how many tokens of each prompt came from the depot."""
    outputs = engine.generate(wanted)
    engine.reset()
    return tokens(outputs), cached(outputs)


def computed(engine: Engine, wanted: list[Prompt]) -> list[list[int]]:
    """Return the tokens of the engine's current weights, computed without the depot."""
    outputs = engine.generate(wanted, params=PRIVATE)
    engine.reset()
    assert cached(outputs) == [0, 0]
    return tokens(outputs)


def update(engine: Engine, version: int) -> None:
    """Write weights and, as trainers do, reset the caches before or after that."""
    if version % 2:
        engine.reset(connector=True)
    engine.ask("update_weights", seed=version)
    if not version % 2:
        engine.reset(connector=True)


@pytest.mark.promise(80)
def test_after_each_of_twenty_updates_replicas_share_and_one_that_is_behind_does_not(
    replicas: tuple[Engine, Engine], depot: DepotProcess
) -> None:
    first, second = replicas
    seen: set[str] = set()
    for version in range(20):
        update(first, version)
        expected = computed(first, PROMPTS)
        assert answers(first, PROMPTS) == (expected, [0, 0])
        assert answers(first, PROMPTS) == (expected, [256, 256])
        others = prompts(2, 300, seed=100 + version)
        behind = computed(second, others)
        answers(first, others)
        assert answers(second, others) == (behind, [0, 0]), "the second has the weights before"
        update(second, version)
        assert answers(second, PROMPTS) == (expected, [256, 256])
        seen.add(str(expected))
    assert len(seen) == 20, "the updates change nothing: the test shows nothing"
    generations = depot.status().generations
    (present,) = [each for each in generations if each.num_schedulers]
    others = [each for each in generations if each.lineage == present.lineage and each is not present]
    assert (present.num_schedulers, present.is_outdated) == (2, False)
    assert len(others) >= 19, "those whose chunks are still in the pool"
    assert all(each.is_outdated for each in others)


@pytest.mark.promise(80)
def test_a_version_that_people_give_is_an_update_even_without_a_reset(replicas: tuple[Engine, Engine]) -> None:
    for engine in replicas:
        engine.ask("update_weights", seed=100)
        engine.execute("child.core.set_weight_version('step 100')")
        engine.reset()
    first, second = replicas
    expected = computed(first, PROMPTS)
    assert answers(first, PROMPTS) == (expected, [0, 0])
    assert answers(second, PROMPTS) == (expected, [256, 256])
    first.execute("child.core.set_weight_version('step 101')")
    assert answers(first, PROMPTS) == (expected, [0, 0])


@pytest.mark.promise(80)
def test_a_reset_without_an_update_finds_nothing_from_before(replicas: tuple[Engine, Engine]) -> None:
    first, second = replicas
    expected = computed(first, PROMPTS)
    for _ in range(2):
        first.reset(connector=True)
        assert answers(first, PROMPTS) == (expected, [0, 0])
        assert answers(first, PROMPTS) == (expected, [256, 256])
    assert answers(second, PROMPTS) == (expected, [256, 256])


TRAIN = """
import sys
from safetensors.torch import load_file, save_file

file, by = sys.argv[1], int(sys.argv[2])
weights = load_file(file)
for name, tensor in weights.items():
    if "norm" in name:
        tensor += 0.01
    elif "o_proj" in name:
        weights[name] = tensor.roll(by, 0)
save_file(weights, file, metadata={"format": "pt"})
"""


@pytest.mark.promise(80)
def test_weights_that_a_kernel_has_packed_count(
    replicas: tuple[Engine, Engine], model: MakeModel, tmp_path: Path, run_code: RunCode
) -> None:
    """On CPU, vLLM packs the weights of most layers for its kernels and empties the parameters.

    Regression: two engines that reloaded equal norms, but different projections, shared their KV.
    """
    paths = [tmp_path / "1", tmp_path / "2"]
    for path in paths:
        shutil.copytree(model("gqa"), path)
        run_code(TRAIN, str(path / "model.safetensors"), path.name)

    def reload(engine: Engine, path: Path) -> None:
        engine.execute(
            f"child.core.collective_rpc('reload_weights', kwargs={{'weights_path': {str(path)!r}}})\n"
            "child.core.set_weight_version('reloaded')"
        )
        engine.reset(connector=True)

    first, second = replicas
    reload(first, paths[0])
    expected = computed(first, PROMPTS)
    assert answers(first, PROMPTS) == (expected, [0, 0])
    reload(second, paths[1])
    others = computed(second, PROMPTS)
    assert others != expected
    assert answers(second, PROMPTS) == (others, [0, 0])
    reload(second, paths[0])
    assert answers(second, PROMPTS) == (expected, [256, 256])


LATENT = """
from kvdepot_vllm.inspection import digest_of_weights

runner = child.core.model_executor.driver_worker.worker.model_runner
found = [digest_of_weights(runner), digest_of_weights(runner)]
module = next(each for each in runner.get_model().modules() if hasattr(each, "kv_lora_rank") and hasattr(each, "impl"))
packed = [getattr(module.impl, name, None) for name in ("_w_uk_packed", "_w_uv_packed")]
for tensor in packed if packed[0] is not None else (module.W_UK_T, module.W_UV):
    tensor.data[(0,) * tensor.dim()] += 1
    found.append(digest_of_weights(runner))
result = found
"""


def test_the_weights_of_latent_attention_count(model: MakeModel) -> None:
    """vLLM's backend for AMX packs them. vLLM 0.32 cannot reload them there."""
    with Engine(model("mla"), None) as engine:
        first, again, *changed = engine.execute(LATENT)
    assert first == again != ""
    assert len({first, *changed}) == 3


DIGESTS = """
import torch
from kvdepot.engines.identity import content_of, weights_digest

def said(tensors):
    return weights_digest(tensors.items())

def sums(tensor):
    return b"".join(content_of(tensor, by_sums=True))

for kind in (torch.float32, torch.bfloat16, torch.int8):
    base = {"b": torch.arange(3 << 20).to(kind).reshape(3, -1), "a": torch.ones(5, dtype=kind), "empty": torch.ones(0)}
    known, summed = said(base), sums(base["b"])
    print("order", said(dict(reversed(base.items()))) == known == said({k: v.clone() for k, v in base.items()}))
    print("shape", said({**base, "b": base["b"].reshape(-1)}) != known, said({**base, "c": base["a"]}) != known)
    print("strides", said({**base, "b": base["b"].t().contiguous().t()}) == known)
    for place in (0, 12345, (1 << 20) + 1, (3 << 20) - 1):
        other = base["b"].clone()
        other.view(torch.uint8).view(-1)[place * other.element_size()] ^= 1
        print("one bit", said({**base, "b": other}) != known, sums(other) != summed, sums(other.clone()) == sums(other))
    swapped = base["b"].clone()
    swapped[0, 1], swapped[0, 2] = base["b"][0, 2], base["b"][0, 1]
    print("swapped", said({**base, "b": swapped}) != known, sums(swapped) != summed)
    print("short", sums(torch.ones(3, dtype=torch.int8)) != sums(torch.zeros(3, dtype=torch.int8)))
flipped = torch.zeros(4096, dtype=torch.int32)
flipped[[7, 9]] = -(1 << 31)
print("signs", sums(flipped) != sums(torch.zeros_like(flipped)))
"""


def test_every_value_counts_whether_bytes_or_sums_are_taken(run_code: RunCode) -> None:
    said = [line.split() for line in run_code(DIGESTS).splitlines() if line.endswith(("True", "False"))]
    assert len(said) == 3 * 9 + 1
    assert [line for line in said if "False" in line] == []
