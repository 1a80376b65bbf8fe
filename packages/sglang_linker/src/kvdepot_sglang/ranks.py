# pyright: basic, reportMissingImports=false
"""The tensor-parallel ranks of an engine, which must take the same branch even if they find different chunks."""

import os
from collections.abc import Sequence
from typing import Any, Final

_BYTES: Final = 16  # in a digest or a random name


class Ranks:
    """The ranks that hold the shards of one KV cache.

    Args:
        group: torch's CPU process group; None for one rank.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size = 0, 1
        self._group = group
        if group is not None:
            from torch import distributed

            self.rank, self.size = distributed.get_rank(group=group), distributed.get_world_size(group=group)

    def all_agree(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are True on all ranks. All ranks must call this with as many flags."""
        if self.size == 1:
            return list(flags)
        import torch

        values = torch.tensor(flags, dtype=torch.int)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [bool(value) for value in values.tolist()]

    def all_tell(self, digest: str) -> dict[int, str]:
        """Return every rank's digest by rank. All ranks must call this.

        Args:
            digest: 32 hexadecimal digits, or "" for none.
        """
        if self.size == 1:
            return {0: digest}
        import torch

        mine = torch.tensor(list(bytes.fromhex(digest) or bytes(_BYTES)), dtype=torch.uint8)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(told, mine, group=self._group)
        return {rank: bytes(each.tolist()).hex() if each.any() else "" for rank, each in enumerate(told)}

    def common_random(self) -> str:
        """Return 32 random hexadecimal digits, equal on all ranks. All ranks must call this."""
        value = os.urandom(_BYTES)
        if self.size == 1:
            return value.hex()
        import torch

        tensor = torch.tensor(list(value), dtype=torch.uint8)
        source = torch.distributed.get_global_rank(self._group, 0)
        torch.distributed.broadcast(tensor, source, group=self._group)
        return bytes(tensor.tolist()).hex()
