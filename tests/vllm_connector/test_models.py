"""Every kind of KV cache that vLLM has on CPU: the same tokens, and loaded bytes equal stored bytes."""

from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import (
    Engine,
    MakeModel,
    RunCode,
    cached,
    connector,
    generate_until_stored,
    prompts,
    tokens,
    wait_until_stored,
)

LONG = prompts(2, 1500)
PROMPTS = LONG[:1] + prompts(2, 1000, seed=1, shared=600)

needs_quantised_caches = pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text().split()),
    reason="vLLM has quantised KV caches on CPUs with AVX-512 or AMX only",
)

# model, options, tokens per block, expected reuse of 1500 and 1000 tokens
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "grouped queries": ("gqa", {}, 1408, 896),
    "chunks of two blocks": ("gqa", {"block_size": 32}, 1472, 960),
    "sliding windows, groups that share addresses": ("windows", {}, 1408, 896),
    "windows of one block": ("short-windows", {}, 1408, 896),
    "windows that begin within a chunk": ("windows", {"block_size": 32, "kvdepot": {"chunk_tokens": 384}}, 1152, 768),
    "windows shorter than a chunk": ("short-windows", {"block_size": 32, "kvdepot": {"chunk_tokens": 384}}, 1152, 768),
    "recurrent states in padded int8 pages": (
        "recurrent",
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "kv_cache_memory_bytes": 256 << 20},
        1280,
        768,
    ),
    "fp8": ("gqa", {"kv_cache_dtype": "fp8"}, 1408, 896),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[needs_quantised_caches] if case == "fp8" else []) for case in CASES]
)
@pytest.mark.promise(17, 29, 32)
def test_cold_warm_and_batched(case: str, depot: DepotProcess, model: MakeModel) -> None:
    name, options, whole_long, whole_short = CASES[case]
    all_options: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "max_tokens": 4, **options}
    settings: dict[str, Any] = all_options.pop("kvdepot", {})
    with Engine(model(name), connector(depot.url, **settings), reference=PROMPTS, **all_options) as engine:
        engine.ask("watch")
        assert tokens(engine.generate(PROMPTS, together=False)) == engine.reference
        engine.reset()
        warm = engine.generate(PROMPTS, together=False)
        assert tokens(warm) == engine.reference
        assert cached(warm) == [whole_long, whole_short, whole_short]
        engine.reset()
        assert tokens(engine.generate(PROMPTS)) == engine.reference
        watched = engine.execute("result = child.watched")
        assert watched["loaded"] >= 10
        assert (watched["wrong"], watched["unknown"]) == (0, 0)
    status = depot.status()
    assert (status.num_leases, status.num_tickets) == (0, 0)


def test_a_window_loads_only_what_it_reaches(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("windows"), connector(depot.url)) as engine:
        prompt = prompts(1, 1500, seed=4)
        engine.generate(prompt)
        engine.reset()
        assert cached(engine.generate(prompt)) == [1408]
        metrics = engine.ask("metrics")
        assert metrics["vllm:kvdepot_store_bytes"] == 6 * 11 * 128 * 2 * 128 * 4  # 6 layers, 11 blocks
        assert metrics["vllm:kvdepot_load_bytes"] == (11 + 5 * 4) * 128 * 2 * 128 * 4  # 4 blocks of each window


def chunk_tokens_of(depot: DepotProcess) -> int:
    """Return the last engine's chunk size. Blocks of latent attention have 16 tokens in vLLM, or 128 with AMX.

    A test's engine may end while that of the next test has started.
    """
    return [context.chunk_tokens for context in depot.status().contexts if context.role == "worker"][-1]


