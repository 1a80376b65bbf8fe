"""Names a model and its weights by content, so that equal engines get equal namespaces in every process.

Weights in files get a `fingerprint`. Weights in an engine's memory get a digest, as a trainer may have written them.

A fingerprint is fast enough for every start, because it samples each tensor. The samples are read once when an engine
starts, and for each new adapter. A file's directory lists its tensors: the header of safetensors, or the central
directory of the zip archives that `torch.save` writes, which also has a checksum of each tensor. Changing a whole
tensor in place changes the fingerprint. In safetensors, a change within a large tensor, for example in some
neighbouring rows, may lie between two samples, because sampling every few rows would read most of the file.
`Fingerprint.unseen_bytes` limits the length of such a change. In archives, the checksum covers it.

Of weights in memory, every byte of every tensor counts, because a step of training changes few values of a 16-bit
model, so samples could miss the change. On CPU, the bytes are hashed in place. A CUDA or XPU device instead computes
two 64-bit sums per 4 MiB of its memory, in which each word has a random factor. Tensors that differ have equal sums
only by chance.
"""

import importlib
import itertools
import json
import logging
import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from blake3 import blake3

from kvdepot.config import format_size

logger = logging.getLogger(__name__)

RANDOM: Final = "dummy"  # the load format with which engines make random weights
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})  # do not change the KV

_SUMS: Final = frozenset({"cuda", "xpu"})  # devices with 64-bit integers, which compute sums
_WORDS: Final = 1 << 20  # words of 32 bits in one sum: the random factors of both sums take 16 MiB of the device
_SEED: Final = 20261125  # arbitrary, but equal in all processes that compare digests

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SETTINGS: Final = frozenset({"adapter_config.json", "quantize_config.json", "hf_quant_config.json"})
_PICKLES: Final = frozenset({".bin", ".pt", ".pth"})
# Rules of vLLM 0.32 and SGLang 0.5 (`DefaultModelLoader._prepare_weights`). A model may name further files to load.
_OF_TRAINERS: Final = (
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth",
)  # fmt: skip
"""Files that no engine loads."""
_COPIES: Final = (
    ("*.safetensors", ("pytorch_model*.bin",)),
    ("adapter_model.safetensors", ("adapter_model.bin", "adapter_model.pt")),
)
"""Pickles that engines load only if there is no file of the kind before them."""
_LOADS_PICKLES: Final = frozenset({"pt", "npcache"})
"""Load formats that load pickles even if there are safetensors."""
_FOLLOWS_INDEX: Final = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"})
"""Load formats that load no file with a name of `_SPLITS` that is not in the index."""
_INDEX: Final = "model.safetensors.index.json"
_SPLITS: Final = ("model.safetensors", "model-*-of-*.safetensors")
_CONSOLIDATED: Final = "consolidated*.safetensors"
_SAMPLES_A_FILE: Final = 64  # spread over the tensors by size, in addition to one for each
_SAMPLE_BYTES: Final = 1024  # lies in one page or two, which a cold file reads as a whole anyway
_WHOLE_BYTES: Final = 32 * 1024  # tensors up to this size are read whole: norms, biases, scales
_LARGEST_HEADER_BYTES: Final = 100_000_000  # the limit of safetensors itself

Tensor = Any
"""A torch tensor. This module imports torch only when it is called."""


