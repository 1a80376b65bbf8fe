"""Keys: digests that identify a computation.

A prompt is cut into chunks of `chunk_tokens` tokens. The key of chunk `i` is BLAKE3 over the key of chunk `i - 1`, the
chunk's tokens as little-endian u32, and the extra keys of the chunk (adapter, multimodal items). So it identifies the
whole prefix. The first chunk uses the digest of the `Namespace`, which contains everything else that determines the
bytes of a KV cache.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.errors import KeyFormatError

DIGEST_BYTES = 32  # of BLAKE3: 256 bits, so that equal digests mean equal prompts even if people try
_NAMESPACE_CONTEXT = "kvdepot 2026-11 namespace"
_TAIL_CONTEXT = "kvdepot 2026-11 tail"
_LINEAGE_CONTEXT = "kvdepot 2026-11 lineage"
_LINEAGE_DIGITS: Final = 16  # 64 bits: few lineages exist at a time
_LONGEST_GENERATION: Final = 512  # characters; a digest replaces the rest, so that long names stay distinct
GENERATION: Final = "generation"
"""The extra input that names weights which a trainer wrote into a running engine."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens and layout that two engines must agree on to share.

    Quotas, statistics and messages use the name `tenant`. The secret `tenant_salt` keeps tenants apart: every digest
    contains it, and it never leaves the client.
    """

    model: str
    revision: str = ""
    tenant: str = "default"
    tenant_salt: str = ""
    quantization: str = ""
    # Other inputs that determine the bytes: rope scaling, weights digest, generation.
    extra: tuple[tuple[str, str], ...] = ()

    def digest(self, chunk_tokens: int) -> bytes:
        """Return the 32 bytes with which all chains of this namespace start."""
        fields = (
            self.model,
            self.revision,
            self.tenant,
            self.tenant_salt,
            self.quantization,
            sorted(self.extra),
            chunk_tokens,
        )
        return blake3(msgspec.msgpack.encode(fields), derive_key_context=_NAMESPACE_CONTEXT).digest()

    @property
    def weights(self) -> str:
        """The lineage of the weights, a space, and their generation ("" for the weights that the engine loaded).

        Namespaces have the same lineage if they differ only by tenant, salt and generation. Of each lineage, the depot
        first evicts generations that no engine computes with any more.
        """
        extra = dict(self.extra)
        generation = extra.pop(GENERATION, "")
        if len(generation) > _LONGEST_GENERATION:
            generation = f"{generation[:_LONGEST_GENERATION]}.. {blake3(generation.encode()).hexdigest()[:32]}"
        fields = self.model, self.revision, self.quantization, sorted(extra.items())
        lineage = blake3(msgspec.msgpack.encode(fields), derive_key_context=_LINEAGE_CONTEXT).hexdigest()
        return f"{lineage[:_LINEAGE_DIGITS]} {generation}"


@dataclass(frozen=True, slots=True)
class NamespaceDigest:
    """A namespace given only by its digest, which is enough to compute keys for chunks of one size."""

    value: bytes
    tenant: str = "default"

    def __post_init__(self) -> None:
        if len(self.value) != DIGEST_BYTES:
            raise KeyFormatError(f"a namespace's digest of {len(self.value)} bytes: it has {DIGEST_BYTES}")

    def digest(self, chunk_tokens: int) -> bytes:
        """Return the 32 bytes."""
        return self.value


def num_digests(digests: bytes | bytearray) -> int:
    """Return the number of packed digests, `(num_chunks, 32)`.

    Raises:
        KeyFormatError: the bytes are not whole digests.
    """
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise not_whole(digests)
    return count


def not_whole(digests: bytes | bytearray) -> KeyFormatError:
    """Return the error for bytes that are not whole digests."""
    return KeyFormatError(f"{len(digests)} bytes of digests: each chunk has {DIGEST_BYTES}")


def digest_at(digests: bytes, chunk: int) -> bytes:
    """Return one of packed digests."""
    return digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]


def split_digests(digests: bytes) -> list[bytes]:
    """Split packed digests."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def slice_digests(digests: bytes, start: int, stop: int) -> bytes:
    """Return packed digests `start` to `stop`."""
    return digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Consecutive chunks of one prompt: the key of one request.

    `digests` are packed, `(num_chunks, 32)` bytes. `parent` is the digest before the first one: that of the previous
    chunk, or of the namespace if `first_chunk` is 0.
    """

    digests: bytes
    first_chunk: int
    parent: bytes
    tenant: str = "default"

    def __post_init__(self) -> None:
        if len(self.digests) % DIGEST_BYTES or len(self.parent) != DIGEST_BYTES:
            raise KeyFormatError(
                f"digests of {len(self.digests)} and {len(self.parent)} bytes: each has {DIGEST_BYTES}"
            )
        if self.first_chunk < 0:
            raise KeyFormatError(f"a run cannot start at chunk {self.first_chunk}")

    @property
    def num_chunks(self) -> int:
        """The number of chunks in the run."""
        return num_digests(self.digests)

    def slice(self, start: int, stop: int | None = None) -> "KeyRun":
        """Return chunks `start` to `stop`, counted from the first chunk of this run."""
        stop = self.num_chunks if stop is None else min(stop, self.num_chunks)
        if not 0 <= start <= stop:
            raise KeyFormatError(f"chunks {start} to {stop} of a run of {self.num_chunks}")
        parent = digest_at(self.digests, start - 1) if start else self.parent
        digests = slice_digests(self.digests, start, stop)
        return KeyRun(digests, self.first_chunk + start, parent, self.tenant)


class PrefixHasher:
    """Computes the key of one growing prompt and hashes each token once.

    Args:
        namespace: the namespace of the prompt, or its digest for chunks of this size.
        chunk_tokens: the tokens per chunk.
        extra_keys: `(first token, end, key)` for each further input to the KV: a LoRA adapter covers the whole prompt,
            a multimodal item its placeholder tokens. The digests of all chunks that overlap the range contain the key
            and its offset.
    """

    def __init__(
        self,
        namespace: Namespace | NamespaceDigest,
        chunk_tokens: int,
        extra_keys: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        if chunk_tokens <= 0:
            raise KeyFormatError(f"chunks of {chunk_tokens} tokens")
        self._root = namespace.digest(chunk_tokens)
        self._tenant = namespace.tenant
        self._chunk_tokens = chunk_tokens
        self._extra_keys = tuple(extra_keys)
        self._pack = struct.Struct(f"<{chunk_tokens}I").pack
        self._digests = bytearray()
        self._last = self._root
        self._rest: list[int] = []

    @property
    def num_tokens(self) -> int:
        """The number of tokens added so far, including an incomplete chunk's."""
        return self.num_chunks * self._chunk_tokens + len(self._rest)

    @property
    def num_chunks(self) -> int:
        """The number of complete chunks so far."""
        return len(self._digests) // DIGEST_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens.

        Raises:
            KeyFormatError: a token is not an integer from 0 to 2**32 - 1. No token was appended.
        """
        step = self._chunk_tokens
        pending = [*self._rest, *tokens] if self._rest else tokens
        whole = len(pending) - len(pending) % step
        added = bytearray()
        last, chunk = self._last, self.num_chunks
        try:
            for start in range(0, whole, step):
                data = self._pack(*pending[start : start + step])
                last = blake3(last + data + self._extra_of(chunk) if self._extra_keys else last + data).digest()
                added += last
                chunk += 1
            struct.pack(f"<{len(pending) - whole}I", *pending[whole:])
        except struct.error as error:
            raise KeyFormatError(f"token ids are integers from 0 to 4294967295: {error}") from error
        self._digests += added
        self._last = last
        self._rest = list(pending[whole:])

    def _extra_of(self, chunk: int, num_tokens: int | None = None) -> bytes:
        start = chunk * self._chunk_tokens
        end = start + (num_tokens or self._chunk_tokens)
        inside = [
            (first - start, stop - start, key) for first, stop, key in self._extra_keys if first < end and stop > start
        ]
        return msgspec.msgpack.encode(inside) if inside else b""

    def run(self, start: int = 0, stop: int | None = None) -> KeyRun:
        """Return the key of chunks `start` to `stop` (default: all complete chunks)."""
        return KeyRun(bytes(self._digests), 0, self._root, self._tenant).slice(start, stop)

    def tail(self, chunk: int, tokens: Sequence[int]) -> bytes:
        """Return the key of an incomplete chunk with these tokens. All chunks before it must have been added."""
        last = self._digests[(chunk - 1) * DIGEST_BYTES : chunk * DIGEST_BYTES] if chunk else self._root
        data = struct.pack(f"<{len(tokens) + 1}I", len(tokens), *tokens)
        return blake3(last + data + self._extra_of(chunk, len(tokens)), derive_key_context=_TAIL_CONTEXT).digest()


def hash_prefix(namespace: Namespace | NamespaceDigest, chunk_tokens: int, tokens: Sequence[int]) -> KeyRun:
    """Return the key of the complete chunks of `tokens`."""
    hasher = PrefixHasher(namespace, chunk_tokens)
    hasher.extend(tokens)
    return hasher.run()
