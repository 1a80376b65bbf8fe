"""Each test breaks one rule of the server, and some history must fail."""

import logging
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import pytest

from kvdepot.features.blend.contents import ContentIndex, SourceRun
from kvdepot.index.entries import Entries, Extent, PartPlace
from kvdepot.index.tree import Space
from kvdepot.index.visibility import Match, Visibility
from kvdepot.pool.table import Entry, IndexTable, NewRecord
from kvdepot.server.contexts import WorkerKey
from kvdepot.server.depot import Depot
from kvdepot.server.stores import QuarantineTable
from simulation.history import replay, run_seed, shrink, story
from simulation.memory import CrashingNames
from simulation.setup import Setup
from simulation.world import World

NUM_SEEDS = 400


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


def first_failure() -> int:
    """Return the first seed whose history fails."""
    for seed in range(NUM_SEEDS):
        if run_seed(seed).failure is not None:
            return seed
    pytest.fail(f"none of {NUM_SEEDS} histories fails")


def first_reason() -> str:
    """Return why the first history that fails does, without shrinking it."""
    return str(run_seed(first_failure()).failure)


@pytest.mark.slow
@pytest.mark.promise(64)
def test_no_history_fails() -> None:
    for seed in range(NUM_SEEDS):
        assert run_seed(seed).failure is None, story(seed)


def test_a_history_is_the_same_each_time() -> None:
    assert run_seed(7) == run_seed(7)


def test_an_extent_that_leaves_quarantine_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def discard(table: QuarantineTable, _worker: object, entries: list[Entry], _num_bytes: int) -> None:
        table.discard(entries)

    monkeypatch.setattr(QuarantineTable, "hold", discard)
    seed = first_failure()
    told = story(seed)
    assert "may still write to it" in told
    assert len(told.splitlines()) < 40


def test_a_living_writer_that_is_taken_for_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "await_death", Mock(return_value=False))
    assert "may still write to it" in story(first_failure())


def test_an_unfinished_entry_whose_extent_is_given_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    abandon, free = Entries.abandon, Entries.free_abandoned
    freed: WeakKeyDictionary[Entries, list[Entry]] = WeakKeyDictionary()

    def free_now(entries: Entries, entry: Entry) -> None:
        abandon(entries, entry)
        free(entries, entry)
        freed.setdefault(entries, []).append(entry)

    def free_once(entries: Entries, entry: Entry) -> None:
        if entry in freed.get(entries, ()):
            freed[entries].remove(entry)
        else:
            free(entries, entry)

    monkeypatch.setattr(Entries, "abandon", free_now)
    monkeypatch.setattr(Entries, "free_abandoned", free_once)
    assert "may still write to it" in story(first_failure())


def test_an_extent_that_is_freed_while_a_tier_copies_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entries, "begin_reading", Entries.nodes_of)
    monkeypatch.setattr(Entries, "end_reading", Mock())
    assert "a tier copies" in story(first_failure())


def test_a_worker_whose_return_frees_what_another_one_of_its_process_writes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_worker(table: QuarantineTable, worker: WorkerKey) -> None:
        table.end_process(worker[0])

    monkeypatch.setattr(QuarantineTable, "end_worker", end_worker)
    assert "may still write to it" in story(first_failure())


def test_a_blend_that_goes_on_in_another_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def enters(_contents: ContentIndex, space: Space, run: SourceRun, key: bytes, _end: int) -> bool:
        if key not in space.nodes:
            return False
        run.node, run.key = space.nodes[key], key
        return True

    monkeypatch.setattr(ContentIndex, "enters", enters)
    assert "a blend takes chunks with another text" in story(first_failure())


def test_a_window_of_which_only_the_last_chunk_is_leased_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    match = Visibility.match

    def lease_last(index: Visibility, space: Space, digests: bytes) -> Match:
        found, nodes = match(index, space, digests)
        return Match(found, nodes[-1:])

    monkeypatch.setattr(Visibility, "match", lease_last)
    assert "is found and is not there" in story(first_failure())


def test_a_record_that_is_sealed_before_its_body_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = IndexTable.write

    def write_sealed(table: IndexTable, records: Iterable[NewRecord], **fields: Any) -> list[int]:
        records = [*records]
        sealed = write(table, records, **fields)
        table.seal([record[0] for record in records], 0)
        return sealed

    monkeypatch.setattr(IndexTable, "write", write_sealed)
    assert first_failure() >= 0


def test_a_part_of_a_name_that_stays_in_the_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_skip(names: CrashingNames, size_bytes: int) -> None:
        names.size_bytes = size_bytes

    monkeypatch.setattr(CrashingNames, "cut", only_skip)
    assert "a part of a name" in story(first_failure())


def test_a_failing_history_shrinks_to_one_that_fails_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Depot, "end_process", Mock())  # a death that is never reported
    seed = first_failure()
    events = run_seed(seed).events
    shorter = shrink(Setup.of_seed(seed), events)
    assert replay(Setup.of_seed(seed), shorter) is not None
    assert len(shorter) < len(events)
    for number in range(len(shorter)):
        assert replay(Setup.of_seed(seed), shorter[:number] + shorter[number + 1 :]) is None


def test_a_reader_that_is_given_too_few_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Entries.cover

    def cover(entries: Entries, node: int, place: PartPlace) -> list[tuple[int, Extent]]:
        return original(entries, node, place)[:1]

    monkeypatch.setattr(Entries, "cover", cover)
    assert "without some of its layers or heads" in story(first_failure())


def test_a_group_that_is_whole_by_the_parts_of_another_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Entries.whole_bit

    def whole_bit(entries: Entries, node: int, group: int, sealed: int | None = None) -> int:
        return (
            any(original(entries, node, each, sealed if each == group else None) for each in range(group + 1)) << group
        )

    monkeypatch.setattr(Entries, "whole_bit", whole_bit)
    assert "has other groups than it says" in first_reason()


def test_a_reader_that_is_given_unfinished_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Entries.cover

    def cover(entries: Entries, node: int, place: PartPlace) -> list[tuple[int, Extent]]:
        with monkeypatch.context() as patch:
            patch.setattr(Entries, "is_sealed", Mock(return_value=True))
            return original(entries, node, place)

    monkeypatch.setattr(Entries, "cover", cover)
    assert "retrieved other bytes" in first_reason()


@pytest.mark.parametrize("wrong", ["first head", "size"])
def test_a_reader_that_is_told_a_wrong_form_of_an_entry_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Entries.cover

    def cover(entries: Entries, node: int, place: PartPlace) -> list[tuple[int, Extent]]:
        found = original(entries, node, place)
        if wrong == "first head":
            return [(part ^ 1, extent) for part, extent in found]
        return [(part, (*extent[:3], place.num_bytes)) for part, extent in found]

    monkeypatch.setattr(Entries, "cover", cover)
    assert {"first head": "retrieved other bytes", "size": "which are not the entry's"}[wrong] in first_reason()
