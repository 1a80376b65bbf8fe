# pyright: basic, reportMissingImports=false
"""K and V in pages of any layout before and after a move: pretend layers, compared with plain tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `tox r -e torch` has it")

from kvdepot.errors import LayoutError
from kvdepot_cpu.kernels import native_move_tokens
from kvdepot_vllm.blend.layers import Layer, Rotation
from kvdepot_vllm.blend.moves import move, token_layout

HEADS, DIM, BLOCK_TOKENS, BLOCKS = 2, 64, 32, 8
TOKENS = BLOCKS * BLOCK_TOKENS

Pack = Callable[[Any], Any]


def _tiles(block: Any) -> Any:
    """Cut K into AMX's tiles of 16 tokens, in which pairs of dims are neighbours."""
    return block.reshape(2, 16, HEADS, DIM // 2, 2).permute(2, 0, 3, 1, 4)


def _pairs_of_tokens(block: Any) -> Any:
    """Cut V into AMX's tiles of 16 dims, in which pairs of tokens are neighbours."""
    return block.reshape(BLOCK_TOKENS // 2, 2, HEADS, DIM // 16, 16).permute(2, 3, 0, 4, 1)


LAYOUTS: dict[str, tuple[Pack, Pack]] = {  # from `(block_tokens, heads, dim)` to the order of memory
    "tokens outermost": (lambda k: k, lambda v: v),
    "heads outermost": (lambda k: k.transpose(0, 1), lambda v: v.transpose(0, 1)),
    "dims outermost": (lambda k: k.permute(1, 2, 0), lambda v: v.transpose(0, 1)),
    "tiles": (_tiles, lambda v: v.transpose(0, 1)),
    "tiles of both": (_tiles, _pairs_of_tokens),
}


class Pages:
    """Pages that are written in a layout, as by an attention backend."""

    scale = 1.0

    def __init__(self, pack_k: Pack, pack_v: Pack, dtype: Any) -> None:
        self.pack_k, self.pack_v = pack_k, pack_v
        generator = torch.Generator().manual_seed(0)
        self.kv_cache = torch.zeros(BLOCKS, 2 * HEADS * DIM * BLOCK_TOKENS, dtype=dtype)
        self.k = torch.randn(TOKENS, HEADS, DIM, generator=generator).to(dtype)
        self.v = torch.randn(TOKENS, HEADS, DIM, generator=generator).to(dtype)
        self.module = SimpleNamespace(
            impl=self, kv_cache=self.kv_cache, num_heads=HEADS, num_kv_heads=HEADS, head_size=DIM, head_size_v=DIM
        )
        self.do_kv_cache_update(self.module, self.k, self.v, self.kv_cache, torch.arange(TOKENS))

    def do_kv_cache_update(self, module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        """Write whole blocks."""
        for place in range(0, len(slots), BLOCK_TOKENS):
            parts = [pack(x[place : place + BLOCK_TOKENS]) for pack, x in ((self.pack_k, k), (self.pack_v, v))]
            cache[slots[place] // BLOCK_TOKENS] = torch.cat([part.flatten() for part in parts])

    def layer(self, rotation: Rotation | None) -> Layer:
        return Layer(self.module, rotation, BLOCK_TOKENS, scratch_block=3)


class Angles:
    """A rotary embedding that scales K, as YaRN does, and rotates the first `2 * pairs` dims."""

    def __init__(self, pairs: int, *, is_neox_style: bool) -> None:
        self.frequencies = 100.0 ** -(torch.arange(pairs) / pairs)
        self.is_neox_style = is_neox_style

    def _compute_cos_sin_cache(self) -> Any:
        angles = torch.outer(torch.arange(1000.0), self.frequencies)
        return 1.25 * torch.cat([angles.cos(), angles.sin()], -1)

    def turned(self, k: Any, distances: Any) -> Any:
        """Rotate K, `(n, heads, dim)`, pair by pair as complex numbers."""
        pairs = len(self.frequencies)
        part = k[..., : 2 * pairs].double()
        part = part.unflatten(-1, (2, pairs)) if self.is_neox_style else part.unflatten(-1, (pairs, 2)).mT
        numbers = torch.complex(part[..., 0, :], part[..., 1, :])
        numbers = numbers * torch.exp(1j * torch.outer(distances.double(), self.frequencies.double()))[:, None]
        part = torch.stack([numbers.real, numbers.imag], -2)
        part = part if self.is_neox_style else part.mT
        return torch.cat([part.flatten(-2), k[..., 2 * pairs :].double()], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_are_found_and_the_scratch_block_is_restored(layout: str, dtype: Any) -> None:
    pages = Pages(*LAYOUTS[layout], dtype)
    before = pages.kv_cache.clone()
    layer = pages.layer(None)
    k, v = layer.rows(torch.arange(TOKENS))
    assert torch.equal(pages.kv_cache, before)
    assert torch.equal(k, pages.k)
    assert torch.equal(v, pages.v)


def test_a_backend_that_changes_values_is_refused() -> None:
    with pytest.raises(LayoutError, match="do not hold K as it was written"):
        Pages(lambda k: 2 * k, lambda v: v, torch.float32).layer(None)


def test_a_layout_without_a_pattern_is_refused() -> None:
    order = torch.randperm(BLOCK_TOKENS, generator=torch.Generator().manual_seed(0))
    with pytest.raises(LayoutError, match="no regular pattern"):
        Pages(lambda k: k[order], lambda v: v, torch.float32).layer(None)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("pairs", [DIM // 2, DIM // 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_turns_in_place_and_nothing_else_changes(layout: str, pairs: int, is_neox_style: bool) -> None:
    pages, angles = Pages(*LAYOUTS[layout], torch.float32), Angles(pairs, is_neox_style=is_neox_style)
    slots = torch.arange(20, 170)  # partial and whole blocks
    old = torch.arange(len(slots)) + 300
    distances = torch.where(old < 400, 57, -300)
    layer = pages.layer(Rotation.of(angles, "cpu"))
    move([layer], slots, slots, old, old + distances)
    k, v = layer.rows(torch.arange(TOKENS))
    wanted = pages.k.clone()
    wanted[slots] = angles.turned(pages.k[slots], distances).float()
    assert (k - wanted).abs().max() < 2e-4  # angles of 300 radians in float32
    assert torch.equal(v, pages.v)


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_move_to_other_slots_of_other_blocks(layout: str, shift: int) -> None:
    pages, angles = Pages(*LAYOUTS[layout], torch.float32), Angles(DIM // 2, is_neox_style=True)
    source = torch.cat([torch.arange(64, 96), torch.arange(0, 50)])
    target = torch.cat([torch.arange(224, 256), torch.arange(128, 178)]) - shift
    old = torch.arange(len(source))
    layer = pages.layer(Rotation.of(angles, "cpu"))
    move([layer, layer], source, target, old, old + 11)
    k, v = layer.rows(torch.arange(TOKENS))
    wanted_k, wanted_v = pages.k.clone(), pages.v.clone()
    wanted_k[target], wanted_v[target] = angles.turned(pages.k[source], torch.full((82,), 11)).float(), pages.v[source]
    assert (k - wanted_k).abs().max() < 1e-5
    assert torch.equal(v, wanted_v)


def test_a_move_of_halves_is_as_exact_as_they_are() -> None:
    pages, angles = Pages(*LAYOUTS["dims outermost"], torch.bfloat16), Angles(DIM // 2, is_neox_style=True)
    layer = pages.layer(Rotation.of(angles, "cpu"))
    positions = torch.arange(TOKENS)
    move([layer], positions, positions, positions, positions + 700)
    wanted = angles.turned(pages.k, torch.full((TOKENS,), 700))
    assert ((layer.rows(positions)[0].double() - wanted).abs() <= wanted.abs() / 256 + 5e-4).all()


def test_a_layer_without_rotation_is_copied_only() -> None:
    pages = Pages(*LAYOUTS["tiles"], torch.float32)
    layer = pages.layer(None)
    source, target = torch.arange(0, 40), torch.arange(130, 170)
    move([layer], source, target, source, target)
    k, v = layer.rows(target)
    assert torch.equal(k, pages.k[source])
    assert torch.equal(v, pages.v[source])


@pytest.mark.parametrize("where", ["in place", "aligned", "elsewhere", "one token on"])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("pairs", [DIM // 2, DIM // 4, 0])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("dims outermost", torch.float32),
        ("dims outermost", torch.bfloat16),
        ("dims outermost", torch.float16),
        ("tiles", torch.bfloat16),
        ("tiles of both", torch.bfloat16),
    ],
)
def test_the_compiled_move_does_what_torch_does(
    layout: str, dtype: Any, pairs: int, is_neox_style: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot_cpu.kernels.BYTES_WORTH_A_THREAD", 1)
    compiled = native_move_tokens(num_threads=2)
    if compiled is None:
        pytest.skip("the compiled move was not built, or this processor cannot run it")
    rotation = Rotation.of(Angles(pairs, is_neox_style=is_neox_style), "cpu") if pairs else None
    source = torch.cat([torch.arange(3, 96), torch.arange(100, 105)])  # 1 to 32 tokens of a block
    target = source + {"in place": 0, "aligned": 128, "elsewhere": 141, "one token on": 129}[where]
    old = torch.arange(len(source)) + 300
    new = torch.where(old < 340, old + 57, torch.where(old < 370, old - 300, old))
    layers = [Pages(*LAYOUTS[layout], dtype).layer(rotation) for _ in range(4)]
    # In tiles, neighbouring dims that rotate together would have to change places.
    assert (token_layout(layers[0]) is None) == (layout != "dims outermost" and pairs > 0 and not is_neox_style)
    move(layers[:2], source, target, old, new, compiled)
    move(layers[2:], source, target, old, new)
    for got, wanted in (layers[::2], layers[1::2]):
        (k, v), (wanted_k, wanted_v) = (layer.rows(torch.arange(TOKENS)) for layer in (got, wanted))
        assert ((k.float() - wanted_k.float()).abs() <= 4 * torch.finfo(dtype).eps).all()  # torch may round once more
        assert torch.equal(k[..., 2 * pairs :], wanted_k[..., 2 * pairs :])
        assert torch.equal(v, wanted_v)
        if layout != "dims outermost":  # there, both ways gather
            assert torch.equal(got.module.kv_cache, wanted.module.kv_cache)


@pytest.mark.parametrize("shift", [0, 1, 21, 48, 128])
def test_pages_that_amx_multiplies_are_moved_as_torch_does_page_by_page(shift: int) -> None:
    """vLLM's attention kernel for AMX writes the pages. That needs no AMX, but a build that supports it."""
    from vllm import _custom_ops as ops

    compiled = native_move_tokens(1)
    if compiled is None:
        pytest.skip("the compiled move was not built, or this processor cannot run it")
    heads, dim, block_tokens, blocks = 3, 64, 128, 6
    generator = torch.Generator().manual_seed(5)

    class Amx:
        scale = 1.0

        def __init__(self) -> None:
            self.kv_cache = torch.zeros(blocks, 2, heads, block_tokens, dim, dtype=torch.bfloat16)
            self.module = SimpleNamespace(
                impl=self, kv_cache=self.kv_cache, num_heads=heads, num_kv_heads=heads, head_size=dim, head_size_v=dim
            )

        def do_kv_cache_update(self, module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
            ops.cpu_attn_reshape_and_cache(k, v, *cache.unbind(1), slots, "amx")

    page, row = Amx(), torch.zeros(1, heads, dim, dtype=torch.bfloat16)
    try:
        page.do_kv_cache_update(page.module, row, row, page.kv_cache, torch.zeros(1, dtype=torch.long))
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip("vLLM's build for this processor has no kernel for AMX")
    rotation = Rotation.of(Angles(dim // 2, is_neox_style=True), "cpu")
    got, wanted = (Layer(Amx().module, rotation, block_tokens, scratch_block=0) for _ in range(2))
    layout = token_layout(got)
    assert layout is not None
    assert (layout.k_lanes, layout.k_tile_tokens, layout.v_lanes, layout.v_group_dims) == (2, 16, 2, 16)
    tokens = torch.arange(blocks * block_tokens)
    k, v = (torch.randn(len(tokens), heads, dim, generator=generator).bfloat16() for _ in range(2))
    source, old = torch.arange(7, 300), torch.arange(293) + 11
    for layer, way in ((got, compiled), (wanted, None)):
        layer.module.impl.do_kv_cache_update(layer.module, k, v, layer.module.kv_cache, tokens)
        move([layer], source, source + 300 + shift if shift else source, old, old + 77, way)
    for page, (moved, by_torch) in enumerate(zip(got.module.kv_cache, wanted.module.kv_cache, strict=True)):
        assert torch.equal(moved, by_torch), page
    assert torch.equal(got.rows(source + 300 + shift)[1], v[source] if shift else v[source + 300])


@pytest.mark.parametrize("layout", ["tokens outermost", "heads outermost", "tiles", "tiles of both"])
def test_other_layouts_are_left_to_torch(layout: str) -> None:
    assert token_layout(Pages(*LAYOUTS[layout], torch.float32).layer(None)) is None


def test_a_compiled_move_of_odd_values_is_that_of_torch() -> None:
    compiled = native_move_tokens(1)
    if compiled is None:
        pytest.skip("the compiled move was not built, or this processor cannot run it")
    rotation, slots = Rotation.of(Angles(DIM // 2, is_neox_style=True), "cpu"), torch.arange(TOKENS)
    for dtype in (torch.bfloat16, torch.float16):
        got, wanted = (Pages(*LAYOUTS["dims outermost"], dtype) for _ in range(2))
        for pages, way in ((got, compiled), (wanted, None)):
            odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 6e4, 1e-7], dtype=dtype)
            layer = pages.layer(rotation)
            pages.kv_cache.view(-1)[: 7 * 500] = odd.repeat(500)
            move([layer], slots, slots, slots, slots + 9, way)
        assert torch.equal(got.kv_cache.isnan(), wanted.kv_cache.isnan())
        torch.testing.assert_close(got.kv_cache, wanted.kv_cache, equal_nan=True)
