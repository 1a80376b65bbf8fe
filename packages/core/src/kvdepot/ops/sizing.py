"""`kvdepot sizing MODEL_CONFIG.json`: computes the size of a model's KV cache, and the tokens that fit into a pool.

Pure arithmetic on the `config.json` of a model, for the three kinds of attention whose cache follows from its fields:
plain or grouped (keys and values of every token), the same with a window in the layers that `layer_types` names, and
DeepSeek's latent attention (one compressed row per token, the same on all ranks).

A size is exact or refused. Models differ in too many ways to list: defaults in code, layers that share a cache, states
of another dtype. So a single unknown key is refused. The error names the method that is exact for every model: attach
an engine, and `kvdepot status` prints the sizes that it registered.
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

# Keys that the arithmetic reads.
_READ: Final = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "head_dim", "num_attention_heads",
    "num_key_value_heads", "num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "quantization_config",
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
# Keys that change the computation, never the bytes of a token in the cache.
_WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "decoder_sparse_step", "ep_size",
    "experts_per_token", "final_logit_softcapping", "first_k_dense_replace", "hidden_act", "hidden_activation",
    "id2label", "initial_context_length", "initializer_range", "intermediate_size", "label2id", "logit_scale",
    "logits_scaling", "max_position_embeddings", "mlp_only_layers", "moe_intermediate_size", "moe_layer_freq",
    "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_local_experts", "num_nextn_predict_layers", "original_max_position_embeddings", "output_attentions",
    "output_hidden_states", "output_router_logits", "partial_rotary_factor", "pretraining_tp", "problem_type",
    "query_pre_attn_scalar", "return_dict", "routed_scaling_factor", "scoring_func", "seq_aux",
    "shared_expert_intermediate_size", "swiglu_limit", "tie_word_embeddings", "topk_group", "topk_method",
    "transformers_version", "unsloth_fixed", "use_cache", "use_qk_norm", "vocab_size",
})  # fmt: skip
_WITHOUT_EFFECT_BY_START: Final = ("rope_", "router_")
_WITHOUT_EFFECT_BY_END: Final = (
    "_bias",
    "_dropout",
    "_eps",
    "_multiplier",
    "_pdrop",
    "_softcapping",
    "_token_id",
)

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
    text: Mapping[str, Any] = config.get("text_config") or config
    name = str((config.get("architectures") or [config.get("model_type", "?")])[0])
    is_mla = bool(text.get("kv_lora_rank")) and text.get("model_type") in _LATENT_TYPES
    known = _READ | _WITHOUT_EFFECT | (_READ_OF_LATENT if is_mla else frozenset[str]())
    unknown = [key for key, value in text.items() if value not in (None, False) and not _is_known(key, known)]
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


def _is_known(key: str, known: frozenset[str]) -> bool:
    return key in known or key.startswith(_WITHOUT_EFFECT_BY_START) or key.endswith(_WITHOUT_EFFECT_BY_END)


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
    quantization: Any = config.get("quantization_config") or text.get("quantization_config") or {}
    settings = [key for key, value in dict(quantization).items() if key.startswith("kv_cache") and value]
    own = next((str(part[key]) for part in (text, config) for key in ("torch_dtype", "dtype") if part.get(key)), "")
    dtype = own.removeprefix("torch.")
    if settings or dtype not in _MODEL_DTYPES:
        why = f"its quantization has {settings[0]!r}" if settings else f"its dtype is {dtype or 'not given'}"
        raise ConfigError(f"the dtype of this model's cache is up to the engine, as {why}: give --kv-cache-dtype")
    return dtype


def _num_windows(config: Mapping[str, Any]) -> int:
    """Return how many layers have a window instead of full attention."""
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if not kinds:
        if config.get("sliding_window") and config.get("use_sliding_window") is not False:
            raise ConfigError(f"the model has a window, but no 'layer_types' says in which layers: {_EXACT_WAY}")
        return 0
    others = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"the size of layers of kind {', '.join(map(repr, others))} is up to the engine: {_EXACT_WAY}"
        )
    if len(kinds) != _number(config, "num_hidden_layers"):
        raise ConfigError(f"'layer_types' names {len(kinds)} layers of {config['num_hidden_layers']}: {_EXACT_WAY}")
    return kinds.count("sliding_attention")
