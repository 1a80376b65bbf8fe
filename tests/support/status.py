"""The status of a depot that holds nothing, for tests that need one without a depot."""

from typing import Final

from kvdepot.wire.status import DepotStatus

EMPTY_STATUS: Final = DepotStatus(
    server_version="",
    protocol_version=1,
    epoch=1,
    pid=1,
    uptime_seconds=0.0,
    policy="lru",
    num_entries=0,
    num_chunks=0,
    max_entries=0,
    pool_size_bytes=0,
    pool_ready_bytes=0,
    pool_used_bytes=0,
    quarantined_bytes=0,
    num_leases=0,
    num_tickets=0,
    num_sessions=0,
    recovering=False,
    contexts=[],
    tenants={},
    counters={},
)