@pytest.mark.parametrize(("has_amx", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_latent_attention_runs_in_a_dtype_of_its_backend(
    has_amx: bool, dtype: str, model: MakeModel, run_code: RunCode
) -> None:
    """Regression: AMX_MLA takes only bfloat16, and the tests below ran in float32."""
    code = f"import sys, torch; torch.cpu._is_amx_tile_supported = lambda: {has_amx}\n"
    code += "from support.vllm.engine_child import dtype_of; print(dtype_of(sys.argv[1]))"
    assert run_code(code, str(model("mla"))).split()[-1] == dtype


WITHOUT_AMX = "import torch; torch.cpu._is_amx_tile_supported = lambda: False"


@pytest.mark.promise(32, 86)
def test_latent_attention_whose_reuse_vllm_has_switched_off_uses_no_depot(
    depot: DepotProcess, model: MakeModel
) -> None:
    """Regression: answers after a hit differed from those of an engine without a depot."""
    contexts = len(depot.status().contexts)
    with Engine(model("mla"), connector(depot.url), reference=PROMPTS, first=WITHOUT_AMX) as engine:
        for _ in range(2):
            outputs = engine.generate(PROMPTS)
            assert (tokens(outputs), cached(outputs)) == (engine.reference, [0] * len(PROMPTS))
        assert "kvdepot is not used: vLLM has switched prefix caching and chunked prefill off" in engine.log()
        assert len(depot.status().contexts) <= contexts, "it neither loads nor stores"


LATENT_REUSE = """
from vllm.platforms.cpu import CpuPlatform
check = CpuPlatform.check_and_update_config
def check_and_update_config(_platform, config):
    check(config)
    config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
"""
"""Makes vLLM reuse latent attention on any CPU, for tests of bytes. On a CPU with AMX it does so by itself."""


@pytest.mark.promise(32)
def test_a_hit_of_latent_attention_has_the_bytes_and_the_effect_of_a_hit_in_vllm_s_own_cache(
    depot: DepotProcess, model: MakeModel
) -> None:
    given = [
        prompt[: 23 * 64 + 1] for prompt in LONG
    ]  # the last token is always computed; blocks may be smaller than chunks
    with Engine(model("mla"), connector(depot.url), first=LATENT_REUSE, kv_cache_memory_bytes=256 << 20) as engine:
        engine.ask("watch")
        engine.generate(given, together=False)
        own = engine.generate(given, together=False, logprobs=1)
        assert engine.execute("result = child.watched")["loaded"] == 0
        engine.reset()
        ours = engine.generate(given, together=False, logprobs=1)
        chunk_tokens = chunk_tokens_of(depot)
        num_chunks = 23 * 64 // chunk_tokens
        assert cached(ours) == cached(own) == [num_chunks * chunk_tokens] * 2
        watched = engine.execute("result = child.watched")
        assert (watched["wrong"], watched["unknown"]) == (0, 0)
        assert watched["loaded"] == 2 * num_chunks
        assert [(each["tokens"], each["logprobs"]) for each in ours] == [
            (each["tokens"], each["logprobs"]) for each in own
        ]


@pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text().split(),
    reason="vLLM on CPU has blocks of latent attention of one size only, but for CPUs with AMX",
)
@pytest.mark.promise(33)
def test_engines_with_other_blocks_of_latent_attention_share(depot: DepotProcess, model: MakeModel) -> None:
    """Compares bytes: AMX_MLA adds up block by block in bfloat16, so that tokens depend on the size of a block."""
    given = prompts(2, 800, seed=79)
    to = connector(depot.url, chunk_tokens=128, namespace="blocks")
    with Engine(model("mla"), to, max_tokens=4, block_size=64) as first:
        first.ask("watch")
        generate_until_stored(first, given, depot, depot.status().num_chunks + 12)
        stored = first.ask("stored_digests")
    for block_tokens in (32, 128):
        with Engine(model("mla"), to, max_tokens=4, block_size=block_tokens) as engine:
            wait_until_stored(engine, depot, seed=80 + block_tokens)
            engine.ask("watch", stored=stored)
            num_entries = depot.status().num_entries
            assert cached(engine.generate(given)) == [768, 768]
            assert depot.status().num_entries == num_entries
            watched = engine.execute("result = child.watched")
            assert (watched["loaded"], watched["wrong"], watched["unknown"]) == (12, 0, 0)


@pytest.mark.promise(32)
def test_states_that_are_not_cacheable_are_refused_with_the_way_out(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(
        model("mamba"),
        connector(depot.url),
        reference=PROMPTS[:1],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
    ) as engine:
        for _ in range(2):
            outputs = engine.generate(PROMPTS[:1])
            assert (tokens(outputs), cached(outputs)) == (engine.reference, [0])
        assert "kvdepot is not used: KV cache group" in engine.log()
        assert "--mamba-cache-mode align" in engine.log()


@pytest.mark.slow
@needs_quantised_caches
@pytest.mark.promise(32)
def test_a_cache_that_vllm_writes_beyond_its_pages_is_refused(depot: DepotProcess, model: MakeModel) -> None:
    """On CPU vLLM accepts KV quantised per token and head, but its kernels write floats over the int8 pages."""
    with Engine(model("gqa"), connector(depot.url), kv_cache_dtype="int8_per_token_head") as engine:
        for _ in range(2):
            assert cached(engine.generate(PROMPTS[:1])) == [0]
            engine.reset()
        assert "differently than it says: not supported" in engine.log()


@pytest.mark.promise(33)
def test_two_ranks_store_once_what_both_hold(depot: DepotProcess, model: MakeModel) -> None:
    """Latent attention has no heads to share out. test_every_size.py has ranks that store their shards."""
    options: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 2048,
        "multiprocessing": True,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "first": LATENT_REUSE,
    }
    # In its own namespace, as otherwise it would find entries of the previous tests' engine of one rank.
    with Engine(model("mla"), connector(depot.url, namespace="two ranks"), **options) as engine:
        wait_until_stored(engine, depot, seed=900)
        before = depot.status()
        workers = [context for context in before.contexts if context.role == "worker"]
        reuse = 1499 // chunk_tokens_of(depot) * chunk_tokens_of(depot)
        num_chunks = 2 * reuse // chunk_tokens_of(depot)
        _, status = generate_until_stored(engine, LONG, depot, before.num_chunks + num_chunks)
        assert [worker.groups[0].part for worker in workers] == ["", ""]
        assert all(worker.groups[0].attention_backend.endswith("Backend") for worker in workers)
        assert status.num_entries - before.num_entries == status.num_chunks - before.num_chunks
        engine.reset()
        assert cached(engine.generate(LONG)) == [reuse, reuse]  # two ranks' tokens differ from run to run
        wait_until(lambda: depot.status().num_leases == 0)
