# pyright: basic, reportMissingImports=false
"""The encoding of pages is found by looking: it is equal for kernels that do the same, whatever they are called."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `tox r -e torch` has it")

from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind
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
    """Neither rows of heads nor heads of rows: elements of all heads are neighbours."""
    return torch.stack([k.permute(0, 2, 1), v.permute(0, 2, 1)])


def rounded(k: Any, v: Any) -> Any:
    return heads_outermost((k / 2).round() * 2, v)


class Kernel:
    """Writes whole blocks as `pack` orders them."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def do_kv_cache_update(self, _module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        cache[slots[0] // TOKENS] = self.pack(k, v).flatten()


class OtherKernel(Kernel):
    """Has another name."""


def layer(
    pack: Pack, heads: int = 2, kernel: type[Kernel] = Kernel, dtype: Any = torch.bfloat16, dim: int = DIM
) -> Any:
    cache = torch.arange(BLOCKS * 2 * heads * dim * TOKENS).view(BLOCKS, -1).to(dtype)
    return SimpleNamespace(impl=kernel(pack), kv_cache=cache, num_kv_heads=heads, head_size=dim, head_size_v=dim)


def seen(*layers: Any, heads: int = 2, rows: int = 1, version: str = "0.32.0", **fields: Any) -> str:
    """Return the format of a cache with one group, of so many heads that can be cut in the whole model; 0: opaque."""
    kind = fields.pop("kind", GroupKind.FULL_ATTENTION)
    names = tuple(str(number) for number in range(len(layers)))
    ours = EngineGroup(0, kind, TOKENS, 0, names, False, False, heads)
    values = {"dtype": "bfloat16", **fields}
    part = SimpleNamespace(num_heads=layers[0].num_kv_heads if heads else 1)
    group: Any = SimpleNamespace(rows=rows, block_tokens=TOKENS, physical_block_tokens=0, part=part)
    cache = EngineCache((ours,), 1, TOKENS, 1, **values)
    return seen_format(cache, [group], dict(zip(names, layers, strict=True)), version)


def test_names_do_not_count() -> None:
    one = seen(layer(heads_outermost), version="0.32.0")
    assert one == seen(layer(heads_outermost, kernel=OtherKernel), version="0.33.1")
    assert one.startswith("vllm 0 seen ")
    assert one != seen(layer(heads_outermost), version="1.0"), "a new major version may mean other values"


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
        ("do not hold K", lambda: seen(layer(rounded))),
        ("do not lie apart", lambda: seen(layer(interleaved))),
        ("of a page do not lie apart", lambda: seen(layer(tokens_outermost), rows=1)),
    ],
)
def test_pages_that_cannot_be_understood_have_none(reason: str, call: Callable[[], str]) -> None:
    with pytest.raises(LayoutError, match=reason):
        call()


def test_the_block_that_was_looked_at_is_as_before() -> None:
    module = layer(heads_outermost)
    before = module.kv_cache.clone()
    seen(module)
    assert torch.equal(module.kv_cache, before)
