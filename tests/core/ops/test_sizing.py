"""Sizes of models' KV caches are exact or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.ops.sizing import read_model_config, size_model
from kvdepot.ops.status import describe_status
from kvdepot.wire import messages as m
from support.commands import run_kvdepot
from support.peer import Peer, registration

KIB = 1024
POOL = 64 << 30

COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 5e5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA_8B = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "mlp_bias": False,
    "pretraining_tp": 1,
}  # fmt: skip
DEEPSEEK_V3 = {
    **COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "ep_size": 1,
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS_120B = {
    **COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 36, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "experts_per_token": 4, "num_local_experts": 128,
    "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "initial_context_length": 4096,
}  # fmt: skip
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "vision_config": {"num_hidden_layers": 24},
    "vision_feature_layer": -1, "text_config": {
        **COMMON, "model_type": "mistral", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "num_hidden_layers": 40, "sliding_window": None}}  # fmt: skip
EXACT = {
    # name: (configuration, layers with full attention / a window, bytes a token, bytes in windows)
    "Llama 3 8B": (LLAMA_8B, (32, 0), 128 * KIB, 0),
    "Qwen3 32B": (
        {**COMMON, "model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 64, "sliding_window": None, "use_sliding_window": False,
         "max_window_layers": 64}, (64, 0), 256 * KIB, 0),
    "Qwen2.5 7B": (
        {**COMMON, "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
         "num_hidden_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
        (28, 0), 56 * KIB, 0),
    "DeepSeek V3": (DEEPSEEK_V3, (61, 0), 61 * 576 * 2, 0),
    "gpt-oss 120B": (GPT_OSS_120B, (18, 18), 36 * KIB, 36 * KIB),
    "Gemma 3 12B with every default written out": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 1152}, "text_config": {
            **COMMON, "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "head_dim": 256,
            "num_key_value_heads": 8, "num_hidden_layers": 48, "sliding_window": 1024, "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}},
        (8, 40), 64 * KIB, 320 * KIB),
    "Gemma 3 1B as transformers 5 writes it": (
        {**COMMON, "model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "head_dim": 256,
         "num_key_value_heads": 1, "num_hidden_layers": 26, "sliding_window": 512, "query_pre_attn_scalar": 256,
         "_sliding_window_pattern": 6, "use_bidirectional_attention": False, "is_encoder_decoder": False,
         "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2},
        (4, 22), 4 * KIB, 22 * KIB),
    "DeepSeek R1 Distill Qwen 7B": (
        {**COMMON, "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
         "num_hidden_layers": 28, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
         "use_mrope": False}, (28, 0), 56 * KIB, 0),
    "SmolLM2 1.7B": (
        {**COMMON, "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 32,
         "num_hidden_layers": 24, "is_llama_config": True, "rope_interleaved": False,
         "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}, (24, 0), 192 * KIB, 0),
    "Mistral Small 3.1, with images": (MISTRAL_SMALL, (40, 0), 160 * KIB, 0),
    "A wrapper that repeats fields of its text model": (
        {**MISTRAL_SMALL, "hidden_size": 5120, "num_hidden_layers": 40}, (40, 0), 160 * KIB, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_configuration_with_explicit_fields_is_sized_as_by_hand(name: str) -> None:
    config, layers, a_token, in_windows = EXACT[name]
    sizing = size_model(config)
    assert (sizing.num_full_layers, sizing.num_window_layers) == layers
    assert (sizing.bytes_per_token, sizing.window_bytes_per_token) == (a_token, in_windows)


HEADS = {**COMMON, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
HYBRID = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # name: (published configuration, a word of the refusal)
    "Falcon 7B": ({**HEADS, "model_type": "falcon", "multi_query": True, "parallel_attn": True}, "'multi_query'"),
    "Falcon 40B": ({**HEADS, "model_type": "falcon", "num_kv_heads": 8}, "'num_kv_heads'"),
    "Gemma 3 12B": (
        {"text_config": {**COMMON, "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16,
         "num_key_value_heads": 8, "num_hidden_layers": 48}}, "no 'head_dim'"),
    "Gemma 3 27B": (
        {"text_config": {**COMMON, "model_type": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32,
         "num_key_value_heads": 16, "head_dim": 128, "num_hidden_layers": 62, "sliding_window": 1024}},
        "no 'layer_types'"),
    "Gemma 3n": ({**GPT_OSS_120B, "num_kv_shared_layers": 10}, "'num_kv_shared_layers'"),
    "Gemma 4": ({**GPT_OSS_120B, "global_head_dim": 512}, "'global_head_dim'"),
    "DeepSeek V3.2": ({**DEEPSEEK_V3, "index_topk": 2048}, "'index_topk'"),
    "MiniCPM3": ({**DEEPSEEK_V3, "model_type": "minicpm3"}, "'kv_lora_rank'"),
    "MiMo V2": ({**GPT_OSS_120B, "v_head_dim": 128}, "'v_head_dim'"),
    "GPT-2": ({**COMMON, "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}, "'n_head'"),
    "Phi 2": ({**COMMON, **HYBRID, "model_type": "phi", "num_key_value_heads": None}, "no 'num_key_value_heads'"),
    "Qwen3-Next": ({**COMMON, **HYBRID, "full_attention_interval": 4}, "'full_attention_interval'"),
    "Qwen3.5": ({**COMMON, **HYBRID, "layer_types": ["linear_attention", "full_attention"] * 16}, "'linear_attention'"),
    "Nemotron-H": ({**COMMON, **HYBRID, "hybrid_override_pattern": "M-M*"}, "'hybrid_override_pattern'"),
    "Gemma 3 1B": (
        {**COMMON, **HYBRID, "model_type": "gemma3_text", "head_dim": 256, "sliding_window_pattern": 6},
        "no 'layer_types'"),
    "DeepSeek-VL2": ({**DEEPSEEK_V3, "use_mla": False}, "'use_mla'"),
    "layers that share a cache, beside the text model": (
        {**MISTRAL_SMALL, "num_kv_shared_layers": 10}, "'num_kv_shared_layers'"),
    "one head, beside the text model": ({**MISTRAL_SMALL, "multi_query": True}, "'multi_query'"),
    "states, beside the text model": ({**MISTRAL_SMALL, "mamba_ssm_dtype": "float32"}, "'mamba_ssm_dtype'"),
    "an encoder, beside the text model": ({**MISTRAL_SMALL, "is_encoder_decoder": True}, "'is_encoder_decoder'"),
    "a wrapper that contradicts its text model": ({**MISTRAL_SMALL, "num_key_value_heads": 4}, "'num_key_value_heads'"),
    "an empty text model": ({**LLAMA_8B, "text_config": {}}, "'num_hidden_layers'"),
    "a text model in a text model": (
        {**MISTRAL_SMALL, "text_config": {**LLAMA_8B, "text_config": LLAMA_8B}}, "'text_config'"),
    "an unknown key of 0": ({**LLAMA_8B, "attention_layer_offset": 0}, "'attention_layer_offset'"),
    "an unknown key of 0.0": ({**LLAMA_8B, "cache_ratio": 0.0}, "'cache_ratio'"),
    "an unknown flag that is false": ({**LLAMA_8B, "share_kv": False}, "'share_kv'"),
    "a flag that should be false, of 0": ({**LLAMA_8B, "is_encoder_decoder": 0}, "'is_encoder_decoder'"),
    "a dimension that looks like RoPE's": ({**LLAMA_8B, "rope_head_dim": 64}, "'rope_head_dim'"),
    "heads that look like a router's": ({**LLAMA_8B, "router_num_heads": 8}, "'router_num_heads'"),
    "an unknown multiplier": ({**LLAMA_8B, "foo_multiplier": 2}, "'foo_multiplier'"),
    "an unknown bias": ({**LLAMA_8B, "foo_bias": True}, "'foo_bias'"),
    "Bamba": ({**COMMON, **HYBRID, "attn_layer_indices": [9, 18, 27]}, "'attn_layer_indices'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_configuration_is_refused_with_the_way_that_is_exact(name: str) -> None:
    config, word = REFUSED[name]
    with pytest.raises(ConfigError, match=f"{re.escape(word)}.*: attach an engine, and 'kvdepot status' prints"):
        size_model(config)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED["Falcon 7B"][0]))
    done = run_kvdepot("sizing", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "'multi_query', 'parallel_attn'" in done.stderr
    assert done.stderr.count("\n") == 1


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


def test_the_cache_may_have_another_dtype_than_the_model() -> None:
    assert size_model(LLAMA_8B, "fp8").bytes_per_token == 64 * KIB
    for change in (
        {"torch_dtype": "float32"},
        {"torch_dtype": None},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
    ):
        with pytest.raises(ConfigError, match=r"the engine chooses the dtype.*give --kv-cache-dtype"):
            size_model({**LLAMA_8B, **change})
        assert size_model({**LLAMA_8B, **change}, "bfloat16").bytes_per_token == 128 * KIB
    with pytest.raises(ConfigError, match="'float4': known are float32"):
        size_model(LLAMA_8B, "float4")


@pytest.mark.parametrize("config", [LLAMA_8B, DEEPSEEK_V3, GPT_OSS_120B])
def test_people_and_machines_are_told_the_same(config: dict[str, Any]) -> None:
    sizing = size_model(config)
    for_machines = sizing.as_dict(POOL)
    assert f"{for_machines['pool_tokens']:,} tokens" in sizing.describe(POOL)
    assert str(config["architectures"][0]) in sizing.describe(POOL)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"layer_types": ["full_attention"]}, "names 1 layers of 32"),
        ({"layer_types": ["sliding_attention"] * 32}, "no 'sliding_window'"),
        ({"num_attention_heads": 0}, "no 'num_attention_heads'"),
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
