"""The block ids that a load fills and a store reads, taken from a request's block table."""

from collections.abc import Mapping

from kvdepot.backends import NO_BLOCK
from kvdepot.layout import GroupKind
from kvdepot_vllm.engine import BlockTable
from kvdepot_vllm.groups import EngineCache, EngineGroup


def blocks_per_chunk(cache: EngineCache, group: EngineGroup) -> int:
    """Return how many blocks of a group one chunk takes."""
    return 1 if group.kind is GroupKind.RECURRENT else cache.chunk_tokens // group.block_tokens


def blocks_to_fill(
    cache: EngineCache, table: BlockTable, first: int, stop_tokens: int, null_block: int
) -> tuple[list[int], ...] | None:
    """Return the blocks, as `BlockIds`, that a load of chunks from `first` on fills; None if one is missing.

    The load ends at token `stop_tokens`, which may be within its last chunk. That chunk's later blocks are `NO_BLOCK`.
    """
    result: list[list[int]] = []
    for group in cache.groups:
        row, step = table[group.number], cache.chunk_tokens // group.block_tokens
        num_blocks = -(-stop_tokens // group.block_tokens)
        if group.kind is GroupKind.RECURRENT:
            ids = list(row[num_blocks - 1 : num_blocks])
            if ids in ([], [null_block]):
                return None
        else:
            ids = list(row[first * step : num_blocks])
            if len(ids) != num_blocks - first * step:
                return None
            if group.kind is GroupKind.FULL_ATTENTION and null_block in ids:
                return None
            ids += [null_block] * (-num_blocks % step)
            while ids and all(block == null_block for block in ids[:step]):  # chunks in front of a window
                del ids[:step]
        result.append([NO_BLOCK if block == null_block else block for block in ids])
    return tuple(result)


def blocks_to_store(
    cache: EngineCache, table: BlockTable, first: int, stop: int, states: Mapping[int, int], null_block: int
) -> tuple[list[int], ...]:
    """Return the blocks that a store of chunks `first` to `stop` reads, as `BlockIds`.

    A group that no longer holds all of them covers only the last chunks.

    Args:
        cache: the engine's cache.
        table: the request's block table.
        first: the first chunk.
        stop: the chunk after the last.
        states: the block with the state at the end of the run, for each recurrent group that has one.
        null_block: marks places of the table without a block.
    """
    result: list[list[int]] = []
    for group in cache.groups:
        row, stride = table[group.number], cache.chunk_tokens // group.block_tokens
        if group.kind is not GroupKind.RECURRENT:
            ids = list(row[first * stride : stop * stride])
        elif group.states_by_position:
            ids = list(row[(first + 1) * stride - 1 : stop * stride : stride])
        else:
            ids = [states[group.number]] if group.number in states else []
        step = blocks_per_chunk(cache, group)
        whole = range(0, len(ids) - step + 1, step)
        after_lost = (start + step for start in reversed(whole) if null_block in ids[start : start + step])
        result.append(ids[next(after_lost, 0) :])
    return tuple(result)
