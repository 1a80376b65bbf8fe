# pyright: basic, reportMissingImports=false
"""Moves tokens' KV to other slots and positions: K is rotated by the distance, everything else is copied.

Slots and positions are int64 on the CPU. The CPU backend has a compiled move for the layouts of its pages. Otherwise, a
CPU moves slices of blocks, each of which fits its cache. A device gathers and scatters tokens, and so does a CPU if
tokens are in tiles that a slice would cut. The work on indices and angles is done once per kind of layer.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch

from kvdepot.kvcache import MoveTokens, TokenLayout
from kvdepot_vllm.blend.layers import Axis, Layer, Strides

_SLICE_ELEMENTS: Final = 1 << 12  # elements of K in a block: below, moving slices costs more than gathering
_GATHERED_ELEMENTS: Final = 1 << 18  # elements of K gathered at once on a CPU: 1 MiB in float32, which fits its cache
_GATHERED_ELEMENTS_OF_DEVICES: Final = 1 << 25  # on a device: 128 MiB in float32, in few launches
_COMPILED: Final = (torch.bfloat16, torch.float16, torch.float32)


def move(
    layers: Sequence[Layer], from_slots: Any, to_slots: Any, old: Any, new: Any, compiled: MoveTokens | None = None
) -> None:
    """Move tokens' KV. An empty move is allowed.

    Args:
        layers: all attention layers.
        from_slots: `(n,)`, the slots with the KV.
        to_slots: `(n,)`, the slots to fill. A token either stays in its slot, or its source is no token's target and
            its target no token's source.
        old: `(n,)`, the positions at which the KV was computed.
        new: `(n,)`, its positions from now on. Long stretches of one distance are fast.
        compiled: the backend's compiled move, used for pages in host memory whose layout it supports; None without one.
    """
    if not len(from_slots):
        return
    in_place = bool((from_slots == to_slots).all())
    kinds: dict[Any, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    distances = new - old
    for alike in kinds.values():
        for begin, end in _stretches(distances[1:] == distances[:-1]):
            distance = int(distances[begin]) if alike[0].rotation is not None else 0
            if not in_place or distance:
                source, target = from_slots[begin:end], to_slots[begin:end]
                layout = token_layout(alike[0]) if compiled is not None else None
                if compiled is not None and layout is not None:
                    _move_compiled(compiled, layout, alike, source, target, distance, in_place=in_place)
                else:
                    _move(alike, source, target, distance, in_place=in_place)


def token_layout(layer: Layer) -> TokenLayout | None:
    """Return the layout of a layer's pages, None if the compiled move does not support it."""
    cache = layer.module.kv_cache
    (k_tokens, k_heads, k_dims), (v_tokens, v_heads, v_dims) = layer.k.axes, layer.v.axes
    if cache.device.type != "cpu" or cache.dtype not in _COMPILED or not (k_tokens and k_dims and v_tokens and v_dims):
        return None
    (k_tile_tokens, k_lanes), (v_group_dims, v_lanes) = k_tokens[-1], v_dims[-1]
    k_rows, v_rows = _rows(k_dims, k_lanes), _rows(v_tokens, v_lanes)
    if k_rows is None or v_rows is None or (k_lanes == 2 and cache.dtype != torch.bfloat16):
        return None
    if max(map(len, (k_rows, v_rows, k_heads, v_heads))) > 1 or max(len(k_tokens), len(v_dims)) > 2:
        return None
    if (v_rows and v_rows[0][1] != v_group_dims * v_lanes) or (v_lanes == 2 and cache.element_size() != 2):
        return None
    pairs, pair_rows, member_stride = 0, (), 0
    if layer.turned is not None:
        assert layer.rotation is not None
        pairs = layer.rotation.num_pairs
        *_, members, pair_dims = layer.turned.axes
        pair_rows, member_stride = _rows(pair_dims, k_lanes), members[0][1]
        if pair_rows is None or len(pair_rows) > 1:
            return None
    return TokenLayout(
        item_bytes=cache.element_size(),
        is_bfloat16=cache.dtype == torch.bfloat16,
        block_stride=cache.stride(0),
        heads=layer.k_index.shape[1],
        k_offset=int(layer.k_index[0, 0, 0]),
        k_head_stride=_stride(k_heads),
        k_row_stride=_stride(k_rows),
        k_dims=layer.k_index.shape[2],
        k_lanes=k_lanes,
        k_tile_tokens=k_tile_tokens,
        k_tile_stride=_stride(k_tokens[:-1]),
        v_offset=int(layer.v_index[0, 0, 0]),
        v_head_stride=_stride(v_heads),
        v_dims=layer.v_index.shape[2],
        v_lanes=v_lanes,
        v_group_dims=v_group_dims,
        v_group_stride=_stride(v_dims[:-1]),
        pairs=pairs,
        pair_row_stride=_stride(pair_rows),
        member_stride=member_stride,
    )


def _rows(axis: Axis, lanes: int) -> Axis | None:
    """Return the digits of an axis without its lanes; None if it does not have them.

    One lane needs no digit. Two lanes are an innermost digit of two neighbouring elements.
    """
    if lanes == 1:
        return axis
    return axis[:-1] if lanes == 2 and axis[-1:] == ((2, 1),) else None


def _stride(axis: Axis) -> int:
    """Return the stride of an axis with one digit; 0 for an axis of length 1."""
    return axis[0][1] if axis else 0


