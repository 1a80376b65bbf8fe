"""`kvdepot sizing MODEL_CONFIG.json`: compute the size of a model's KV cache, and how many tokens a pool holds.

Pure arithmetic on the `config.json` that comes with a model. The kind of a layer decides how much it keeps:

- full attention: keys and values of every token;
- a sliding window: keys and values of the last `window` tokens of a prefix;
- latent attention (MLA): one compressed row a token, the same for all ranks;
- linear attention and state spaces: a state of fixed size, wherever a prefix ends.

Many published configurations leave the kinds to defaults of their model type; `_layer_kinds` knows these defaults. A
guess is never silent: `Sizing.notes` lists everything that the configuration leaves open.
"""

import enum
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

_INDEXER_ROW_BYTES: Final = 132  # sparse attention (`index_topk`): 128 fp8 values and their scale, each token and layer


class _Keeps(enum.Flag):
    """The KV that one layer keeps."""

    NOTHING = 0
    ALL = enum.auto()
    WINDOW = enum.auto()
    STATE = enum.auto()


_KINDS: Final = {
    "full_attention": _Keeps.ALL, "attention": _Keeps.ALL, "global_attention": _Keeps.ALL,
    "sliding_attention": _Keeps.WINDOW, "chunked_attention": _Keeps.WINDOW, "local_attention": _Keeps.WINDOW,
    "linear_attention": _Keeps.STATE, "mamba": _Keeps.STATE, "mamba2": _Keeps.STATE, "recurrent": _Keeps.STATE,
    "conv": _Keeps.STATE, "hybrid": _Keeps.ALL | _Keeps.STATE, "mlp": _Keeps.NOTHING, "moe": _Keeps.NOTHING,
}  # fmt: skip

_LETTERS: Final = {"*": _Keeps.ALL, "G": _Keeps.ALL, "L": _Keeps.WINDOW, "M": _Keeps.STATE, "-": _Keeps.NOTHING,
                   "E": _Keeps.NOTHING}  # fmt: skip

# One layer in this many has full attention and the others a window, where the configuration does not say.
_PATTERN_OF_TYPE: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4": 4, "llama4_text": 4}
_WINDOW_KEYS: Final = ("sliding_window", "attention_chunk_size", "attention_window_size")
_ALL_WINDOWS: Final = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_KEEPS_BOTH: Final = {"falcon_h1"}  # attention and a state side by side in every layer
_HINTS_OF_OTHER_KINDS: Final = (
    "pattern",
    "block_type",
    "layer_type",
    "attn_layer",
    "ssm",
    "mamba",
    "linear_attn",
    "rwkv",
)


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
    notes: tuple[str, ...] = ()  # a sentence for each thing that the configuration leaves open

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
            "notes": list(self.notes),
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
        lines += [f"note     {note}" for note in self.notes]
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
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path} cannot be read: {why} (give the config.json of a model on this machine)") from error
    except msgspec.DecodeError as error:
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
    kinds, notes = _layer_kinds(text)
    num_full, num_windows, num_states = (
        sum(kind in keeps for keeps in kinds) for kind in (_Keeps.ALL, _Keeps.WINDOW, _Keeps.STATE)
    )
    rank = text.get("kv_lora_rank")
    if rank:
        row = (int(rank) + _number(text, "qk_rope_head_dim")) * element
        if text.get("index_topk"):
            row += _INDEXER_ROW_BYTES
    else:
        heads = int(text.get("num_key_value_heads") or _number(text, "num_attention_heads"))
        head_dim = text.get("head_dim") or text.get("attention_head_dim")
        row = (
            2 * heads * int(head_dim or _number(text, "hidden_size") // _number(text, "num_attention_heads")) * element
        )
    window = next((int(text[key]) for key in _WINDOW_KEYS if text.get(key)), 0) if num_windows else 0
    if num_windows and not window:
        raise ConfigError(f"{name} has layers with a window, but its configuration does not say how long it is")
    return Sizing(
        name, dtype, num_full, num_windows, num_states, window, num_full * row, num_windows * row,
        num_states * _state_bytes(text, element), bool(rank), notes,
    )  # fmt: skip


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"the model's configuration has no {key!r}: its KV cache cannot be sized")
    return value


def _layer_kinds(config: Mapping[str, Any]) -> tuple[list[_Keeps], tuple[str, ...]]:
    """Return the memory of each layer, and notes on questions that the configuration leaves open.

    Raises:
        ConfigError: a layer is of a kind that is not known.
    """
    kinds, notes = _told_kinds(config)
    shared = int(config.get("num_kv_shared_layers") or 0)  # the last ones read the cache of earlier layers
    return kinds[: len(kinds) - shared], notes


