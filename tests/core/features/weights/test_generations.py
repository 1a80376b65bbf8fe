"""Generations of weights: chunks of outdated ones leave first, but not those that an attached engine uses."""

from dataclasses import dataclass

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.features.weights.feature import GRACE_SECONDS, Generations
from kvdepot.keys import GENERATION, KeyRun, Namespace, hash_prefix, split_digests
from kvdepot.operate.report import status_of
from kvdepot.pool.names import Names
from kvdepot.server import state
from kvdepot.server.depot import Depot
from kvdepot.server.restoring import Restoring
from kvdepot.wire import messages as m
from kvdepot.wire.status import GenerationStatus
from support.index import PAGE, Bench, Worker


def namespace(generation: str, tenant: str = "default", settings: str = "") -> Namespace:
    return Namespace("model", tenant=tenant, extra=(("settings", settings), (GENERATION, generation)))


def prompt(generation: str, name: int = 0, num_chunks: int = 4, tenant: str = "default") -> KeyRun:
    return hash_prefix(namespace(generation, tenant), 1, [name * 100 + place for place in range(num_chunks)])


@dataclass
class Engine:
    """A worker and a scheduler that names the engine's weights."""

    bench: Bench
    worker: Worker
    scheduler: Worker

    @classmethod
    def at(cls, bench: Bench, generation: str, name: str = "engine", settings: str = "") -> "Engine":
        worker = bench.worker(name=name)
        weights = namespace(generation, settings=settings).weights
        request = m.RegisterScheduler(m.PROTOCOL_VERSION, name, "model", bench.spec, weights=weights)
        context = worker.ask(request).context
        return cls(bench, worker, Worker(bench, worker.session, worker.writer, context, 0))

    def update(self, generation: str) -> None:
        self.scheduler.ask(m.ChangeWeights(self.scheduler.context, namespace(generation).weights))
        self.bench.depot.background.work()

    def use(self, run: KeyRun) -> int:
        reply = self.scheduler.lookup(run)
        self.scheduler.release(reply.lease)
        return reply.num_chunks

    def leave(self) -> None:
        self.bench.depot.end_session(self.worker.session)


def generations(depot: Depot) -> dict[str, GenerationStatus]:
    return {each.name: each for each in status_of(depot).generations}


def fill(engine: Engine, generation: str, num_chunks: int) -> None:
    for name in range(100, 100 + num_chunks):
        engine.worker.store(prompt(generation, name, 1))


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.promise(81)
def test_an_outdated_generation_leaves_before_any_chunk_of_the_present_one(policy: str) -> None:
    bench = Bench(pages=16, policy=policy)
    first, second = Engine.at(bench, "1", "a"), Engine.at(bench, "1", "b")
    first.update("2")
    first.worker.store(prompt("2"))
    second.worker.store(prompt("1"))
    for _ in range(3):
        assert second.use(prompt("1")) == 4  # the older generation is used more recently and more often
    second.update("2")
    fill(first, "2", 8)
    assert bench.found(prompt("1")) == bench.found(prompt("2")) == 4, "the pool has room for all"
    for name in range(200, 204):
        first.worker.store(prompt("2", name, 1))
        assert bench.found(prompt("2")) == 4
    assert bench.found(prompt("1")) == 0
    bench.index.check_integrity()
    first.leave()
    second.leave()
    bench.drain()


@pytest.mark.promise(81)
def test_two_engines_a_version_apart_share_nothing_and_both_keep_theirs() -> None:
    bench = Bench(pages=16, policy="lru")
    behind, ahead = Engine.at(bench, "1", "behind"), Engine.at(bench, "1", "ahead")
    behind.worker.store(prompt("1"))
    ahead.update("2")
    assert ahead.use(prompt("2")) == 0
    ahead.worker.store(prompt("2"))
    assert ahead.use(prompt("2")) == behind.use(prompt("1")) == 4
    assert not {*split_digests(prompt("1").digests)} & {*split_digests(prompt("2").digests)}
    fill(ahead, "2", 12)
    assert (bench.found(prompt("1")), bench.found(prompt("2"))) == (4, 0), "by last use, as without an update"
    assert not any(each.is_outdated for each in generations(bench.depot).values())
    bench.index.check_integrity()


