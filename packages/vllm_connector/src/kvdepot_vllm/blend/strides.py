# pyright: basic, reportMissingImports=false
"""The places of a token's elements in the pages of an attention layer, as strides.

A page keeps `(block_tokens, heads, dim)` elements in an order that the attention backend chooses. Some backends cut an
axis into tiles: element `t` of it lies at `t // 16 * 1024 + t % 16 * 2`. So each axis is described by digits, each with
a size and a stride, and a tensor with one dimension for each digit views all pages without copying an element.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.errors import LayoutError

Digit = tuple[int, int]
"""Size and stride in elements."""

Axis = tuple[Digit, ...]
"""The most significant digit first; no digit for an axis of length 1."""


def digits_of(offsets: list[int]) -> Axis:
    """Return the digits of an axis whose element `i` lies `offsets[i]` elements behind element 0.

    Raises:
        LayoutError: the offsets follow no such pattern.
    """
    if len(offsets) == 1:
        return ()
    stride, size = offsets[1], 1
    while size < len(offsets) and offsets[size] == size * stride:
        size += 1
    while len(offsets) % size:
        size -= 1
    higher = offsets[::size]
    if size == 1 or offsets != [high + low * stride for high in higher for low in range(size)]:
        raise LayoutError("the attention backend lays out its pages in no regular pattern")
    return (*digits_of(higher), (size, stride))


@dataclass(frozen=True, slots=True)
class Strides:
    """Views of one part of every token's KV, `(tokens, *others)`, in all pages of a layer.

    Attributes:
        pages: `(num_blocks, *digits)`, the digits of all axes in the order of memory.
        rows: `(num_blocks, *token digits, *digits)`, the digits of the other axes in the order of memory.
        axes: the digits of each axis; the first axis is that of tokens.
        token_dim: the dimension of tokens in one of `pages`; None if tokens have no digit or several.
    """

    pages: Any
    rows: Any
    axes: tuple[Axis, ...]
    token_dim: int | None

    @classmethod
    def of(cls, cache: Any, index: Any) -> "Strides":
        """Describe a part of a layer's KV.

        Args:
            cache: `(num_blocks, ...)` of any strides.
            index: `(block_tokens, *others)`, int64 on the CPU: the offset of each element from the start of its block
                in memory, in elements.

        Raises:
            LayoutError: the places follow no regular pattern.
        """
        start = (0,) * index.dim()
        base = int(index[start])
        axes: list[Axis] = []
        rest = index - base
        for axis in range(index.dim()):
            offsets = index[(*start[:axis], slice(None), *start[axis + 1 :])] - base
            axes.append(digits_of(offsets.tolist()))
            rest = rest - offsets.view([-1 if other == axis else 1 for other in range(index.dim())])
        if rest.any():
            raise LayoutError("the attention backend lays out its pages in no regular pattern")

        def view(digits: Sequence[Digit]) -> Any:
            return cache.as_strided(
                (cache.shape[0], *(size for size, _ in digits)),
                (cache.stride(0), *(stride for _, stride in digits)),
                cache.storage_offset() + base,
            )

        pages = view(_in_memory(axes))
        token_dim = _in_memory(axes).index(axes[0][0]) if len(axes[0]) == 1 else None
        return cls(pages, view([*axes[0], *_in_memory(axes[1:])]), tuple(axes), token_dim)

    def dim_of(self, axis: int, *, in_pages: bool) -> int:
        """Return the dimension of an axis that has one digit, in one of `pages` or in a selection of `rows`."""
        (digit,) = self.axes[axis]
        return _in_memory(self.axes).index(digit) if in_pages else 1 + _in_memory(self.axes[1:]).index(digit)

    def at(self, blocks: Any, offsets: Any) -> tuple[Any, ...]:
        """Return the index of tokens in `rows`, from block numbers and places in the blocks, `(n,)` each."""
        index: list[Any] = []
        for size, _ in reversed(self.axes[0]):
            index.insert(0, offsets % size)
            offsets = offsets // size
        return (blocks, *index)

    def logical(self, rows: Any) -> Any:
        """Return a selection of rows as `(n, *others)`."""
        memory = _in_memory(self.axes[1:])
        rows = rows.permute(0, *(1 + memory.index(digit) for axis in self.axes[1:] for digit in axis))
        return rows.reshape(len(rows), *(math.prod(size for size, _ in axis) for axis in self.axes[1:]))

    def spread(self, values: Any, *, in_pages: bool) -> Any:
        """Return values of the last axes, reshaped to multiply one of `pages`, or one token of `rows`."""
        axes = self.axes[-values.dim() :]
        mine = [digit for axis in axes for digit in axis]
        values = values.reshape([size for size, _ in mine]).permute([mine.index(digit) for digit in _in_memory(axes)])
        every = _in_memory(self.axes if in_pages else self.axes[1:])
        return values.reshape([digit[0] if digit in mine else 1 for digit in every]).contiguous()


def _in_memory(axes: Iterable[Axis]) -> list[Digit]:
    return sorted((digit for axis in axes for digit in axis), key=lambda digit: -digit[1])
