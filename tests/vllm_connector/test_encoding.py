# pyright: basic, reportMissingImports=false
"""The encoding of pages is found by probing: kernels that write alike have the same encoding, whatever their names."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `tox r -e torch` has it")

from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind, Plane
from kvdepot_vllm.encoding import seen_format
from kvdepot_vllm.groups import EngineCache, EngineGroup

DIM, TOKENS, BLOCKS = 32, 16, 4

Pack = Callable[[Any, Any], Any]


def heads_outermost(k: Any, v: Any) -> Any:
    return torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], 1)


def tokens_outermost(k: Any, v: Any) -> Any:
    return torch.cat([k, v], -1)


def dims_outermost(k: Any, v: Any) -> Any:
    return torch.cat([k.permute(1, 2, 0).flatten(1), v.transpose(0, 1).flatten(1)], 1)


def values_first(k: Any, v: Any) -> Any:
    return heads_outermost(v, k)


def interleaved(k: Any, v: Any) -> Any:
    """Pack elements of all heads next to each other: neither rows of heads nor heads of rows."""
    return torch.stack([k.permute(0, 2, 1), v.permute(0, 2, 1)])


def rows_of_pairs(k: Any, v: Any) -> Any:
    return torch.cat([each.view(-1, 2, *each.shape[1:]).transpose(1, 2).flatten(2) for each in (k, v)], -1)


def odd_tokens_backwards(k: Any, v: Any) -> Any:
    k = k.clone()
    k[1::2] = k[1::2].flip(-1)
    return tokens_outermost(k, v)


class Kernel:
    """Writes each token of a block to its place in `pack`."""

    def __init__(self, pack: Pack, tokens: int = TOKENS) -> None:
        self.pack = pack
        self.tokens = tokens

    def pack_of(self, block: int) -> Pack:
        return self.pack

    def kept(self, values: Any) -> Any:
        return values

    def do_kv_cache_update(self, _module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        ids = torch.arange(self.tokens * k[0].numel()).view(self.tokens, *k.shape[1:])
        for slot, *token in zip(slots.tolist(), k, v, strict=True):
            block, place = divmod(slot, self.tokens)
            places = self.pack_of(block)(ids, ids + ids.numel()).flatten().argsort().view(2, self.tokens, -1)
            for values, where in zip(token, places[:, place], strict=True):
                cache[block][where] = self.kept(values).flatten()


class OtherKernel(Kernel):
    """The same kernel with another name."""


class Even(Kernel):
    def kept(self, values: Any) -> Any:
        return (values / 2).round() * 2


class Rounding(Kernel):
    """Rounds to bfloat16, which keeps integers up to 256."""

    def kept(self, values: Any) -> Any:
        return values.bfloat16().to(values.dtype)


class Positive(Kernel):
    def kept(self, values: Any) -> Any:
        return values.abs()


class OddBlocks(Kernel):
    def pack_of(self, block: int) -> Pack:
        return self.pack if block % 2 else dims_outermost


class FirstBlock(Kernel):
    def pack_of(self, block: int) -> Pack:
        return self.pack if block else dims_outermost


class InOrder(Kernel):
    """Writes tokens in order and ignores the order of their slots."""

    def do_kv_cache_update(self, _module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        super().do_kv_cache_update(_module, k, v, cache, slots.sort().values)


class Scaling(Kernel):
    """Writes a value of its own after K and V of a block if K has negative elements, else 0."""

    def do_kv_cache_update(self, _module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        super().do_kv_cache_update(_module, k, v, cache, slots)
        cache[slots // TOKENS, -1] = (k.min() < 0).to(cache.dtype)


def layer(
    pack: Pack,
    heads: int = 2,
    kernel: type[Kernel] = Kernel,
    dtype: Any = torch.bfloat16,
    dim: int = DIM,
    padding: int = 0,
    tokens: int = TOKENS,
) -> Any:
    """Return a layer. Each block has `padding` elements after K and V."""
    cache = torch.arange(BLOCKS * (2 * heads * dim * tokens + padding)).view(BLOCKS, -1).to(dtype)
    return SimpleNamespace(
        impl=kernel(pack, tokens), kv_cache=cache, num_kv_heads=heads, head_size=dim, head_size_v=dim
    )


def seen(*layers: Any, heads: int = 2, rows: int = 1, version: str = "0.32.0", **fields: Any) -> str:
    """Return the format of a cache with one group. `heads` are the whole model's heads that can be cut, 0 if opaque.

    `num_layers` are the whole model's layers if stages can divide them.
    """
    kind, num_layers = fields.pop("kind", GroupKind.FULL_ATTENTION), fields.pop("num_layers", 0)
    names = fields.pop("names", tuple(str(number) for number in range(len(layers))))
    tokens = fields.pop("tokens", TOKENS)
    ours = EngineGroup(0, kind, tokens, 0, names, False, False, heads, 0, num_layers)
    values = {"dtype": "bfloat16", **fields}
    part = SimpleNamespace(num_heads=layers[0].num_kv_heads if heads else 1)
    plane = Plane(num_layers or 1, heads or 1)
    group: Any = SimpleNamespace(rows=rows, block_tokens=tokens, physical_block_tokens=0, part=part, plane=plane)
    cache = EngineCache((ours,), 1, tokens, 1, **values)
    return seen_format(cache, [group], dict(zip(names, layers, strict=True)), version)


def test_names_do_not_count() -> None:
    one = seen(layer(heads_outermost), version="0.32.0")
    assert one == seen(layer(heads_outermost, kernel=OtherKernel), version="0.33.1")
    assert one.startswith("vllm 0 seen ")
    assert one != seen(layer(heads_outermost), version="1.0"), "a new major version may mean other values"


def test_pages_between_those_of_other_layers_have_the_same_encoding() -> None:
    """With the block outermost, the pages of all layers of a block lie together."""
    between = layer(heads_outermost)
    between.kv_cache = between.kv_cache.repeat(1, 3)[:, : between.kv_cache.shape[1]]
    assert not between.kv_cache.is_contiguous()
    assert seen(between) == seen(layer(heads_outermost)) != seen(layer(tokens_outermost), rows=TOKENS)


def test_blocks_of_any_number_of_rows_have_one_encoding() -> None:
    def of(pack: Pack, tokens: int, rows: int) -> str:
        return seen(layer(pack, tokens=tokens), tokens=tokens, rows=rows)

    assert len({of(tokens_outermost, tokens, tokens) for tokens in (8, 16, 32)}) == 1
    assert len({of(heads_outermost, tokens, 1) for tokens in (8, 16, 32)}) == 3
    assert of(rows_of_pairs, 16, 8) == of(rows_of_pairs, 32, 16) != of(tokens_outermost, 16, 16)
    with pytest.raises(LayoutError, match="the rows of a page differ"):
        of(odd_tokens_backwards, 16, 16)


def test_stages_have_the_encoding_of_the_whole_model() -> None:
    def of(first: int, stop: int, *packs: Pack, num_stages: int, name: str = "layers.{}.attn") -> str:
        names = tuple(name.format(number) for number in range(first, stop))
        each = [layer(pack) for pack in packs * (stop - first)][: stop - first]
        return seen(*each, names=names, num_layers=3, num_stages=num_stages)

    whole = of(0, 3, heads_outermost, num_stages=1)
    assert whole == of(0, 1, heads_outermost, num_stages=2) == of(1, 3, heads_outermost, num_stages=2)
    assert whole != of(0, 3, dims_outermost, num_stages=1)
    assert whole != of(0, 3, heads_outermost, num_stages=1, name="layers.{}.cross"), "layers of another kind"
    with pytest.raises(LayoutError, match="layers of one group have different pages"):
        of(0, 3, heads_outermost, dims_outermost, num_stages=1)
    with pytest.raises(LayoutError, match="does not see the layers of the others"):
        seen(layer(heads_outermost), num_stages=2)


@pytest.mark.parametrize(("pack", "rows"), [(heads_outermost, 1), (tokens_outermost, TOKENS), (dims_outermost, 1)])
def test_ranks_with_fewer_heads_have_the_encoding_of_those_with_more(pack: Pack, rows: int) -> None:
    assert len({seen(layer(pack, heads), rows=rows) for heads in (1, 2, 4)}) == 1


def test_whatever_lies_elsewhere_has_another_encoding() -> None:
    found = [
        seen(layer(heads_outermost)),
        seen(layer(tokens_outermost), rows=TOKENS),
        seen(layer(dims_outermost)),
        seen(layer(values_first)),
        seen(layer(heads_outermost, dtype=torch.float32)),
        seen(layer(heads_outermost, dim=2 * DIM)),
        seen(layer(heads_outermost), layer(dims_outermost)),
        seen(layer(dims_outermost), layer(heads_outermost)),
        seen(layer(heads_outermost), layer(heads_outermost)),
        seen(layer(heads_outermost), layer(heads_outermost), names=("1", "0")),
        seen(layer(interleaved), heads=0),
        seen(layer(interleaved, 4), heads=0),
        seen(layer(heads_outermost), heads=0),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("written as fp8", lambda: seen(layer(heads_outermost), dtype="fp8")),
        ("pipeline", lambda: seen(layer(heads_outermost), num_stages=2)),
        ("recurrent", lambda: seen(layer(heads_outermost), kind=GroupKind.RECURRENT)),
        ("do not hold K", lambda: seen(layer(heads_outermost, kernel=Even))),
        ("do not lie apart", lambda: seen(layer(interleaved))),
        ("of a page do not lie apart", lambda: seen(layer(tokens_outermost), rows=1)),
    ],
)
def test_pages_that_cannot_be_understood_have_none(reason: str, call: Callable[[], str]) -> None:
    with pytest.raises(LayoutError, match=reason):
        call()


@pytest.mark.promise(70)
@pytest.mark.parametrize("kernel", [Rounding, Positive, OddBlocks, FirstBlock, InOrder])
def test_a_kernel_that_only_small_numbers_in_order_in_one_block_do_not_tell_apart_has_none(
    kernel: type[Kernel],
) -> None:
    with pytest.raises(LayoutError, match="hold the written bits"):
        seen(layer(heads_outermost, kernel=kernel, dtype=torch.float32), dtype="float32")


@pytest.mark.promise(70)
def test_a_kernel_that_writes_more_than_k_and_v_has_none() -> None:
    padded = {"pack": heads_outermost, "padding": 2 * DIM}
    assert seen(layer(**padded), heads=0)
    with pytest.raises(LayoutError, match="hold the written bits"):
        seen(layer(**padded, kernel=Scaling), heads=0)


@pytest.mark.parametrize("kernel", [Kernel, Even, Rounding])
def test_blocks_that_were_looked_at_are_as_before(kernel: type[Kernel]) -> None:
    module = layer(heads_outermost, kernel=kernel, dtype=torch.float32)
    before = module.kv_cache.clone()
    with contextlib.suppress(LayoutError):
        seen(module, dtype="float32")
    assert torch.equal(module.kv_cache, before)