def test_an_engine_that_comes_back_in_time_finds_its_generation_as_it_was() -> None:
    bench = Bench(pages=16, policy="lru")
    behind, ahead = Engine.at(bench, "1", "behind"), Engine.at(bench, "2", "ahead")
    ahead.worker.store(prompt("2"))
    behind.worker.store(prompt("1"))
    behind.leave()
    bench.pass_time(GRACE_SECONDS - 1)
    assert ended(bench, prompt("1")) == {False}
    behind = Engine.at(bench, "1", "behind")
    bench.pass_time(GRACE_SECONDS)
    ahead = Engine.at(bench, "2", "ahead")  # again the newest generation
    fill(ahead, "2", 12)
    assert bench.found(prompt("1")) == 4
    behind.leave()
    bench.pass_time(GRACE_SECONDS)
    assert generations(bench.depot)["1"].is_outdated
    for name in range(300, 304):
        ahead.worker.store(prompt("2", name, 1))
    assert bench.found(prompt("1")) == 0


def test_an_engine_whose_new_session_is_there_before_its_old_one_ends_keeps_its_weights() -> None:
    bench = Bench(pages=16)
    before, after = Engine.at(bench, "1"), Engine.at(bench, "2")
    after.worker.store(prompt("2", num_chunks=1))
    before.leave()
    after.worker.store(prompt("2"))
    assert generations(bench.depot)["2"].used_bytes == 4 * PAGE
    after.leave()
    assert bench.depot.contexts.weights_of("engine") == ""


def test_weights_that_an_engine_goes_back_to_are_the_present_ones_again() -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "1")
    engine.worker.store(prompt("1"))
    engine.update("2")
    engine.worker.store(prompt("2"))
    assert ended(bench, prompt("1")) == {True}
    engine.update("1")
    assert ended(bench, prompt("1")) == {False}
    assert ended(bench, prompt("2")) == {True}
    bench.index.check_integrity()


def ended(bench: Bench, run: KeyRun) -> set[int]:
    space, tree = bench.index.spaces[0], bench.index.nodes.tree
    return {tree.ended[space.nodes[key]] for key in split_digests(run.digests)}


def test_neither_uses_nor_late_stores_revoke_the_end_of_an_outdated_generation() -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "1")
    engine.worker.store(prompt("1"))
    engine.update("2")
    run = prompt("1")
    engine.use(run)
    bench.depot.background.work()
    assert ended(bench, run) == {True}
    outdated = bench.depot.labels.number_of("default", "model", namespace("1").weights)
    bench.index.add_level(bench.index.spaces[0], [bytes(32)], [0xFFFFFFFF], 0, [outdated])
    assert bench.index.nodes.tree.ended[bench.index.spaces[0].nodes[bytes(32)]]


def test_nothing_is_left_of_a_lineage_whose_engine_stored_nothing() -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "1")
    engine.update("2")
    bench.depot.features.of(Generations).check_integrity()
    engine.leave()
    bench.depot.features.of(Generations).check_integrity()


def test_lineages_do_not_outdate_each_other() -> None:
    bench = Bench(pages=16)
    production, experiment = Engine.at(bench, "", "p"), Engine.at(bench, "", "e", "other")
    run = hash_prefix(namespace(""), 1, range(4))
    production.worker.store(run)
    production.leave()
    for generation in "123":
        experiment.scheduler.ask(
            m.ChangeWeights(experiment.scheduler.context, namespace(generation, settings="other").weights)
        )
    bench.pass_time(2 * GRACE_SECONDS)
    assert ended(bench, run) == {False}


def test_the_next_server_knows_the_generations_and_waits_for_their_engines() -> None:
    bench = Bench(pages=16)
    first, second = Engine.at(bench, "1", "a"), Engine.at(bench, "2", "b")
    first.worker.store(prompt("1"))
    second.worker.store(prompt("2"))
    names, after = list(bench.depot.labels.names), Bench(pages=16)
    after.memory[:] = bench.memory
    restoring = Restoring(after.depot, Names([bench.spec], names), lambda _writer: False, lambda: False)
    early = Engine.at(after, "2", "early")
    early.update("3")
    assert not after.index.shares.outdated, "nothing is ranked while records are read"
    early.update("2")
    early.leave()
    restoring.go_on(lambda: False)
    assert after.found(prompt("1")) == after.found(prompt("2")) == 4
    assert {name: each.is_outdated for name, each in generations(after.depot).items()} == {"1": False, "2": False}
    after.pass_time(GRACE_SECONDS)
    assert {name: each.is_outdated for name, each in generations(after.depot).items()} == {"1": True, "2": False}
    assert ended(after, prompt("1")) == {True}
    Engine.at(after, "1", "a")
    after.depot.background.work()
    assert ended(after, prompt("1")) == {False}, "its engine is back, however late"


