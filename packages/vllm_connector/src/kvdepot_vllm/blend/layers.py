# pyright: basic, reportMissingImports=false
"""A blender's view of attention layers: the places of K and V of a token, and the rotation of K by its position.

Neither is known beforehand. The places are found by experiment (`kvdepot_vllm.encoding`). The rotation comes from the
layer's rotary embedding, recomputed in float32, because the engine's table has the precision of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvdepot.errors import LayoutError
from kvdepot_vllm.blend.strides import Strides
from kvdepot_vllm.encoding import find_places, layout_of


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
        """Return the rotation of vLLM's `RotaryEmbeddingBase`. A factor on K, such as YaRN's, is divided out.

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
