"""`kvdepot sizing MODEL_CONFIG.json`: compute the size of a model's KV cache, and how many tokens a pool holds.

Pure arithmetic on a model's `config.json`. The kind of a layer determines its cache:

- full attention: keys and values of every token;
- sliding window: keys and values of the last `window` tokens of a prefix;
- latent attention (MLA): one compressed row per token, shared by all ranks;
- linear attention and state spaces: a state of fixed size, kept at the end of a prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvdepot.config import format_size
from kvdepot.errors import ConfigError

DTYPE_BYTES: Final = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "int8": 1,
}  # fmt: skip

_WINDOW_KINDS: Final = {"sliding_attention", "chunked_attention"}
_STATE_KINDS: Final = {"linear_attention", "mamba", "recurrent", "conv"}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of one model's KV cache on all ranks together, in bytes."""

    name: str
    dtype: str
    num_full_layers: int
    num_window_layers: int
    num_state_layers: int
    window_tokens: int
    bytes_per_token: int  # of the layers with full attention
    window_bytes_per_token: int  # of the layers with a window, for each token inside it
    state_bytes: int  # of the layers with a state, per possible end of a prefix; 0: unknown
    is_mla: bool

    def prefix_bytes(self, num_tokens: int) -> int:
        """Return the size of one prefix of this length, with windows and states kept only at its end."""
        window = min(num_tokens, self.window_tokens) * self.window_bytes_per_token
        return num_tokens * self.bytes_per_token + window + self.state_bytes

    def as_dict(self, pool_bytes: int) -> dict[str, Any]:
        """Return the sizes for JSON."""
        stored = self.bytes_per_token + self.window_bytes_per_token
        return {
            "model": self.name,
            "dtype": self.dtype,
            "layers": {
                "full_attention": self.num_full_layers,
                "sliding_window": self.num_window_layers,
                "state": self.num_state_layers,
            },
            "is_mla": self.is_mla,
            "window_tokens": self.window_tokens,
            "bytes_per_token": self.bytes_per_token,
            "window_bytes_per_token": self.window_bytes_per_token,
            "state_bytes": self.state_bytes,
            "pool_bytes": pool_bytes,
            "pool_tokens": pool_bytes // stored if stored else 0,
        }

    def describe(self, pool_bytes: int) -> str:
        """Return the sizes as text."""
        kinds = [
            (self.num_full_layers, "with latent attention" if self.is_mla else "with full attention"),
            (self.num_window_layers, f"with a window of {self.window_tokens:,} tokens"),
            (self.num_state_layers, "with a state"),
        ]
        lines = [
            f"model    {self.name}",
            "layers   " + ", ".join(f"{count} {kind}" for count, kind in kinds if count) + f"; cache in {self.dtype}",
            f"a token  {format_size(self.bytes_per_token)}"
            + (f", and {format_size(self.window_bytes_per_token)} in windows" if self.num_window_layers else ""),
        ]
        if self.num_state_layers:
            state = format_size(self.state_bytes) if self.state_bytes else "not told by this configuration"
            lines.append(f"a state  {state}, for each place where a stored prefix may end")
        lines += [
            f"{tokens:>7,}  tokens of one prompt: {format_size(self.prefix_bytes(tokens))}"
            for tokens in (1_000, 8_000, 32_000, 128_000)
        ]
        stored = self.bytes_per_token + self.window_bytes_per_token
        if stored:
            lines.append(
                f"a pool of {format_size(pool_bytes)} holds about {pool_bytes // stored:,} tokens"
                + (" (windows are kept for every token that an engine stores)" if self.num_window_layers else "")
            )
        return "\n".join(lines)


def read_model_config(path: Path | str) -> Mapping[str, Any]:
    """Read a model's `config.json`, or the one in a folder.

    Raises:
        ConfigError: the file is missing or is not JSON.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's configuration")
    return msgspec.convert(config, dict[str, Any])


def size_model(config: Mapping[str, Any], cache_dtype: str = "auto") -> Sizing:
    """Return the size of a model's cache.

    Args:
        config: of the model, as in its `config.json`.
        cache_dtype: as vLLM's `--kv-cache-dtype`; "auto" is the model's own.

    Raises:
        ConfigError: the configuration is incomplete, or the dtype is unknown.
    """
    text: Mapping[str, Any] = config.get("text_config") or config.get("llm_config") or config
    name = str((config.get("architectures") or [config.get("model_type", "?")])[0])
    own = str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or config.get("dtype") or "")
    dtype = (own or "bfloat16").removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"a cache in {dtype!r}: known are {', '.join(sorted(DTYPE_BYTES))}")
    element = DTYPE_BYTES[dtype]
    kinds = _layer_kinds(text)
    num_states = sum(kind in _STATE_KINDS for kind in kinds)
    num_windows = sum(kind in _WINDOW_KINDS for kind in kinds)
    num_full = len(kinds) - num_states - num_windows
    rank = text.get("kv_lora_rank")
    if rank:
        row = (int(rank) + _number(text, "qk_rope_head_dim")) * element
    else:
        heads = int(text.get("num_key_value_heads") or _number(text, "num_attention_heads"))
        head_dim = int(text.get("head_dim") or _number(text, "hidden_size") // _number(text, "num_attention_heads"))
        row = 2 * heads * head_dim * element
    return Sizing(
        name, dtype, num_full, num_windows, num_states, int(text.get("sliding_window") or 0) if num_windows else 0,
        num_full * row, num_windows * row, num_states * _state_bytes(text, element), bool(rank),
    )  # fmt: skip


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"the model's configuration has no {key!r}: its KV cache cannot be sized")
    return value


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer that has a cache."""
    kinds: Sequence[str] | None = config.get("layer_types") or config.get("layers_block_type")
    if kinds:
        return [str(kind) for kind in kinds]
    num_layers = _number(config, "num_hidden_layers")
    window, pattern = config.get("sliding_window"), config.get("sliding_window_pattern")
    if window and pattern:
        return ["full_attention" if (i + 1) % int(pattern) == 0 else "sliding_attention" for i in range(num_layers)]
    if window and config.get("use_sliding_window", True):
        return ["sliding_attention"] * num_layers
    return ["full_attention"] * num_layers


def _state_bytes(config: Mapping[str, Any], element: int) -> int:
    """Return the size of one layer's state, for gated delta nets and Mamba 2; 0 if unknown."""
    if "linear_num_value_heads" in config:
        key = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
        values, value_dim = _number(config, "linear_num_value_heads"), _number(config, "linear_value_head_dim")
        convolution = (2 * key + values * value_dim) * (_number(config, "linear_conv_kernel_dim") - 1)
        recurrence = values * _number(config, "linear_key_head_dim") * value_dim
        return (convolution + recurrence) * element
    if "mamba_d_state" in config or "ssm_state_size" in config:
        state = int(config.get("mamba_d_state") or _number(config, "ssm_state_size"))
        inner = int(config.get("mamba_expand", config.get("expand", 2))) * _number(config, "hidden_size")
        kernel = int(config.get("mamba_d_conv") or config.get("conv_kernel") or 4)
        groups = int(config.get("mamba_n_groups") or config.get("n_groups") or 1)
        return (inner * state + (inner + 2 * groups * state) * (kernel - 1)) * element
    return 0
