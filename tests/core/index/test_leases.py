"""A lease pins chunks until it is released, its request or context ends, or it expires."""

from collections.abc import Sequence

import pytest

from kvdepot.index.leases import LeaseTable


class Pins:
    """The part of an index that a lease table uses. Counts the calls."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.evictor = self

    def pin(self, nodes: Sequence[int]) -> None:
        self.held += nodes

    def unpin(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.held.remove(node)


@pytest.fixture
def pins() -> Pins:
    return Pins()


@pytest.fixture
def leases(pins: Pins) -> LeaseTable:
    return LeaseTable(pins, 10.0)  # type: ignore[arg-type]


def test_a_lease_pins_until_its_context_releases_it_and_only_once(leases: LeaseTable, pins: Pins) -> None:
    number = leases.grant(1, "a", (4, 5), now=0.0)
    assert not leases.release(2, number)
    assert sum(leases.end_request(2, "a")) == sum(leases.end_context(2)) == 0
    assert pins.held == [4, 5]
    assert leases.release(1, number)
    assert not leases.release(1, number)
    assert pins.held == []


def test_a_request_ends_with_its_own_leases_only(leases: LeaseTable, pins: Pins) -> None:
    for request, node in (("a", 1), ("a", 2), ("b", 3)):
        leases.grant(1, request, (node,), now=0.0)
    leases.grant(2, "a", (4,), now=0.0)
    assert leases.count_of_request(1, "a") == 2
    assert sum(leases.end_request(1, "a")) == 2
    assert leases.count_of_request(1, "a") == 0
    assert pins.held == [3, 4]


def test_ending_leases_in_steps_leaves_out_leases_granted_meanwhile(leases: LeaseTable, pins: Pins) -> None:
    numbers = [leases.grant(1, "a", (node,), now=0.0) for node in range(4)]
    steps = leases.end_request(1, "a")
    assert next(steps) == 1
    left = [number for number in numbers if leases.find(1, number)]
    assert leases.release(1, left[0])
    leases.grant(1, "a", (9,), now=0.0)
    assert sum(steps) == 2
    assert (pins.held, leases.count_of(1), leases.count_of_request(1, "a")) == ([9], 1, 1)
    assert sum(leases.end_context(1)) == 1
    assert (pins.held, len(leases), leases.count_of(1)) == ([], 0, 0)


def test_leases_expire_in_order_and_at_their_time(leases: LeaseTable, pins: Pins) -> None:
    leases.grant(1, "a", (1,), now=0.0)
    leases.grant(1, "a", (2,), now=3.0)
    assert sum(leases.expire(9.999)) == 0
    assert sum(leases.expire(10.0)) == 1
    assert pins.held == [2]
    assert sum(leases.expire(100.0)) == 1
    assert (pins.held, leases.num_expired, leases.count_of(1)) == ([], 2, 0)


def test_a_context_ends_with_all_its_leases_and_ended_leases_leave_nothing_behind(
    leases: LeaseTable, pins: Pins
) -> None:
    numbers = [leases.grant(context, request, (context,), now=0.0) for context in (1, 2, 3) for request in "ab"]
    leases.release(1, numbers[0])
    leases.check_integrity()
    assert [leases.count_of(context) for context in (1, 2, 3)] == [1, 2, 2]
    assert sum(leases.end_context(2)) == 2
    assert (pins.held, leases.count_of(2)) == ([1, 3, 3], 0)
    assert sum(leases.expire(10.0)) == 3
    leases.check_integrity()
    assert len(leases) == 0