def models_digest(
    models: Iterable[Any], hidden_of: Callable[[Any], Iterable[tuple[str, Tensor]]] = lambda _model: ()
) -> str:
    """Return a digest of the parameters and persistent buffers of torch models.

    Args:
        models: have the weights.
        hidden_of: returns tensors that stand for the weights that a model keeps outside of both.
    """
    return weights_digest(
        (f"{number}.{name}", tensor)
        for number, model in enumerate(models)
        for name, tensor in itertools.chain(model.state_dict().items(), hidden_of(model))
        if hasattr(tensor, "numel")
    )


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of the names, dtypes, shapes and content of tensors."""
    digest = blake3(derive_key_context="kvdepot 2026-11 weights in memory", max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        for part, plain in _plain(name, tensor):
            digest.update(msgspec.msgpack.encode((part, str(plain.dtype), tuple(plain.shape))))
            if plain.numel() and plain.device.type != "meta":
                for piece in content_of(plain):
                    digest.update(piece)
    return digest.hexdigest()[:32]


def content_of(tensor: Tensor, *, by_sums: bool | None = None) -> Iterator[Any]:
    """Yield bytes that stand for a tensor's content.

    Args:
        tensor: has at least one element.
        by_sums: whether to yield sums instead of the bytes; None: as suits the tensor's device.
    """
    torch = importlib.import_module("torch")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not (flat.device.type in _SUMS if by_sums is None else by_sums):
        yield memoryview(flat.cpu().numpy())
        return
    end = flat.numel() // 4 * 4
    words = flat[:end].view(torch.int32)
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.randint(-(1 << 63), (1 << 63) - 1, (2, min(_WORDS, max(1, words.numel()))), generator=generator)
    weights = weights.to(flat.device)
    sums = [(part.to(torch.int64) * weights[:, : part.numel()]).sum(1) for part in words.split(_WORDS) if part.numel()]
    if sums:
        yield memoryview(torch.stack(sums).cpu().numpy()).cast("B")
    if end < flat.numel():
        yield memoryview(flat[end:].cpu().numpy())


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors inside a tensor. A quantised tensor consists of several."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


Span = tuple[int, int]
"""Start and end of a range in a file."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the weights in a folder.

    Attributes:
        digest: "" if the folder has no weights.
        coarse: files whose tensors could not be found. They were sampled evenly, so a change in place may go unnoticed.
        unseen_bytes: the length of the longest stretch of a tensor between two samples. A longer contiguous change
            within one tensor is noticed; a change of this length may not be. Coarse files are not counted.
    """

    digest: str
    coarse: tuple[str, ...]
    unseen_bytes: int

    def text(self, path: Path) -> str:
        """Return a text that identifies the weights in `path`; "" if there are none.

        It contains the path only if the fingerprint covers too little of some file.
        """
        return f"{self.digest} {path}" if self.digest and self.coarse else self.digest


def fingerprint(path: Path, load_format: str = "") -> Fingerprint:
    """Return the fingerprint of a model's or adapter's files, given its folder or its only file.

    Files that the engine does not load do not count, nor do the names of a model's shards.

    Args:
        path: the folder or file.
        load_format: the engine's name for its way to load a model; "" for an adapter.

    Raises:
        OSError: a file cannot be read.
    """
    files, shards = ([path], set[str]()) if path.is_file() else _loaded(path, load_format)
    coarse: list[str] = []
    found: list[tuple[str, bytes]] = []  # the role and the digest of each file
    names: list[str] = []  # of the tensors in shards
    unseen_bytes = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            place, size = stream.fileno(), os.fstat(stream.fileno()).st_size
            directory = _directory(file, place, size)
            listing, tensors = (b"", [(0, size)]) if directory is None else (directory.listing, directory.tensors)
            digest = blake3(msgspec.msgpack.encode((size, listing)))
            samples = [[*_samples(tensor, size)] for tensor in tensors]
            for piece in _read(place, [span for spans in samples for span in spans]):
                digest.update(piece)
        is_shard = file.name in shards and directory is not None
        found.append(("" if is_shard else file.name, digest.digest()))
        if is_shard and directory is not None:
            names += directory.names
        if directory is None and size > _WHOLE_BYTES:
            coarse.append(file.name)
        elif file.suffix == ".safetensors":
            unseen_bytes = max(unseen_bytes, *map(_longest_gap, tensors, samples), 0)
    if len(set(names)) < len(names):  # the name of a shard decides which tensor is loaded last
        found = [(file.name, digest) for file, (_, digest) in zip(files, found, strict=True)]
    if not any(file.suffix in _WEIGHTS for file in files):
        return Fingerprint("", tuple(coarse), unseen_bytes)
    whole = blake3(msgspec.msgpack.encode(sorted(found)), derive_key_context="kvdepot 2026-11 weights by tensor")
    return Fingerprint(whole.hexdigest()[:32], tuple(coarse), unseen_bytes)


def _loaded(folder: Path, load_format: str) -> tuple[list[Path], set[str]]:
    """Return the files of a folder that an engine may load weights from, and the names of the shards among them.

    A file of another name may have a role of its own in a model, so it counts with its name.
    """
    files = {file.name: file for file in folder.iterdir() if file.suffix in _WEIGHTS or file.name in _SETTINGS}
    safetensors = {name for name in files if name.endswith(".safetensors")}
    splits = {name for name in safetensors if _is_like(name, *_SPLITS)}
    unused = {name for name in files if _is_like(name, *_OF_TRAINERS)}
    for kind, copies in _COPIES:
        if load_format not in _LOADS_PICKLES and any(_is_like(name, kind) for name in files):
            unused |= {name for name in files if _is_like(name, *copies)}
    shards = _index_of(folder)
    if load_format in _FOLLOWS_INDEX and shards and shards <= safetensors:
        unused |= splits - shards
        # With "auto", vLLM loads the consolidated file, and SGLang the shards.
        if load_format != "auto":
            unused |= {name for name in safetensors - shards if _is_like(name, _CONSOLIDATED)}
    else:
        shards = splits
    return [file for name, file in sorted(files.items()) if name not in unused], shards


def _is_like(name: str, *patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _index_of(folder: Path) -> set[str]:
    """Return the files that the index of a folder lists; none without a readable index."""
    try:
        index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, Any])
        return set(msgspec.convert(index.get("weight_map"), dict[str, str]).values())
    except (OSError, msgspec.MsgspecError, RecursionError, ValueError):
        return set()


@dataclass(frozen=True, slots=True)
class _Directory:
    """The tensors in a file: a listing with all that identifies them, their places in order, and their names."""

    listing: bytes
    tensors: list[Span]
    names: Collection[str] = ()


def _directory(file: Path, place: int, size: int) -> _Directory | None:
    """Return the directory of a file; None if it has none, or one that does not fit the file."""
    if file.suffix == ".safetensors":
        length = int.from_bytes(os.pread(place, 8, 0), "little")
        if length > min(size - 8, _LARGEST_HEADER_BYTES):
            return None
        header = os.pread(place, length, 8)
        try:
            tensors = msgspec.json.decode(header, type=dict[str, Any])
            tensors.pop("__metadata__", None)
            found = [tuple(tensor["data_offsets"]) for tensor in tensors.values()]
            spans = sorted((8 + length + int(start), 8 + length + int(stop)) for start, stop in found)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            return None
        return _Directory(header, spans, tensors.keys()) if _is_sound(spans, 8 + length, size) else None
    if file.suffix in _PICKLES:
        try:
            with zipfile.ZipFile(file) as archive:
                members = sorted(archive.infolist(), key=lambda member: member.header_offset)
        except (zipfile.BadZipFile, NotImplementedError, ValueError):  # as of a later format, or a name that is no text
            return None
        if not members:
            return None
        listing = msgspec.msgpack.encode([(member.filename, member.file_size, member.CRC) for member in members])
        starts = [member.header_offset for member in members]
        spans = list(zip(starts, [*starts[1:], size], strict=True))
        return _Directory(listing, spans) if _is_sound(spans, 0, size) else None
    return None


def _is_sound(spans: list[Span], first: int, size: int) -> bool:
    """Return whether spans lie in a file one after the other. Others would take samples without bound."""
    for start, stop in spans:
        if not first <= start <= stop <= size:
            return False
        first = stop
    return True


def _samples(span: Span, file_size: int) -> Iterator[Span]:
    """Yield the ranges to read: all of a small tensor, else at least one piece, and more of a larger tensor."""
    start, stop = span
    if stop - start <= _WHOLE_BYTES:
        yield span
        return
    rest = stop - start - _SAMPLE_BYTES
    more = (stop - start) * _SAMPLES_A_FILE // file_size
    for number in range(more + 1):
        begin = start + (rest * number // more if more else rest // 2)
        yield begin, begin + _SAMPLE_BYTES


def _longest_gap(tensor: Span, samples: list[Span]) -> int:
    """Return the length in bytes of the longest stretch of a tensor that is in no sample."""
    starts = [start for start, _ in samples] + [tensor[1]]
    stops = [tensor[0]] + [stop for _, stop in samples]
    return max(start - stop for start, stop in zip(starts, stops, strict=True))


def _read(place: int, spans: list[Span]) -> Iterator[bytes]:
    """Read spans of a file, after announcing all of them, so that a disk or a server works on many at once."""
    os.posix_fadvise(place, 0, 0, os.POSIX_FADV_RANDOM)
    for start, stop in spans:
        os.posix_fadvise(place, start, stop - start, os.POSIX_FADV_WILLNEED)
    for start, stop in spans:
        yield os.pread(place, stop - start, start)


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
        return weights_in(Path(model), load_format=load_format)
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


def weights_in(path: Path, what: str = "weights", load_format: str = "") -> str:
    """Return a text that identifies the weights in a folder; "", with a log line, if there are none.

    The text does not depend on the path, unless the fingerprint covers too little of some file. `what` names the
    weights in log lines. `load_format` is that of `fingerprint`.
    """
    try:
        found = fingerprint(path, load_format)
    except OSError as error:
        logger.warning("cannot fingerprint %s in %s: %s", what, path, error)
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
    elif found.digest and found.unseen_bytes:
        logger.info(
            "the fingerprint of %s in %s has samples of each tensor. It may miss a change in place of up to %s in a"
            " row, for example of some rows of an embedding: after such a change, change kvdepot's setting `weights`.",
            what,
            path,
            format_size(found.unseen_bytes),
        )
    return found.text(path)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {str(key): _without_volatile(inner) for key, inner in fields.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_without_volatile(inner) for inner in cast("list[Any]", value)]
    return value
