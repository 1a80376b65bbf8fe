"""The pool's files."""

import mmap
import os
from pathlib import Path

import pytest

from kvdepot.pool import is_locked, open_with_lock

NUMBER = (1 << 61) + 5


def test_a_lock_lasts_as_long_as_a_descriptor_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "pool", os.O_RDWR)
    opened = open_with_lock(fd, NUMBER)
    assert is_locked(fd, NUMBER)
    assert not is_locked(fd, NUMBER + 1)
    with pytest.raises(OSError, match="unavailable"):
        open_with_lock(fd, NUMBER)
    mapping = mmap.mmap(opened, 4096)
    os.close(opened)
    assert is_locked(fd, NUMBER), "the mapping is left"
    mapping.close()
    assert not is_locked(fd, NUMBER)
    os.close(fd)
