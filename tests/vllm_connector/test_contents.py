"""Adapters and weights that change under their names: no engine gets KV of one content under the key of another."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import Engine, MakeModel, Prompt, cached, connector, prompts, tokens

MakeAdapter = Callable[[Path, int], Path]
Answer = list[int]

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8, "max_tokens": 4}


# --- real engines ---------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Contents of adapters in folders of their own, and an engine that answers with any of them and has no cache."""

    folder: Path
    model: Path
    contents: list[Path]
    oracle: Engine
    numbers: int = 100
    known: dict[tuple[int, str], Answer] = field(default_factory=dict[tuple[int, str], Answer])

    def right(self, content: int, wanted: list[Prompt]) -> list[Answer]:
        """Return the answers with a content, computed once each."""
        missing = [prompt for prompt in wanted if (content, str(prompt)) not in self.known]
        if missing:
            outputs = self.oracle.generate(missing, adapter=[f"c{content}", str(self.contents[content]), content + 1])
            for prompt, answer in zip(missing, tokens(outputs), strict=True):
                self.known[content, str(prompt)] = answer
        return [self.known[content, str(prompt)] for prompt in wanted]

    def put(self, content: int, name: str = "latest") -> str:
        """Overwrite the folder of an adapter, as a trainer that pushes to it does, and return its path."""
        shutil.copytree(self.contents[content], self.folder / name, dirs_exist_ok=True)
        return str(self.folder / name)

    def number(self) -> int:
        """Return an id that no adapter had."""
        self.numbers += 1
        return self.numbers

    def fresh(self, depot: DepotProcess, **options: Any) -> Engine:
        return Engine(self.model, connector(depot.url), **{**LORA, **options})

    def find(self, engine: Engine, content: int, wanted: list[Prompt]) -> tuple[list[Answer], list[int]]:
        """Serve prompts with a content under a name and a path that nobody else uses."""
        outputs = engine.generate(wanted, adapter=[f"c{content}", str(self.contents[content]), content + 1])
        return tokens(outputs), cached(outputs)


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    """A depot that has nothing of other tests, whose adapters have the same content."""
    with DepotProcess(pool_size="256MiB", new_session=True) as depot:
        yield depot


@pytest.fixture
def world(tmp_path: Path, model: MakeModel, make_adapter: MakeAdapter) -> Iterator[World]:
    path = model("gqa")
    contents: list[Path] = []
    for seed in range(3):
        made = make_adapter(path, seed + 1)
        contents.append(Path(shutil.move(made, tmp_path / f"content-{seed}")))
    options: dict[str, Any] = {**LORA, "max_cpu_loras": 3}
    with Engine(path, None, enable_prefix_caching=False, **options) as oracle:
        yield World(tmp_path, path, contents, oracle)


WANTED = prompts(3, 500, seed=90)


@pytest.mark.slow
@pytest.mark.promise(82)
@pytest.mark.parametrize("way", ["in place", "by the engine", "under a new id"])
def test_an_adapter_that_is_replaced_under_its_name_and_path(world: World, depot: DepotProcess, way: str) -> None:
    old, new = world.right(0, WANTED), world.right(1, WANTED)
    assert all(one != other for one, other in zip(old, new, strict=True)), "the adapters change nothing"
    with world.fresh(depot) as first:
        path, number = world.put(0), world.number()
        assert tokens(first.generate(WANTED, adapter=["m", path, number])) == old
        world.put(1)
        if way == "by the engine":
            first.ask("add_adapter", adapter=["m", path, number, True])
        elif way == "under a new id":
            first.execute(f"llm.llm_engine.remove_lora({number})")
            number = world.number()
        first.generate(WANTED, adapter=["m", path, number, way == "in place"])  # vLLM itself may answer with old blocks
        more = prompts(2, 500, seed=91)
        assert tokens(first.generate(more, adapter=["m", path, number])) == world.right(1, more)
        with world.fresh(depot) as replica:
            assert world.find(replica, 0, WANTED) == (old, [384] * 3)
            assert world.find(replica, 1, WANTED)[0] == new
            assert world.find(replica, 1, more) == (world.right(1, more), [384] * 2), "computed after the change"
        first.reset()
        assert tokens(first.generate(WANTED, adapter=["m", path, number])) == new
        assert tokens(first.generate(more, adapter=["m", path, number])) == world.right(1, more)


