"""The prefix rule: computes the number of usable leading chunks of a prompt from the present groups of each chunk.

Full attention needs all chunks before the boundary. A sliding window needs only the chunks that it spans before the
boundary. A recurrent state needs only the last chunk, so it is a window of one chunk.
"""

from collections.abc import Callable, Sequence
from typing import Final

_MOST_WALKED: Final = 8192  # chunks back from the end of full attention; boundaries further back are ignored


def usable_prefix(
    limit: int,
    has: Callable[[int, int], bool],
    full: Sequence[int] = (),
    windows: Sequence[tuple[int, int]] = (),
    *,
    start: int = 0,
    last_boundary: Callable[[int, int], int] | None = None,
) -> int:
    """Return the length of the longest usable prefix; `start` if none is longer.

    Args:
        limit: the number of chunks of the prompt.
        has: returns whether a chunk has a group.
        full: the full-attention groups.
        windows: other groups, each with the number of chunks that it needs before the boundary. Smallest first is
            cheapest.
        start: the number of chunks known to be usable.
        last_boundary: given a limit and a least length, returns the longest prefix between them whose last chunk
            has all `windows`, 0 for none. It only saves calls of `has`.
    """
    for group in full:
        limit = _first_missing(start, limit, group, has)
    if not windows:
        return max(start, limit)
    lowest = max(start, limit - _MOST_WALKED)
    while limit > lowest:
        if last_boundary is not None:
            limit = last_boundary(limit, lowest)
            if limit <= lowest:
                break
        missing = _missing_before(limit, windows, has)
        if missing is None:
            return limit
        limit = missing  # all prefixes in between need this chunk in the same window
    return start


def _missing_before(limit: int, windows: Sequence[tuple[int, int]], has: Callable[[int, int], bool]) -> int | None:
    """Return a chunk that is missing in a window before `limit`, None if all windows are whole."""
    for group, num_chunks in windows:
        for chunk in range(max(0, limit - num_chunks), limit):
            if not has(chunk, group):
                return chunk
    return None


def _first_missing(start: int, limit: int, group: int, has: Callable[[int, int], bool]) -> int:
    for chunk in range(start, limit):
        if not has(chunk, group):
            return chunk
    return limit
