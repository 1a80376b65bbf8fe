# pyright: basic, reportMissingImports=false
"""A blender's view of attention layers: the places of K and V of a token, and the rotation of K by its position.

Neither is known beforehand. The places are found by experiment (`kvdepot_vllm.encoding`). The rotation comes from the
layer's rotary embedding, recomputed in float32, because the engine's table has the precision of the model.

A page keeps `(block_tokens, heads, dim)` elements in an order that the attention backend chooses. Some backends cut an
axis into tiles: element `t` of it lies at `t // 16 * 1024 + t % 16 * 2`. So each axis is described by digits, each with
a size and a stride, and a tensor with one dimension for each digit views all pages without copying an element.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvdepot.errors import LayoutError
from kvdepot_vllm.encoding import find_places, layout_of

Digit = tuple[int, int]
"""Size and stride in elements."""

Axis = tuple[Digit, ...]
"""The most significant digit first; no digit for an axis of length 1."""


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
            axes.append(_digits_of(offsets.tolist()))
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


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns pairs of K's elements by angles proportional to the distance moved.

    Attributes:
        table: `(positions, 2, num_pairs)` float32 on the device: cosine and sine of the angles at each position.
        is_neox: whether element `i` is paired with `i + num_pairs`, rather than `2 i` with `2 i + 1`.
    """

    table: Any
    is_neox: bool

    @classmethod
    def of(cls, rotary: Any, device: Any) -> "Rotation":
        """Return the rotation of vLLM's `RotaryEmbeddingBase`. A factor on K, like YaRN's, is divided out.

        Raises:
            LayoutError: the table of this embedding depends on more than the position.
        """
        try:
            with torch.device("cpu"):
                table = rotary._compute_cos_sin_cache().float().unflatten(-1, (2, -1))  # noqa: SLF001
        except TypeError as error:
            raise LayoutError(f"{type(rotary).__name__} has more than one table of angles") from error
        factor = (table[0] ** 2).sum(0).sqrt()
        return cls((table / factor).to(device), bool(rotary.is_neox_style))

    @property
    def num_pairs(self) -> int:
        """The number of pairs that are turned, beginning with the first elements of K."""
        return self.table.shape[-1]

    def factors(self, distance: int) -> tuple[Any, Any]:
        """Return the factors of a move by `distance` tokens, `(2, num_pairs)` float32 each.

        The first multiply each element itself, the second multiply the other element of its pair.
        """
        cosine, sine = self.table[abs(distance)]
        sine = sine if distance >= 0 else -sine
        return torch.stack([cosine, cosine]), torch.stack([-sine, sine])

    def pairs(self, index: Any) -> Any:
        """Return an index of places, `(block_tokens, heads, dim)`, as pairs, `(block_tokens, heads, 2, num_pairs)`."""
        turned = index[..., : 2 * self.num_pairs]
        return turned.unflatten(-1, (2, -1)) if self.is_neox else turned.unflatten(-1, (-1, 2)).transpose(-1, -2)