@pytest.mark.slow
@pytest.mark.promise(82)
def test_an_adapter_that_was_pushed_out_is_read_again(world: World, depot: DepotProcess) -> None:
    """vLLM keeps `max_cpu_loras` adapters, and reads the files again whenever another one took the place."""
    with world.fresh(depot, max_cpu_loras=1, enable_prefix_caching=False) as first:
        path, number = world.put(0), world.number()
        assert tokens(first.generate(WANTED, adapter=["m", path, number])) == world.right(0, WANTED)
        assert world.find(first, 2, WANTED)[0] == world.right(2, WANTED)
        world.put(1)
        assert tokens(first.generate(WANTED, adapter=["m", path, number])) == world.right(1, WANTED)
        assert tokens(first.generate(WANTED, adapter=["m", path, number])) == world.right(1, WANTED)
        with world.fresh(depot) as replica:
            assert world.find(replica, 0, WANTED) == (world.right(0, WANTED), [384] * 3)
            assert world.find(replica, 1, WANTED) == (world.right(1, WANTED), [384] * 3)


@pytest.mark.slow
@pytest.mark.promise(82)
@pytest.mark.parametrize("is_preempted", [False, True], ids=["running and waiting", "preempted"])
def test_an_adapter_that_is_replaced_while_its_requests_run_wait_or_are_preempted(
    world: World, depot: DepotProcess, *, is_preempted: bool
) -> None:
    texts = prompts(3, 200, seed=92)
    names = [f"r{number}" for number in range(3)]
    path, number = world.put(0), world.number()
    room = {"num_gpu_blocks_override": 6, "max_model_len": 512} if is_preempted else {"max_num_seqs": 1}
    with world.fresh(depot, block_size=128, **room) as first:
        first.ask("submit", requests=dict(zip(names, texts, strict=True)), max_tokens=200, adapter=["m", path, number])
        done: dict[str, Answer] = first.ask("step", steps=90 if is_preempted else 40)["tokens"]
        preemptions = first.execute("result = sum(r.num_preemptions for r in child.core.scheduler.requests.values())")
        assert (preemptions > 0) == is_preempted
        world.put(1)
        first.ask("add_adapter", adapter=["m", path, number, True])
        while len(done) < 3:
            done |= first.ask("step", steps=50)["tokens"]
        first.ask("drain")
    answered = [text + done[name] for name, text in zip(names, texts, strict=True)]
    with world.fresh(depot) as replica:
        for content in (0, 1):
            assert world.find(replica, content, answered)[0] == world.right(content, answered)


@pytest.mark.slow
@pytest.mark.promise(82)
def test_an_adapter_that_did_not_change_is_shared_by_its_content(world: World, depot: DepotProcess) -> None:
    with world.fresh(depot) as first, world.fresh(depot) as second:
        path, number = world.put(0), world.number()
        assert cached(first.generate(WANTED, adapter=["m", path, number])) == [0] * 3
        assert world.find(second, 0, WANTED) == (world.right(0, WANTED), [384] * 3)
        second.reset()
        again = ["m", path, world.number(), True]  # read in every step
        outputs = second.generate(WANTED, adapter=again)
        assert (tokens(outputs), cached(outputs)) == (world.right(0, WANTED), [384] * 3)


@pytest.fixture
def other_weights(model: MakeModel) -> list[Path]:
    return [model("gqa", seed) for seed in (1, 2)]