def test_after_a_restart_an_engine_with_new_weights_outdates_no_others_before_these_could_return() -> None:
    bench = Bench(pages=16)
    Engine.at(bench, "1").worker.store(prompt("1"))
    names, after = list(bench.depot.labels.names), Bench(pages=16)
    after.memory[:] = bench.memory
    Restoring(after.depot, Names([bench.spec], names), lambda _writer: False, lambda: False).go_on(lambda: False)
    Engine.at(after, "2")
    assert not after.index.shares.outdated
    after.pass_time(GRACE_SECONDS)
    assert ended(after, prompt("1")) == {True}


@pytest.mark.parametrize("returns", ["in time", "late"])
def test_after_a_restart_the_weights_that_engines_went_back_to_are_the_present_ones(returns: str) -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "1")
    for generation in "12":
        engine.update(generation)
        engine.worker.store(prompt(generation))
    engine.update("1")
    names, after = list(bench.depot.labels.names), Bench(pages=16)
    after.memory[:] = bench.memory
    Restoring(after.depot, Names([bench.spec], names), lambda _writer: False, lambda: False).go_on(lambda: False)
    if returns == "in time":
        Engine.at(after, "1")
    after.pass_time(GRACE_SECONDS)
    if returns == "late":
        assert not after.index.shares.outdated, "nobody knows which ones engines compute with"
        Engine.at(after, "1")
        after.depot.background.work()
    assert (ended(after, prompt("1")), ended(after, prompt("2"))) == ({False}, {True})


def test_status_shows_the_version_of_each_engine_and_the_bytes_of_each_generation() -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "7 abc", "trained")
    engine.worker.store(prompt("7 abc"))
    engine.update("8 def")
    engine.worker.store(prompt("8 def", num_chunks=2))
    shown = generations(bench.depot)
    seven, eight = shown["7 abc"], shown["8 def"]
    assert (seven.used_bytes, seven.num_schedulers, seven.is_outdated) == (4 * PAGE, 0, True)
    assert (eight.used_bytes, eight.num_schedulers, eight.is_outdated) == (2 * PAGE, 1, False)
    assert seven.models == eight.models == ["model"]
    assert seven.lineage == eight.lineage
    contexts = status_of(bench.depot).contexts
    assert [each.weights for each in contexts if each.role == "scheduler"] == ["8 def"]
    engine.leave()
    bench.drain()
    assert all(not each.used_bytes for each in generations(bench.depot).values())


def test_a_worker_names_no_weights() -> None:
    bench = Bench(pages=16)
    engine = Engine.at(bench, "1")
    request = m.ChangeWeights(engine.worker.context, namespace("2").weights)
    assert engine.worker.refusal(request) is ErrorCode.UNKNOWN_CONTEXT
    assert bench.depot.contexts.weights_of("engine") == namespace("1").weights


def test_generations_beyond_the_bound_have_no_label_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_WITH_WEIGHTS", 3)
    bench = Bench(pages=16)
    engine = Engine.at(bench, "0")
    for generation in "12345":
        engine.worker.store(prompt(generation, num_chunks=1))
        engine.update(generation)
    assert len(bench.depot.labels.names) == 4
    assert bench.depot.labels.names[-1].weights == ""


def test_very_many_chunks_are_outdated_in_short_steps() -> None:
    bench = Bench(pages=200, num_records=200)
    engine, run = Engine.at(bench, "1"), prompt("1", num_chunks=200)
    for first in range(0, 200, 20):
        engine.worker.store(run.slice(first, first + 20))
    (label,) = {bench.index.nodes.label[node] for node in range(200)}
    steps = list(bench.index.shares.outdate({label: True}))
    assert (sum(steps), max(steps)) == (200, 40)
