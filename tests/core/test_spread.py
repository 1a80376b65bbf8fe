"""Mappings that grow without a pause agree with a dictionary, and grow a part at a time."""

# pyright: reportPrivateUsage=false

import random
import sys

from kvdepot.index import KeyMap
from kvdepot.spread import SpreadMap


def test_it_agrees_with_a_dictionary() -> None:
    rng = random.Random(7)
    keys = [rng.randbytes(32) for _ in range(300)]
    spread, by_first_byte, plain = SpreadMap[bytes](), KeyMap(), dict[bytes, int]()
    for number in range(5000):
        key = rng.choice(keys)
        assert spread.get(key) == by_first_byte.get(key) == plain.get(key)
        assert (key in spread) == (key in by_first_byte) == (key in plain)
        if key in plain and rng.random() < 0.3:
            assert spread[key] == by_first_byte[key] == plain[key]
            del by_first_byte[key], plain[key]
            spread.clear()
            for other, value in plain.items():
                spread[other] = value
        else:
            spread[key] = by_first_byte[key] = plain[key] = number
    assert dict(spread.items()) == dict(by_first_byte.items()) == plain
    assert len(spread) == len(by_first_byte) == len(plain)
    for each in (spread, by_first_byte):
        assert sum(1 for _ in each.drain()) <= len(plain)
        assert (len(each), list(each.items())) == (0, [])


def test_it_grows_a_part_at_a_time() -> None:
    """Regression: a dictionary of 43,690 tenants' names grew in 7 to 13 ms."""
    names = SpreadMap[tuple[str, str]]()
    largest = before = 0
    for number in range(60_000):
        names["model", f"tenant {number}"] = number
        if number % 10 == 0:
            now = sum(map(sys.getsizeof, names._parts))
            largest, before = max(largest, now - before), now
    assert before > 2_000_000
    assert largest < before / 10


def test_keys_before_a_place_are_found_backwards() -> None:
    rng = random.Random(8)
    digests = [rng.randbytes(32) for _ in range(20)]
    nodes = KeyMap()
    for place in (1, 4, 5, 17):
        nodes[digests[place]] = 100 + place
    assert list(nodes.before(b"".join(digests), 17, 2)) == [(5, 105), (4, 104)]
    assert list(nodes.before(b"".join(digests), 18, 0)) == [(17, 117), (5, 105), (4, 104), (1, 101)]
