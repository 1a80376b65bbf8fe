# pyright: basic, reportMissingImports=false
"""The KV cache layout that the connector requests from vLLM, and how it handles each of vLLM's layouts."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.backends import Capability
from kvdepot.errors import ConfigError
from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import (
    EngineCache,
    EngineGroup,
    Unsupported,
    engine_cache,
    heads_of,
    layers_of,
    lie_apart,
    named_format,
)
from kvdepot_vllm.settings import Settings, requested_layout
from support.vllm.engines import RunCode


@pytest.mark.parametrize(
    ("wish", "is_cuda", "block_tokens", "expected"),
    [
        ("auto", True, 16, "BLNHC"),
        ("auto", True, 64, "BLNHC"),
        ("auto", True, None, "BLNHC"),
        ("auto", True, 128, None),  # kernels may need smaller blocks, and vLLM cannot split these
        ("auto", False, 16, None),
        ("engine", True, 16, None),
        ("LBHNC", True, 16, "LBHNC"),
        ("BLHNC", True, 256, "BLHNC"),
        ("BLHNC", False, 16, "BLHNC"),
    ],
)
def test_all_layers_of_a_block_are_wished_together_on_cuda(
    wish: str, is_cuda: bool, block_tokens: int | None, expected: str | None
) -> None:
    assert requested_layout(wish, is_cuda=is_cuda, block_tokens=block_tokens) == expected


@pytest.mark.parametrize(("capability", "expected"), [(8, "BLNHC"), (9, "BLNHC"), (10, "BLHNC"), (12, "BLHNC")])
def test_where_flashinfer_wants_the_heads_first_vllm_is_asked_for_that(capability: int, expected: str) -> None:
    """If the attention backend refuses the requested layout, blocks have one run per layer."""
    assert requested_layout("auto", is_cuda=True, block_tokens=16, capability=capability) == expected
    assert requested_layout("auto", is_cuda=True, block_tokens=128, capability=capability) is None
    assert requested_layout("LBNHC", is_cuda=True, block_tokens=16, capability=capability) == "LBNHC"


WISH = """
from types import SimpleNamespace as Space
import vllm.platforms
from kvdepot_vllm.connector import KVDepotConnector
def wish(block_size=16, **extra):
    transfer = Space(kv_connector_extra_config={f"kvdepot.{name}": value for name, value in extra.items()})
    return KVDepotConnector.get_required_kvcache_layout(
        Space(kv_transfer_config=transfer, cache_config=Space(block_size=block_size)))
print(wish(), wish(kv_cache_layout="LBHNC"))
vllm.platforms._current_platform = Space(is_cuda=lambda: True, get_device_capability=lambda: None)
print(wish(), wish(block_size=128), wish(kv_cache_layout="engine"))
vllm.platforms._current_platform.get_device_capability = lambda: Space(major=10, minor=0)
print(wish(), wish(kv_cache_layout="BLNHC"))
try:
    wish(kv_cache_layuot="BLNHC")
except Exception as error:
    print(type(error).__name__)
"""


def test_vllm_is_asked_on_cuda_only(run_code: RunCode) -> None:
    """On CPU nothing changes, as vLLM has only one layout there."""
    assert run_code(WISH).splitlines()[-4:] == ["None LBHNC", "BLNHC None None", "BLHNC BLNHC", "ConfigError"]


VIEWS = """
import torch
from types import SimpleNamespace as Space
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout
from kvdepot.errors import LayoutError
from kvdepot.copying.arrays import page_layout_of
from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache, EngineGroup, worker_groups

LAYERS, BLOCKS = 3, 8
spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
page = spec.page_size_bytes
raw = torch.zeros(LAYERS * BLOCKS * page, dtype=torch.int8)
names = [f"layer{number}" for number in range(LAYERS)]
cache = EngineCache((EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, tuple(names), False, False),), 1, 16, 1, "", "")
for layout in KVCacheLayout:
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    place = KVCacheTensor(size=raw.numel(), layers=names, layer_stride=layer_stride, block_stride=block_stride)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, place)
    (group,) = worker_groups(cache, dict(zip(names, views)), BLOCKS)
    try:
        pages = [page_layout_of(tensor, "cpu") for tensor in group.tensors]
    except LayoutError as error:
        print(layout.name, "refused", "not contiguous" in str(error))
        continue
    assert all((p.page_size_bytes, p.num_blocks) == (page, BLOCKS) for p in pages)
    together = all(b.address == a.address + page for a, b in zip(pages, pages[1:]))
    whole = pages[0].stride_bytes == LAYERS * page
    print(layout.name, "one run a block" if together and whole else "one run a layer")