def _told_kinds(config: Mapping[str, Any]) -> tuple[list[_Keeps], tuple[str, ...]]:
    named: Sequence[str] | None = config.get("layer_types") or config.get("layers_block_type")
    if named:
        return [_kind(str(name)) for name in named], ()
    letters = config.get("hybrid_override_pattern")
    if letters:
        return [_letter(letter) for letter in str(letters)], ()
    num_layers, model_type = _number(config, "num_hidden_layers"), str(config.get("model_type", ""))
    layers = range(num_layers)
    cycle: Sequence[str] | None = config.get("block_types")
    if cycle:  # Griffin: its attention is local
        local = [_Keeps.WINDOW if name == "attention" else _kind(str(name)) for name in cycle]
        return [local[i % len(local)] for i in layers], ()
    if config.get("attn_type_list"):
        return [_Keeps.ALL if is_full else _Keeps.STATE for is_full in config["attn_type_list"]], ()
    full = _full_layers(config, num_layers)
    if full is not None:
        return [_Keeps.ALL if i in full else _Keeps.STATE for i in layers], ()
    if model_type in _KEEPS_BOTH:
        return [_Keeps.ALL | _Keeps.STATE] * num_layers, ()
    if not any(config.get(key) for key in _WINDOW_KEYS) or config.get("use_sliding_window") is False:
        return [_Keeps.ALL] * num_layers, _doubts(config, num_layers)
    return _window_kinds(config, num_layers, model_type)


def _full_layers(config: Mapping[str, Any], num_layers: int) -> set[int] | None:
    """Return which layers have attention where the others have a state; None if no key says so."""
    if config.get("full_attention_interval"):
        return {i for i in range(num_layers) if (i + 1) % int(config["full_attention_interval"]) == 0}
    if config.get("attn_layer_indices") or config.get("full_attn_idxs"):
        return {int(i) for i in config.get("attn_layer_indices") or config["full_attn_idxs"]}
    if config.get("attn_layer_period"):
        offset = int(config.get("attn_layer_offset", 0))
        return {i for i in range(num_layers) if i % int(config["attn_layer_period"]) == offset}
    linear: Mapping[str, Any] = config.get("linear_attn_config") or {}
    if linear.get("full_attn_layers"):
        return {int(i) - 1 for i in linear["full_attn_layers"]}  # counted from 1
    return None


def _window_kinds(config: Mapping[str, Any], num_layers: int, model_type: str) -> tuple[list[_Keeps], tuple[str, ...]]:
    """Return the kinds of a model some of whose layers have a window."""
    layers = range(num_layers)
    pattern = config.get("sliding_window_pattern") or _PATTERN_OF_TYPE.get(model_type)
    if isinstance(pattern, str):
        return [_letter(pattern[i % len(pattern)]) for i in layers], ()
    if pattern:
        return [_Keeps.ALL if (i + 1) % int(pattern) == 0 else _Keeps.WINDOW for i in layers], ()
    if config.get("max_window_layers") is not None:
        return [_Keeps.WINDOW if i >= int(config["max_window_layers"]) else _Keeps.ALL for i in layers], ()
    if model_type in _ALL_WINDOWS:
        return [_Keeps.WINDOW] * num_layers, ()
    note = (
        f"which layers of a {model_type or 'model like this'!r} have the window is not known: all {num_layers} are"
        " counted with it, and each that has full attention instead takes more"
    )
    return [_Keeps.WINDOW] * num_layers, (note,)


def _doubts(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Say which keys speak of other kinds of layers, if the configuration has such keys and nothing reads them."""
    hints = [key for key, value in config.items() if value and any(hint in key for hint in _HINTS_OF_OTHER_KINDS)]
    if not hints:
        return ()
    keys = ", ".join(repr(key) for key in sorted(hints))
    return (f"all {num_layers} layers are counted with full attention, but {keys} may say otherwise: not known",)


def _kind(name: str) -> _Keeps:
    if name not in _KINDS:
        raise ConfigError(f"layers of kind {name!r} are not known: known are {', '.join(sorted(_KINDS))}")
    return _KINDS[name]


def _letter(letter: str) -> _Keeps:
    if letter not in _LETTERS:
        raise ConfigError(f"layers marked {letter!r} are not known: known are {', '.join(sorted(_LETTERS))}")
    return _LETTERS[letter]


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
        inner = _inner_size(config)
        kernel = int(config.get("mamba_d_conv") or config.get("conv_kernel") or 4)
        groups = int(config.get("mamba_n_groups") or config.get("n_groups") or 1)
        convolution = inner if "mamba_dt_rank" in config else inner + 2 * groups * state  # Mamba 1 or 2
        return (inner * state + convolution * (kernel - 1)) * element
    return 0


def _inner_size(config: Mapping[str, Any]) -> int:
    """Return the width of one Mamba layer."""
    if config.get("mamba_d_ssm"):
        return int(config["mamba_d_ssm"])
    if config.get("mamba_num_heads"):
        return int(config["mamba_num_heads"]) * _number(config, "mamba_head_dim")
    return int(config.get("mamba_expand", config.get("expand", 2))) * _number(config, "hidden_size")
