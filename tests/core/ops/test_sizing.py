"""Sizes of known models' KV caches, from their configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.ops.sizing import read_model_config, size_model

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_hidden_layers": 34, "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 48, "torch_dtype": "bfloat16",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


KIB = 1024
NANO_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
PUBLISHED = {
    # name: (what config.json says of its layers, layers with all / a window / a state, bytes a token, in windows)
    "Llama 3 8B": (LLAMA_8B, (32, 0, 0), 128 * KIB, 0),
    "Qwen3 32B": (
        {"model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 64, "sliding_window": None, "use_sliding_window": False,
         "max_window_layers": 64}, (64, 0, 0), 256 * KIB, 0),
    "DeepSeek V3": (DEEPSEEK_V3, (61, 0, 0), 61 * 576 * 2, 0),
    "DeepSeek V3.2": ({**DEEPSEEK_V3, "index_topk": 2048}, (61, 0, 0), 61 * (576 * 2 + 132), 0),
    "gpt-oss 120B": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "num_hidden_layers": 36, "sliding_window": 128,
         "layer_types": ["sliding_attention", "full_attention"] * 18}, (18, 18, 0), 36 * KIB, 36 * KIB),
    "Gemma 3 27B": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "num_hidden_layers": 62, "sliding_window": 1024}}, (10, 52, 0), 80 * KIB, 416 * KIB),
    "Gemma 2 9B": (
        {"model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 256, "num_hidden_layers": 42, "sliding_window": 4096}, (21, 21, 0), 168 * KIB, 168 * KIB),
    "Gemma 3n E2B": (
        {"model_type": "gemma3n_text", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 256, "num_hidden_layers": 30, "sliding_window": 512, "num_kv_shared_layers": 10,
         "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6}, (4, 16, 0), 8 * KIB, 32 * KIB),
    "Mistral 7B v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 32, "sliding_window": 4096}, (0, 32, 0), 0, 128 * KIB),
    "EXAONE 4 32B": (
        {"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 64, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        (16, 48, 0), 64 * KIB, 192 * KIB),
    "Llama 4 Scout": (
        {"text_config": {"model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48, "attention_chunk_size": 8192}},
        (12, 36, 0), 48 * KIB, 144 * KIB),
    "Qwen3-Next 80B": (
        {**{key: value for key, value in QWEN3_NEXT.items() if key != "layer_types"}, "full_attention_interval": 4},
        (12, 0, 36), 24 * KIB, 0),
    "Nemotron Nano 9B v2": (
        {"model_type": "nemotron_h", "hidden_size": 4480, "num_attention_heads": 40, "num_key_value_heads": 8,
         "attention_head_dim": 128, "num_hidden_layers": 56, "hybrid_override_pattern": NANO_PATTERN,
         "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "conv_kernel": 4},
        (4, 0, 27), 16 * KIB, 0),
    "Bamba 9B": (
        {"model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128, "mamba_expand": 2,
         "mamba_d_conv": 4, "mamba_n_groups": 1}, (3, 0, 29), 12 * KIB, 0),
    "Jamba 1.5 Mini": (
        {"model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
         "mamba_expand": 2, "mamba_d_conv": 4, "mamba_dt_rank": 256}, (4, 0, 28), 16 * KIB, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_sized_as_by_hand(name: str) -> None:
    config, layers, a_token, in_windows = PUBLISHED[name]
    sizing = size_model(config)
    assert (sizing.num_full_layers, sizing.num_window_layers, sizing.num_state_layers) == layers
    assert (sizing.bytes_per_token, sizing.window_bytes_per_token) == (a_token, in_windows)
    assert not sizing.notes


def test_states_of_mamba_are_those_of_its_version() -> None:
    assert size_model(PUBLISHED["Jamba 1.5 Mini"][0]).state_bytes == 28 * 8192 * (16 + 3) * 2
    assert size_model(PUBLISHED["Bamba 9B"][0]).state_bytes == 29 * (8192 * 128 + (8192 + 2 * 128) * 3) * 2
    assert size_model(PUBLISHED["Nemotron Nano 9B v2"][0]).state_bytes == 27 * (10240 * 128 + (10240 + 2048) * 3) * 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sliding_window": 512, "model_type": "new_model"}, "all 32 are counted with it"),
        ({"ssm_layers": [1, 2]}, "'ssm_layers' may say otherwise"),
    ],
)
def test_a_configuration_that_leaves_kinds_open_is_sized_with_a_note(keys: dict[str, Any], words: str) -> None:
    sizing = size_model({**LLAMA_8B, **keys})
    assert words in sizing.notes[0]
    assert sizing.notes[0] in sizing.describe(64 << 30)
    assert sizing.as_dict(64 << 30)["notes"] == list(sizing.notes)


def test_grouped_queries() -> None:
    sizing = size_model(LLAMA_8B)
    assert sizing.bytes_per_token == 128 << 10
    assert sizing.prefix_bytes(1000) == 1000 * (128 << 10)
    assert size_model(LLAMA_8B, "fp8").bytes_per_token == 64 << 10


def test_latent_attention_keeps_one_row_for_all_ranks() -> None:
    assert size_model(DEEPSEEK_V3).bytes_per_token == 61 * 576 * 2


def test_windows_end_where_they_end() -> None:
    sizing = size_model(GEMMA_3_4B)
    assert (sizing.num_full_layers, sizing.num_window_layers, sizing.window_tokens) == (5, 29, 1024)
    assert sizing.prefix_bytes(10_000) == 10_000 * 5 * 4096 + 1024 * 29 * 4096


def test_states_are_of_one_size_however_long_the_prompt() -> None:
    sizing = size_model(QWEN3_NEXT)
    assert (sizing.num_full_layers, sizing.num_state_layers) == (12, 36)
    assert sizing.bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert sizing.state_bytes == 36 * (8192 * 3 + 32 * 128 * 128) * 2
    assert sizing.prefix_bytes(2000) - sizing.prefix_bytes(1000) == 1000 * sizing.bytes_per_token


@pytest.mark.parametrize("config", [LLAMA_8B, DEEPSEEK_V3, GEMMA_3_4B, QWEN3_NEXT])
def test_people_and_machines_are_told_the_same(config: dict[str, Any]) -> None:
    sizing = size_model(config)
    for_machines = sizing.as_dict(64 << 30)
    assert f"{for_machines['pool_tokens']:,} tokens" in sizing.describe(64 << 30)
    assert str(config["architectures"][0]) in sizing.describe(64 << 30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"torch_dtype": "float4"}, "'float4'"),
        ({"layer_types": ["retention"]}, "kind 'retention'"),
        ({"hybrid_override_pattern": "M?"}, "marked '[?]'"),
        ({"layer_types": ["sliding_attention"]}, "does not say how long"),
        ({"num_key_value_heads": None, "num_attention_heads": 0}, "no 'num_attention_heads'"),
    ],
)
def test_a_configuration_that_says_too_little_says_what_is_missing(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        size_model({**LLAMA_8B, **change})


def test_a_folder_or_a_file_is_read_and_nonsense_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "config.json")
    (tmp_path / "list.json").write_text("[]")
    for path, why in (("list.json", "is not a model's"), ("nothing.json", "cannot be read: No such file or directory")):
        with pytest.raises(ConfigError, match=f"{path} {why}"):
            read_model_config(tmp_path / path)
