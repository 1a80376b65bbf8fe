"""Whose KV it is: the namespace of an engine, and what else but its tokens decides the KV of a request.

Everything here is computed from content and names, with no seed: two processes that agree get the same keys.
"""

import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from blake3 import blake3

from kvdepot.keys import Namespace
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.settings import Settings

logger = logging.getLogger(__name__)

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SETTINGS: Final = frozenset({"adapter_config.json", "quantize_config.json", "hf_quant_config.json"})
_SAMPLES_A_FILE: Final = 64
_SAMPLE_BYTES: Final = 4096
_WHOLE_PROMPT: Final = 1 << 40
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})  # do not change the KV


def fingerprint(path: Path) -> str:
    """Return a digest of a model's or adapter's weight files: names, sizes, and samples of their content.

    Sampled, as reading all weights would take as long as loading them: 64 pieces of 4 KiB a file, spread evenly, the
    whole of small files. Weights that were trained further differ in all of them.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake3(derive_key_context="kvdepot 2026-11 weights")
    inside = [path] if path.is_file() else path.iterdir()
    files = sorted(file for file in inside if file.suffix in _WEIGHTS or file.name in _SETTINGS)
    for file in files:
        size = file.stat().st_size
        digest.update(msgspec.msgpack.encode((file.name, size)))
        with file.open("rb") as stream:
            for piece in _samples(stream, size):
                digest.update(piece)
    return digest.hexdigest()[:32]


def _samples(stream: Any, size: int) -> Iterator[bytes]:
    if size <= _SAMPLES_A_FILE * _SAMPLE_BYTES:
        yield stream.read()
        return
    for number in range(_SAMPLES_A_FILE):
        stream.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES_A_FILE - 1))
        yield stream.read(_SAMPLE_BYTES)


def engine_namespace(vllm_config: Any, settings: Settings) -> Namespace:
    """Return what two engines must agree on before they may share."""
    model = vllm_config.model_config
    extra = {
        "connector": "vllm",
        "namespace": settings.namespace,
        "config": _config_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "code_revision": str(getattr(model, "code_revision", None) or ""),
        "load_format": str(vllm_config.load_config.load_format),
        "weights": settings.weights or _weights(vllm_config),
    }
    if extra["load_format"] == "dummy":
        extra["seed"] = str(model.seed)
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        tenant=settings.tenant,
        tenant_salt=settings.tenant_salt,
        quantization=str(model.quantization or ""),
        extra=tuple(sorted(extra.items())),
    )


def _config_digest(model: Any) -> str:
    """Return a digest of the model's configuration after overrides: rope scaling, windows, heads."""
    config = model.hf_config
    values = config.to_dict() if hasattr(config, "to_dict") else {"config": str(config)}
    text = json.dumps(_without_volatile(values), sort_keys=True, default=str)
    return blake3(text.encode(), derive_key_context="kvdepot 2026-11 model config").hexdigest()[:32]


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {str(key): _without_volatile(inner) for key, inner in fields.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_without_volatile(inner) for inner in cast("list[Any]", value)]
    return value


def _weights(vllm_config: Any) -> str:
    """Return what names the weights: a digest of local files, else the commit of the hub's snapshot."""
    model = vllm_config.model_config
    path = Path(str(model.model))
    if path.exists():
        try:
            return fingerprint(path)
        except OSError as error:
            logger.warning("weights in %s cannot be read for their fingerprint: %s", path, error)
            return ""
    return str(getattr(model.hf_config, "_commit_hash", None) or "")


class RequestIdentity:
    """What decides a request's KV beside its tokens, as extra keys of `PrefixHasher`."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, str], str] = {}

    def extra_keys(self, request: EngineRequest) -> list[tuple[int, int, bytes]]:
        """Return `(first token, end, key)` for the adapter, cache salt, multimodal items and prompt embeddings."""
        found: list[tuple[int, int, bytes]] = []
        if request.lora_request is not None:
            found.append((0, _WHOLE_PROMPT, self._adapter(request.lora_request)))
        if request.cache_salt:
            found.append((0, _WHOLE_PROMPT, msgspec.msgpack.encode(("salt", request.cache_salt))))
        if request.prompt_embeds is not None:
            found.append((0, _WHOLE_PROMPT, msgspec.msgpack.encode(("embeds", _tensor_digest(request.prompt_embeds)))))
        for item in request.mm_features:
            place = item.mm_position
            key = msgspec.msgpack.encode(("item", item.modality, item.identifier))
            found.append((place.offset, place.offset + place.length, key))
        return found

    def _adapter(self, adapter: Any) -> bytes:
        name, path = str(adapter.lora_name), str(adapter.lora_path)
        if (name, path) not in self._adapters or getattr(adapter, "load_inplace", False):
            try:
                self._adapters[name, path] = fingerprint(Path(path)) if Path(path).exists() else ""
            except OSError as error:
                logger.warning("adapter %s in %s cannot be read for its fingerprint: %s", name, path, error)
                self._adapters[name, path] = ""
        return msgspec.msgpack.encode(("adapter", name, path, self._adapters[name, path]))


def _tensor_digest(tensor: Any) -> bytes:
    torch: Any = importlib.import_module("torch")
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return blake3(raw.tobytes(), derive_key_context="kvdepot 2026-11 embeddings").digest()
