"""Removes the sockets, files and shared memory that a killed vLLM or SGLang leaves behind. The tests kill most engines.

A test session gives its engines a folder, and their shared memory a prefix, and removes both at its end. The engines
draw all other names at random, so they could belong to engines that run beside the tests.
"""

import importlib
import os
import secrets
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # only for types, as engines load this module, too

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "KVDEPOT_TESTS_SHM_PREFIX"


@contextmanager
def own_places(monkeypatch: "pytest.MonkeyPatch") -> Generator[None]:
    """Give the engines of these tests their own folder and names, and remove their leftovers at the end."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv(
            "VLLM_RPC_BASE_PATH", folder
        )  # short, as the path of a Unix socket has 107 characters at most
        monkeypatch.setenv(_PREFIX, f"kv_{secrets.token_hex(2)}")  # Python's names have 13 characters, so 6 stay random
        monkeypatch.setattr(tempfile, "tempdir", None)  # makes Python read TMPDIR again
        try:
            yield
        finally:
            for path in left_in_shared_memory():
                path.unlink(missing_ok=True)


def left_in_shared_memory() -> list[Path]:
    """Return the shared memory of these tests' engines: queues between processes and buffers of two ranks."""
    stores = Path(tempfile.gettempdir()).glob("vllm_dist_*")  # the buffers are named after the store of their ranks
    names = [os.environ[_PREFIX], *(store.name for store in stores)]
    return [path for path in _SHARED_MEMORY.iterdir() if path.name.startswith(tuple(names))]


def take_own_names() -> None:
    """Use the tests' prefix for Python's shared memory in this process and its forks."""
    if _PREFIX in os.environ:
        shared_memory._SHM_NAME_PREFIX = f"/{os.environ[_PREFIX]}"  # pyright: ignore[reportAttributeAccessIssue]


def take_own_names_in_sglang() -> None:
    """Use the tests' prefix for the names that SGLang makes, in this process and its forks: of queues and loads."""
    prefix = os.environ.get(_PREFIX)
    if prefix is None:
        return
    queues: Any = importlib.import_module("sglang.srt.utils.stale_shm_cleanup")
    loads: Any = importlib.import_module("sglang.srt.managers.load_snapshot")
    path_of = loads.shm_path_for

    def own_path_of(instance: str) -> str:
        return path_of(instance).replace("sglang_loads", prefix)

    queues._SGL_SHM_PREFIX = prefix
    loads.shm_path_for = own_path_of
