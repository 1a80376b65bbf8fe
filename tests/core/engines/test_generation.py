"""Equal weights have the same name everywhere, and different weights share nothing."""

from collections.abc import Mapping

import pytest

from kvdepot.engines.generation import Generation
from kvdepot.keys import Namespace

LOADED = {0: "a", 1: "b"}
UPDATED = {0: "c", 1: "d"}


class Engine:
    """An engine of `num_workers` workers."""

    def __init__(self, weights: Mapping[int, str] = LOADED, num_workers: int = 2) -> None:
        self.now = 0.0
        self.generation = Generation(Namespace("m"), num_workers, weights, lambda: self.now)

    def name(self, weights: Mapping[int, str] | None, *, has_slept: bool = False, version: str = "") -> bytes:
        """Reset the caches, report the workers' weights, and return the namespace's digest, which begins every key."""
        generation = self.generation
        generation.set_version(version)
        generation.reset()
        number = generation.ask()
        for worker, digest in (weights or {}).items():
            generation.tell({worker: (number, digest)}, has_slept=has_slept)
        assert generation.is_known
        return generation.namespace.digest(16)

    @property
    def key(self) -> bytes:
        return self.generation.namespace.digest(16)


@pytest.mark.promise(80)
def test_replicas_of_other_sizes_share_what_they_loaded_and_after_an_update_with_their_own_size_only() -> None:
    """Engines of other sizes have other shards, so their digests cannot be compared, whatever the given version."""
    engines = [Engine(), Engine()], [Engine({0: "ab"}, 1), Engine({0: "ab"}, 1)]
    assert len({engine.key for size in engines for engine in size}) == 1
    for version in ("", "7"):
        two_ranks = {engine.name(UPDATED, version=version) for engine in engines[0]}
        one_rank = {engine.name({0: "cd"}, version=version) for engine in engines[1]}
        assert len(two_ranks) == len(one_rank) == 1
        assert not two_ranks & one_rank


@pytest.mark.promise(80)
def test_replicas_with_the_same_new_weights_share_and_one_that_is_behind_does_not() -> None:
    first, second, behind = Engine(), Engine(), Engine()
    assert first.key == second.key == behind.key
    for version in range(20):
        weights = {0: f"c{version}", 1: "d"}
        keys = {first.name(weights), second.name(weights)}
        assert len(keys) == 1
        assert behind.key not in keys
        behind.name(weights)


def test_a_replica_that_comes_later_has_the_name_of_its_weights() -> None:
    first = Engine()
    for weights in ({0: "x", 1: "y"}, UPDATED):
        first.name(weights)
    assert Engine().name(UPDATED) == first.key


def test_one_worker_with_other_weights_is_another_engine() -> None:
    assert Engine().name(UPDATED) != Engine().name({**UPDATED, 1: "other"})
    assert Engine().name(UPDATED) != Engine().name({0: "d", 1: "c"})


def test_a_reset_without_an_update_shares_with_nothing_before_it() -> None:
    engine = Engine()
    assert len({engine.key, engine.name(LOADED), engine.name(LOADED), Engine().name(LOADED)}) == 4


def test_after_a_sleep_equal_weights_keep_their_name_and_others_have_a_new_one() -> None:
    engine = Engine()
    before = engine.key
    assert engine.name(LOADED, has_slept=True) == before
    updated = engine.name(UPDATED, has_slept=True)
    assert updated == Engine().name(UPDATED)
    assert engine.name(UPDATED, has_slept=True) == updated
    assert engine.name(LOADED, has_slept=True) != updated


def test_workers_that_cannot_tell_share_with_nobody() -> None:
    blind = {0: "c", 1: ""}
    keys = [Engine().name(blind), Engine().name(blind), Engine(blind).name(blind, has_slept=True)]
    assert len({*keys, Engine().key}) == 4


def test_a_version_is_a_part_of_the_name_and_never_all_of_it() -> None:
    assert Engine().name(UPDATED, version="7") == Engine().name(UPDATED, version="7")
    assert Engine().name(UPDATED, version="7") != Engine().name(UPDATED, version="8")
    assert Engine().name(UPDATED, version="7") != Engine().name(LOADED, version="7"), "two trainings count alike"
    engine = Engine()
    assert engine.generation.set_version("7")
    assert not engine.generation.set_version("7")


def test_workers_are_asked_once_and_an_answer_from_before_another_reset_does_not_count() -> None:
    generation = Engine().generation
    assert generation.ask() == 0
    generation.reset()
    early = generation.ask()
    assert early
    assert generation.ask() == 0
    generation.reset()
    number = generation.ask()
    assert not generation.tell({0: (early, "c"), 1: (early, "d")}, has_slept=False)
    assert not generation.tell({0: (number, "e")}, has_slept=False)
    assert generation.tell({1: (number, "f")}, has_slept=False)
    assert generation.namespace.digest(16) == Engine().name({0: "e", 1: "f"})


def test_workers_that_do_not_answer_cost_the_cache_and_not_the_engine() -> None:
    engine = Engine()
    engine.generation.reset()
    number = engine.generation.ask()
    assert not engine.generation.tell({0: (number, "c")}, has_slept=False)
    engine.now = 61.0
    assert engine.generation.tell({}, has_slept=False)
    assert engine.key != Engine().key
