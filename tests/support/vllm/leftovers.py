"""vLLM leaves sockets, files and shared memory behind when it is killed, as most engines of the tests are.

A session of tests gives its engines a folder, and their shared memory a name, and removes both at its end. vLLM draws
all other names at random, so nobody could tell them from those of engines that run beside the tests.
"""

import os
import secrets
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # engines load this module, too

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "KVDEPOT_TESTS_SHM_PREFIX"


@contextmanager
def own_places(monkeypatch: "pytest.MonkeyPatch") -> Generator[None]:
    """Give the engines of these tests a folder and names of their own, and remove at the end what they left there."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv(
            "VLLM_RPC_BASE_PATH", folder
        )  # short, as the path of a Unix socket has 107 characters at most
        monkeypatch.setenv(_PREFIX, f"kv_{secrets.token_hex(2)}")  # Python's names have 13 characters: 6 stay random
        monkeypatch.setattr(tempfile, "tempdir", None)  # computed again, from TMPDIR
        try:
            yield
        finally:
            for path in left_in_shared_memory():
                path.unlink(missing_ok=True)


def left_in_shared_memory() -> list[Path]:
    """Return what engines of these tests have there: queues between their processes and the buffers of two ranks."""
    stores = Path(tempfile.gettempdir()).glob("vllm_dist_*")  # the buffers are named after the store of their ranks
    names = [os.environ[_PREFIX], *(store.name for store in stores)]
    return [path for path in _SHARED_MEMORY.iterdir() if path.name.startswith(tuple(names))]


def take_own_names() -> None:
    """Have Python's shared memory bear the tests' name in this process and its forks."""
    if _PREFIX in os.environ:
        shared_memory._SHM_NAME_PREFIX = f"/{os.environ[_PREFIX]}"  # pyright: ignore[reportAttributeAccessIssue]
