"""Linked lists within columns, compared with plain lists."""

import random

from kvdepot.index.evictor import Links


def test_linked_lists_agree_with_plain_ones() -> None:
    rng = random.Random(10)
    links, plain = Links(50, 3), [list[int]() for _ in range(3)]
    for _ in range(5000):
        number, which = rng.randrange(50), rng.randrange(3)
        before = next((k for k, numbers in enumerate(plain) if number in numbers), None)
        assert links.list_of(number) == before
        if before is not None:
            plain[before].remove(number)
        if rng.random() < 0.6:
            links.append(number, which)
            plain[which].append(number)
        else:
            links.remove(number)
        if plain[which] and rng.random() < 0.3:
            place = rng.randrange(len(plain[which]))
            links.begin_with(plain[which][place], which)
            plain[which] = plain[which][place:] + plain[which][:place]
        assert list(links.numbers(which)) == plain[which]
        assert links.sizes == list(map(len, plain))
    for which, numbers in enumerate(plain):
        for number in numbers:
            assert next(links.numbers(which)) == number
            links.remove(number)
        assert list(links.numbers(which)) == []
