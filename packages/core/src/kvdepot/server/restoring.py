"""Takes over what an earlier server left: its entries, and the extents that living writers may still fill.

The loop drives it in steps between messages. Stores are declined until it ends.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from kvdepot.pool.table import Writer
from kvdepot.server.depot import Depot, Fence

logger = logging.getLogger(__name__)


def take_over(depot: Depot, restored: Iterator[int | None], await_death: Callable[[Writer], bool]) -> Iterator[None]:
    """Read an earlier server's table to its end, then decide about each unfinished entry.

    An entry whose worker has registered again, or whose process is dead, is freed. Any other stays in quarantine.

    Args:
        depot: with the index that `restored` rebuilds.
        restored: see `ChunkIndex.restore`.
        await_death: watches a process; False if it is dead.
    """
    table = depot.index.table
    by_fence: dict[Fence, list[int]] = {}
    sizes: Counter[Fence] = Counter()
    for record in restored:
        if record is not None:
            fence = table.writer_of(record), table.owner_of(record)
            by_fence.setdefault(fence, []).append(record)
            sizes[fence] += table.extent(record)[1]
        yield
    for fence, records in by_fence.items():
        is_back = any(context.fence == fence for context in depot.contexts.values())
        if not is_back and await_death(fence[0]):
            depot.quarantine(fence, records, sizes[fence])
        else:
            depot.discard_records(records)
        yield
    logger.info(
        "found %d entries of an earlier server, %d were unfinished",
        depot.index.num_entries, sum(map(len, by_fence.values())),
    )  # fmt: skip