"""


def test_each_layout_is_understood_or_refused(run_code: RunCode) -> None:
    """Uses vLLM's own views of one allocation. The worker refuses a layout that scatters a page, with a reason."""
    found = dict(line.split(" ", 1) for line in run_code(VIEWS).splitlines() if line.split()[0].isupper())
    assert found == {
        "LBHNC": "one run a layer",
        "LBNHC": "one run a layer",
        "LHBNC": "refused True",
        "BLHNC": "one run a block",
        "BLNHC": "one run a block",
        "BHLNC": "refused True",
    }


# --- settings of one backend ------------------------------------------------------------------------------------------


def backend(*settings: str, capabilities: Sequence[Capability] = (Capability.ASYNCHRONOUS,)) -> Any:
    """Return the part of a backend that the settings use."""
    return SimpleNamespace(name="it", settings=frozenset(settings), capabilities=frozenset(capabilities))


cpu, cuda, hpu = backend("copy_threads"), backend("mode", "batch_runs", "gather_kernel"), backend(capabilities=())


def test_each_backend_is_told_its_own_settings_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    extra: dict[str, Any] = {
        "kvdepot.copy_threads": 2,
        "kvdepot.gather_kernel": True,
        "kvdepot.batch_runs": 512,
        "kvdepot.mode": "ipc",
    }
    settings = Settings.parse(extra)
    assert settings.backend_options(cpu) == {"copy_threads": 2}
    ignored = {f"kvdepot.{name} has no effect on it and is ignored" for name in ("mode", "batch_runs", "gather_kernel")}
    assert set(caplog.messages) == ignored
    caplog.clear()
    assert settings.backend_options(cuda) == {"mode": "ipc", "batch_runs": 512, "gather_kernel": True}
    assert caplog.messages == ["kvdepot.copy_threads has no effect on it and is ignored"]
    assert settings.backend_options(hpu) == {}
    assert Settings().backend_options(cuda) == {}


def test_transfers_run_on_the_engines_thread_where_a_backend_needs_it_unless_somebody_says_otherwise() -> None:
    assert [Settings().is_synchronous(each) for each in (cpu, cuda, hpu)] == [False, False, True]
    assert not Settings.parse({"kvdepot.synchronous": False}).is_synchronous(hpu)
    assert Settings.parse({"kvdepot.synchronous": True}).is_synchronous(cpu)


@pytest.mark.parametrize("extra", [{"gather_kernel": 1}, {"mode": "auto"}, {"batch_runs": 0}])
def test_settings_of_a_backend_that_are_wrong_say_what_is_right(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"kvdepot\.(gather_kernel is 1: give bool|mode is \"direct\" or|batch_runs)"):
        Settings.parse({f"kvdepot.{name}": value for name, value in extra.items()})


# --- the format: the packing of a block's bytes -----------------------------------------------------------------------


def test_all_stages_divide_the_layers_or_none_does() -> None:
    def of(
        names: Sequence[str], rank: int = 1, num_groups: int = 1, config: dict[str, int] | None = None, **changes: Any
    ):
        def indices(parallel: Any) -> tuple[int, int]:
            return 3 * parallel.rank, 3 * parallel.rank + 3

        model = {
            "hf_text_config": SimpleNamespace(to_dict=lambda: config or {"num_hidden_layers": 6}),
            "is_hybrid": False,
            "has_noops": False,
            "get_layers_start_end_indices": indices,
            "get_total_num_hidden_layers": lambda: 6,
        }
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(**{name: changes.pop(name, value) for name, value in model.items()}),
            parallel_config=SimpleNamespace(rank=rank),
            speculative_config=changes.pop("speculative_config", None),
        )
        assert not changes
        group = SimpleNamespace(layer_names=names)
        return layers_of(vllm_config, SimpleNamespace(kv_cache_groups=[group] * num_groups), group)

    names = [f"model.layers.{number}.self_attn.attn" for number in range(6)]
    assert of(names[:3], 0) == (0, 6)
    assert of(names[3:]) == (3, 6)
    assert of(names[3:], 0) == of(names[3:5]) == of([*names[4:], names[3]]) == of([*names[3:], "mtp.attn"]) == (0, 0)
    others: list[dict[str, Any]] = [{"is_hybrid": True}, {"has_noops": True}, {"num_groups": 2}]
    others.append({"speculative_config": object()})
    for change in others:
        assert of(names[3:], **change) == (0, 0), "wherever such layers are, all stages say so"
    assert of(names[3:], config={"num_kv_shared_layers": 2}) == (0, 0)
    assert of(names[3:], config={"num_kv_shared_layers": 0}) == (3, 6)


