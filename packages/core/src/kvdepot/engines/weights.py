"""Digests of weights in an engine's memory, which a trainer may have written there.

Every byte of every tensor counts, because a step of training changes few values of a 16-bit model, so samples could
miss the change. On CPU, the bytes are hashed in place. A CUDA or XPU device instead computes two 64-bit sums per 4 MiB
of its memory, in which each word has a random factor. Tensors that differ have equal sums only by chance.
"""

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from blake3 import blake3

_SUMS: Final = frozenset({"cuda", "xpu"})  # devices with 64-bit integers, which compute sums
_WORDS: Final = 1 << 20  # words of 32 bits in one sum
_SEED: Final = 20261125  # arbitrary, but equal in all processes that compare digests

Tensor = Any
"""A torch tensor. This module imports torch only when it is called."""


def models_digest(models: Iterable[Any]) -> str:
    """Return a digest of the parameters and persistent buffers of torch models."""
    return weights_digest(
        (f"{number}.{name}", tensor)
        for number, model in enumerate(models)
        for name, tensor in model.state_dict().items()
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
