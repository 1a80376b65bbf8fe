"""The ids of described chunks, and spans of flags about them."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.features.routers.ids import IdCounts
from kvdepot.features.routers.shelves import spans


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
