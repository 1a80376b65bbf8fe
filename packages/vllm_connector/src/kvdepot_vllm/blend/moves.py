# pyright: basic, reportMissingImports=false
"""Moves tokens' KV to other slots and positions: K is turned by the distance, everything else is copied.

Slots and positions are CPU int64. A move is cut into pieces of one distance, and those into batches: on a CPU a batch
stays in the cache. Whole blocks that stay in place are turned as they lie in memory; other tokens are gathered.
Indices and angles are worked out once for each kind of layer.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from kvdepot_vllm.blend.layers import Layer

_BATCH_ELEMENTS: Final = 1 << 18  # of K, on a CPU
_BATCH_ELEMENTS_OF_DEVICES: Final = 1 << 25


def move(layers: Sequence[Layer], from_slots: Any, to_slots: Any, old: Any, new: Any) -> None:
    """Move tokens' KV. No tokens are no error.

    Args:
        layers: all attention layers.
        from_slots: `(n,)`, the slots with the KV.
        to_slots: `(n,)`, the slots to fill. Equal to `from_slots` for KV that is in place; otherwise the two have no
            slot in common.
        old: `(n,)`, the positions at which the KV was computed.
        new: `(n,)`, its positions from now on.
    """
    in_place = bool((from_slots == to_slots).all())
    kinds: dict[Any, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    for alike in kinds.values():
        for begin, end, distance in _runs(new - old):
            if in_place and distance == 0:
                continue
            for batch in _batches(alike[0], from_slots[begin:end], in_place=in_place):
                part = slice(begin + batch.start, begin + batch.stop)
                _Batch(alike[0], from_slots[part], None if in_place else to_slots[part], distance).move(alike)


class _Batch:
    """Tokens that move at once by the same distance.

    Args:
        layer: one of the kind.
        target: None for tokens that stay in place.
    """

    def __init__(self, layer: Layer, source: Any, target: Any | None, distance: int) -> None:
        size, device = layer.block_tokens, layer.module.kv_cache.device

        def index(slots: Any) -> tuple[Any, ...]:
            return layer.k.at((slots // size).to(device), (slots % size).to(device))

        self._whole = target is None and _is_whole(source, size)
        self._source = ((source[::size] // size).to(device),) if self._whole else index(source)
        self._target = self._source if target is None else index(target)
        self._in_place = target is None
        self._angles: tuple[Any, Any] | None = None
        if layer.rotation is not None and layer.pair is not None and distance:
            cosine, sine = layer.rotation.angles(distance)
            places = layer.pair[0]
            self._angles = places.spread(cosine, over_pages=self._whole), places.spread(sine, over_pages=self._whole)

    def move(self, layers: Sequence[Layer]) -> None:
        """Move the tokens' KV in every layer of the kind."""
        for layer in layers:
            if not self._in_place:
                for places in (layer.k, layer.v):
                    places.rows[self._target] = places.rows[self._source]
            if self._angles is not None:
                self._turn(layer)

    def _turn(self, layer: Layer) -> None:
        assert self._angles is not None
        assert layer.pair is not None
        cosine, sine = self._angles
        views = [places.pages if self._whole else places.rows for places in layer.pair]
        first, second = (view[self._target].float() for view in views)
        turned = first * cosine
        turned.addcmul_(second, sine, value=-1)
        second *= cosine
        second.addcmul_(first, sine)
        for view, values in zip(views, (turned, second), strict=True):
            view[self._target] = values.to(view.dtype)


def _runs(distances: Any) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and distance of the longest runs of one distance."""
    if not len(distances):
        return
    cuts = [0, *((distances[1:] != distances[:-1]).nonzero().squeeze(1) + 1).tolist(), len(distances)]
    for begin, end in pairwise(cuts):
        yield begin, end, int(distances[begin])


def _batches(layer: Layer, slots: Any, *, in_place: bool) -> Iterator[slice]:
    """Cut tokens into batches: whole blocks by themselves if they stay in place."""
    size = layer.block_tokens
    is_cpu = layer.module.kv_cache.device.type == "cpu"
    elements = len(layer.k_index[0].flatten()) * size
    most = max(1, (_BATCH_ELEMENTS if is_cpu else _BATCH_ELEMENTS_OF_DEVICES) // elements) * size
    head, body = len(slots), 0
    if in_place:
        head = min(int(-slots[0] % size), len(slots))
        body = (len(slots) - head) // size * size
        if not _is_whole(slots[head : head + body], size):
            head, body = len(slots), 0
    for begin, end in ((0, head), (head, head + body), (head + body, len(slots))):
        for start in range(begin, end, most):
            yield slice(start, min(start + most, end))


def _is_whole(slots: Any, block_tokens: int) -> bool:
    """Return whether slots are all those of some blocks, in order."""
    if len(slots) % block_tokens:
        return False
    blocks = slots.view(-1, block_tokens)
    return bool((blocks == blocks[:, :1] // block_tokens * block_tokens + slots.new_tensor(range(block_tokens))).all())