class Layer:
    """One attention layer.

    With latent attention (MLA) "K" is the part with a rotation, which all heads share, and "V" the latent vector.

    Args:
        module: vLLM's `Attention` or `MLAAttention`.
        rotation: None if positions do not change K.
        block_tokens: tokens of a block in `module.kv_cache`.
        scratch_block: a block whose contents are overwritten and restored.
        twin: a layer with the same layout of pages, whose places are taken over.

    Attributes:
        k, v: places of K and V, `(heads, dim)` per token.
        turned: places of the part of K that a move turns, `(heads, 2, num_pairs)` per token; None without a rotation.

    Raises:
        LayoutError: the elements of K and V cannot be found in the pages.
    """

    def __init__(
        self, module: Any, rotation: Rotation | None, block_tokens: int, scratch_block: int, twin: "Layer | None" = None
    ) -> None:
        self.module = module
        self.rotation = rotation
        self.block_tokens = block_tokens
        self.is_latent = hasattr(module, "kv_lora_rank")
        cache = module.kv_cache
        if twin is None:
            self.k_index, self.v_index = find_places(module, block_tokens, scratch_block)
        else:
            self.k_index, self.v_index = twin.k_index, twin.v_index
        self.k, self.v = Strides.of(cache, self.k_index), Strides.of(cache, self.v_index)
        self.turned = None if rotation is None else Strides.of(cache, rotation.pairs(self.k_index))

    @property
    def kind(self) -> tuple[Any, ...]:
        """A value that is equal for layers whose pages have the same layout and whose K turns alike."""
        return (*layout_of(self.module), id(self.rotation))

    @property
    def turns_all_of_k(self) -> bool:
        """Whether a move turns every element of K."""
        return self.rotation is not None and 2 * self.rotation.num_pairs == self.k_index.shape[-1]

    @property
    def scale(self) -> float:
        """The factor on products of queries and keys."""
        return float(self.module.impl.scale)

    def rows(self, slots: Any) -> tuple[Any, Any]:
        """Return copies of K and V of slots, `(n, heads, dim)` each."""
        blocks, offsets = slots // self.block_tokens, slots % self.block_tokens
        k, v = (places.logical(places.rows[places.at(blocks, offsets)]) for places in (self.k, self.v))
        return k, v

    def keys(self, slots: Any) -> Any:
        """Return the vectors that queries are compared with, `(n, heads, dim)`: with MLA the latent one and K."""
        k, v = self.rows(slots)
        return torch.cat([v, k], -1) if self.is_latent else k

    def keys_of(self, inputs: tuple[Any, ...]) -> Any:
        """Return the vectors of `keys` from the arguments of the module's `forward`."""
        if self.is_latent:
            return torch.cat([inputs[1].unsqueeze(1), inputs[2].view(len(inputs[2]), 1, -1)], -1)
        return inputs[1].view(len(inputs[1]), self.module.num_kv_heads, -1)

    def queries_of(self, inputs: tuple[Any, ...]) -> Any:
        """Return the queries to compare with `keys`, `(n, query heads, dim)`, from the arguments of `forward`."""
        module, query = self.module, inputs[0]
        if not self.is_latent:
            return query.view(len(query), module.num_heads, -1)
        plain, turned = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        return torch.cat([_latent(module, plain), turned], -1)


def _latent(module: Any, plain: Any) -> Any:
    """Return the plain part of queries, `(n, heads, dims)`, as vectors to compare with latent ones.

    With AMX, only the backend has the weights for it, packed for its own product (`uses_amx_bmm` in vLLM 0.32's
    `mla_attention.py`).
    """
    if not getattr(module.impl, "uses_amx_bmm", False):
        return torch.einsum("qhp,hpl->qhl", plain, module.W_UK_T)
    found = plain.new_empty(*plain.shape[:2], module.kv_lora_rank)
    packed, scale = module.impl._w_uk_packed, module.impl._w_scale  # noqa: SLF001
    torch.ops._C.bmm_cpu(found.transpose(0, 1), plain.transpose(0, 1), packed, True, scale)  # noqa: SLF001
    return found


def layers_of(model: Any, modules: Iterable[Any], num_slots: int, scratch_block: int) -> list[Layer]:
    """Return the attention layers of a model.

    Args:
        model: has the modules among its descendants.
        modules: vLLM's attention layers, in the order of the model.
        num_slots: tokens that all pages of a layer hold.
        scratch_block: a block of the modules' caches, which is overwritten and restored.

    Raises:
        LayoutError: a layer's pages or angles cannot be understood.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    rotations: dict[int, Rotation] = {}
    twins: dict[tuple[Any, ...], Layer] = {}
    layers: list[Layer] = []
    for module in modules:
        rotary = next((each for each in parents[module].modules() if hasattr(each, "_compute_cos_sin_cache")), None)
        if rotary is not None and id(rotary) not in rotations:
            rotations[id(rotary)] = Rotation.of(rotary, module.kv_cache.device)
        rotation = None if rotary is None else rotations[id(rotary)]
        layout = layout_of(module)
        layer = Layer(module, rotation, num_slots // module.kv_cache.shape[0], scratch_block, twins.get(layout))
        twins.setdefault(layout, layer)
        layers.append(layer)
    return layers


def _digits_of(offsets: list[int]) -> Axis:
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
    return (*_digits_of(higher), (size, stride))


def _in_memory(axes: Iterable[Axis]) -> list[Digit]:
    return sorted((digit for axis in axes for digit in axis), key=lambda digit: -digit[1])
