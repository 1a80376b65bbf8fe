"""A node of a Mooncake cluster in its own process, for tests that share with it, damage its entries, or kill it.

Run: python node.py URL. Commands and answers are lines of JSON. The first answer says that the node is ready.
"""

import importlib
import json
import os
import sys
from mmap import mmap
from typing import Any

from kvdepot.testing.tier import Damage
from kvdepot.testing.tier_traffic import EXTENT_BYTES, NUM_EXTENTS, extents_of, fill, make_key, read, write
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl
from kvdepot_mooncake.child import object_name
from kvdepot_mooncake.options import parse_options
from kvdepot_mooncake.tier import open_tier


def make_shared_pool(num_bytes: int = NUM_EXTENTS * EXTENT_BYTES) -> TierPool:
    """Return memory that stands for the pool. The tier's process can map it."""
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return TierPool(fd, memoryview(mmap(fd, num_bytes)))


class Vandal:
    """Changes entries without the tier, through the SDK in this process."""

    def __init__(self, url: str) -> None:
        options = parse_options(TierUrl.parse(url))
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code: int = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", options.setup.master)
        assert code == 0, code

    def damage(self, prefix: str, key: bytes, other: bytes, how: Damage) -> None:
        name = object_name(prefix, key)
        stored = bytearray(self._store.get(object_name(prefix, other) if how is Damage.SWAPPED else name))
        assert stored, f"no {name}"
        if how is Damage.FLIPPED:
            stored[100] ^= 4
        elif how is Damage.TRUNCATED:
            del stored[-1000:]
        assert self._store.remove(name, True) == 0
        assert self._store.put(name, bytes(stored)) == 0


def main(url: str) -> None:
    pool = make_shared_pool()
    tier = open_tier(TierUrl.parse(url), pool)
    queue = TierQueue(tier, pool, "node", deadline_seconds=10.0)
    vandal: Vandal | None = None

    def answer(value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    answer(tier.writer_pid)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        match operation:
            case "write":
                keys = [make_key(number) for number in arguments[0]]
                fill(pool, 0, keys, [EXTENT_BYTES] * len(keys))
                answer(write(queue, keys, extents_of(0, [EXTENT_BYTES] * len(keys))))
            case "read":
                keys = [make_key(number) for number in arguments[0]]
                answer(read(queue, keys, extents_of(0, [EXTENT_BYTES] * len(keys))))
            case "damage":
                vandal = vandal or Vandal(url)
                prefix, key, other, how = arguments
                vandal.damage(prefix, bytes.fromhex(key), bytes.fromhex(other), Damage[how])
                answer(True)
            case _:
                raise ValueError(operation)
    queue.close()


if __name__ == "__main__":
    main(sys.argv[1])
