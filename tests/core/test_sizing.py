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
    for path in ("list.json", "nothing.json"):
        with pytest.raises(ConfigError, match=path):
            read_model_config(tmp_path / path)
