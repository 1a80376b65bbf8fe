# pyright: basic
"""The namespace of an SGLang engine: everything besides tokens that determines its KV.

SGLang's names of pages already distinguish tokens, adapters (`extra_key`) and salts (`cache_salt`). SGLang gives an
adapter that it loads while it runs a new random id, but one of `--lora-paths` the same id at each start, made of its
name and path. So the content of these adapters is part of the namespace.

At start, the weight files name the weights, so that replicas with equal weights share. An update of the running engine
makes the name random, because until SGLang flushes its cache, pages on the device may come from the weights before.
After that flush, digests of the weights of all ranks determine the name. A flush without an update is a request for a
cold cache, so the name is random.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvdepot.engines.generation import digest_of_ranks, of_generation
from kvdepot.engines.identity import RANDOM, commit_of, config_digest, digest_of, models_digest, weights_in, weights_of
from kvdepot.engines.settings import EngineSettings
from kvdepot.keys import GENERATION, Namespace
from kvdepot_sglang.ranks import Ranks

logger = logging.getLogger(__name__)

_FROM_FILES: Final = frozenset(
    {"auto", "pt", "safetensors", "npcache", "gguf", "bitsandbytes", "layered", "sharded_state", "fastsafetensors"}
)
"""Load formats that take the weights from the model's folder."""
_DECIDING: Final = (  # fields of `ServerArgs` that change bits of KV
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "load_format",
    "model_loader_extra_config",
    "json_model_override_args",
    "context_length",
    "torchao_config",
    "modelopt_quant",
)


def engine_namespace(
    server_args: Any, hf_config: Any, device: str, num_ranks: int, settings: EngineSettings
) -> Namespace:
    """Return the namespace. Two engines share only if their namespaces are equal.

    Args:
        server_args: SGLang's `ServerArgs`.
        hf_config: the model's configuration.
        device: type of the device.
        num_ranks: tensor-parallel ranks. They count only if each generates its own weights or bits must be equal.
        settings: the user's settings.
    """
    model, load_format = str(server_args.model_path), _plain(getattr(server_args, "load_format", ""))
    weights = "" if settings.weights else weights_of(model, load_format, _FROM_FILES, hf_config)
    extra = {
        "connector": "sglang",
        "namespace": settings.namespace,
        "config": config_digest(hf_config),
        "weights": settings.weights or weights or commit_of(hf_config),
        "device": device,
        **{name: _plain(getattr(server_args, name, "")) for name in _DECIDING},
    }
    adapters = sorted(_adapter_paths(getattr(server_args, "lora_paths", None) or ()))
    if adapters:
        told = [(path, weights_in(Path(path), "weights of an adapter")) for path in adapters]
        extra["adapters"] = digest_of("adapters", told)
    scales = Path(str(getattr(server_args, "quantization_param_path", None) or ""))
    if scales.is_file():  # scales of an fp8 cache, which pages do not have
        extra["scales"] = digest_of("scales", scales.read_text())
    if load_format == RANDOM:
        extra["seed"] = str(getattr(server_args, "random_seed", ""))
    if load_format == RANDOM or getattr(server_args, "enable_deterministic_inference", False):
        extra["ranks"] = str(num_ranks)
    return Namespace(
        model="" if weights else model,
        revision=str(getattr(server_args, "revision", None) or ""),
        tenant=settings.tenant,
        tenant_salt=settings.tenant_salt,
        quantization=str(getattr(server_args, "quantization", None) or ""),
        extra=tuple(sorted(extra.items())),
    )


def _adapter_paths(given: Any) -> Iterator[str]:
    """Yield the paths in `--lora-paths`: a dictionary by name, or a list of texts, dictionaries and `LoRARef`s."""
    for each in given.values() if isinstance(given, Mapping) else given:
        if isinstance(each, Mapping):
            yield str(each["lora_path"])
        else:
            yield each.partition("=")[2] or each if isinstance(each, str) else str(each.lora_path)


def _plain(value: Any) -> str:
    """Return a setting as text; for an enumeration, its value."""
    return str(getattr(value, "value", value) or "").removeprefix("torch.")


class Weights:
    """The weights of one engine. All ranks must make the same calls.

    Args:
        namespace: the namespace of the weights that the engine loaded at start.
        ranks: the ranks that hold the weights.

    Attributes:
        namespace: the namespace of the weights that the engine computes with; valid while `is_named`.
    """

    def __init__(self, namespace: Namespace, ranks: Ranks) -> None:
        self.namespace = of_generation(namespace, "")
        self.is_named = True
        self._ranks = ranks
        self._updated: Any = None  # the model, if it was updated since the weights were last named

    def update(self, model: Any) -> bool:
        """Note that a model is about to get new weights. Return whether this changes the namespace."""
        is_first, self._updated = self._updated is None, model
        if is_first and self.is_named:
            self.namespace = of_generation(self.namespace, self._ranks.common_random())
            return True
        return False

    def flush(self) -> None:
        """Note that the device has no pages any more, so that the weights need a name when the next request arrives.

        They are not named here: a trainer may flush with the first of several updates, or before SGLang packs the
        received weights.
        """
        self.is_named = False

    def name(self, version: str) -> None:
        """Name the weights after a flush.

        Args:
            version: the version that people gave them, which is part of the name; "" for none.
        """
        name = ""
        if self._updated is not None:
            name = digest_of_ranks(self._ranks.all_tell(_digest(self._updated)), self._ranks.size)
        self.namespace = of_generation(self.namespace, f"{version} {name or self._ranks.common_random()}".strip())
        self.is_named, self._updated = True, None
        logger.info("the cache was flushed: KV of the weights %s from now on", dict(self.namespace.extra)[GENERATION])


def _digest(model: Any) -> str:
    """Return a digest of the weights with which a rank computes KV; "" if that fails."""
    try:
        return models_digest([model])
    except Exception:
        logger.exception("the weights have no digest: this engine shares with no other until the next update")
        return ""