def heads(
    total: int = 8, ranks: int = 2, *, config: dict[str, Any] | None = None, cache_dtype: str = "auto", **changes: Any
) -> int:
    """Return `heads_of` a group of full attention. `changes` are fields of its spec, group or architecture."""
    kind = changes.pop("name", "FullAttentionSpec")
    arch = SimpleNamespace(per_layer_overrides=changes.pop("per_layer_overrides", None))
    group = SimpleNamespace(is_eagle_group=changes.pop("is_eagle_group", False))
    group.kv_cache_spec = type(kind, (), {"num_kv_heads": max(1, total // ranks), **changes})()
    hf_text_config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": total, **(config or {})})
    model = SimpleNamespace(hf_text_config=hf_text_config, model_arch_config=arch, get_total_num_kv_heads=lambda: total)
    vllm_config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    return heads_of(vllm_config, group, "full_attention")


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"ranks": 8},
        {"ranks": 16},
        {"total": 256},
        {"cache_dtype": "bfloat16"},
        {"config": {"num_global_key_value_heads": None, "kv_lora_rank": 4}},
        {"name": "SlidingWindowSpec", "num_head_slots": 4, "tokens_per_state": 1},
    ],
    ids=str,
)
def test_ranks_divide_the_heads_of_plain_pages(plain: dict[str, Any]) -> None:
    assert heads(**plain) == plain.get("total", 8)


@pytest.mark.parametrize(
    "opaque",
    [
        {"is_eagle_group": True},
        {"cache_dtype": "fp8"},
        {"total": 512},
        {"ranks": 3},
        {"total": 3, "ranks": 4},
        {"per_layer_overrides": {3: {"num_key_value_heads": 4}}},
        {"config": {"num_global_key_value_heads": 4}},
        {"config": {"attn_kv_heads_per_layer": [8, 4]}},
        {"num_kv_heads": 2},
        {"num_head_slots": 8},
        {"state_content_bytes": 64},
        {"tokens_per_state": 4},
        {"name": "RSWASpec"},
    ],
    ids=str,
)
def test_pages_whose_heads_ranks_cannot_divide_are_opaque(opaque: dict[str, Any]) -> None:
    """A drafter's, quantised ones, too many heads, a remainder, layers that differ, and specs with other pages."""
    assert heads(**opaque) == 0


@pytest.mark.parametrize(
    ("strides", "rows"),
    [((4096, 1024, 64, 1), 1), ((4096, 64, 256, 1), 16), ((4096, 1, 256, 4), 0)],
    ids=["heads outermost", "tokens outermost", "heads innermost"],
)
def test_heads_lie_apart_in_the_rows_of_one_layout(strides: tuple[int, ...], rows: int) -> None:
    """A view of vLLM is (blocks, heads, tokens, content), whatever the order in memory."""
    view = SimpleNamespace(shape=(8, 4, 16, 64), stride=lambda: strides)
    assert [number for number in (1, 16) if lie_apart([view, view], number, 4)] == [rows] * (rows > 0)
    assert lie_apart([view], 16, 1), "a single head"


def test_ranks_that_schedule_for_themselves_use_no_depot() -> None:
    parallel = SimpleNamespace(
        distributed_executor_backend="external_launcher", tensor_parallel_size=2, pipeline_parallel_size=2
    )
    with pytest.raises(Unsupported, match="each of 4 ranks of an external_launcher schedules for itself"):
        engine_cache(SimpleNamespace(parallel_config=parallel), None, str, None)


@pytest.mark.parametrize(
    ("device", "is_latent", "prefix_caching", "chunked_prefill", "refused"),
    [
        ("cpu", True, False, False, True),
        ("cpu", True, False, True, False),  # the user's own choice
        ("cpu", True, True, False, False),
        ("cpu", False, False, False, False),
        ("cuda", True, False, False, False),
    ],
)
@pytest.mark.promise(86)
def test_only_latent_attention_on_a_cpu_for_which_vllm_reuses_nothing_is_refused(
    device: str, is_latent: bool, prefix_caching: bool, chunked_prefill: bool, refused: bool
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            distributed_executor_backend=None, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=is_latent),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked_prefill),
    )
    with pytest.raises(Unsupported, match="leave chunked prefill on" if refused else "no KV cache group"):
        engine_cache(config, SimpleNamespace(kv_cache_groups=[]), str, None)


