"""The block ids that a load fills and a store reads, taken from a request's block table."""

from collections.abc import Mapping, Sequence

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
        ids = _blocks_to_fill(cache, group, table[group.number], first, stop_tokens, null_block)
        if ids is None:
            return None
        result.append(ids)
    return tuple(result)


def _blocks_to_fill(
    cache: EngineCache, group: EngineGroup, row: Sequence[int], first: int, stop_tokens: int, null_block: int
) -> list[int] | None:
    step = cache.chunk_tokens // group.block_tokens
    num_blocks = -(-stop_tokens // group.block_tokens)
    if group.kind is GroupKind.RECURRENT:
        ids = list(row[num_blocks - 1 : num_blocks])
        return None if ids in ([], [null_block]) else ids
    ids = list(row[first * step : num_blocks])
    if len(ids) != num_blocks - first * step:
        return None
    if group.kind is GroupKind.FULL_ATTENTION and null_block in ids:
        return None
    ids += [null_block] * (-num_blocks % step)
    if group.kind is GroupKind.FULL_ATTENTION:
        return [NO_BLOCK if block == null_block else block for block in ids]
    while ids and all(block == null_block for block in ids[:step]):
        del ids[:step]
    return [NO_BLOCK if block == null_block else block for block in ids]


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
    return tuple(
        _blocks_to_store(cache, group, table[group.number], first, stop, states, null_block) for group in cache.groups
    )


def _blocks_to_store(
    cache: EngineCache,
    group: EngineGroup,
    row: Sequence[int],
    first: int,
    stop: int,
    states: Mapping[int, int],
    null_block: int,
) -> list[int]:
    stride = cache.chunk_tokens // group.block_tokens
    if group.kind is not GroupKind.RECURRENT:
        ids = list(row[first * stride : stop * stride])
    elif group.states_by_position:
        ids = list(row[(first + 1) * stride - 1 : stop * stride : stride])
    else:
        return [states[group.number]] if group.number in states else []
    step = blocks_per_chunk(cache, group)
    for chunk in reversed(range(len(ids) // step)):
        if null_block in ids[chunk * step : (chunk + 1) * step]:
            return ids[(chunk + 1) * step :]
    return ids
