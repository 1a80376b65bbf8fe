"""kvdepot: one server per node that keeps the KV caches of all inference engines there.

The names below are loaded on first use, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.backends import CacheGroup, KVCache, get_backend, list_backends
    from kvdepot.client.answers import Lease
    from kvdepot.client.scheduler import SchedulerClient
    from kvdepot.errors import KVDepotError
    from kvdepot.keys import KeyRun, Namespace, PrefixHasher, hash_prefix

__all__ = [
    "CacheGroup",
    "KVCache",
    "KVDepotError",
    "KeyRun",
    "Lease",
    "Namespace",
    "PrefixHasher",
    "SchedulerClient",
    "get_backend",
    "hash_prefix",
    "list_backends",
]


_HOMES = {
    "kvdepot.backends": {"CacheGroup", "KVCache", "get_backend", "list_backends"},
    "kvdepot.client.scheduler": {"Lease", "SchedulerClient"},
    "kvdepot.errors": {"KVDepotError"},
    "kvdepot.keys": {"KeyRun", "Namespace", "PrefixHasher", "hash_prefix"},
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'kvdepot' has no attribute {name!r}")
