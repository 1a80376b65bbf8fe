"""The size of a model's tokens is bounded from its configuration; `kvdepot status` is exact."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.operate.sizing import size_model
from kvdepot.operate.status import describe_status
from kvdepot.wire import messages as m
from support.commands import run_kvdepot
from support.peer import Peer, registration

KIB = 1024

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16", "intermediate_size": 14336,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "num_hidden_layers": 48, "full_attention_interval": 4, "linear_key_head_dim": 128,
}  # fmt: skip
GEMMA_3_12B = {"vision_config": {"num_hidden_layers": 99, "num_attention_heads": 99}, "text_config": {
    "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_hidden_layers": 48, "sliding_window": 1024}}  # fmt: skip
BOUNDS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": (LLAMA_8B, 32 * 2 * 8 * 128 * 2),
    "float32 is served in 16 bits": ({**LLAMA_8B, "torch_dtype": "float32"}, 128 * KIB),
    "latent attention takes less": (DEEPSEEK_V3, 61 * 2 * 128 * 192 * 2),
    "states take less": (QWEN3_NEXT, 48 * 2 * 2 * 256 * 2),
    "Gemma's own head size, below a wrapper": (GEMMA_3_12B, 48 * 2 * 8 * 256 * 2),
    "a wrapper in a wrapper": ({"thinker_config": {"text_config": LLAMA_8B}}, 128 * KIB),
    "KV heads as attention heads": ({**LLAMA_8B, "num_key_value_heads": None}, 512 * KIB),
    "the names of GPT-2": ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 12 * 64 * 2),
    "larger heads in some layers": ({**QWEN3_NEXT, "global_head_dim": 512}, 48 * 2 * 2 * 512 * 2),
    "more heads in some layers": ({**LLAMA_8B, "swa_num_key_value_heads": 16}, 256 * KIB),
    "heads a layer": ({**LLAMA_8B, "num_kv_heads": [4, 16, 8], "num_key_value_heads": None}, 256 * KIB),
    "another kind of head is smaller": ({**LLAMA_8B, "mamba_head_dim": 64}, 128 * KIB),
}


def written(folder: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", BOUNDS)
def test_a_token_is_bounded_from_layers_heads_and_dtype(tmp_path: Path, name: str) -> None:
    config, a_token = BOUNDS[name]
    assert size_model(written(tmp_path, config=config)).bytes_per_token == a_token


def test_latent_attention_is_estimated_beside_the_bound(tmp_path: Path) -> None:
    sizing = size_model(written(tmp_path, config=DEEPSEEK_V3), "bfloat16")
    assert sizing.latent_bytes_per_token == 61 * 576 * 2
    assert "latent   about 68.6 KiB a token, 15,279 tokens" in sizing.describe(1 << 30)
    assert "latent" not in size_model(written(tmp_path, config=LLAMA_8B)).describe(1 << 30)


SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("files", "a_token"),
    [
        ({"config": {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": SCHEME}}}, 64),
        ({"config": {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": None}}}, 128),
        ({"config": {"text_config": LLAMA_8B, "quantization_config": {"kv_cache_quant_algo": "FP8"}}}, 64),
        ({"config": LLAMA_8B, "hf_quant_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, 64),
        ({"config": LLAMA_8B, "hf_quant_config": {"quantization": {"kv_cache_quant_algo": None}}}, 128),
    ],
)
def test_a_checkpoint_may_quantize_its_cache(tmp_path: Path, files: dict[str, dict[str, Any]], a_token: int) -> None:
    folder = written(tmp_path, **files)
    assert size_model(folder).bytes_per_token == a_token * KIB
    assert size_model(folder, "bfloat16").bytes_per_token == 128 * KIB
    assert size_model(folder, "fp8").bytes_per_token == 64 * KIB


def test_the_command_prints_the_bound_with_its_sum(tmp_path: Path) -> None:
    done = run_kvdepot("sizing", str(written(tmp_path, config=LLAMA_8B) / "config.json"), "--pool-size", "1GiB")
    assert done.stdout.splitlines() == [
        "model    LlamaForCausalLM",
        "a token  at most 128.0 KiB: 32 layers x 8 KV heads x 2 (key, value) x 128 x 2 B (bfloat16)",
        "a pool   of 1.0 GiB holds 8,192 tokens or more",
        "Windows and states take less; 'kvdepot status' is exact while an engine is attached.",
    ]
    in_json = json.loads(run_kvdepot("sizing", str(tmp_path), "--pool-size", "1GiB", "--json").stdout)
    assert (in_json["bytes_per_token"], in_json["pool_tokens"]) == (128 * KIB, 8192)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "no number of layers"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "no number of KV heads"),
        ({"hidden_size": None}, "no number of the size of a head"),
    ],
)
def test_a_configuration_without_a_number_of_the_sum_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = written(tmp_path, config={**LLAMA_8B, **change})
    with pytest.raises(ConfigError, match=f"{words}: attach an engine, and 'kvdepot status' is exact"):
        size_model(folder)


def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    for path, why in (("list.json", "is not a model's"), ("nothing.json", "No such file or directory")):
        done = run_kvdepot("sizing", str(tmp_path / path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert path in done.stderr
        assert why in done.stderr


def test_status_prints_bytes_a_token_and_a_state_and_how_many_prompts_the_pool_holds() -> None:
    groups = (m.GroupShape(GroupKind.FULL_ATTENTION, 16, 0, 2), m.GroupShape(GroupKind.RECURRENT, 64, 0, 2))
    details = (m.GroupDetail((16 * 1024,) * 2, 64), m.GroupDetail((256 << 10,), 64))
    with DepotProcess(pool_size="40MiB") as depot:
        request = registration(m.CacheSpec(64, groups, "bfloat16"), details=details, world_size=2)
        peer = Peer(depot, request)
        lines = describe_status(depot.status()).splitlines()
        peer.close()
    # Two ranks: 4 KiB a token and 512 KiB a state, so a prompt of 8,000 tokens takes 31.75 MiB.
    (line,) = [line for line in lines if " a token" in line]
    assert "2.0 KiB a token, 256.0 KiB a state; the pool holds about 1 prompt of 8,000 tokens" in line