def _follows(source: Any, target: Any, size: int) -> Any:
    """Return for each token but the first whether it continues the slice of a block that holds the token before."""
    follows = (source[1:] == source[:-1] + 1) & (target[1:] == target[:-1] + 1)
    return follows & (source[1:] % size != 0) & (target[1:] % size != 0)


def _move_compiled(
    compiled: MoveTokens,
    layout: TokenLayout,
    layers: Sequence[Layer],
    source: Any,
    target: Any,
    distance: int,
    *,
    in_place: bool,
) -> None:
    """Move tokens by one distance, in layers of one kind, by the compiled move."""
    size, rotation = layers[0].block_tokens, layers[0].rotation
    cuts = torch.tensor(_stretches(_follows(source, target, size)))
    starts = cuts[:, 0]
    source, target = source[starts], target[starts]
    slices = torch.stack([source // size, source % size, target // size, target % size, cuts[:, 1] - starts], 1)
    turn = torch.empty(2, 0)
    if rotation is None or not distance:
        layout = layout._replace(pairs=0)
    else:
        turn = rotation.table[abs(distance)].clone()
        turn[1] *= 1 if distance > 0 else -1
    pages = [layer.module.kv_cache.data_ptr() for layer in layers]
    compiled(pages, slices.numpy(), layout, turn.numpy(), in_place)


def _move(layers: Sequence[Layer], source: Any, target: Any, distance: int, *, in_place: bool) -> None:
    """Move tokens by one distance, in layers of one kind."""
    layer = layers[0]
    size, is_cpu = layer.block_tokens, layer.module.kv_cache.device.type == "cpu"
    left = [torch.empty(0, dtype=torch.int64)]  # indices of the tokens that are gathered
    slices: list[_Slice] = []
    elements = layer.k_index.numel()
    if not is_cpu or elements < _SLICE_ELEMENTS:
        left.append(torch.arange(len(source)))
    else:
        for begin, end in _stretches(_follows(source, target, size)):
            if end - begin == size or layer.k.token_dim is not None:
                slices.append(_Slice(*divmod(int(source[begin]), size), *divmod(int(target[begin]), size), end - begin))
            else:
                left.append(torch.arange(begin, end))
    if slices:
        turn = _Turn.of(layer, distance, in_pages=True)
        for each in layers:
            for one in slices:
                one.move(each, turn, in_place=in_place)
    most = (_GATHERED_ELEMENTS if is_cpu else _GATHERED_ELEMENTS_OF_DEVICES) * size // elements
    for tokens in torch.cat(left).split(max(1, most)):
        _gather(layers, source[tokens], target[tokens], _Turn.of(layer, distance, in_pages=False), in_place=in_place)


class _Turn(NamedTuple):
    """A turn of K by one distance, for layers of one kind."""

    own: Any  # factors of each element
    other: Any  # factors of the other element of its pair
    dim: int  # the dimension of the two elements of a pair

    @classmethod
    def of(cls, layer: Layer, distance: int, *, in_pages: bool) -> "_Turn | None":
        """Return the turn for `Strides.pages` or for `Strides.rows`; None if nothing turns."""
        places = layer.turned
        if places is None or layer.rotation is None or not distance:
            return None
        own, other = (places.spread(each, in_pages=in_pages) for each in layer.rotation.factors(distance))
        return cls(own, other, places.dim_of(2, in_pages=in_pages))

    def __call__(self, values: Any) -> Any:
        """Return values after the turn, float32."""
        values = values.float()
        return (values * self.own).addcmul_(values.flip(self.dim), self.other)


class _Slice(NamedTuple):
    """Neighbouring tokens of one block."""

    from_block: int
    from_offset: int
    to_block: int
    to_offset: int
    length: int

    def move(self, layer: Layer, turn: _Turn | None, *, in_place: bool) -> None:
        """Move the tokens in one layer."""
        if not in_place:
            for places in (layer.v,) if turn is not None and layer.turns_all_of_k else (layer.k, layer.v):
                source = self._part(places, self.from_block, self.from_offset)
                self._part(places, self.to_block, self.to_offset).copy_(source)
        if turn is not None and layer.turned is not None:
            source = self._part(layer.turned, self.from_block, self.from_offset)
            self._part(layer.turned, self.to_block, self.to_offset).copy_(turn(source))

    def _part(self, places: Strides, block: int, offset: int) -> Any:
        page, dim = places.pages[block], places.token_dim
        whole = dim is None or page.shape[dim] == self.length
        return page if whole else page.narrow(dim, offset, self.length)


def _gather(layers: Sequence[Layer], source: Any, target: Any, turn: _Turn | None, *, in_place: bool) -> None:
    """Move single tokens in layers of one kind."""
    if not len(source):
        return
    size, device = layers[0].block_tokens, layers[0].module.kv_cache.device
    source, target = (((slots // size).to(device), (slots % size).to(device)) for slots in (source, target))
    for layer in layers:
        if not in_place:
            for places in (layer.k, layer.v):
                places.rows[places.at(*target)] = places.rows[places.at(*source)]
        if turn is not None and layer.turned is not None:
            rows, index = layer.turned.rows, layer.turned.at(*target)
            rows[index] = turn(rows[index]).to(rows.dtype)


def _stretches(follows: Any) -> list[tuple[int, int]]:
    """Return begin and end of the stretches in which each item but the first follows the one before.

    `follows` has a value for each item but the first, so there is at least one item.
    """
    cuts = (~follows).nonzero().squeeze(1) + 1
    return list(pairwise([0, *cuts.tolist(), len(follows) + 1]))
