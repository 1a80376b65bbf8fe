"""A tier that keeps each entry as a file, `folder:///PATH`. Start your own tier as a copy of it.

A file contains the payload, then the trailer, by which the depot recognizes its entry.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdepot.errors import ConfigError
from kvdepot.tiers import KEY_BYTES, Extents, Tier, TierPool, TierUrl, TierUsage, has_names


class FolderTier(Tier):
    """Entries in the files of one folder.

    Args:
        pool: the depot's pool. The bytes of an extent are `pool.view[offset : offset + num_bytes]`.
        folder: created if it does not exist.
    """

    def __init__(self, pool: TierPool, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pool = pool
        self._folder = folder
        self._lock = threading.Lock()  # the depot calls from several threads
        self._num_entries = sum(1 for _ in self._entries())

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [self._path(key).exists() for key in keys]

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. A file appears under its name when it is complete."""
        for key, trailer, (offset, num_bytes) in zip(keys, trailers, extents, strict=True):
            new = self._folder / f".{key.hex()}-{threading.get_ident()}"
            try:
                with new.open("wb") as file:
                    file.write(self._pool.view[offset : offset + num_bytes])
                    file.write(trailer)
                with self._lock:
                    self._num_entries += not self._path(key).exists()
                    new.rename(self._path(key))
            finally:
                new.unlink(missing_ok=True)
        return [True] * len(keys)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        return [self._read(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def _read(self, key: bytes, offset: int, num_bytes: int) -> bytes | None:
        try:
            with self._path(key).open("rb") as file:
                file.readinto(self._pool.view[offset : offset + num_bytes])
                return file.read()
        except FileNotFoundError:
            return None

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        for key in keys:
            self._remove(self._path(key))

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. Each file is a step."""
        for path in self._entries():
            if has_names(bytes.fromhex(path.name), tenant, model):
                yield self._remove(path)

    def _entries(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if len(path.name) == 2 * KEY_BYTES)

    def _remove(self, path: Path) -> int:
        """Remove an entry. Return 1 if it existed, else 0."""
        with self._lock:
            try:
                path.unlink()
            except FileNotFoundError:
                return 0
            self._num_entries -= 1
            return 1

    def probe(self) -> None:
        """See `Tier`."""
        os.stat(self._folder)

    def usage(self) -> TierUsage:
        """See `Tier`. It must not wait, so it does not access the storage."""
        return TierUsage(self._num_entries)

    def close(self) -> None:
        """See `Tier`. No file stays open between calls."""


def open_tier(url: TierUrl, pool: TierPool) -> FolderTier:
    """Open `folder:///PATH`.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        return FolderTier(pool, Path(url.path))
    except OSError as error:
        raise ConfigError(f"--tier {url.name}: {error}") from error
