"""`kvdepot sizing MODEL_CONFIG.json`: prints the most bytes that a token takes in a pool, with the sum that gives them.

Four numbers of a model's `config.json` give this bound. Layers with windows or states take less. Latent attention takes
so much less that it has a line of its own; it is no bound, because engines serve some of these models without it.
Exact figures need an attached engine: `kvdepot status` prints the sizes that it registered.
"""

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvdepot.config import format_size
from kvdepot.errors import ConfigError, describe_os_error

VALUE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
# As vLLM reads checkpoints of ModelOpt and compressed-tensors.
_IS_QUANTIZED: Final = re.compile(
    rb'"kv_cache_(scheme|quant_algo)"\s*:\s*("(fp8|nvfp4)"|{[^}]*"num_bits"\s*:\s*[48]\b)', re.IGNORECASE
)

_TEXT_MODELS: Final = ("text_config", "llm_config", "language_config", "thinker_config")  # of wrappers, also nested
# The bound takes the largest match: some models have other heads in some layers (`swa_num_key_value_heads`).
_HEADS: Final = "(num_attention|num|n)_heads?"
_KV_HEADS: Final = ".*(key_value|kv)_heads.*"
_HEAD_SIZE: Final = ".*head_dim"
_GEMMA_HEAD_SIZE: Final = 256  # the default in Gemma's code; in others' it is hidden size / heads


class Sizing(NamedTuple):
    """The most bytes that one model's KV cache takes, on all ranks together."""

    model: str
    bytes_per_token: int
    how: str
    latent_bytes_per_token: int | None = None  # one vector a layer, for all heads

    def as_dict(self, pool_bytes: int) -> dict[str, Any]:
        """Return the sizes for JSON."""
        return {**self._asdict(), "pool_bytes": pool_bytes, "pool_tokens": pool_bytes // self.bytes_per_token}

    def describe(self, pool_bytes: int) -> str:
        """Return the sizes as text."""
        latent = self.latent_bytes_per_token
        return (
            f"model    {self.model}\n"
            f"a token  at most {format_size(self.bytes_per_token)}: {self.how}\n"
            f"a pool   of {format_size(pool_bytes)} holds {pool_bytes // self.bytes_per_token:,} tokens or more\n"
            + (f"latent   about {format_size(latent)} a token, {pool_bytes // latent:,} tokens\n" if latent else "")
            + "Windows and states take less; 'kvdepot status' is exact while an engine is attached."
        )


def size_model(path: Path, cache_dtype: str = "auto") -> Sizing:
    """Return a bound of the size of a model's cache.

    Args:
        path: its `config.json`, or the folder of that file.
        cache_dtype: a key of `VALUE_BYTES`, or "auto": vLLM's and SGLang's choice for this checkpoint.

    Raises:
        ConfigError: a file cannot be read, or the sum lacks a number.
    """
    path = path / "config.json" if path.is_dir() else path
    quantization = path.with_name("hf_quant_config.json")  # of NVIDIA's checkpoints
    try:
        content = path.read_bytes()
        config: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        content += quantization.read_bytes() if quantization.exists() else b""
    except OSError as error:
        raise ConfigError(f"{describe_os_error(error)} (give the config.json of a model on this machine)") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a model's configuration: {error}") from error
    if cache_dtype == "auto":  # both engines serve a float32 model in 16 bits, too
        cache_dtype = "fp8" if _IS_QUANTIZED.search(content) else "bfloat16"

    text = config
    while inner := next((text[key] for key in _TEXT_MODELS if isinstance(text.get(key), dict)), None):
        text = inner
    layers, heads = _largest(text, "(num_hidden|num|n)_layers?"), _largest(text, _HEADS)
    kv_heads = _largest(text, _KV_HEADS) or heads
    head_size = max(_largest(text, _HEAD_SIZE), _largest(text, "qk_nope_head_dim") + _largest(text, "qk_rope_head_dim"))
    if not text.get("head_dim"):
        is_gemma = str(text.get("model_type")).startswith("gemma")
        derived = _GEMMA_HEAD_SIZE if is_gemma else _largest(text, "hidden_size|n_embd|d_model") // max(1, heads)
        head_size = max(head_size, derived)
    if not layers or not kv_heads or not head_size:
        lacks = "layers" if not layers else "KV heads" if not kv_heads else "the size of a head"
        raise ConfigError(f"{path} has no number of {lacks}: attach an engine, and 'kvdepot status' is exact")
    how = f"{layers} layers x {kv_heads} KV heads x 2 (key, value) x {head_size} x {VALUE_BYTES[cache_dtype]} B"
    model = str((config.get("architectures") or [config.get("model_type", "?")])[0])
    latent = _largest(text, "kv_lora_rank")
    row = latent + _largest(text, "qk_rope_head_dim")
    return Sizing(
        model,
        layers * kv_heads * 2 * head_size * VALUE_BYTES[cache_dtype],
        f"{how} ({cache_dtype})",
        layers * row * VALUE_BYTES[cache_dtype] if latent else None,
    )


def _largest(config: dict[str, Any], pattern: str) -> int:
    """Return the largest number under a matching key, alone or in a list; 0 without one."""
    values = [str(value) for key, value in config.items() if re.fullmatch(pattern, key)]
    return max(map(int, re.findall(r"\d+", " ".join(values))), default=0)
