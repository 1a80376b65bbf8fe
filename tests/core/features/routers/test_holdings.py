"""The ids of described chunks, and spans of flags about them."""

import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.features.routers.ids import IdCounts
from kvdepot.features.routers.shelves import ALL_NODES, Family, Run, Shelf, spans

BLOCK_TOKENS = 16


def family_of(shelf: Shelf, block_tokens: int = BLOCK_TOKENS) -> Family:
    return Family(shelf, 0, b"", 1, block_tokens, (), None)


def run_of(family: Family, ids: Sequence[int], parent: int = 0) -> Run:
    tokens = bytes(4 * family.block_tokens * len(ids))
    run = Run(family, struct.pack("<Q", parent), struct.pack(f"<{len(ids)}Q", *ids), tokens)
    run.nodes = [*ids]
    return run


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([0, 1, 1024, 1025, 2**64 - 1]), max_size=4))))
def test_ids_are_counted_as_a_counter_does(steps: list[tuple[bool, list[int]]]) -> None:
    ids, model = IdCounts(), Counter[int]()
    for adds, each in steps:
        if adds:
            expected: list[bool] = []
            for one in each:
                expected.append(not model[one])
                model[one] += 1
            assert ids.add(each) == expected
        else:
            held = [one for one, count in (Counter(each) & model).items() for _ in range(count)]
            expected = []
            for one in held:
                model[one] -= 1
                expected.append(not model[one])
            assert ids.remove(held) == expected
        assert len(ids) == model.total()


@given(st.lists(st.booleans()))
def test_spans_are_maximal_and_cover_all_flags(flags: list[bool]) -> None:
    found = [*spans(flags)]
    assert [flag for flag, start, stop in found for _ in range(start, stop)] == flags
    assert all(before[0] is not after[0] and before[2] == after[1] for before, after in pairwise(found))


def test_changes_of_a_run_that_others_hold_in_part_say_which_chunks_are_public() -> None:
    shelf = Shelf("topic")
    run = run_of(family_of(shelf), [1, 2, 3, 4, 5])
    shelf.num_counted = ALL_NODES
    shelf.show(run_of(run.family, [3]), 0, 1, [9])
    shelf.show(run, 1, 5, [4, 5, 6, 7])
    shelf.hide(run, 1, 5, [4, 5, 6, 7])
    shown, hidden = shelf.log[1:4], shelf.log[4:]
    assert [(first, stop, is_public) for _, first, stop, _, _, is_public in shown] == [
        (1, 2, True),
        (2, 3, False),
        (3, 5, True),
    ]
    assert [(first, stop, is_public) for _, first, stop, _, _, is_public in hidden] == [
        (3, 5, True),
        (2, 3, False),
        (1, 2, True),
    ]
    assert [is_there for *_, is_there, _ in shelf.log] == [True] * 4 + [False] * 3


@pytest.mark.parametrize(("block_tokens", "most_chunks"), [(16, 32), (256, 32), (512, 16), (8192, 1), (16384, 1)])
def test_a_run_takes_chunks_up_to_its_bound(block_tokens: int, most_chunks: int) -> None:
    family = family_of(Shelf("topic"), block_tokens)
    run = run_of(family, range(1, most_chunks + 1))
    assert not run.takes(run_of(family, [99], parent=most_chunks), above=most_chunks)
    if most_chunks > 1:
        shorter = run_of(family, range(1, most_chunks))
        assert shorter.takes(run_of(family, [99], parent=most_chunks - 1), above=most_chunks - 1)
