"""The depot's own operations: each with its message, its answer, its HTTP paths and its command.

`kvdepot.wire.operation` tells how one is declared. A new module of operations is imported here.
"""

from kvdepot.operate.operations.cache import Clear, Find, Found, FoundPrefix, Warm
from kvdepot.operate.operations.server import (
    Configuration,
    ConfigurationReply,
    Drain,
    SetLogLevel,
    Status,
    StatusReply,
)
from kvdepot.operate.operations.tenants import SetQuota
from kvdepot.operate.operations.tiers import AddTier, RemoveTier

__all__ = [
    "AddTier",
    "Clear",
    "Configuration",
    "ConfigurationReply",
    "Drain",
    "Find",
    "Found",
    "FoundPrefix",
    "RemoveTier",
    "SetLogLevel",
    "SetQuota",
    "Status",
    "StatusReply",
    "Warm",
]
