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

_HOMES = {
    "CacheGroup": "kvdepot.backends",
    "KVCache": "kvdepot.backends",
    "KVDepotError": "kvdepot.errors",
    "KeyRun": "kvdepot.keys",
    "Lease": "kvdepot.client.scheduler",
    "Namespace": "kvdepot.keys",
    "PrefixHasher": "kvdepot.keys",
    "SchedulerClient": "kvdepot.client.scheduler",
    "get_backend": "kvdepot.backends",
    "hash_prefix": "kvdepot.keys",
    "list_backends": "kvdepot.backends",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvdepot' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