def group_of(kind: str, block_tokens: int) -> Any:
    """Return a `KVCacheGroupSpec`; `str` of its spec is its kind."""
    attributes = {
        "block_size": block_tokens,
        "prefix_cacheable": True,
        "sliding_window": 512,
        "mamba_cache_mode": "align",
        "__str__": lambda _: kind,
    }
    return SimpleNamespace(
        kv_cache_spec=type("Spec", (), attributes)(),
        layer_names=["layers.0"],
        enable_kv_transfer=True,
        host_resident=False,
        is_eagle_group=False,
    )


def chunk_of(*groups: tuple[str, int], state_step: int | None = None, chunk_tokens: int | None = None) -> int:
    """Return the chunk of an engine with groups of these kinds and block sizes."""
    ranks = {"distributed_executor_backend": None, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**ranks),
        device_config=SimpleNamespace(device_type="cuda"),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        model_config=SimpleNamespace(hf_text_config=None, is_hybrid=True),
        speculative_config=None,
    )
    cache = SimpleNamespace(
        kv_cache_groups=[group_of(*each) for each in groups],
        cache_hit_alignment_tokens=state_step,
        kv_cache_layout="BLNHC",
    )
    return engine_cache(config, cache, str, chunk_tokens).chunk_tokens


def test_blocks_of_full_attention_form_chunks_of_64_tokens_or_more() -> None:
    full, latent = "full_attention", "mla_attention"
    blocks = (1, 16, 32, 48, 64, 128)
    assert [chunk_of((full, size)) for size in blocks] == [64, 64, 64, 96, 64, 128]
    assert chunk_of((full, 16), (latent, 32)) == 64
    assert chunk_of((full, 16), chunk_tokens=16) == 16
    with pytest.raises(Unsupported, match="is 24: give a multiple of 16"):
        chunk_of((full, 16), chunk_tokens=24)


def test_a_chunk_is_one_block_where_windows_or_recurrent_states_are_kept() -> None:
    assert chunk_of(("full_attention", 16), ("sliding_window", 32)) == 32
    assert chunk_of(("full_attention", 16), ("mamba", 16), state_step=48) == 48


FULL = EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, ("a", "b"), False, False)
WINDOW = EngineGroup(1, GroupKind.SLIDING_WINDOW, 16, 64, ("c",), False, False)
LATENT = EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, ("a", "b"), True, False)


def layer(backend: str = "FlashAttentionBackend", isa: str | None = None) -> Any:
    attributes = {} if isa is None else {"isa": isa}
    return SimpleNamespace(get_attn_backend=lambda: type(backend, (), {}), **attributes)


def formatted(device: str, *groups: EngineGroup, version: str = "0.32.0", layout: str = "LBHNC", **layers: Any) -> str:
    return named_format(EngineCache(groups or (FULL,), 1, 16, 1, "bfloat16", layout=layout), layers, device, version)


@pytest.mark.promise(70)
def test_engines_that_pack_blocks_otherwise_have_other_formats() -> None:
    """Even if pages have the same size and model: K packed for AMX is useless to other devices."""
    amx, vec = (layer("CPUAttentionBackend", isa) for isa in ("amx", "vec"))
    plain, triton = layer(), layer("TritonAttentionBackend")
    found = [
        formatted("cpu", a=amx, b=amx),
        formatted("cpu", a=vec, b=vec),
        formatted("cpu", a=amx, b=vec),
        formatted("cuda", a=plain, b=plain),
        formatted("rocm", a=plain, b=plain),
        formatted("rocm fnuz", a=plain, b=plain),
        formatted("cuda", a=triton, b=triton),
        formatted("cuda", a=plain, b=triton),
        formatted("cuda", FULL, WINDOW, a=plain, b=plain, c=triton),
        formatted("cuda", FULL, WINDOW, a=triton, b=triton, c=plain),
        formatted("cuda", a=plain, b=plain, version="0.33.0"),
        formatted("cuda", a=plain, b=plain, layout="LBNHC"),
    ]
    assert len(set(found)) == len(found)
    assert found[0].startswith("vllm 0.32 pp1 named ")
    assert formatted("cuda", a=plain, b=plain, version="0.32.1") == found[3]


@pytest.mark.promise(70)
def test_a_layer_that_does_not_say_what_packs_it_is_refused() -> None:
    for layers in ({}, {"a": layer(isa="amx"), "b": SimpleNamespace()}, {"a": layer(isa="vec"), "b": layer()}):
        with pytest.raises(Unsupported, match="does not say"):
            formatted("cpu", **layers)
    formatted("cpu", LATENT, a=layer("CPUMLABackend"), b=layer("CPUMLABackend"))  # never packed
