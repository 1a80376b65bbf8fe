"""Tests of engines remove what killed engines leave behind, and nothing else: `support.leftovers`."""

import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.leftovers import left_in_shared_memory, own_places

SHARED_MEMORY = Path("/dev/shm")
KILLED_ENGINE = """
import os, signal, sys
from multiprocessing import resource_tracker, shared_memory
from support.leftovers import take_own_names

resource_tracker.register = lambda *_: None  # it would remove the memory after the kill
take_own_names()
print(shared_memory.SharedMemory(create=True, size=1).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def of_others() -> Iterator[list[Path]]:
    """Memory of engines that run beside the tests."""
    paths = [SHARED_MEMORY / f"{kind}_beside_{secrets.token_hex(4)}" for kind in ("kv", "vllm_dist")]
    for path in paths:
        path.touch()
    yield paths
    for path in paths:
        path.unlink()


def test_leftovers_of_the_tests_engines_are_removed_and_those_of_others_stay(
    of_others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_before = tempfile.gettempdir()
    with own_places(monkeypatch):
        folder = Path(tempfile.gettempdir())
        assert folder.parent == Path(folder_before)
        store = folder / f"vllm_dist_{secrets.token_hex(4)}"  # of two ranks, whose buffer is named after it
        store.touch()
        buffer = SHARED_MEMORY / f"{store.name}_buffer"
        buffer.touch()
        engine = subprocess.run([sys.executable, "-c", KILLED_ENGINE], stdout=subprocess.PIPE, text=True, check=False)
        assert engine.returncode == -signal.SIGKILL
        left = [buffer, SHARED_MEMORY / engine.stdout.strip()]
        assert sorted(left_in_shared_memory()) == sorted(left)
    assert [path for path in (folder, *left) if path.exists()] == []
    assert all(path.exists() for path in of_others)
