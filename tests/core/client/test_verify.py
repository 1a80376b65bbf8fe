"""Checksums of stored extents."""

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from kvdepot.client.verify import Verifier
from kvdepot.wire import messages as m

POOL = random.Random(1).randbytes(64 << 10)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_extents", [0, 1, 3, 4, 9])
def test_any_number_of_threads_makes_the_same_checksums(num_threads: int, num_extents: int) -> None:
    places = [(number * 4096, 300 + number) for number in range(num_extents)]
    extents = b"".join(m.EXTENT.pack(0, 0, 0, 0, 0, 0, *place) for place in places)
    session: Any = SimpleNamespace(verify=m.Verify.ALL, mapping=SimpleNamespace(pool=bytearray(POOL)))
    with contextlib.closing(Verifier(num_threads)) as verifier:
        found = verifier.checksums(session, extents)
    assert found == b"".join(xxhash.xxh3_128_digest(POOL[start : start + size]) for start, size in places)
