"""Names a model and its weights by content, so that equal engines get equal namespaces in every process."""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, cast

from blake3 import blake3

from kvdepot.config import format_size
from kvdepot.engines.weights import fingerprint

logger = logging.getLogger(__name__)

RANDOM: Final = "dummy"  # the load format with which engines make random weights
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})  # do not change the KV


def digest_of(what: str, value: Any) -> str:
    """Return a digest of a JSON-like value; `what` names its kind."""
    text = json.dumps(value, sort_keys=True, default=str)
    return blake3(text.encode(), derive_key_context=f"kvdepot 2026-11 {what}").hexdigest()[:32]


def config_values(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a model configuration of transformers."""
    return hf_config.to_dict() if hasattr(hf_config, "to_dict") else {"config": str(hf_config)}


def config_digest(hf_config: Any) -> str:
    """Return a digest of a model configuration after overrides: rope scaling, windows, heads."""
    return digest_of("model config", _without_volatile(config_values(hf_config)))


def commit_of(hf_config: Any) -> str:
    """Return the commit of the hub's snapshot that a configuration came from; empty if there is none."""
    return str(getattr(hf_config, "_commit_hash", None) or "")


def weights_of(model: str, load_format: str, from_files: Collection[str], hf_config: Any) -> str:
    """Return a text that identifies the weights of a model; "", with a log line, if no files identify them.

    `from_files` are the load formats that take the weights from the model's folder. Random weights are "" as well.
    """
    if load_format == RANDOM:
        return ""
    if load_format in from_files and Path(model).exists():
        return weights_in(Path(model))
    commit = commit_of(hf_config)
    logger.log(
        logging.INFO if commit else logging.WARNING,
        "weights of %s (load format %s) have no fingerprint: kvdepot identifies them by that name and %s. If the"
        " weights change and these do not, set a new name in kvdepot's setting `weights`.",
        model,
        load_format,
        f"the commit {commit}" if commit else "nothing else",
    )
    return ""


def weights_in(path: Path, what: str = "weights") -> str:
    """Return a text that identifies the weights in a folder; "", with a log line, if there are none.

    The text does not depend on the path, unless the fingerprint covers too little of some file. `what` names the
    weights in log lines.
    """
    try:
        found = fingerprint(path)
    except OSError as error:
        logger.warning("%s in %s cannot be read for their fingerprint: %s", what, path, error)
        return ""
    if not found.digest:
        logger.warning("%s in %s have no fingerprint: no file of a known kind is there", what, path)
    if found.digest and found.coarse:
        logger.warning(
            "%s in %s: of %s only even samples are in the fingerprint, as its tensors cannot be told apart. Convert it"
            " to safetensors, or change the setting `weights` of kvdepot whenever it changes.",
            what,
            path,
            ", ".join(found.coarse),
        )
        return f"{found.digest} {path}"
    if found.digest and found.unseen_bytes:
        logger.info(
            "the fingerprint of %s in %s has samples of each tensor. It may miss a change in place of up to %s in a"
            " row, for example of some rows of an embedding: after such a change, change kvdepot's setting `weights`.",
            what,
            path,
            format_size(found.unseen_bytes),
        )
    return found.digest


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {str(key): _without_volatile(inner) for key, inner in fields.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_without_volatile(inner) for inner in cast("list[Any]", value)]
    return value