@pytest.mark.slow
@pytest.mark.promise(83)
@pytest.mark.parametrize("version", ["step 7", None], ids=["with a version", "in silence"])
def test_weights_that_change_without_a_reset(
    model: MakeModel, other_weights: list[Path], depot: DepotProcess, version: str | None
) -> None:
    """vLLM keeps blocks of the weights before in its own cache. A replica that was reset must not find them."""
    original, changed = model("gqa"), other_weights[0]
    private = {"kvdepot": {"load": False, "store": False}}
    with Engine(original, connector(depot.url), max_tokens=4, enable_prefix_caching=False) as replica:
        replica.ask("reload", path=str(changed), version=version)
        replica.reset(connector=True)
        right = tokens(replica.generate(WANTED, params=private))
        with Engine(original, connector(depot.url), max_tokens=4) as first:
            running = prompts(1, 300, seed=95)[0]
            first.generate(WANTED)
            first.ask("submit", requests={"running": running}, max_tokens=120, steps=40)
            first.ask("reload", path=str(changed))
            first.ask("step", steps=20)
            first.ask("reload", path=str(changed), version=version)
            first.ask("step", steps=100)
            first.generate(WANTED)  # vLLM itself answers with old blocks
            more = prompts(2, 500, seed=96)
            first.generate(more)
            assert tokens(replica.generate(WANTED)) == right
            outputs = replica.generate(more)
            assert cached(outputs) == [384] * 2, "computed after the change"
            assert tokens(outputs) == tokens(replica.generate(more, params=private))
            assert tokens(replica.generate([running])) == tokens(replica.generate([running], params=private))
            first.reset()
            assert tokens(first.generate(WANTED)) == right
    with Engine(original, connector(depot.url), reference=[*WANTED, running], max_tokens=4) as fresh:
        assert tokens(fresh.generate([*WANTED, running])) == fresh.reference


CHANGES = int(os.environ.get("KVDEPOT_TEST_CHANGES", "8"))


@pytest.mark.slow
@pytest.mark.promise(82, 83)
def test_random_changes_of_adapters_and_weights_among_requests(
    world: World, other_weights: list[Path], depot: DepotProcess
) -> None:
    """One engine changes carelessly. A replica, which takes everything from the depot, answers as if nobody did."""
    source = random.Random(5)
    texts = prompts(6, 300, seed=97) + prompts(6, 700, seed=98, shared=400)
    weights, version, num_found = [world.model, *other_weights], 0, 0
    latest, number = 0, world.number()
    path = world.put(latest)
    with (
        world.fresh(depot, max_cpu_loras=1, max_num_seqs=3) as careless,
        world.fresh(depot, enable_prefix_caching=False, max_cpu_loras=3) as replica,
    ):
        for change in range(CHANGES):
            # vLLM on CPU computes a request without an adapter as if it had that of the others in its batch.
            is_plain = source.random() < 0.3
            for turn in range(3):  # requests are under way when the change comes
                adapter = None if is_plain else source.choice([["m", path, number], ["c2", str(world.contents[2]), 3]])
                chosen = {f"{change}.{turn}.{each}": source.choice(texts) for each in range(2)}
                careless.ask(
                    "submit", requests=chosen, max_tokens=source.choice([2, 90]), steps=source.randrange(40),
                    adapter=adapter,
                )  # fmt: skip
            if is_plain:
                way = source.choice(["weights", "reset", "local"])
            else:
                way = source.choice(["files", "in place", "by the engine", "new id", "weights", "reset", "local"])
            if way in ("files", "in place", "by the engine", "new id"):
                latest = source.randrange(2)
                world.put(latest)
                if way == "new id":
                    careless.execute(f"llm.llm_engine.remove_lora({number})")
                    number = world.number()
                elif way == "by the engine":
                    careless.ask("add_adapter", adapter=["m", path, number, True])
                elif way == "in place":
                    careless.ask(
                        "submit", requests={f"{change}.new": texts[0]}, max_tokens=2, adapter=["m", path, number, True]
                    )
            elif way == "weights":
                version += 1
                told = str(weights[version % 3])
                careless.ask("reload", path=told, version=f"step {version}" if source.random() < 0.5 else None)
                for engine in (replica, world.oracle):
                    engine.ask("reload", path=told, version=f"step {version}")
                    engine.reset(connector=True)
                world.known.clear()
            else:
                careless.ask("reset", connector=way == "reset")  # does nothing while blocks are in use
            careless.ask("step", steps=source.randrange(30))
            careless.ask("drain")
            for content in range(3):
                wanted = source.sample(texts, 4)
                answers, found = world.find(replica, content, wanted)
                num_found += sum(map(bool, found))
                assert answers == world.right(content, wanted), f"after change {change}: {way}"
            plain = source.sample(texts, 4)
            outputs, expected = replica.generate(plain), world.oracle.generate(plain)
            assert tokens(outputs) == tokens(expected), f"after change {change}: {way} {cached(outputs)}"
    assert num_found, "nothing was found: the test shows nothing"
