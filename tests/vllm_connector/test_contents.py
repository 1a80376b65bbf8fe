"""Adapters and weights that change under their names: no engine gets KV of one content under the key of another."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot_vllm.contents import Changes, Contents, EngineContents, Loaded, WorkerContents
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
        for _ in range(2):  # vLLM itself answers with old blocks
            first.generate(WANTED, adapter=["m", path, number, way == "in place"])
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


CHANGES = int(os.environ.get("KVDEPOT_TEST_CHANGES", "10"))


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


# --- without an engine ----------------------------------------------------------------------------------------------


PLAIN: Any = SimpleNamespace(lora_request=None)  # a request without an adapter


class Manager:
    """vLLM's manager of adapters in a worker, which has read what the files contained."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.while_loading: Callable[[], None] = lambda: None

    def _load_adapter(self, request: Any) -> None:
        file = Path(request.lora_path) / "adapter_model.bin"
        self.loaded[request.lora_int_id] = file.read_bytes() if file.exists() else b""
        self.while_loading()

    def use(self, request: Any) -> None:
        """Load an adapter as vLLM does when a step needs it."""
        if request.lora_int_id not in self.loaded or request.load_inplace:
            self._load_adapter(request)

    def list_adapters(self) -> set[int]:
        return {*self.loaded}


class Writer:
    """vLLM's worker."""

    def reload_weights(self, path: str) -> str:
        if path == "broken":
            raise OSError(path)
        return path

    def update_weights(self) -> None:
        pass


@dataclass
class Blocks:
    """vLLM's pool of blocks."""

    num_free: int = 9
    cached_block_hash_to_block: set[str] = field(default_factory=set[str])
    blocks: range = range(10)

    def get_num_free_blocks(self) -> int:
        return self.num_free


@dataclass
class Both:
    """Both sides of one engine with one worker, and adapters in a folder."""

    folder: Path
    manager: Manager = field(default_factory=Manager)
    writer: Writer = field(default_factory=Writer)
    pool: Blocks = field(default_factory=Blocks)
    keeps_names: bool = False

    def __post_init__(self) -> None:
        self.worker = WorkerContents()
        self.worker.watch(self.writer, SimpleNamespace(lora_manager=self.manager))
        pool: Any = self.pool
        self.engine = EngineContents(lambda: pool, keeps_names=self.keeps_names)

    def write(self, content: bytes, name: str = "m") -> None:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "adapter_model.bin").write_bytes(content * 64)

    def request(self, number: int = 1, name: str = "m", *, in_place: bool = False) -> Any:
        lora = SimpleNamespace(
            lora_name=name, lora_int_id=number, lora_path=str(self.folder / name), load_inplace=in_place
        )
        return SimpleNamespace(lora_request=lora)

    def step(self, *requests: Any) -> Changes | None:
        """Compute a step with some requests. Return the worker's report."""
        number = self.engine.next_step()
        for request in requests:
            self.manager.use(request.lora_request)
            self.pool.cached_block_hash_to_block.add("some block")
        self.worker.begin_step(number)
        return self.worker.take_changes()

    def take(self, changes: Changes | None) -> bool:
        assert changes is not None
        return self.engine.take(changes)

    def run(self, request: Any) -> Contents:
        """Serve a request to its end."""
        contents = self.engine.of(request)
        self.engine.admit(contents)
        changes = self.step(request)
        if changes is not None:
            self.engine.take(changes)
        return contents

    def reset(self) -> None:
        self.pool.cached_block_hash_to_block.clear()
        self.engine.reset()


@pytest.fixture
def both(tmp_path: Path) -> Both:
    both = Both(tmp_path)
    both.write(b"1")
    return both


def name_of(contents: Contents) -> str:
    assert contents.adapter is not None
    return contents.adapter.loaded.content


def test_a_worker_confirms_what_it_has_loaded_and_nothing_before(both: Both) -> None:
    request = both.request()
    contents = both.engine.of(request)
    assert both.worker.will_compute_with(contents), "it would read these files"
    assert not both.worker.computed_with(contents)
    changes = both.step(request)
    assert changes == Changes(1, 0, {1: Loaded(name_of(contents), 1)})
    assert both.worker.computed_with(contents)
    assert both.worker.will_compute_with(contents)
    assert not both.take(changes), "no new weights"
    assert both.step(request) is None, "reported once"
    assert both.engine.of(request) == contents
    assert not both.worker.computed_with(Contents(1, contents.adapter)), "of other weights"
    assert not both.worker.will_compute_with(Contents(1, contents.adapter))


