"""`kvdepot sizing MODEL_CONFIG.json`: computes the size of a model's KV cache, and the tokens that fit into a pool.

Pure arithmetic on the `config.json` of a model, for the three kinds of attention whose cache follows from its fields:
plain or grouped (keys and values of every token), the same with a window in the layers that `layer_types` names, and
DeepSeek's latent attention (one compressed row per token, the same on all ranks).

A size is exact or refused. Models differ in too many ways to list: defaults in code, layers that share a cache, states
of another dtype. So a single unknown key is refused unless it is null, also beside `text_config`. The error names the
method that is exact for every model: attach an engine, and `kvdepot status` prints the sizes that it registered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvdepot.config import format_size
from kvdepot.errors import ConfigError

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Engines keep these dtypes. They serve a float32 model in a dtype of their own choice.
_MODEL_DTYPES: Final = ("bfloat16", "float16")

_EXACT_WAY: Final = "attach an engine, and 'kvdepot status' prints its bytes a token and bytes a state"

# Keys that the arithmetic reads: from the wrapper of a model with images, too, and from the text model alone.
_READ_OF_BOTH: Final = frozenset({"architectures", "model_type", "dtype", "torch_dtype", "quantization_config"})
_READ_OF_TEXT: Final = frozenset({
    "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "layer_types",
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window", "max_window_layers",
})  # fmt: skip
_READ_OF_LATENT: Final = frozenset(
    {
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    }
)
# Keys that change the computation, never the bytes of a token in the cache. Each is a whole name: `rope_theta` is
# harmless, but `rope_head_dim` is not.
_WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "attention_bias", "attention_dropout", "attention_multiplier", "attention_out_bias",
    "attn_logit_softcapping", "auto_map", "aux_loss_alpha", "boi_token_id", "boi_token_index", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "decoder_sparse_step", "embd_pdrop", "embedding_multiplier",
    "eoi_token_id", "eoi_token_index", "eos_token_id", "ep_size", "experts_per_token", "final_logit_softcapping",
    "first_k_dense_replace", "hidden_act", "hidden_activation", "id2label", "ignore_index", "image_grid_pinpoints",
    "image_seq_length", "image_token_id", "image_token_index", "initial_context_length", "initializer_range",
    "input_jitter_noise", "intermediate_size", "is_composition", "is_llama_config", "label2id", "layer_norm_eps",
    "lm_head_bias", "logit_scale", "logits_scaling", "max_position_embeddings", "media_placeholder_token_id",
    "mlp_bias", "mlp_only_layers", "mm_tokens_per_image", "moe_intermediate_size", "moe_layer_freq",
    "multimodal_projector_bias", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "num_local_experts", "num_nextn_predict_layers", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "partial_rotary_factor",
    "pretraining_tp", "problem_type", "projector_hidden_act", "qkv_bias", "query_pre_attn_scalar", "resid_pdrop",
    "residual_dropout", "residual_multiplier", "return_dict", "rms_norm_eps", "rope_interleave", "rope_interleaved",
    "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor",
    "router_aux_loss_coef", "router_jitter_noise", "scoring_func", "seq_aux", "shared_expert_intermediate_size",
    "spatial_merge_size", "swiglu_alpha", "swiglu_limit", "tie_word_embeddings", "topk_group", "topk_method",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
    "use_image_newline_parameter", "use_mrope", "use_qk_norm", "video_token_id", "video_token_index",
    "vision_aspect_ratio", "vision_config", "vision_end_token_id", "vision_feature_layer",
    "vision_feature_select_strategy", "vision_start_token_id", "vision_token_id", "vocab_size",
})  # fmt: skip
# Flags of another kind of model if they are true. transformers writes them out if they are false, too.
_WITHOUT_EFFECT_IF_FALSE: Final = frozenset({
    "add_cross_attention", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "use_bidirectional_attention",
})  # fmt: skip

# Types whose code defaults `head_dim` to hidden_size / num_attention_heads. Gemma's, for example, does not.
_DERIVE_HEAD_DIM: Final = frozenset({"llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"})
# Types that vLLM serves with latent attention as DeepSeek's; MiniCPM3, with the same keys, gets plain attention.
_LATENT_TYPES: Final = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of one model's KV cache on all ranks together, in bytes."""

    name: str
    dtype: str
    num_full_layers: int
    num_window_layers: int
    window_tokens: int
    bytes_per_token: int  # in layers with full or latent attention
    window_bytes_per_token: int  # in layers with a window; a pool keeps them for every stored token
    is_mla: bool

    def as_dict(self, pool_bytes: int) -> dict[str, Any]:
        """Return the sizes for JSON."""
        return {
            "model": self.name,
            "dtype": self.dtype,
            "layers": {"full_attention": self.num_full_layers, "sliding_window": self.num_window_layers},
            "is_mla": self.is_mla,
            "window_tokens": self.window_tokens,
            "bytes_per_token": self.bytes_per_token,
            "window_bytes_per_token": self.window_bytes_per_token,
            "pool_bytes": pool_bytes,
            "pool_tokens": pool_bytes // (self.bytes_per_token + self.window_bytes_per_token),
        }

    def describe(self, pool_bytes: int) -> str:
        """Return the sizes as text."""
        stored = self.bytes_per_token + self.window_bytes_per_token
        kinds = [
            (self.num_full_layers, "with latent attention" if self.is_mla else "with full attention"),
            (self.num_window_layers, f"with a window of {self.window_tokens:,} tokens"),
        ]
        lines = [
            f"model    {self.name}",
            "layers   " + ", ".join(f"{count} {kind}" for count, kind in kinds if count) + f"; cache in {self.dtype}",
            f"a token  {format_size(stored)}"
            + (f", of it {format_size(self.window_bytes_per_token)} in windows" if self.num_window_layers else ""),
        ]
        lines += [
            f"{tokens:>7,}  tokens of one prompt: {format_size(tokens * stored)}"
            for tokens in (1_000, 8_000, 32_000, 128_000)
        ]
        return "\n".join([*lines, f"a pool of {format_size(pool_bytes)} holds about {pool_bytes // stored:,} tokens"])


