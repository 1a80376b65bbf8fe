# pyright: basic, reportMissingImports=false
"""Where the elements of a token lie in the pages of an attention layer, as strides.

A page keeps `(block_tokens, heads, dim)` elements in an order that the attention backend chooses. Some backends cut an
axis into tiles: element `t` of it lies at `t // 16 * 1024 + t % 16 * 2`. So each axis is described by digits, each with
a size and a stride, and a tensor with one dimension for each digit views all pages without copying an element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.errors import LayoutError

Digit = tuple[int, int]
"""Size and stride in elements; an axis is a tuple of them, the most significant first."""


def digits_of(offsets: list[int]) -> tuple[Digit, ...]:
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
class Places:
    """Views of one part of every token's KV, `(tokens, heads, dim)`, in all pages of a layer.

    Attributes:
        pages: `(num_blocks, *digits)`, in the order of memory.
        rows: `(num_blocks, *token digits, *others)`, the digits of heads and dim in the order of memory.
        tokens, heads, dims: digits of each axis.
    """

    pages: Any
    rows: Any
    tokens: tuple[Digit, ...]
    heads: tuple[Digit, ...]
    dims: tuple[Digit, ...]

    @classmethod
    def of(cls, cache: Any, index: Any) -> "Places":
        """Describe a part of a layer's KV.

        Args:
            cache: `(num_blocks, ...)` of any strides.
            index: `(block_tokens, heads, dim)`, int64 on the CPU: where each element lies, in elements from the start
                of its block in memory.

        Raises:
            LayoutError: the places follow no regular pattern.
        """
        base = int(index[0, 0, 0])
        axes = index[:, 0, 0] - base, index[0, :, 0] - base, index[0, 0, :] - base
        if not (index == base + axes[0][:, None, None] + axes[1][None, :, None] + axes[2]).all():
            raise LayoutError("the attention backend lays out its pages in no regular pattern")
        tokens, heads, dims = (digits_of(axis.tolist()) for axis in axes)

        def view(digits: Sequence[Digit]) -> Any:
            return cache.as_strided(
                (cache.shape[0], *(size for size, _ in digits)),
                (cache.stride(0), *(stride for _, stride in digits)),
                cache.storage_offset() + base,
            )

        pages = view(sorted((*tokens, *heads, *dims), key=_by_stride))
        return cls(pages, view((*tokens, *sorted((*heads, *dims), key=_by_stride))), tokens, heads, dims)

    def at(self, blocks: Any, offsets: Any) -> tuple[Any, ...]:
        """Return the index of tokens in `rows`, from block numbers and places in the blocks, `(n,)` each."""
        index: list[Any] = []
        for size, _ in reversed(self.tokens):
            index.insert(0, offsets % size)
            offsets = offsets // size
        return (blocks, *index)

    def logical(self, rows: Any) -> Any:
        """Return a selection of rows, `(n, *others)`, as `(n, heads, dim)`."""
        logical = (*self.heads, *self.dims)
        ordered = sorted(logical, key=_by_stride)
        rows = rows.permute(0, *(1 + ordered.index(digit) for digit in logical))
        return rows.reshape(len(rows), math.prod(size for size, _ in self.heads), -1)

    def spread(self, values: Any, *, over_pages: bool) -> Any:
        """Return values of each dim, `(dim,)`, in a shape that multiplies one page, or one token of `rows`."""
        others = sorted(
            (*self.tokens, *self.heads, *self.dims) if over_pages else (*self.heads, *self.dims), key=_by_stride
        )
        ordered = sorted(self.dims, key=_by_stride)
        values = values.reshape([size for size, _ in self.dims]).permute([self.dims.index(digit) for digit in ordered])
        return values.reshape([digit[0] if digit in self.dims else 1 for digit in others])


def _by_stride(digit: Digit) -> int:
    return -digit[1]