def test_a_loaded_adapter_counts_and_not_the_files_that_came_later(both: Both) -> None:
    contents = both.run(both.request())
    both.write(b"2")
    assert both.engine.of(both.request()) == contents
    assert both.worker.will_compute_with(contents)
    again = both.engine.of(both.request(in_place=True))
    assert name_of(again) != name_of(contents)
    assert again.adapter is not None
    assert again.adapter.loaded.number == 2
    assert both.worker.will_compute_with(again)
    assert not both.worker.computed_with(again)
    both.step(both.request(in_place=True))
    assert both.worker.computed_with(again)
    assert not both.worker.computed_with(contents)
    assert not both.worker.will_compute_with(contents)


def test_an_adapter_that_changed_and_changed_back_is_another_one(both: Both) -> None:
    first = both.run(both.request())
    for content in (b"2", b"1"):
        both.write(content)
        both.run(both.request(in_place=True))
    assert name_of(both.engine.of(both.request())) == name_of(first)
    assert both.engine.of(both.request()) != first
    assert not both.worker.computed_with(first)


def test_an_adapter_that_is_read_again_without_a_change_is_the_same(both: Both) -> None:
    first = both.run(both.request())
    assert both.step(both.request(in_place=True)) is None
    assert both.worker.computed_with(first)


def test_an_adapter_that_was_pushed_out_is_looked_at_again(both: Both) -> None:
    first = both.run(both.request())
    del both.manager.loaded[1]
    assert both.worker.will_compute_with(first)
    both.write(b"2")
    assert not both.worker.will_compute_with(first)
    changes = both.step(both.request())
    both.take(changes)
    assert changes is not None
    assert both.engine.concern(changes, first)
    second = both.engine.of(both.request())
    assert not both.engine.concern(changes, second)
    assert not both.engine.concern(changes, both.engine.of(PLAIN))
    assert name_of(second) != name_of(first)
    assert both.worker.computed_with(second)


def test_files_that_change_while_they_are_read_have_a_name_of_their_own(both: Both) -> None:
    request = both.request()
    both.manager.while_loading = lambda: both.write(b"2")
    expected = both.engine.of(request)
    both.take(both.step(request))
    assert not both.worker.computed_with(expected)
    assert name_of(both.engine.of(request)) not in (name_of(expected), name_of(Both(both.folder).engine.of(request)))
    assert both.worker.computed_with(both.engine.of(request)), "this engine alone may share it with itself"


def test_adapters_without_files_are_new_whenever_they_are_told_to_be(tmp_path: Path) -> None:
    both = Both(tmp_path)
    first = both.run(both.request())
    assert both.worker.computed_with(first)
    del both.manager.loaded[1]
    assert both.step(both.request()) is None, "read again, as far as anybody can tell the same"
    both.take(both.step(both.request(in_place=True)))
    assert not both.worker.computed_with(first)
    assert name_of(both.engine.of(both.request())) != name_of(first)


def test_a_worker_that_cannot_see_loads_confirms_no_adapter(both: Both) -> None:
    blind = WorkerContents()
    blind.watch(None, SimpleNamespace())
    contents = both.run(both.request())
    assert not blind.computed_with(contents)
    assert not blind.will_compute_with(contents)
    assert blind.computed_with(Contents())
    assert blind.will_compute_with(Contents())


def test_workers_that_loaded_different_contents_leave_the_adapter_without_a_name(both: Both) -> None:
    first = both.run(both.request())
    one, two = Changes(3, 1, {1: Loaded("a", 2), 2: Loaded("c", 1)}), Changes(2, 2, {1: Loaded("b", 2)})
    merged = one.merge(two)
    assert merged == two.merge(one) == Changes(3, 2, {1: Loaded("", 0), 2: Loaded("c", 1)})
    assert one.merge(one) == one
    both.take(merged)
    names = {name_of(both.engine.of(both.request())) for _ in range(3)}
    assert len(names | {"", name_of(first)}) == 5, "nobody has these names, not even this engine a second time"
    assert name_of(both.engine.of(both.request(2, "n"))) == "c"


def test_what_vllm_has_of_an_earlier_content_is_outdated_until_its_cache_was_empty(both: Both) -> None:
    first, other = both.run(both.request()), both.engine.of(both.request(2, "n"))
    both.write(b"2")
    changes = both.step(both.request(in_place=True))
    both.take(changes)
    second = both.engine.of(both.request())
    assert both.engine.admit(second)
    assert both.engine.admit(first)
    assert not both.engine.admit(other), "another adapter"
    assert not both.engine.admit(Contents()), "no adapter"
    both.engine.look_at_pool()
    assert both.engine.admit(second)
    both.pool.cached_block_hash_to_block.clear()
    both.pool.num_free = 8  # a block that is in use may get its hash later
    both.engine.look_at_pool()
    assert both.engine.admit(second)
    both.pool.num_free = 9
    both.engine.of(both.request())
    assert not both.engine.admit(second)