def read_model_config(path: Path | str) -> Mapping[str, Any]:
    """Read a model's `config.json`, or the one in a folder.

    Raises:
        ConfigError: the file is missing or is not JSON.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path} cannot be read: {why} (give the config.json of a model on this machine)") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a model's configuration: {error}") from error


def size_model(config: Mapping[str, Any], cache_dtype: str = "auto") -> Sizing:
    """Return the size of a model's cache.

    Args:
        config: the model's `config.json`.
        cache_dtype: a value of vLLM's `--kv-cache-dtype`; "auto" is the model's own dtype.

    Raises:
        ConfigError: the configuration does not determine the size, or the dtype is unknown.
    """
    inner: Any = config.get("text_config")
    text: Mapping[str, Any] = config if inner is None else inner
    name = str((config.get("architectures") or [config.get("model_type", "?")])[0])
    is_mla = bool(text.get("kv_lora_rank")) and text.get("model_type") in _LATENT_TYPES
    unknown = _unknown_keys(config, text, _READ_OF_TEXT | _READ_OF_LATENT if is_mla else _READ_OF_TEXT)
    if unknown:
        keys = ", ".join(map(repr, sorted(unknown)))
        raise ConfigError(f"the configuration of {name} has keys that may change its KV cache ({keys}): {_EXACT_WAY}")

    dtype = _cache_dtype(config, text, cache_dtype)
    num_layers, num_windows = _number(text, "num_hidden_layers"), _num_windows(text)
    window = _number(text, "sliding_window") if num_windows else 0
    if is_mla:
        row = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
    else:
        row = 2 * _number(text, "num_key_value_heads") * _head_dim(text)
    row *= DTYPE_BYTES[dtype]
    num_full = num_layers - num_windows
    return Sizing(name, dtype, num_full, num_windows, window, num_full * row, num_windows * row, is_mla)


def _unknown_keys(config: Mapping[str, Any], text: Mapping[str, Any], read: frozenset[str]) -> set[str]:
    """Return the keys with an unknown effect, also those of the wrapper, which may repeat `text` but not differ."""
    known = _READ_OF_BOTH | _WITHOUT_EFFECT | read
    unknown = {
        key
        for part in (config, text)
        for key, value in part.items()
        if key not in known and value is not None and not (value is False and key in _WITHOUT_EFFECT_IF_FALSE)
        if key != "text_config" or part is text
    }
    if text is not config:
        unknown.update(key for key in read if config.get(key) not in (None, text.get(key)))
    return unknown


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"the model's configuration has no {key!r}: {_EXACT_WAY}")
    return value


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is None and config.get("model_type") in _DERIVE_HEAD_DIM:
        return _number(config, "hidden_size") // _number(config, "num_attention_heads")
    return _number(config, "head_dim")


def _cache_dtype(config: Mapping[str, Any], text: Mapping[str, Any], wanted: str) -> str:
    """Return the dtype of the cache. A checkpoint may also set it in its quantization."""
    if wanted != "auto":
        if wanted not in DTYPE_BYTES:
            raise ConfigError(f"a cache in {wanted!r}: known are {', '.join(DTYPE_BYTES)}")
        return wanted
    quantizations: list[dict[str, Any]] = [part.get("quantization_config") or {} for part in (config, text)]
    settings = [key for each in quantizations for key, value in each.items() if key.startswith("kv_cache") and value]
    own = next((str(part[key]) for part in (text, config) for key in ("torch_dtype", "dtype") if part.get(key)), "")
    dtype = own.removeprefix("torch.")
    if settings or dtype not in _MODEL_DTYPES:
        why = f"its quantization has {settings[0]!r}" if settings else f"its dtype is {dtype or 'not given'}"
        raise ConfigError(f"the engine chooses the dtype of this model's cache, because {why}: give --kv-cache-dtype")
    return dtype


def _num_windows(config: Mapping[str, Any]) -> int:
    """Return how many layers have a window instead of full attention."""
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if not kinds:
        signs = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern")
        if any(map(config.get, signs)) and config.get("use_sliding_window") is not False:
            raise ConfigError(f"the model has a window, but no 'layer_types' says in which layers: {_EXACT_WAY}")
        return 0
    others = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(f"the engine chooses the size of layers of kind {', '.join(map(repr, others))}: {_EXACT_WAY}")
    if len(kinds) != _number(config, "num_hidden_layers"):
        raise ConfigError(f"'layer_types' names {len(kinds)} layers of {config['num_hidden_layers']}: {_EXACT_WAY}")
    return kinds.count("sliding_attention")
