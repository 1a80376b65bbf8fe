# pyright: basic
"""Interprets the kernels with which vLLM finds the slot of each token, from their source (`contract`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np


class Value(np.ndarray):
    """An array, with the method of Triton's tensors that the kernels use."""

    def to(self, _dtype: Any) -> "Value":
        """Return itself."""
        return self


@dataclass
class Pointer:
    """The address of an element of an array, or addresses of several."""

    array: Any
    places: Any = 0

    def __add__(self, places: Any) -> "Pointer":
        return Pointer(self.array, self.places + places)


class Triton:
    """The part of `triton.language` that the kernels use, for the first program of a grid."""

    int64 = int32 = None

    def program_id(self, _axis: int) -> int:
        """Return 0."""
        return 0

    def num_programs(self, _axis: int) -> int:
        """Return 2: one request, and the last program, which pads."""
        return 2

    def arange(self, first: int, stop: int) -> Any:
        """Return numbers."""
        return np.arange(first, stop)

    def where(self, *each: Any) -> Any:
        """Choose."""
        return np.where(*each).view(Value)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        """Read the elements that the mask allows."""
        places = np.where(mask, pointer.places, 0)
        return np.asarray(np.where(mask, pointer.array[places], np.array(other, pointer.array.dtype))).view(Value)

    def store(self, pointer: Pointer, values: Any, mask: Any) -> None:
        """Write the elements that the mask allows."""
        mask = np.broadcast_to(mask, np.shape(pointer.places))
        pointer.array[pointer.places[mask]] = np.broadcast_to(values, mask.shape)[mask]


def _call(source: str, given: dict[str, Any], **names: Any) -> None:
    scope: dict[str, Any] = {"tl": Triton(), **names}
    exec(source, scope)  # noqa: S102  # vLLM's own function
    (kernel,) = (
        each for each in scope.values() if hasattr(each, "__code__") and each.__code__.co_filename == "<string>"
    )
    kernel(**given)


def slots_of_v1(
    source: str, table: list[int], num_tokens: int, page_tokens: int, shards: int, shard: int, interleave: int
) -> Any:
    """Return the slot of each token of a request on one rank, by the kernel of the V1 runner. -1: on another rank."""
    slots = np.full(num_tokens, -2)
    given = {
        "num_tokens": num_tokens,
        "max_num_tokens": num_tokens,
        "query_start_loc_ptr": Pointer(np.array([0, num_tokens])),
        "positions_ptr": Pointer(np.arange(num_tokens)),
        "block_table_ptr": Pointer(np.array(table)),
        "block_table_stride": len(table),
        "slot_mapping_ptr": Pointer(slots),
        "KV_CACHE_BLOCK_SIZE": page_tokens,
        "TOTAL_CP_WORLD_SIZE": shards,
        "TOTAL_CP_RANK": shard,
        "CP_KV_CACHE_INTERLEAVE_SIZE": interleave,
        "PAD_ID": -1,
        "BLOCK_SIZE": 256,
    }
    _call(source, given)
    return slots


def slots_of_v2(
    source: str, table: list[int], num_tokens: int, page_tokens: int, shards: int, shard: int, interleave: int
) -> Any:
    """Return the same by the kernel of the V2 runner."""
    slots, zero, yes = np.full(num_tokens, -2), Pointer(np.array([0])), Pointer(np.array([True]))
    given = {
        "max_num_tokens": num_tokens,
        "idx_mapping": zero,
        "query_start_loc": Pointer(np.array([0, num_tokens])),
        "pos": Pointer(np.arange(num_tokens)),
        "block_table_ptrs": zero,
        "block_table_strides": Pointer(np.array([len(table)])),
        "block_sizes": Pointer(np.array([page_tokens])),
        "slot_mapping_enabled": yes,
        "dcp_sharded": yes,
        "slot_mappings_ptr": Pointer(slots),
        "slot_mappings_stride": 0,
        "cp_rank": shard,
        "CP_SIZE": shards,
        "CP_INTERLEAVE": interleave,
        "PAD_ID": -1,
        "TRITON_BLOCK_SIZE": 256,
    }
    _call(source, given, _load_ptr=lambda *_: Pointer(np.array(table)))
    return slots