def test_a_new_id_of_the_same_name_and_path_finds_blocks_of_the_old_one(both: Both) -> None:
    both.run(both.request(1))
    both.write(b"2")
    assert both.engine.admit(both.engine.of(both.request(2)))


def test_the_same_content_under_a_new_id_outdates_nothing(both: Both) -> None:
    both.run(both.request(1))
    assert not both.engine.admit(both.engine.of(both.request(2)))


def test_a_change_before_the_first_step_of_an_adapter_outdates_nothing(both: Both) -> None:
    """Its files changed between the request and the step in which vLLM read them: all its blocks are newer."""
    both.step()
    contents = both.engine.of(both.request())
    both.engine.admit(contents)
    both.write(b"2")
    changes = both.step(both.request())
    assert changes is not None
    assert changes.since == 2
    both.take(changes)
    second = both.engine.of(both.request())
    assert second != contents
    assert not both.engine.admit(second)


def test_each_write_of_weights_is_reported_with_the_first_step_that_may_use_it(both: Both) -> None:
    both.worker.watch(both.writer, SimpleNamespace(lora_manager=both.manager))  # the cache is registered again
    assert both.step() is None
    assert both.writer.reload_weights("other") == "other"
    assert not both.worker.computed_with(Contents())
    both.worker.begin_step(0)  # a step that could not be planned
    assert both.worker.take_changes() is None
    changes = both.step()
    assert changes == Changes(2, 1)
    assert both.take(changes)
    assert both.engine.of(PLAIN) == Contents(1)
    assert both.worker.computed_with(Contents(1))
    assert changes is not None
    assert both.engine.concern(changes, Contents())
    assert not both.engine.concern(changes, Contents(1))
    both.writer.update_weights()
    with pytest.raises(OSError, match="broken"):
        both.writer.reload_weights("broken")
    both.worker.begin_step(7)
    both.writer.update_weights()
    both.worker.begin_step(8)
    assert both.worker.take_changes() == Changes(8, 4)


@pytest.mark.parametrize("keeps_names", [False, True])
def test_blocks_of_earlier_weights_are_outdated_unless_the_user_says_that_they_never_change(
    tmp_path: Path, *, keeps_names: bool
) -> None:
    both = Both(tmp_path, keeps_names=keeps_names)
    both.run(both.request())
    both.writer.update_weights()
    changes = both.step()
    assert both.take(changes) is not keeps_names
    assert both.engine.admit(Contents(1)) is not keeps_names
    assert changes is not None
    assert both.engine.concern(changes, Contents()) is not keeps_names


def test_weights_that_are_written_right_after_a_reset_outdate_nothing(both: Both) -> None:
    both.run(both.request())
    both.reset()
    both.writer.update_weights()
    request = both.request()
    both.engine.admit(both.engine.of(request))
    assert both.take(both.step(request))
    assert not both.engine.admit(Contents(1)), "all blocks were computed after the update"


def test_a_reset_that_vllm_could_not_make_outdates_its_blocks(both: Both) -> None:
    both.run(both.request())
    both.engine.reset()
    assert both.engine.admit(Contents())
    both.reset()
    assert not both.engine.admit(Contents())


def test_without_a_pool_nobody_knows_that_vllm_has_no_blocks(both: Both) -> None:
    engine = EngineContents(lambda: None, keeps_names=False)
    engine.reset()
    assert engine.admit(engine.of(both.request()))


def test_blocks_of_the_first_step_are_outdated_by_an_update_after_it(both: Both) -> None:
    both.pool.num_free = 8
    both.run(both.request())
    both.writer.update_weights()
    both.take(both.step())
    assert both.engine.admit(Contents(1))


def test_a_change_that_no_request_uses_outdates_the_blocks_of_its_adapter(both: Both) -> None:
    first = both.run(both.request())
    both.write(b"2")
    both.take(both.step(both.request(in_place=True)))
    assert both.engine.admit(first), "its content is the one of the old blocks, but newer ones may be among them"


def test_an_adapter_that_changed_back_between_two_requests_finds_outdated_blocks(both: Both) -> None:
    both.run(both.request(1))
    both.write(b"2")
    assert both.engine.admit(both.engine.of(both.request(2)))
    both.write(b"1")
    assert both.engine.admit(both.engine.of(both.request(3)))
